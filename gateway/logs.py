"""Logging for the gateway's process: one line of key=value per event, to standard error or to a file."""

import logging
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

import structlog

from gateway.config import LogLevel

_FILE_BYTES = 16 * 1024**2
_FILES_KEPT = 4


def configure_logging(level: LogLevel, *, file: Path | None = None) -> None:
    """Call once, at start. Our lines go to `file`, which is rotated, or to standard error.

    Libraries' own loggers go to standard error, from `warning` up: below that they may quote requests. Raises OSError.
    """
    number = getattr(logging, level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr) if file is None else _file_logger(file),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(
        stream=sys.stderr,
        level=max(number, logging.WARNING),
        format='level=%(levelname)s event=%(name)s message="%(message)s"',
        force=True,
    )


class _PrivateRotatingFile(RotatingFileHandler):
    """Opens files that only their owner reads: a log tells who asks when."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def _file_logger(path: Path) -> Callable[..., logging.Logger]:
    """Rotated by this process: launchd never opens a log again, so nobody else could."""
    logger = logging.getLogger("mlxd.file")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.addHandler(_PrivateRotatingFile(path, maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT))
    logger.setLevel(logging.DEBUG)  # structlog has filtered already
    logger.propagate = False
    return lambda *_: logger
