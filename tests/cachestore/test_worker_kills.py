# pyright: basic
"""A worker is killed at any step of a publish, beside a cachestore process that lives on: see `dying_workers`."""

import queue
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import mlx.core as mx
import pytest

from protocol.blocks import Describe, Described
from protocol.ids import BLOCK_TOKENS
from tests.cachestore.block_files import open_service
from tests.cachestore.dying_workers import (
    ALWAYS_RESTORE,
    FINGERPRINT,
    FIRST_SLOTS,
    LATER_SLOTS,
    SHORT_GRAINS,
    connect,
    payload,
    prepared,
)
from tests.cachestore.test_process import Daemon
from worker.cold_cache import ColdCache
from worker.messages import BlocksFetched
from worker.mlx_block_files import BlockFile, write_block
from worker.prefix_cache import Fetch

ROOT = Path(__file__).parents[2]
RELEASED_SECONDS = 10.0
"""A lease ends by itself after a minute or two; those of a dead worker are to end long before."""
AT_LEAST_STEPS = 50


class Deaths:
    """How each worker ended, and which blocks it knew to be durable."""

    def __init__(self, lines: list[str]) -> None:
        self.ends: dict[int, int] = {}
        self.durable: defaultdict[int, list[str]] = defaultdict(list)
        for line in lines:
            number, what, *status = line.split()
            if what == "end":
                self.ends[int(number)] = int(status[0])
            else:
                self.durable[int(number)].append(what)


def kill_them_all(runtime_directory: Path) -> Deaths:
    command = [sys.executable, "-m", "tests.cachestore.dying_workers", runtime_directory]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=120)
    return Deaths(done.stdout.splitlines())


def read(runtime_directory: Path, numbers: list[int]) -> dict[int, BlocksFetched]:
    """What a worker that lives finds of each prompt, by the real way of reading."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    cold: ColdCache = ColdCache(
        connect=lambda: connect(runtime_directory, "reader"),
        fingerprint=FINGERPRINT,
        begin=BlockFile,
        write=write_block,
        deliver=answers.put,
        clock=time.monotonic,
    )
    cold.start()
    found: dict[int, BlocksFetched] = {}
    for number in numbers:
        cold.fetch(Fetch(prepared(number), 0, 0, ALWAYS_RESTORE))
        found[number] = answers.get(timeout=20.0)
    assert cold.stop(20.0) == 0
    return found


def check_blocks(number: int, fetched: BlocksFetched, durable: list[str], where: str) -> int:
    """The bytes are those that were written, nothing durable is lost; how many blocks there are beyond those."""
    slots = [block.start // BLOCK_TOKENS for block in fetched.blocks]
    assert slots == list(range(len(slots))), where
    for slot, block in zip(slots, fetched.blocks, strict=True):
        written = payload(number, slot, len(block.token_ids))
        assert block.payload.keys() == written.keys(), where
        assert all(mx.array_equal(block.payload[name], written[name]) for name in written), where
    known = [slot for slot in durable if slot not in map(str, FIRST_SLOTS)]
    assert len(slots) >= len(FIRST_SLOTS), f"{where}: the tail that was there is gone and nothing stands for it"
    has_grown = len(slots) > 2 or len(fetched.blocks[1].token_ids) > SHORT_GRAINS * 16
    more = len(slots) - 1 - len(known) if has_grown else -len(known)
    assert more >= 0, f"{where}: a block that was durable is lost"
    return more


def bytes_on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def books(daemon: Daemon) -> Described:
    described = daemon.ask(Describe(call_id=1))
    assert isinstance(described, Described)
    return described


def await_no_lease(daemon: Daemon) -> Described:
    deadline = time.monotonic() + RELEASED_SECONDS
    while (described := books(daemon)).leases:
        assert time.monotonic() < deadline, f"{described.leases} leases of dead workers are still held"
        time.sleep(0.1)  # between two looks at a process
    return described


@pytest.fixture
def daemon(tmp_path: Path, runtime_directory: Path):
    running = Daemon(tmp_path / "cache", runtime_directory)
    yield running
    running.close()


def test_a_worker_killed_at_any_step_of_a_publish_costs_one_block_at_most(daemon, tmp_path, runtime_directory):
    """What is read afterwards are the bytes that were written; a block that was durable stays, and the tail until its
    successor is there. The dead hold no lease, no staged file and no byte of the quota, now and after a restart."""
    assert books(daemon).blocks == 0
    deaths = kill_them_all(runtime_directory)
    assert len(deaths.ends) >= AT_LEAST_STEPS, "it has too few steps to prove anything"
    described = await_no_lease(daemon)
    assert not list((tmp_path / "cache").glob("*/staging/*"))
    assert described.file_bytes == bytes_on_disk(tmp_path / "cache")
    more: dict[int, int] = {}
    for number, fetched in read(runtime_directory, list(deaths.ends)).items():
        more[number] = check_blocks(number, fetched, deaths.durable[number], f"killed at step {number}")
    assert set(more.values()) == {0, 1}, "a block is in flight at some of the steps, never more than one"
    assert len(deaths.durable[max(deaths.ends)]) == len(FIRST_SLOTS) + len(LATER_SLOTS)
    daemon.process.terminate()
    status, log = daemon.wait()
    assert status == 0
    assert "level=error" not in log
    assert "block_lost" not in log
    again = open_service(tmp_path / "cache")
    again.check()
    again.service.close()
