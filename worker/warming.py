"""Prefixes that were computed to be kept, until the disk has said what of them it holds. Pure."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Generic, TypeVar

from protocol.generation import CacheReport, Timings, Warmed
from protocol.ids import BlockKey, RequestId
from worker.prefix_index import Block
from worker.sequence import Prepared, Sequence

Payload = TypeVar("Payload")

STORE_SECONDS = 10.0
"""How long the answer to a warm waits for its blocks to be durable."""


@dataclass(frozen=True, kw_only=True)
class Warming(Generic[Payload]):
    """A warmed prefix whose blocks are on their way to disk; `storing` are those that have not arrived."""

    prepared: Prepared
    sequence: Sequence
    timings: Timings
    report: CacheReport
    blocks: tuple[Block[Payload], ...]
    storing: set[BlockKey]
    deadline: float

    @property
    def answer(self) -> Warmed:
        return Warmed(
            request_id=self.prepared.request_id,
            prompt_tokens=self.sequence.prompt_tokens,
            cached_tokens=self.sequence.cached,
            blocks=len(self.blocks),
            size_bytes=sum(block.size_bytes for block in self.blocks),
            durable_blocks=sum(block.is_durable for block in self.blocks),
            timings=self.timings,
            cache=self.report,
        )


class WarmingPrefixes(Generic[Payload]):
    """Those that wait for the disk. Each leaves by `take_due` or `cancel`."""

    def __init__(self) -> None:
        self._warming: dict[RequestId, Warming[Payload]] = {}

    def __bool__(self) -> bool:
        return bool(self._warming)

    @property
    def request_ids(self) -> Many[RequestId]:
        return list(self._warming)

    @property
    def deadlines(self) -> Many[float]:
        return [warming.deadline for warming in self._warming.values()]

    def add(self, warming: Warming[Payload]) -> None:
        self._warming[warming.prepared.request_id] = warming

    def stored(self, key: BlockKey) -> None:
        """The disk answered for this block, in one way or the other."""
        for warming in self._warming.values():
            warming.storing.discard(key)

    def cancel(self, request_id: RequestId) -> bool:
        """Whether it was there."""
        return self._warming.pop(request_id, None) is not None

    def take_due(self, now: float) -> list[Warming[Payload]]:
        """Those whose blocks all arrived, or whose deadline has passed."""
        due = [warming for warming in self._warming.values() if not warming.storing or now >= warming.deadline]
        for warming in due:
            del self._warming[warming.prepared.request_id]
        return due
