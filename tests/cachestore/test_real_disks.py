"""K07 on real file systems: a limit of 50 MB, a volume that is full, a volume that turns read-only."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.blocks import Declined, Published
from tests.cachestore.block_files import FINGERPRINT, block_paths, chain, open_service

BLOCK_BYTES = 500_000
VOLUME_BYTES = 8 * 1024 * 1024


def mount(*arguments: str) -> str:
    """Why it failed; empty when it did not."""
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except OSError as why:
        return str(why)
    return "" if done.returncode == 0 else done.stderr.strip() or "mount failed"


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A volume of 8 MB. Needs root on Linux."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root on Linux")
    at = tmp_path / "volume"
    at.mkdir()
    refused = mount("-t", "tmpfs", "-o", f"size={VOLUME_BYTES}", "tmpfs", str(at))
    if refused:
        pytest.skip(f"no tmpfs can be mounted here: {refused}")
    yield at
    subprocess.run(["umount", "--lazy", str(at)], check=True, timeout=20)


def bytes_in(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*") if not path.is_dir())


def test_two_models_in_turn_never_exceed_the_limit(tmp_path):
    """K07: 50 MB for every file there is, whosever; the oldest go first, wherever they came from."""
    limit_bytes = 50_000_000
    old = tmp_path / "0ldm0del" / "ab" / ("ab" * 16 + ".safetensors")
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x" * 5_000_000)
    worker = open_service(tmp_path, quota_bytes=limit_bytes)
    worker.settle()
    for turn in range(3):
        for model in (FINGERPRINT, "other"):
            for number in range(12):
                grains = chain(f"{turn}{model}{number}", 16)
                reply = worker.store(grains, 0, fingerprint=model, data_bytes=4_000_000)
                assert isinstance(reply, Published)
                assert bytes_in(tmp_path) <= limit_bytes
    assert not old.exists()
    newest = [f"2other{number}" for number in range(12)]
    kept = [name for name in newest if worker.fetch(chain(name, 16), fingerprint="other").blocks]
    assert len(kept) >= 10
    assert kept == newest[-len(kept) :]
    assert worker.books().evicted > 30
    worker.settle()
    worker.service.close()


def test_a_full_volume_stops_writing_and_serves_on(volume):
    """ENOSPC by somebody else's file: declined as no_space, hits as before; with room again it writes by itself."""
    worker = open_service(volume / "cache", quota_bytes=1 << 30)
    grains = chain("a", 32)
    worker.store_all(grains, data_bytes=BLOCK_BYTES)
    hog = volume / "hog"
    with hog.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 65536):
                pass
        except OSError as why:
            assert why.errno == 28
    for number in range(3):
        reply = worker.store(chain(f"n{number}", 16), 0, data_bytes=BLOCK_BYTES)
        assert isinstance(reply, Declined)
        assert reply.reason == "no_space"
        assert [block.grains for block in worker.read(grains)] == [16, 16]
    hog.unlink()
    assert isinstance(worker.store(chain("n0", 16), 0, data_bytes=BLOCK_BYTES), Published)
    worker.check()
    worker.service.close()


def test_a_volume_that_fills_while_a_worker_writes_costs_that_block(volume):
    """The floor of 0 lets the write begin; the worker's own ENOSPC ends it, and nothing of it stays."""
    worker = open_service(volume / "cache", quota_bytes=1 << 30)
    stored = 0
    for number in range(40):
        try:
            reply = worker.store(chain(f"n{number}", 16), 0, data_bytes=BLOCK_BYTES)
        except OSError as why:
            assert why.errno == 28
            worker.service.drop_peer(worker.peer, worker.now)
            continue
        if isinstance(reply, Declined):
            assert reply.reason == "no_space"
        else:
            stored += 1
    assert stored > 5
    assert len(block_paths(volume / "cache")) == stored
    found = sum(len(worker.read(chain(f"n{number}", 16))) for number in range(40))
    assert found == stored
    worker.check()
    worker.service.close()


def test_a_read_only_volume_serves_misses_and_comes_back_by_itself(volume):
    """Not even the lock can be taken: misses and declines, and once it is writable all is found."""
    grains = chain("a", 32)
    worker = open_service(volume / "cache")
    worker.store_all(grains)
    worker.service.close()
    assert mount("-o", "remount,ro", str(volume)) == ""
    worker = open_service(volume / "cache")
    for _ in range(3):
        leased = worker.fetch(grains)
        assert (leased.blocks, leased.miss_reason) == ((), "unavailable")
        assert worker.store(chain("b", 16), 0) == Declined(call_id=1, reason="unavailable")
        worker.now += 10
        worker.service.idle(worker.now)
    assert mount("-o", "remount,rw", str(volume)) == ""
    worker.now += 10
    worker.settle()
    assert [block.grains for block in worker.read(grains)] == [16, 16]
    assert isinstance(worker.store(chain("b", 16), 0), Published)
    worker.check()
    worker.service.close()
