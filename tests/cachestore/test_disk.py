"""What survives a kill at any moment, and what the seams to the system do."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachestore import disk
from cachestore.layout import BadBlock, parse_block_name
from tests.cachestore.block_files import block_bytes, block_paths, chain, open_service, slot
from tests.cachestore.crash_points import EVICTABLE, KEPT, LONG, QUOTA_BYTES, SHORT


def test_a_kill_before_any_step_of_a_write_leaves_only_whole_blocks_and_loses_none_but_the_one_in_flight(tmp_path):
    """For every step of opening, evicting, publishing and superseding: all blocks sound, books exact, quota kept."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "tests.cachestore.crash_points", tmp_path], cwd=root, check=True)
    outcomes = sorted(path for path in tmp_path.iterdir() if path.name.isdigit())
    assert len(outcomes) > 50
    lengths: list[int] = []
    for directory in outcomes:
        worker = open_service(directory, quota_bytes=QUOTA_BYTES)
        worker.check()
        for path in block_paths(directory):
            inspected = disk.inspect(path)
            assert parse_block_name(path.name) == (inspected.metadata.key, inspected.checksum), directory.name
        assert [block.grains for block in worker.read(KEPT)] == [16, 16], directory.name
        [tail] = worker.read(LONG)  # the old one is dropped only when the new one is durable
        lengths.append(tail.grains)
        assert not list(directory.glob("*/staging/*"))
        worker.check()
        worker.service.close()
    assert set(lengths) == {len(SHORT), len(LONG)}
    assert lengths == sorted(lengths), "once the new block was there, a later kill lost it"
    worker = open_service(outcomes[-1], quota_bytes=QUOTA_BYTES)
    assert worker.read(EVICTABLE) == (), "the write did not evict, so the test proves nothing about eviction"
    worker.service.close()


def test_flushing_asks_macos_for_a_real_flush(tmp_path, monkeypatch):
    """Where F_FULLFSYNC exists it is used, with fsync for the volumes that do not know it."""
    asked: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: asked.append("fsync"))
    descriptor = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.delattr(fcntl, "F_FULLFSYNC", raising=False)
    disk.flush_file(descriptor)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: asked.append(f"fcntl {command}"))
    disk.flush_file(descriptor)

    def unknown(*_: object) -> None:
        raise OSError(45, "not supported")

    monkeypatch.setattr(fcntl, "fcntl", unknown)
    disk.flush_file(descriptor)
    os.close(descriptor)
    assert asked == ["fsync", "fcntl 51", "fsync"]


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
