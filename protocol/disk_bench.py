"""What `python -P -m cachestore.bench DIRECTORY` prints: one DiskBench as JSON."""

from typing import Literal

from msgspec import Struct

PageCache = Literal["dropped", "bypassed", "kept", "unknown"]
"""What stood between a cold read and the disk: nothing (dropped, bypassed), memory (kept), or nobody can tell."""


class BlockSpeed(Struct, frozen=True, kw_only=True):
    """How fast files of one size are. Medians over `files`, so that one slow write does not speak for the disk."""

    block_bytes: int
    files: int
    write_seconds: float
    cold_read_seconds: float
    warm_read_seconds: float
    write_bytes_per_second: float
    cold_read_bytes_per_second: float
    warm_read_bytes_per_second: float


class DiskBench(Struct, frozen=True, kw_only=True):
    """One measurement of a cache directory. With `page_cache` "kept", its cold reads came from memory."""

    directory: str
    free_bytes: int
    page_cache: PageCache
    seconds: float
    written_bytes: int
    sizes: tuple[BlockSpeed, ...]
