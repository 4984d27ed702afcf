"""Files and directories: what the store does to them, one function each. No policy, no index.

Everything here raises OSError as it comes; what that means for a request is decided in `reasons.py`.
"""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import xxhash
from msgspec import Struct

from cachestore.layout import QUARANTINE_DIRECTORY, BadBlock, check_header, header_bytes
from protocol.block_file import BlockMetadata
from protocol.block_header import LENGTH_BYTES
from protocol.flushing import flush_file

_READ_BYTES = 1024 * 1024


class DirectoryTaken(Exception):
    """Another process holds this directory. Says which, and what to do."""


class FileIdentity(Struct, frozen=True):
    """Changes when a file's bytes are changed by ordinary means."""

    inode: int
    file_bytes: int
    modified_nanoseconds: int


class Inspected(Struct, frozen=True, kw_only=True):
    """A block file that was read: what it says of itself, the checksum of all its bytes, and which file it was."""

    metadata: BlockMetadata
    checksum: bytes
    identity: FileIdentity


def flush_directory(path: Path) -> None:
    """Put the names in a directory on disk before anything written later."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flush_file(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make one directory, 0700, if it is not there; durable, since a file's name is lost with its directory's."""
    try:
        path.mkdir(0o700)
    except FileExistsError:
        return
    flush_directory(path.parent)


def hold_lock(path: Path) -> int:
    """Lock a directory for this process's life: a descriptor to close at the end. Raises DirectoryTaken."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise DirectoryTaken(
            f"the cache directory {path.parent} is in use by process {holder}: stop that mlxd, "
            "or give this one another cache directory in mlxd.toml"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def create_private_file(path: Path) -> None:
    """An empty file that only this user can open."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def inspect(path: Path) -> Inspected:
    """Read a whole block file. Raises BadBlock when it is no regular file or its header is wrong."""
    descriptor = _open_regular(path)
    try:
        return _inspect(descriptor)
    finally:
        os.close(descriptor)


def seal(path: Path) -> Inspected:
    """Read a finished file, make it private and flush its content. The last step before it is renamed."""
    descriptor = _open_regular(path)
    try:
        os.fchmod(descriptor, 0o600)
        inspected = _inspect(descriptor)
        flush_file(descriptor)
        return inspected
    finally:
        os.close(descriptor)


def read_metadata(path: Path) -> tuple[BlockMetadata, FileIdentity]:
    """Read and check a block file's header only. Raises BadBlock."""
    descriptor = _open_regular(path)
    try:
        identity = _identity(os.fstat(descriptor))
        return _metadata(descriptor, identity), identity
    finally:
        os.close(descriptor)


def identity(path: Path) -> FileIdentity | None:
    """Which regular file is there now; None if something else is. Raises FileNotFoundError."""
    status = os.lstat(path)
    return _identity(status) if stat.S_ISREG(status.st_mode) else None


def put_in_place(source: Path, target: Path) -> None:
    """Rename a sealed file to its name, durably. Afterwards it is there whole or not at all, whatever happens."""
    source.rename(target)
    flush_directory(target.parent)


def move(source: Path, target: Path) -> None:
    """Rename whatever is there, durable or not."""
    source.rename(target)


def remove_file(path: Path) -> None:
    """Unlink; a file that is gone already is fine."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def remove_tree(path: Path) -> None:
    """Remove what lies in quarantine, be it a file, a link or (put there by somebody) a directory."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        remove_file(path)


def remove_if_empty(path: Path) -> None:
    """Remove a directory that nobody needs any more."""
    with contextlib.suppress(OSError):
        path.rmdir()


def tree_bytes(path: Path) -> int:
    """The size of a file, or of all files below a directory. Links are not followed. Nothing there is 0."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return 0
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size
    return sum(tree_bytes(Path(entry.path)) for entry in list_directory(path))


def walk_files(root: Path) -> Iterator[str]:
    """Every file and link below a directory, relative to it. What lies in quarantine is one thing each."""
    for entry in list_directory(root):
        if entry.is_dir(follow_symlinks=False) and root.name != QUARANTINE_DIRECTORY:
            yield from (f"{entry.name}/{below}" for below in walk_files(Path(entry.path)))
        else:
            yield entry.name


def list_directory(path: Path) -> list[os.DirEntry[str]]:
    """The entries of a directory by name; none when it is not there or is no directory."""
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def free_bytes(path: Path) -> int:
    """What the volume has left for us."""
    volume = os.statvfs(path)
    return volume.f_bavail * volume.f_frsize


def _open_regular(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadBlock("it is not a regular file")
    return descriptor


def _identity(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_ino, status.st_size, status.st_mtime_ns)


def _metadata(descriptor: int, found: FileIdentity) -> BlockMetadata:
    length = header_bytes(os.pread(descriptor, LENGTH_BYTES, 0))
    header = os.pread(descriptor, length, 0)
    if len(header) != length:
        raise BadBlock("it ends inside its header")
    return check_header(header, found.file_bytes)


def _inspect(descriptor: int) -> Inspected:
    found = _identity(os.fstat(descriptor))
    metadata = _metadata(descriptor, found)
    digest = xxhash.xxh3_128()
    read_bytes = 0
    # Fresh bytes at each read: twice as fast here as one buffer read into again and again. A mapping would be faster
    # still, and a disk's read error would then kill this process instead of being one block's end.
    while data := os.read(descriptor, _READ_BYTES):
        digest.update(data)
        read_bytes += len(data)
    if read_bytes != found.file_bytes or _identity(os.fstat(descriptor)) != found:
        raise BadBlock("it changed while it was read")
    return Inspected(metadata=metadata, checksum=digest.digest(), identity=found)
