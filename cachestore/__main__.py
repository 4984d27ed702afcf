"""`python -P -m cachestore`: reads one CachestoreLaunch as a JSON line on standard input, then serves.

Ends with status 0 on SIGTERM and when standard input ends (the parent died), 2 when its settings are unusable, 3 when
another process holds the directory.
"""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import structlog

from cachestore.disk import DirectoryTaken
from cachestore.loop import run
from cachestore.service import Service
from protocol.addresses import SocketPathTooLong, cachestore_socket
from protocol.blocks import BlockReply, BlockRequest
from protocol.launch import CachestoreLaunch
from protocol.sockets import Listener

BAD_SETTINGS_STATUS = 2
DIRECTORY_TAKEN_STATUS = 3

_STDIN = 0
_MAX_LAUNCH_BYTES = 1024 * 1024


def main() -> int:
    """Run the process; its exit status."""
    os.umask(0o077)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the gateway's to answer; it drains first, then closes stdin
    try:
        settings = msgspec.json.decode(_read_line(), type=CachestoreLaunch)
        socket_path = cachestore_socket(Path(settings.runtime_directory))
    except (msgspec.DecodeError, SocketPathTooLong) as why:
        sys.stderr.write(f"cachestore: bad settings on standard input: {why}. Start it through `mlxd serve`.\n")
        return BAD_SETTINGS_STATUS
    _log_to_stderr(settings.log_level)
    threading.Thread(target=_watch_parent, args=(stop,), name="watch-parent", daemon=True).start()
    service = Service(settings, first_number=time.time_ns() // 1000, unix_clock=time.time)
    try:
        service.open(time.monotonic())
        with Listener[BlockRequest, BlockReply](socket_path, BlockRequest) as listener:  # pyright: ignore[reportArgumentType]
            try:
                run(listener, service, time.monotonic, stop.is_set)
            finally:
                socket_path.unlink(missing_ok=True)  # ZeroMQ leaves it behind when peers were connected
    except DirectoryTaken as why:
        sys.stderr.write(f"cachestore: {why}\n")
        return DIRECTORY_TAKEN_STATUS
    finally:
        service.close()
    return 0


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_LAUNCH_BYTES:
        byte = os.read(_STDIN, 1)  # one at a time: sys.stdin would read ahead, and lock itself against the watcher
        if not byte:
            break
        line += byte
    return line


def _watch_parent(stop: threading.Event) -> None:
    while os.read(_STDIN, 4096):
        pass
    stop.set()


def _log_to_stderr(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
        ),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


if __name__ == "__main__":
    sys.exit(main())
