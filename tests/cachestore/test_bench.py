"""Measuring a directory: what it says is true, and nothing stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from cachestore import bench
from protocol.disk_bench import DiskBench
from tests.cachestore.block_files import Clock, chain, open_service

ROOT = Path(__file__).parents[2]
SMALL = {64 * 1024: 3, 256 * 1024: 2}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "cachestore.bench", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_size_is_measured_and_nothing_stays(tmp_path):
    """Rates are bytes over median seconds; the directory is as it was."""
    (tmp_path / "index.sqlite3").write_bytes(b"not mine")
    result = bench.measure(tmp_path, free_floor_bytes=0, files_of_size=SMALL)
    assert [(speed.block_bytes, speed.files) for speed in result.sizes] == list(SMALL.items())
    assert result.written_bytes == sum(size * files for size, files in SMALL.items())
    for speed in result.sizes:
        assert speed.write_bytes_per_second == pytest.approx(speed.block_bytes / speed.write_seconds)
        assert speed.cold_read_bytes_per_second == pytest.approx(speed.block_bytes / speed.cold_read_seconds)
        assert speed.warm_read_bytes_per_second == pytest.approx(speed.block_bytes / speed.warm_read_seconds)
    assert [path.name for path in tmp_path.iterdir()] == ["index.sqlite3"]


def test_it_never_plans_more_than_it_says():
    """512 MiB in all, whatever the disk."""
    assert set(bench.FILES_OF_SIZE) == {size * bench.MIB for size in (1, 4, 12, 32)}
    assert sum(size * files for size, files in bench.FILES_OF_SIZE.items()) <= bench.MAX_BYTES


def test_a_slow_disk_is_measured_by_fewer_files(tmp_path):
    """One file of the first size at least, and no further size once the time is over."""
    result = bench.measure(tmp_path, free_floor_bytes=0, files_of_size=SMALL, max_seconds=1e-9)
    assert [speed.files for speed in result.sizes] == [1]


def test_the_free_space_floor_is_kept(tmp_path):
    """Refused before the first byte, with the way out."""
    with pytest.raises(bench.CannotMeasure, match=r"make room, or lower the cache's free_floor"):
        bench.measure(tmp_path / "new", free_floor_bytes=1 << 60)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_running_store_counts_none_of_it_and_a_later_one_sweeps_what_a_kill_left(tmp_path):
    """The files lie where the store sweeps and where it does not look for blocks."""
    worker = open_service(tmp_path, clock=Clock())
    worker.store_all(chain("a", 16))
    left = tmp_path / "mlxd-bench" / "staging" / "1048576-0.tmp.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x" * 1000)
    worker.check()
    worker.service.close()
    worker = open_service(tmp_path, clock=Clock())
    assert not left.exists()
    worker.check()
    worker.service.close()


def test_the_command_prints_one_json_object(tmp_path):
    """The CLI decodes it."""
    done = run(tmp_path / "cache", 0)
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode(done.stdout, type=DiskBench)
    assert result.sizes[0].block_bytes == bench.MIB
    assert result.seconds < 3 * bench.MAX_SECONDS
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_directory_that_cannot_be_measured_is_one_line(tmp_path):
    """What is wrong and what to do, on standard error; nothing on standard output."""
    (tmp_path / "file").write_bytes(b"")
    for arguments in ((), (tmp_path, "many"), (tmp_path / "file",), (tmp_path, 1 << 60)):
        done = run(*arguments)
        assert done.returncode == bench.CANNOT_MEASURE_STATUS
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr


def test_sigterm_leaves_nothing(tmp_path):
    """Stopped in the middle, it takes its files away."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cachestore.bench", tmp_path, "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("*/staging/*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert list(tmp_path.iterdir()) == []
