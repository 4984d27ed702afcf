"""A chain is used up to the first block that cannot be trusted, whenever and wherever that is found out."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Literal, ParamSpec, TypeVar, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.blocks import LeasedBlock
from protocol.ids import BlockKey
from worker.chain_reading import FILES_AHEAD, BlockDamaged, ReadFailed, read_chain
from worker.prefix_index import BlockParts

P = ParamSpec("P")
T = TypeVar("T")

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
        self.file_bytes = 1000
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
        assert read.failed is not None
        assert (read.failed.key, read.failed.reason) == (blocks[first_bad].key, REASONS[bad])
        assert read.failed.why


def test_files_are_checked_while_the_next_are_read() -> None:
    """Some are begun before the first is finished, and no more than that; each is hashed when it is finished, by
    another thread than the one that reads."""
    events: list[str] = []
    hashing: set[int] = set()

    class Noting(Reading):
        def __init__(self, leased: LeasedBlock) -> None:
            events.append("begin")
            super().__init__(leased)

        def finish(self) -> BlockParts[str]:
            events.append("finish")
            return super().finish()

        def checksum(self) -> bytes:
            hashing.add(threading.get_ident())
            return super().checksum()

    class Submitting(ThreadPoolExecutor):
        def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
            events.append("check")
            return super().submit(fn, *args, **kwargs)

    with Submitting(1) as executor:
        read = read_chain([leased(number, "sound") for number in range(5)], Noting, executor)

    assert (read.failed, len(read.verified)) == (None, 5)
    ahead = ["begin"] * FILES_AHEAD
    assert events == [*ahead, *["begin", "finish", "check"] * (5 - FILES_AHEAD), *["finish", "check"] * FILES_AHEAD]
    assert len(hashing) == 1
    assert threading.get_ident() not in hashing


def test_no_more_is_read_once_a_check_was_wrong() -> None:
    """What was read until then is counted as read, whether it is used or not."""

    class AtOnce(Executor):
        def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
            done: Future[T] = Future()
            done.set_result(fn(*args, **kwargs))
            return done

    begun: list[Reading] = []

    def begin(block: LeasedBlock) -> Reading:
        begun.append(Reading(block))
        return begun[-1]

    fates = ["sound", "other_bytes", *["sound"] * 20]
    read = read_chain([leased(number, fate) for number, fate in enumerate(fates)], begin, AtOnce())

    assert read.failed is not None
    assert read.failed.key == leased(1, "").key
    assert [reading.is_finished for reading in begun] == [True, True, *[False] * FILES_AHEAD]
    assert read.file_bytes == 2 * 1000


def test_a_bad_block_is_named_once() -> None:
    """The reason a request counts and the block that the cachestore is told to look at are of the same block."""
    with ThreadPoolExecutor(1) as executor:
        read = read_chain([leased(0, "sound"), leased(1, "other_bytes"), leased(2, "gone")], Reading, executor)

    assert read.failed == ReadFailed(leased(1, "").key, "integrity", "its checksum is another one")
