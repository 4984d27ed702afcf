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
from typing import Literal, NamedTuple

from protocol.ids import RequestId
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


Entry = Literal["free", "by_preempting", "none"]
"""Whether a sequence may come in: now, when lower classes have given way, or not yet."""


@dataclass(frozen=True, kw_only=True)
class LiveKV:
    """The budget. `budget_bytes` None: there is none."""

    footprint: KVFootprint = field(default_factory=KVFootprint)
    budget_bytes: int | None = None

    def size_bytes(self, live: Iterable[Sequence]) -> int:
        """Of all rows that live."""
        return self._crowd(live, 0).size_bytes(self.footprint)

    def holds(self, live: Collection[Sequence]) -> bool:
        """Whether all that live keep to the budget. One alone always does: requests that never could are refused."""
        return self.budget_bytes is None or len(live) <= 1 or self.size_bytes(live) <= self.budget_bytes

    def victim(self, live: Collection[Sequence]) -> Sequence | None:
        """Who has to give up his KV before all that live can go on by a token. A row alone may go on in any case."""
        if self.budget_bytes is None or len(live) <= 1:
            return None
        if self._crowd(live, 1).size_bytes(self.footprint) <= self.budget_bytes:
            return None
        return max(live, key=lambda each: (each.lane, each.has_gone_on, each.arrived))

    def entries(self, candidates: Iterable[Sequence], live: Collection[Sequence]) -> dict[RequestId, Entry]:
        """Whether each of the candidates, alone, may come in beside those that live."""
        if self.budget_bytes is None or not live:
            return {each.request_id: "free" for each in candidates}
        budget_bytes = self.budget_bytes
        again = max((each.preemptions for each in live if not each.has_gone_on), default=0)
        # Asked for many candidates at every step: what only depends on those that live is counted once.
        crowds: dict[tuple[Lane | None, int], _Crowd] = {}

        def fits(candidate: Sequence, over: Lane | None) -> bool:
            """Beside all, or, with `over`, beside those that do not give way to this lane, if there are any that do."""
            reserve = _RESERVE_TOKENS * _RESERVE_GROWTH ** max(again, candidate.preemptions)
            if (over, reserve) not in crowds:
                stay = [each for each in live if over is None or not _gives_way(each, over)]
                crowds[over, reserve] = self._crowd(stay, reserve)
            crowd = crowds[over, reserve]
            if over is not None and crowd.rows in (0, len(live)):
                return crowd.rows == 0
            return (crowd + self._crowd([candidate], reserve)).size_bytes(self.footprint) <= budget_bytes

        return {
            each.request_id: "free" if fits(each, None) else "by_preempting" if fits(each, each.lane) else "none"
            for each in candidates
        }

    def gives_way(self, candidate: Sequence, live: Collection[Sequence]) -> Sequence | None:
        """Who has to give up his KV first, that the candidate may come in. None when it may, or cannot by this."""
        if self.entries([candidate], live)[candidate.request_id] != "by_preempting":
            return None
        lower = [each for each in live if _gives_way(each, candidate.lane)]
        return max(lower, key=lambda each: (each.lane, each.arrived))

    def _crowd(self, rows: Iterable[Sequence], grown_by: int) -> "_Crowd":
        """When each has drawn `grown_by` tokens more, or all that it may."""
        count, together, longest, alone_bytes = 0, 0, 0, 0
        for each in rows:
            tokens = min(each.tokens + grown_by, each.most_tokens)
            count += 1
            # What only warms the cache never joins the batch.
            if self.footprint.rows == "apart" or each.lane is Lane.WARM:
                alone_bytes += self.footprint.row_bytes(tokens)
            else:
                together += 1
                longest = max(longest, tokens)
        return _Crowd(count, together, longest, alone_bytes)


@dataclass(frozen=True)
class _Crowd:
    """Rows, in what they take: some will decode together, padded to the longest; others have caches of their own."""

    rows: int
    together: int
    longest_tokens: int
    alone_bytes: int

    def __add__(self, other: "_Crowd") -> "_Crowd":
        return _Crowd(
            self.rows + other.rows,
            self.together + other.together,
            max(self.longest_tokens, other.longest_tokens),
            self.alone_bytes + other.alone_bytes,
        )

    def size_bytes(self, footprint: KVFootprint) -> int:
        return self.alone_bytes + (self.together * footprint.row_bytes(self.longest_tokens) if self.together else 0)


def overdue(waiting: Iterable[Sequence]) -> Sequence | None:
    """Who waited for memory for so long that nobody else comes in before: the one that waited longest."""
    late = [
        each
        for each in waiting
        if each.lane in _PATIENCE_SECONDS and each.memory_held_seconds >= _PATIENCE_SECONDS[each.lane]
    ]
    return max(late, key=lambda each: each.memory_held_seconds, default=None)


def _gives_way(each: Sequence, lane: Lane) -> bool:
    return each.lane > lane and each.has_gone_on
