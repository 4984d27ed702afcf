"""Telling whoever started the service that it serves: a line on standard output, and systemd's datagram."""

import contextlib
import os
import socket
import sys


def tell_ready(url: str) -> None:
    """Once, when requests are accepted. Scripts wait for this line; who closed the output does not stop the service."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(f"mlxd ready at {url}\n")
        sys.stdout.flush()
    _notify_systemd(b"READY=1")


def tell_stopping() -> None:
    """Once, when the drain begins."""
    _notify_systemd(b"STOPPING=1")


def _notify_systemd(state: bytes) -> None:
    """sd_notify(3). Does nothing where no NOTIFY_SOCKET is set, which is everywhere but in a unit of Type=notify."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return
    address = "\0" + name[1:] if name.startswith("@") else name
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.sendto(state, address)
