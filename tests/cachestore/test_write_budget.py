"""The day's write budget: the decision, and what the service does by it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.write_budget import utc_day, write_permission, write_state
from protocol.blocks import Declined, Published, Staged
from protocol.ids import BlockKey
from tests.cachestore.block_files import Clock, chain, open_service

DAY_SECONDS = 86400


@pytest.mark.parametrize(
    ("written", "budget", "state"),
    [
        (0, None, "green"),
        (1 << 60, None, "green"),
        (0, 100, "green"),
        (50, 100, "green"),
        (51, 100, "yellow"),
        (99, 100, "yellow"),
        (100, 100, "red"),
        (0, 0, "red"),
    ],
)
def test_the_states(written, budget, state):
    """Green up to half, yellow above it, red when all is gone; without a budget always green."""
    assert write_state(written, budget) == state


@given(sizes=st.lists(st.integers(1, 60)), budget=st.integers(0, 300), at_once=st.integers(1, 4))
def test_a_day_ends_at_most_one_block_over(sizes, budget, at_once):
    """Whatever is written beside each other, what is permitted exceeds the budget by less than its last block."""
    written, reserved, last = 0, [], 0
    for size in sizes:
        if len(reserved) == at_once:
            written += reserved.pop(0)
        if write_permission(written, sum(reserved), budget) == "allowed":
            reserved.append(size)
            last = size
    total = written + sum(reserved)
    assert total == 0 or total - last < budget


def test_a_spent_budget_declines_until_the_next_day_and_hits_are_served(tmp_path: Path):
    """Red is red after a restart too; at midnight UTC it is green again."""
    clock = Clock(utc_midnight := 1_800_057_600.0)
    assert utc_midnight % DAY_SECONDS == 0
    worker = open_service(tmp_path, daily_write_bytes=100_000, clock=clock)
    states = []
    for number in range(10):
        if isinstance(worker.store(chain(f"n{number}", 16), 0, data_bytes=20_000), Declined):
            break
        states.append(worker.books().write_state)
    assert states == ["green", "green", "yellow", "yellow", "red"]
    assert worker.stage(BlockKey(b"k" * 16), 10) == Declined(call_id=1, reason="write_budget")
    books = worker.books()
    assert (books.daily_write_bytes, books.written_today_bytes) == (100_000, books.written_bytes)
    worker.service.close()
    clock.unix += DAY_SECONDS - 1
    worker = open_service(tmp_path, daily_write_bytes=100_000, clock=clock)
    assert worker.books().write_state == "red"
    assert [block.grains for block in worker.read(chain("n1", 16))] == [16]
    assert worker.stage(BlockKey(b"k" * 16), 10) == Declined(call_id=1, reason="write_budget")
    clock.unix += 1
    assert worker.books().write_state == "green"
    assert worker.books().written_today_bytes == 0
    assert isinstance(worker.store(chain("new", 16), 0), Published)
    worker.check()
    worker.service.close()


def test_a_write_that_comes_to_nothing_counts_too(tmp_path: Path):
    """The disk does not care whether a block was published, given up, or left behind by a kill."""
    worker = open_service(tmp_path, daily_write_bytes=1_000_000)
    staged = worker.stage(BlockKey(b"k" * 16), 1000)
    assert isinstance(staged, Staged)
    Path(staged.path).write_bytes(b"x" * 700)
    worker.release(staged.lease)
    assert worker.books().written_today_bytes == 700
    staged = worker.stage(BlockKey(b"k" * 16), 1000)
    assert isinstance(staged, Staged)
    Path(staged.path).write_bytes(b"x" * 300)
    worker.service.close()
    worker = open_service(tmp_path, daily_write_bytes=1_000_000)
    assert worker.books().written_today_bytes == 1000
    worker.service.close()


def test_the_day_is_known_when_the_index_is_lost_in_the_same_run(tmp_path: Path):
    """The process remembers what it wrote."""
    worker = open_service(tmp_path / "cache", daily_write_bytes=30_000)
    worker.store_all(chain("a", 16), data_bytes=40_000)
    for path in (tmp_path / "cache").glob("index*"):
        path.unlink()
    worker.store(chain("b", 16), 0)
    worker.settle()
    assert worker.books().write_state == "red"
    worker.service.close()


def test_without_a_budget_everything_is_counted_and_nothing_declined(tmp_path: Path):
    """None is unlimited."""
    worker = open_service(tmp_path, daily_write_bytes=None)
    worker.store_all(chain("a", 16), data_bytes=40_000)
    books = worker.books()
    assert (books.write_state, books.daily_write_bytes) == ("green", None)
    assert books.written_today_bytes == books.written_bytes > 40_000
    assert utc_day(0.0) == 0
    worker.service.close()
