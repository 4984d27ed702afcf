"""One JSON line for every purge: who asked, for what, and how much there was of it. Never a token, never a key.

Two files of at most 1 MiB each, 0600, which count towards the quota.
"""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from cachestore import disk
from cachestore.layout import AUDIT_NAME, OLD_AUDIT_NAME
from protocol.flushing import flush_file

ROTATE_BYTES = 1024 * 1024
MAX_ASKED_BY_LETTERS = 200


class PurgeCriteria(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """As they were asked for; nothing given is everything."""

    fingerprint: str | None = None
    owner: str | None = None
    unused_for_seconds: float | None = None


class PurgeLine(Struct, frozen=True, kw_only=True):
    """What one line says. `blocks` and `file_bytes` are those that matched when it was written."""

    unix: float
    asked_by: str
    criteria: PurgeCriteria
    blocks: int
    file_bytes: int


def append(directory: Path, line: PurgeLine) -> None:
    """Add a line, durably; the file before it is kept once when it is full. Raises OSError."""
    path = directory / AUDIT_NAME
    data = msgspec.json.encode(line) + b"\n"
    if disk.tree_bytes(path) + len(data) > ROTATE_BYTES:
        disk.move(path, directory / OLD_AUDIT_NAME)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":
            data = b"\n" + data  # a kill or a full disk cut the last line short: this one must not be lost with it
        os.write(descriptor, data)
        flush_file(descriptor)
    finally:
        os.close(descriptor)
