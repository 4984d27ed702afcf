"""A child's first and last word from its parent, both on standard input: a JSON line, and end-of-file."""

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

Launch = TypeVar("Launch", bound=msgspec.Struct)


def read_launch(kind: type[Launch]) -> Launch:
    """The settings line. Raises msgspec.ValidationError or DecodeError."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def when_parent_is_gone(act: Callable[[], None], *, then_exit_within_seconds: float) -> None:
    """Call `act` when the parent closes its end of the pipe, dead or not; then make sure that this process ends."""

    def watch() -> None:
        # The descriptor itself: a thread inside a buffered read would block the interpreter's shutdown.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        act()
        threading.Event().wait(then_exit_within_seconds)
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
