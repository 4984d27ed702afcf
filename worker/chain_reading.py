"""Read the files of a chain of blocks in order, and check what was read while the next files are being read.

Nothing of a file that was not verified leaves here before its checksum was compared, over the very bytes in memory.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from protocol.blocks import LeasedBlock
from protocol.ids import BlockKey
from worker.prefix_index import BlockParts

Payload = TypeVar("Payload")

FILES_AHEAD = 2
"""How many files are being read behind the one that is waited for."""


class BlockDamaged(Exception):
    """A file that is not the block it should be. Says why in words that hold no content."""


class BlockReading(Protocol[Payload]):
    """One file on its way into memory: begun, then finished on the same thread, then perhaps hashed on another."""

    @property
    def file_bytes(self) -> int:
        """How many bytes are read, whatever of them is used."""
        ...

    def finish(self) -> BlockParts[Payload]:
        """Wait for the bytes. Raises OSError, and BlockDamaged for what is no such block."""
        ...

    def checksum(self) -> bytes:
        """The xxh3-128 of the whole file, over the header as it was understood and the arrays as they are used."""
        ...


class ReadFailed(NamedTuple):
    """The block at which reading ended, the reason to count, and for the log why, in words that hold no content."""

    key: BlockKey
    reason: Literal["integrity", "missing", "unreadable"]
    why: str


class ChainRead(NamedTuple, Generic[Payload]):
    """The parts of a lease's first blocks, all of them sound; which of them were checked; why there are no more.

    `file_bytes` is what was read for that: what was then found unsound as well, and what of the rest is not used.
    """

    parts: tuple[BlockParts[Payload], ...]
    verified: tuple[BlockKey, ...]
    failed: ReadFailed | None
    file_bytes: int


class _Read(NamedTuple, Generic[Payload]):
    block: LeasedBlock
    parts: BlockParts[Payload]
    file_bytes: int
    check: Future[bytes] | None


def read_chain(
    leased: Sequence[LeasedBlock], begin: Callable[[LeasedBlock], BlockReading[Payload]], checks: Executor
) -> ChainRead[Payload]:
    """Read leased blocks up to the first that cannot be used. What was not verified is hashed on `checks`."""
    read, failed = _read(leased, begin, checks)
    parts: list[BlockParts[Payload]] = []
    verified: list[BlockKey] = []
    for item in read:
        if item.check is not None:
            unsound = _unsound(item.block, item.check)
            if unsound is not None:
                failed = unsound
                break
            verified.append(item.block.key)
        parts.append(item.parts)
    return ChainRead(tuple(parts), tuple(verified), failed, sum(item.file_bytes for item in read))


def _read(
    leased: Sequence[LeasedBlock], begin: Callable[[LeasedBlock], BlockReading[Payload]], checks: Executor
) -> tuple[list[_Read[Payload]], ReadFailed | None]:
    """In order, until there is no more, a file fails, or a check says meanwhile that the rest is of no use."""
    to_begin = deque(leased)
    begun: deque[tuple[LeasedBlock, BlockReading[Payload]]] = deque()
    read: list[_Read[Payload]] = []
    unsettled: deque[tuple[LeasedBlock, Future[bytes]]] = deque()
    not_begun: ReadFailed | None = None
    while True:
        while unsettled and unsettled[0][1].done():
            if _unsound(*unsettled.popleft()) is not None:
                return read, not_begun
        while to_begin and len(begun) <= FILES_AHEAD and not_begun is None:
            block = to_begin.popleft()
            try:
                begun.append((block, begin(block)))
            except Exception as why:  # noqa: BLE001 - whatever is wrong with a file, it is a miss and counted
                not_begun = _failure(block, why)
        if not begun:
            return read, not_begun
        block, reading = begun.popleft()
        try:
            parts = reading.finish()
        except Exception as why:  # noqa: BLE001 - as above; what was begun behind it is of no use
            return read, _failure(block, why)
        check = checks.submit(reading.checksum) if block.checksum else None
        read.append(_Read(block, parts, reading.file_bytes, check))
        if check is not None:
            unsettled.append((block, check))


def _unsound(block: LeasedBlock, check: Future[bytes]) -> ReadFailed | None:
    try:
        checksum = check.result()
    except Exception as why:  # noqa: BLE001 - what cannot be checked is not used
        return _failure(block, why)
    return None if checksum == block.checksum else ReadFailed(block.key, "integrity", "its checksum is another one")


def _failure(block: LeasedBlock, why: Exception) -> ReadFailed:
    match why:
        case FileNotFoundError():
            return ReadFailed(block.key, "missing", "its file is gone")
        case BlockDamaged():
            return ReadFailed(block.key, "integrity", str(why))
        case _:
            return ReadFailed(block.key, "unreadable", f"{type(why).__name__}: {why}")
