"""Whether the KV of rows that live fits its budget, who has to give his up, and who may come in. Pure.

Live KV is what rows compute with, beside the prefix cache. All rows that live are counted as if they decoded together,
which they will: a decode batch is padded to its longest row, so a short row beside a long one takes as much as that.
Buffers grow in steps, so every row is counted with a step more than it holds. Windows are counted full; what a slice
adds to one until the next slice is scratch.

A row comes in when all fit, grown by a reserve. When they outgrow the budget the lowest class gives way, the youngest
first, but before it those of its class that have gone on since they were preempted last. A higher class that wants in
takes the room of lower ones if that is enough, and never that of its own or of one that has not gone on yet: each
preemption buys somebody some progress. Every time that a row was preempted it waits for a larger reserve, so that it
is not soon preempted again. Who waited long for memory is let in before anybody else.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from worker.sequence import Lane, Sequence

BUFFER_STEP_TOKENS = 256
"""By how much the buffers of a cache grow at a time."""

_RESERVE_TOKENS = 256
_RESERVE_GROWTH = 4

_PATIENCE_SECONDS = {Lane.INTERACTIVE: 10.0, Lane.STANDARD: 30.0, Lane.BATCH: 120.0}
"""How long others may come in before one that waits for memory. What only warms the cache waits as long as it takes."""


class Window(NamedTuple):
    """Layers that keep the last `tokens` only."""

    tokens: int
    bytes_per_token: int


@dataclass(frozen=True, kw_only=True)
class KVFootprint:
    """What one row's KV takes: of each token in the layers that keep all, in windows, and `fixed_bytes` whatever its
    length. `rows` "padded": a batch takes for each row what it takes for its longest."""

    bytes_per_token: int = 0
    windows: tuple[Window, ...] = ()
    fixed_bytes: int = 0
    rows: Literal["padded", "apart"] = "padded"

    def row_bytes(self, tokens: int) -> int:
        """Of a row that holds `tokens`, with the spare room of its buffers."""
        room = tokens + BUFFER_STEP_TOKENS
        in_windows = sum(min(room, window.tokens) * window.bytes_per_token for window in self.windows)
        return room * self.bytes_per_token + in_windows + self.fixed_bytes

    def most_tokens(self, budget_bytes: int, limit_tokens: int) -> int:
        """How many tokens a row may hold when it has all of the budget; at most `limit_tokens`, 0 when none."""
        low, high = 0, limit_tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.row_bytes(middle) <= budget_bytes else (low, middle - 1)
        return low


class Bound(NamedTuple):
    """What a candidate must keep to: `tokens` now, or `most_tokens` however long its answer gets."""

    tokens: int
    most_tokens: int

    def may_admit(self, candidate: Sequence) -> bool:
        """False is certain."""
        return candidate.tokens <= self.tokens or candidate.most_tokens <= self.most_tokens


Entry = Literal["free", "by_preempting", "none"]
"""Whether a sequence may come in: now, when lower classes have given way, or not yet."""


@dataclass(frozen=True, kw_only=True)
class LiveKV:
    """The budget. `budget_bytes` None: there is none."""

    footprint: KVFootprint = field(default_factory=KVFootprint)
    budget_bytes: int | None = None

    def size_bytes(self, live: Iterable[Sequence]) -> int:
        """Of all rows that live."""
        return _crowd(self.footprint, live, 0).size_bytes(self.footprint)

    def holds(self, live: Collection[Sequence]) -> bool:
        """Whether all that live keep to the budget. One alone always does: requests that never could are refused."""
        return self.budget_bytes is None or len(live) <= 1 or self.size_bytes(live) <= self.budget_bytes

    def victim(self, live: Collection[Sequence]) -> Sequence | None:
        """Who has to give up his KV before all that live can go on by a token. A row alone may go on in any case."""
        if self.budget_bytes is None or len(live) <= 1:
            return None
        if _crowd(self.footprint, live, 1).size_bytes(self.footprint) <= self.budget_bytes:
            return None
        return max(live, key=lambda each: (each.lane, each.has_gone_on, each.arrived))

    def entrance(self, live: Collection[Sequence], only: Sequence | None = None) -> "Entrance":
        """Who may come in beside those that live; `only` this one, if there is one that waited too long."""
        return Entrance(self, live, only)

    def gives_way(self, candidate: Sequence, live: Collection[Sequence]) -> Sequence | None:
        """Who has to give up his KV first, that the candidate may come in. None when it may, or cannot by this."""
        if self.entrance(live).entry(candidate) != "by_preempting":
            return None
        lower = [each for each in live if _gives_way(each, candidate.lane)]
        return max(lower, key=lambda each: (each.lane, each.arrived))


class Entrance:
    """Whether a sequence, alone, may come in beside those that live: asked for many at every step, so that what only
    depends on those that live is counted once. It stands for one moment: those that live must not change meanwhile."""

    def __init__(self, kv: LiveKV, live: Collection[Sequence], only: Sequence | None) -> None:
        self.only = only
        self._kv = kv
        self._live = live
        self._is_open = kv.budget_bytes is None or not live
        self._again = 0
        if not self._is_open:
            self._again = max((each.preemptions for each in live if not each.has_gone_on), default=0)
        self._rooms: dict[tuple[Lane | None, _Storage, int], int] = {}

    def admits(self, candidate: Sequence) -> bool:
        """Whether it may come in now, be it that others give way."""
        return (self.only is None or candidate is self.only) and self.entry(candidate) != "none"

    def entry(self, candidate: Sequence) -> Entry:
        """As whoever has the budget beside these rows would be told."""
        if self._is_open:
            return "free"
        if self._fits(candidate, None):
            return "free"
        return "by_preempting" if self._fits(candidate, candidate.lane) else "none"

    def bound(self, lane: Lane) -> Bound:
        """No candidate of this lane that exceeds it comes in; who was never preempted and keeps to it does."""
        if self._is_open:
            return Bound(_UNBOUNDED, _UNBOUNDED)
        storage, reserve = _storage(self._kv.footprint, lane), self._reserve(0)
        room = max(self._room(None, storage, reserve), self._room(lane, storage, reserve))
        return Bound(room - reserve, room)

    def _fits(self, candidate: Sequence, over: Lane | None) -> bool:
        """Beside all, or, with `over`, beside those that do not give way to this lane, if there are any that do."""
        reserve = self._reserve(candidate.preemptions)
        tokens = min(candidate.tokens + reserve, candidate.most_tokens)
        return tokens <= self._room(over, _storage(self._kv.footprint, candidate.lane), reserve)

    def _reserve(self, preemptions: int) -> int:
        return _RESERVE_TOKENS * _RESERVE_GROWTH ** max(self._again, preemptions)

    def _room(self, over: Lane | None, storage: "_Storage", reserve: int) -> int:
        """How many tokens a row may grow to beside the others, when each of them has grown by `reserve`."""
        key = (over, storage, reserve)
        if key not in self._rooms:
            self._rooms[key] = self._counted_room(over, storage, reserve)
        return self._rooms[key]

    def _counted_room(self, over: Lane | None, storage: "_Storage", reserve: int) -> int:
        footprint, budget_bytes = self._kv.footprint, self._kv.budget_bytes or 0
        stay = [each for each in self._live if over is None or not _gives_way(each, over)]
        if over is not None and len(stay) in (0, len(self._live)):
            return -1 if stay else _UNBOUNDED
        crowd = _crowd(footprint, stay, reserve)
        if storage == "alone":
            return _most_tokens(footprint, budget_bytes - crowd.size_bytes(footprint))
        room = _most_tokens(footprint, (budget_bytes - crowd.alone_bytes) // (crowd.together + 1))
        return room if room >= crowd.longest_tokens else -1


_Storage = Literal["together", "alone"]


def _storage(footprint: KVFootprint, lane: Lane) -> _Storage:
    """Whether a row's KV is in the batch. What only warms the cache never joins it."""
    return "alone" if lane is Lane.WARM or footprint.rows == "apart" else "together"


