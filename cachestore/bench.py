"""How fast a cache directory is: `python -P -m cachestore.bench DIRECTORY [FREE_FLOOR_BYTES]` prints one DiskBench.

Writes as a publish does (flush, rename, flush of the directory), reads cold and warm, in blocks of several sizes. Takes
about 10 seconds and 512 MiB at most, all of it removed again; what a kill leaves lies in a staging directory, which
the cachestore sweeps at its next start. Ends with status 1 and one line when the directory cannot be measured.
"""

import contextlib
import errno
import fcntl
import os
import signal
import statistics
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import msgspec

from cachestore import disk
from cachestore.layout import STAGED_SUFFIX, staging_directory
from protocol.disk_bench import BlockSpeed, DiskBench, PageCache
from protocol.flushing import flush_file
from protocol.ids import Incarnation
from protocol.launch import CachestoreLaunch

MIB = 1024 * 1024
FILES_OF_SIZE = {1 * MIB: 48, 4 * MIB: 24, 12 * MIB: 10, 32 * MIB: 4}
"""Block size → how many files of it, where there is time for all: 392 MiB together, one size on disk at a time."""

MAX_BYTES = 512 * MIB
MAX_SECONDS = 10.0
CANNOT_MEASURE_STATUS = 1

_MODEL = "mlxd-bench"  # a name such as a model has, so that the store sweeps the staging directory below it
_WRITE_SHARE = 0.6  # of a size's time: reading is faster
_CACHE_WORDS: tuple[PageCache, ...] = ("kept", "unknown", "bypassed", "dropped")
_ALREADY_IN_MEMORY = getattr(os, "RWF_NOWAIT", 0)  # Linux: read only what needs no disk


class CannotMeasure(Exception):
    """Says why, and what to do."""


def main(arguments: list[str]) -> int:
    """Measure and print; the exit status."""
    os.umask(0o077)
    signal.signal(signal.SIGTERM, _stop)
    try:
        match arguments:
            case [directory]:
                floor_bytes = _default_floor_bytes()
            case [directory, floor] if floor.isdecimal():
                floor_bytes = int(floor)
            case _:
                raise CannotMeasure("usage: python -P -m cachestore.bench DIRECTORY [FREE_FLOOR_BYTES]")
        result = measure(Path(directory), free_floor_bytes=floor_bytes)
    except CannotMeasure as why:
        sys.stderr.write(f"{why}\n")
        return CANNOT_MEASURE_STATUS
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    return 0


def measure(
    directory: Path,
    *,
    free_floor_bytes: int,
    files_of_size: dict[int, int] = FILES_OF_SIZE,
    max_seconds: float = MAX_SECONDS,
) -> DiskBench:
    """Measure the volume of a directory, which is made if need be. Raises CannotMeasure."""
    started = time.perf_counter()
    sizes: list[BlockSpeed] = []
    seen: set[PageCache] = set()
    written_bytes = 0
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        free_bytes = disk.free_bytes(directory)
        needed_bytes = max(size * files for size, files in files_of_size.items())
        if free_bytes - needed_bytes < free_floor_bytes:
            raise CannotMeasure(
                f"{directory} has {free_bytes} bytes free and {free_floor_bytes} must stay free beside the "
                f"{needed_bytes} this writes: make room, or lower the cache's free_floor in mlxd.toml"
            )
        with _workplace(directory) as place:
            for number, (block_bytes, files) in enumerate(files_of_size.items()):
                seconds_left = max_seconds - (time.perf_counter() - started)
                if sizes and seconds_left <= 0:
                    break
                speed, page_cache = _measure_size(
                    place, block_bytes, files, seconds_left / (len(files_of_size) - number)
                )
                sizes.append(speed)
                seen.add(page_cache)
                written_bytes += speed.files * block_bytes
    except OSError as why:
        what_to_do = (
            "make room" if why.errno in (errno.ENOSPC, errno.EDQUOT) else "make it a directory mlxd can write to"
        )
        raise CannotMeasure(f"{directory} cannot be measured ({why.strerror}): {what_to_do}") from why
    return DiskBench(
        directory=str(directory),
        free_bytes=free_bytes,
        page_cache=next(word for word in _CACHE_WORDS if word in seen),
        seconds=time.perf_counter() - started,
        written_bytes=written_bytes,
        sizes=tuple(sizes),
    )


