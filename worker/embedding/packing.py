"""Which rows run in the next batch: by class, by tenant, then by length. Decides only.

A batch is bounded by its tokens, padding counted, and by the time that these are expected to take; one row always
goes. Padding is wasted work, so a batch is filled with rows of about the length of the one whose turn it is.

Whose turn it is: the highest class; every `lower_class_every`-th batch the next lower one that waits. In a class the
tenant who had the least of the device; of a tenant in turns the oldest request and the one with the fewest rows left,
so that one text does not wait for the two thousand of the request before it, nor those for ever for small ones.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from protocol.ids import RequestId
from protocol.latency import LatencyClass
from worker.tenants import TenantBooks

_RATE_SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class PackingSettings:
    """`first_batch_tokens` bounds a batch while nothing was measured; `wasted_share` of one may be padding."""

    most_tokens: int = 16_384
    most_rows: int = 256
    first_batch_tokens: int = 1024
    wasted_share: float = 0.2
    lower_class_every: int = 17


@dataclass(frozen=True, kw_only=True)
class Row:
    """The `index`-th row of a request."""

    request_id: RequestId
    index: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows to run together. `rank` is their class's."""

    rows: tuple[Row, ...]
    rank: int

    @property
    def padded_tokens(self) -> int:
        return len(self.rows) * max(row.tokens for row in self.rows)


@dataclass(kw_only=True)
class _Waiting:
    """A request that has rows left, by their lengths."""

    request_id: RequestId
    rank: int
    tenant: str
    by_length: dict[int, deque[Row]]
    left: int


@dataclass
class Packer:
    """The rows that wait. Requests keep their order of arrival."""

    settings: PackingSettings = field(default_factory=PackingSettings)
    _waiting: dict[RequestId, _Waiting] = field(default_factory=dict[RequestId, _Waiting])
    _tenants: TenantBooks = field(default_factory=TenantBooks)
    _seconds_per_token: deque[float] = field(default_factory=lambda: deque[float](maxlen=_RATE_SAMPLES))
    _batches: int = 0

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def tokens_per_second(self) -> float | None:
        """Of the slowest of the latest batches, padding counted; None before the first."""
        slowest = max(self._seconds_per_token, default=0.0)
        return 1 / slowest if slowest > 0 else None

    @property
    def highest_rank(self) -> int | None:
        """The highest class that waits."""
        return min((waiting.rank for waiting in self._waiting.values()), default=None)

    def add(
        self,
        request_id: RequestId,
        lengths: Sequence[int],
        *,
        latency_class: LatencyClass,
        tenant: str = "",
        tenant_weight: float = 1.0,
    ) -> None:
        """A request whose rows have so many tokens each."""
        by_length: dict[int, deque[Row]] = {}
        for index, tokens in enumerate(lengths):
            by_length.setdefault(tokens, deque()).append(Row(request_id=request_id, index=index, tokens=tokens))
        if not by_length:
            return
        self._waiting[request_id] = _Waiting(
            request_id=request_id, rank=latency_class.rank, tenant=tenant, by_length=by_length, left=len(lengths)
        )
        self._tenants.arrived(tenant, tenant_weight)

    def remove(self, request_id: RequestId) -> None:
        """Nobody wants its rows any more. An unknown one is fine."""
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            self._tenants.left(waiting.tenant)

    def most_tokens(self, most_seconds: float) -> int:
        """How many tokens can be expected to run in this time, padding counted; at most a batch's."""
        rate = self.tokens_per_second
        if rate is None:
            return self.settings.first_batch_tokens
        return min(self.settings.most_tokens, int(rate * most_seconds))

    def next_batch(self, most_seconds: float) -> Batch | None:
        """What to run now, None when nothing waits. Changes nothing: tell `ran` when it did."""
        if not self._waiting:
            return None
        rank = self._rank()
        rivals = [waiting for waiting in self._waiting.values() if waiting.rank == rank]
        head = self._head(rivals)
        first = head.by_length[max(head.by_length)][0]
        budget = self.most_tokens(most_seconds)
        rows = [first]
        real = longest = first.tokens
        for row in _nearest(rivals, head, first):
            padded = max(longest, row.tokens) * (len(rows) + 1)
            is_wasteful = padded - real - row.tokens > self.settings.wasted_share * padded
            if padded > budget or is_wasteful or len(rows) == self.settings.most_rows:
                break
            rows.append(row)
            real += row.tokens
            longest = max(longest, row.tokens)
        return Batch(rows=tuple(rows), rank=rank)

    def ran(self, batch: Batch, seconds: float) -> None:
        """It ran, in so much time: its rows wait no more. Those of removed requests are passed by."""
        self._batches += 1
        self._seconds_per_token.append(seconds / batch.padded_tokens)
        tokens = sum(row.tokens for row in batch.rows)
        done: dict[RequestId, set[int]] = {}
        for row in batch.rows:
            waiting = self._waiting.get(row.request_id)
            if waiting is None:
                continue
            self._tenants.charge(waiting.tenant, seconds * row.tokens / tokens)
            done.setdefault(row.request_id, set()).add(row.index)
        for request_id, indexes in done.items():
            self._take(self._waiting[request_id], indexes, {row.tokens for row in batch.rows})

    # --- whose turn it is --------------------------------------------------------------------------------------------

    def _rank(self) -> int:
        ranks = sorted({waiting.rank for waiting in self._waiting.values()})
        is_lower_ones_turn = (self._batches + 1) % self.settings.lower_class_every == 0
        if is_lower_ones_turn and len(ranks) > 1:
            # Of several lower classes each has its turn, or the lowest would wait for ever.
            return ranks[1 + (self._batches // self.settings.lower_class_every) % (len(ranks) - 1)]
        return ranks[0]

    def _head(self, rivals: Sequence[_Waiting]) -> _Waiting:
        leads = self._tenants.leads()
        least = min(leads(waiting.tenant) for waiting in rivals)
        of_tenant = next(waiting.tenant for waiting in rivals if leads(waiting.tenant) == least)
        requests = [waiting for waiting in rivals if waiting.tenant == of_tenant]
        if self._batches % 2:
            return min(requests, key=lambda waiting: waiting.left)
        return requests[0]

    def _take(self, waiting: _Waiting, indexes: set[int], lengths: set[int]) -> None:
        for tokens in lengths & waiting.by_length.keys():
            kept = deque(row for row in waiting.by_length[tokens] if row.index not in indexes)
            waiting.left -= len(waiting.by_length[tokens]) - len(kept)
            if kept:
                waiting.by_length[tokens] = kept
            else:
                del waiting.by_length[tokens]
        if not waiting.left:
            self.remove(waiting.request_id)


def _nearest(rivals: Sequence[_Waiting], head: _Waiting, first: Row) -> Iterator[Row]:
    """Every other row of these requests: the nearest in length first, of equal ones those of `head` first."""
    lengths = {tokens for waiting in rivals for tokens in waiting.by_length}
    in_order = [head, *(waiting for waiting in rivals if waiting is not head)]
    for tokens in sorted(lengths, key=lambda tokens: (abs(tokens - first.tokens), tokens)):
        for waiting in in_order:
            for row in waiting.by_length.get(tokens, ()):
                if row is not first:
                    yield row