_UNBOUNDED = 10**9


@lru_cache(maxsize=256)
def _most_tokens(footprint: KVFootprint, budget_bytes: int) -> int:
    """Of one row in so many bytes; below 0 if it cannot even be empty."""
    return footprint.most_tokens(budget_bytes, _UNBOUNDED) if footprint.row_bytes(0) <= budget_bytes else -1


@dataclass(frozen=True)
class _Crowd:
    """Rows, in what they take: some will decode together, padded to the longest; others have caches of their own."""

    together: int
    longest_tokens: int
    alone_bytes: int

    def size_bytes(self, footprint: KVFootprint) -> int:
        return self.alone_bytes + (self.together * footprint.row_bytes(self.longest_tokens) if self.together else 0)


def _crowd(footprint: KVFootprint, rows: Iterable[Sequence], grown_by: int) -> _Crowd:
    """When each has drawn `grown_by` tokens more, or all that it may."""
    together, longest, alone_bytes = 0, 0, 0
    for each in rows:
        tokens = min(each.tokens + grown_by, each.most_tokens)
        if _storage(footprint, each.lane) == "alone":
            alone_bytes += footprint.row_bytes(tokens)
        else:
            together += 1
            longest = max(longest, tokens)
    return _Crowd(together, longest, alone_bytes)


def is_overdue(waiting: Sequence) -> bool:
    """Whether it waited for memory for so long that nobody else comes in before."""
    patience_seconds = _PATIENCE_SECONDS.get(waiting.lane)
    return patience_seconds is not None and waiting.memory_held_seconds >= patience_seconds


def overdue_first(waiting: Iterable[Sequence]) -> list[Sequence]:
    """Those that are overdue, who waited longest first: in this order they come in before anybody else."""
    return sorted(filter(is_overdue, waiting), key=lambda each: each.memory_held_seconds, reverse=True)


def _gives_way(each: Sequence, lane: Lane) -> bool:
    return each.lane > lane and each.has_gone_on