@contextlib.contextmanager
def _workplace(directory: Path) -> Generator[Path]:
    place = directory / staging_directory(_MODEL)
    disk.make_directory(directory / _MODEL)
    disk.make_directory(place)
    try:
        yield place
    finally:
        for entry in disk.list_directory(place):
            disk.remove_file(Path(entry.path))
        disk.remove_if_empty(place)
        disk.remove_if_empty(directory / _MODEL)


def _measure_size(place: Path, block_bytes: int, files: int, seconds: float) -> tuple[BlockSpeed, PageCache]:
    """Write, read cold, read warm, remove; fewer files when the time is over, one at least."""
    started = time.perf_counter()
    data = os.urandom(block_bytes)  # a disk that compresses is not to look faster than KV lets it be
    paths: list[Path] = []
    writes: list[float] = []
    while len(paths) < files and (not paths or time.perf_counter() - started < seconds * _WRITE_SHARE):
        path = place / f"{block_bytes}-{len(paths)}{STAGED_SUFFIX}"
        writes.append(_timed_write(path, data))
        paths.append(path)
    buffer = memoryview(bytearray(block_bytes))
    seen = {_forget_pages(path) for path in paths}  # all before the first read, which may read ahead
    colds = [_timed_read(path, buffer) for path in paths]
    warms = [_timed_warm_read(path, buffer) for path in paths]
    for path in paths:
        disk.remove_file(path)
    write, cold, warm = (statistics.median(times) for times in (writes, colds, warms))
    speed = BlockSpeed(
        block_bytes=block_bytes,
        files=len(paths),
        write_seconds=write,
        cold_read_seconds=cold,
        warm_read_seconds=warm,
        write_bytes_per_second=block_bytes / write,
        cold_read_bytes_per_second=block_bytes / cold,
        warm_read_bytes_per_second=block_bytes / warm,
    )
    return speed, next(word for word in _CACHE_WORDS if word in seen)


def _timed_write(path: Path, data: bytes) -> float:
    written = path.with_name("being-written" + STAGED_SUFFIX)
    started = time.perf_counter()
    disk.create_private_file(written)
    with written.open("wb", buffering=0) as file:
        _bypass_cache(file.fileno())
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        flush_file(file.fileno())
    disk.put_in_place(written, path)
    return time.perf_counter() - started


def _timed_read(path: Path, buffer: memoryview) -> float:
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        _bypass_cache(file.fileno())
        _read_into(file.fileno(), buffer)
    return time.perf_counter() - started


def _timed_warm_read(path: Path, buffer: memoryview) -> float:
    with path.open("rb", buffering=0) as file:
        _read_into(file.fileno(), buffer)  # where the cold read went around the cache, this fills it
        started = time.perf_counter()
        _read_into(file.fileno(), buffer)
        return time.perf_counter() - started


def _read_into(descriptor: int, buffer: memoryview) -> None:
    read_bytes = 0
    while read_bytes < len(buffer):
        count = os.preadv(descriptor, [buffer[read_bytes:]], read_bytes)
        if not count:
            raise OSError(errno.EIO, "a file became shorter while it was measured; is a cachestore starting here?")
        read_bytes += count


def _bypass_cache(descriptor: int) -> None:
    """On macOS, where what is cached cannot be dropped, a file that never was cached is the only cold one."""
    if hasattr(fcntl, "F_NOCACHE"):
        with contextlib.suppress(OSError):  # a volume that does not know it: measured all the same
            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)


def _forget_pages(path: Path) -> PageCache:
    if hasattr(fcntl, "F_NOCACHE"):
        return "bypassed"
    if not hasattr(os, "posix_fadvise"):
        return "unknown"
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not _ALREADY_IN_MEMORY:
            return "unknown"
        try:
            os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size // 2, _ALREADY_IN_MEMORY)
        except BlockingIOError:
            return "dropped"
        except OSError:
            return "unknown"  # this file system does not say
        return "kept"


def _default_floor_bytes() -> int:
    return CachestoreLaunch(directory="", runtime_directory="", incarnation=Incarnation(0)).free_floor_bytes


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(CANNOT_MEASURE_STATUS)  # through `finally`, so that the files go


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
