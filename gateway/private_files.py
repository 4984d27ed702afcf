"""Small secret files: mode 0600, replaced whole, so that a crash leaves the old one or the new one."""

import os
import secrets
import stat
from pathlib import Path


class FileNotPrivate(Exception):
    """Others may read this file, so it is not trusted to hold a secret."""


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` with `data`, durable when this returns. Its folder is made if need be, 0700."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_private(path: Path, *, max_bytes: int = 16 * 1024**2) -> bytes:
    """The file's bytes. Raises FileNotPrivate with the command that mends it, FileNotFoundError, OSError."""
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise FileNotPrivate(f"{path} can be read by others (mode {mode:04o}); run: chmod 600 '{path}'")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"{path} is larger than {max_bytes} bytes")
    return data


def read_or_make_secret(path: Path) -> bytes:
    """The secret kept in `path`; 32 random bytes are put there first when it does not exist."""
    try:
        text = read_private(path)
    except FileNotFoundError:
        text = secrets.token_hex(32).encode()
        write_private(path, text)
    return text.strip()
