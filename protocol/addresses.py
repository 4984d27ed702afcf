"""Where the processes meet: short names in one private runtime directory."""

import os
from pathlib import Path

SOCKET_PATH_MAX_BYTES = 103
"""macOS: `sockaddr_un.sun_path` holds 104 bytes with its final NUL. Linux allows 107; the smaller one holds."""


class SocketPathTooLong(Exception):
    """The runtime directory's path leaves no room for a socket's name."""


def gateway_socket(runtime_directory: Path) -> Path:
    """Where the gateway listens for its workers."""
    return _checked(runtime_directory / "gateway.sock")


def cachestore_socket(runtime_directory: Path) -> Path:
    """Where the cachestore listens for workers (and for the gateway's questions)."""
    return _checked(runtime_directory / "cachestore.sock")


def board_directory(runtime_directory: Path) -> Path:
    """Where each worker of this machine tells the others what it does."""
    return runtime_directory / "board"


def prefill_lease(runtime_directory: Path) -> Path:
    """The file that the worker which prefills has locked."""
    return runtime_directory / "prefill.lease"


def _checked(path: Path) -> Path:
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_MAX_BYTES:
        raise SocketPathTooLong(
            f"socket path {path} has {length} bytes, the limit is {SOCKET_PATH_MAX_BYTES}: "
            "set a shorter runtime_directory in mlxd.toml"
        )
    return path
