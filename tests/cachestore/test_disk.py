"""What the seams to the system do."""

import fcntl
import os

import pytest

from cachestore import disk
from cachestore.layout import BadBlock
from protocol.flushing import flush_file
from tests.cachestore.block_files import block_bytes, chain, slot


def test_flushing_asks_macos_for_a_barrier(tmp_path, monkeypatch):
    """On macOS F_BARRIERFSYNC (85), with fsync for the volumes that do not know it; never the slow F_FULLFSYNC."""
    asked: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: asked.append("fsync"))
    descriptor = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.delattr(fcntl, "F_FULLFSYNC", raising=False)
    flush_file(descriptor)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: asked.append(f"fcntl {command}"))
    flush_file(descriptor)

    def unknown(*_: object) -> None:
        raise OSError(45, "not supported")

    monkeypatch.setattr(fcntl, "fcntl", unknown)
    flush_file(descriptor)
    os.close(descriptor)
    assert asked == ["fsync", "fcntl 85", "fsync"]


def test_a_directory_has_one_owner(tmp_path):
    """A second lock is refused, with a line that names the holder and the way out."""
    held = disk.hold_lock(tmp_path / "lock")
    with pytest.raises(disk.DirectoryTaken, match=f"process {os.getpid()}: stop that mlxd, or give this one another"):
        disk.hold_lock(tmp_path / "lock")
    os.close(held)
    os.close(disk.hold_lock(tmp_path / "lock"))


def test_inspecting_reads_all_bytes_of_a_file_larger_than_the_buffer(tmp_path, monkeypatch):
    """The checksum covers every byte, wherever the read buffer ends."""
    monkeypatch.setattr(disk, "_READ_BYTES", 64)
    data = block_bytes(*slot(chain("a", 16), 0), data_bytes=1000)
    path = tmp_path / "block"
    path.write_bytes(data)
    checksum = disk.inspect(path).checksum
    for at in (len(data) - 1, len(data) - 65, len(data) - 500):
        spoiled = bytearray(data)
        spoiled[at] ^= 1
        path.write_bytes(spoiled)
        assert disk.inspect(path).checksum != checksum


def test_what_is_no_regular_file_is_never_waited_for(tmp_path):
    """A pipe would block for ever, a directory cannot be read, a link may lead anywhere."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("/etc/hosts")
    for name in ("pipe", "directory"):
        with pytest.raises(BadBlock):
            disk.inspect(tmp_path / name)
    with pytest.raises(OSError, match="symbolic links"):
        disk.inspect(tmp_path / "link")
