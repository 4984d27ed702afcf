"""A chain is used up to the first block that cannot be trusted, whenever and wherever that is found out."""

from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.blocks import LeasedBlock
from protocol.ids import BlockKey
from worker.chain_reading import BlockDamaged, ReadFailed, read_chain
from worker.prefix_index import BlockParts

Fate = Literal[
    "verified", "sound", "other_bytes", "gone", "gone_later", "damaged", "damaged_later", "error", "hash_error"
]
FATES: tuple[Fate, ...] = get_args(Fate)
GOOD: tuple[Fate, ...] = ("verified", "sound")
REASONS = {
    "other_bytes": "integrity",
    "gone": "missing",
    "gone_later": "missing",
    "damaged": "integrity",
    "damaged_later": "integrity",
    "error": "unreadable",
    "hash_error": "unreadable",
}


class Reading:
    """A file with a fate."""

    def __init__(self, leased: LeasedBlock) -> None:
        self.path = leased.path
        self.is_finished = False
        match self.path:
            case "gone":
                raise FileNotFoundError
            case "damaged":
                raise BlockDamaged("no header")
            case _:
                pass

    def finish(self) -> BlockParts[str]:
        self.is_finished = True
        match self.path:
            case "gone_later":
                raise FileNotFoundError
            case "damaged_later":
                raise BlockDamaged("it ends early")
            case "error":
                raise MemoryError
            case _:
                return BlockParts(self.path, 1, {})

    def checksum(self) -> bytes:
        assert self.is_finished
        match self.path:
            case "verified":
                raise AssertionError("this file was verified before")
            case "hash_error":
                raise MemoryError
            case "other_bytes":
                return b"another"
            case _:
                return b"right"


@pytest.fixture(scope="module")
def checks() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def leased(number: int, fate: str) -> LeasedBlock:
    checksum = b"" if fate == "verified" else b"right"
    return LeasedBlock(key=BlockKey(number.to_bytes(16, "big")), grains=16, path=fate, checksum=checksum)


@given(fates=st.lists(st.sampled_from(FATES), max_size=8))
def test_nothing_from_the_first_bad_block_on_is_used(checks: Executor, fates: list[Fate]) -> None:
    """What comes back is all before it; of that, what was checked is said to be; the bad one is named and counted."""
    blocks = [leased(number, fate) for number, fate in enumerate(fates)]
    first_bad = next((number for number, fate in enumerate(fates) if fate not in GOOD), len(fates))

    read = read_chain(blocks, Reading, checks)

    assert [parts.payload for parts in read.parts] == fates[:first_bad]
    assert read.verified == tuple(block.key for block in blocks[:first_bad] if block.path == "sound")
    if first_bad == len(fates):
        assert read.failed is None
    else:
        bad = fates[first_bad]
        error = "MemoryError" if REASONS[bad] == "unreadable" else ""
        assert read.failed == (blocks[first_bad].key, REASONS[bad], error)


def test_files_are_checked_while_the_next_are_read() -> None:
    """The first checksum is asked for before the last file is finished, and not by the thread that reads."""
    events: list[str] = []

    class Noting(Reading):
        def finish(self) -> BlockParts[str]:
            events.append("read")
            return super().finish()

    class Counting(Executor):
        def submit(self, fn, /, *args, **kwargs):  # pyright: ignore
            events.append("check")
            done: Future[bytes] = Future()
            done.set_result(fn(*args, **kwargs))
            return done

    read = read_chain([leased(number, "sound") for number in range(4)], Noting, Counting())

    assert read.failed is None
    assert events == ["read", "check"] * 4


def test_a_bad_block_is_named_once() -> None:
    """The reason a request counts and the block that the cachestore is told to look at are of the same block."""
    with ThreadPoolExecutor(1) as executor:
        read = read_chain([leased(0, "sound"), leased(1, "other_bytes"), leased(2, "gone")], Reading, executor)

    assert read.failed == ReadFailed(leased(1, "").key, "integrity")
