"""Logging for the gateway's process: one line of key=value per event, to standard error."""

import logging
import sys

import structlog

from gateway.config import LogLevel


def configure_logging(level: LogLevel) -> None:
    """Call once, at start. Libraries' own loggers are heard from `warning` up: below that they may quote requests."""
    number = getattr(logging, level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(
        stream=sys.stderr,
        level=max(number, logging.WARNING),
        format='level=%(levelname)s event=%(name)s message="%(message)s"',
        force=True,
    )
