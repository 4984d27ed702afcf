"""When rows will probably get free: by how many tokens answers had lately, and never later than `max_tokens`. Pure.

Nobody knows how long an answer gets: it may become as long as each of those of its lane that ended lately and were
longer than it is now. Of many rows one is short, so ends are counted over all of them: each of a row's lengths is a
part of an end, and the n-th end is expected when the parts make n. Who has a row next keeps it for an answer's time.
"""

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterator

from worker.sequence import LANES, Lane, Sequence

_KEPT_ANSWERS = 64
_FEWEST_ANSWERS = 4
_PARTS = 8
"""A row's spread is told by so many of the answers that are longer."""

_KNOWN_TOKENS = 512
"""Of a lane of which no answers are known, a row is trusted to take all of its `max_tokens` if these are no more: most
clients ask for far more than they get."""

_MEASURED_TOKENS = 8
"""Rows that drew fewer say nothing of their pace."""

_COUNTED_ENDS = 64
"""Those after these are expected to follow as the last ones do."""


class AnswerLengths:
    """How many tokens the latest rows of each lane drew, however they ended."""

    def __init__(self) -> None:
        self._latest: list[deque[int]] = [deque(maxlen=_KEPT_ANSWERS) for _ in LANES]

    def ended(self, lane: Lane, tokens: int) -> None:
        """A row got free for good that had drawn so many."""
        if tokens > 0:
            self._latest[lane].append(tokens)

    def left(self, row: Sequence) -> list[int]:
        """How many tokens this row may still draw, as numbers that are equally probable; empty if nobody can say."""
        most = max(1, row.max_tokens - row.drawn) if row.max_tokens else None
        lengths = self._latest[row.lane]
        longer = sorted(length - row.drawn for length in lengths if length > row.drawn)
        if len(lengths) < _FEWEST_ANSWERS or not longer:
            return [most] if most is not None and most <= _KNOWN_TOKENS else []
        if len(longer) > _PARTS:
            longer = [longer[len(longer) * (2 * part + 1) // (2 * _PARTS)] for part in range(_PARTS)]
        return [tokens if most is None else min(tokens, most) for tokens in longer]

    def mean(self, lane: Lane) -> float:
        """Of a whole answer of this lane; infinite while too few are known."""
        lengths = self._latest[lane]
        return sum(lengths) / len(lengths) if len(lengths) >= _FEWEST_ANSWERS else math.inf


class RowEnds:
    """As things stand with the rows that decode: good for one moment. `step_seconds` is what a step takes, 0 when that
    is not known."""

    def __init__(self, rows: Collection[Sequence], lengths: AnswerLengths, step_seconds: float, now: float) -> None:
        seconds_per_token = _token_seconds(rows, step_seconds, now)
        self._coming = iter(()) if seconds_per_token <= 0 else _ends(rows, lengths, seconds_per_token)
        self._seconds: list[float] = []

    def seconds_until(self, count: int) -> float | None:
        """Until so many rows, at least one, will have got free; None if nobody can say."""
        wanted = min(count, _COUNTED_ENDS)
        while len(self._seconds) < wanted:
            seconds = next(self._coming, None)
            if seconds is None:
                return None
            self._seconds.append(seconds)
        if count <= _COUNTED_ENDS:
            return self._seconds[count - 1]
        half = _COUNTED_ENDS // 2
        between_seconds = (self._seconds[-1] - self._seconds[half - 1]) / (_COUNTED_ENDS - half)
        return self._seconds[-1] + (count - _COUNTED_ENDS) * between_seconds


def _token_seconds(rows: Collection[Sequence], step_seconds: float, now: float) -> float:
    """What a token of a row takes at present, with all that comes between its steps."""
    paces = sorted(
        (now - row.decode_started) / row.drawn
        for row in rows
        if row.decode_started is not None and row.drawn >= _MEASURED_TOKENS
    )
    return max(paces[len(paces) // 2] if paces else 0.0, step_seconds)


def _ends(rows: Collection[Sequence], lengths: AnswerLengths, seconds_per_token: float) -> Iterator[float]:
    """In how many seconds the first of these rows is expected to get free, the second, and so on. Never falls."""
    pending: list[tuple[float, float, Lane]] = []
    for row in rows:
        left = lengths.left(row)
        pending += [(tokens * seconds_per_token, 1 / len(left), row.lane) for tokens in left]
    heapq.heapify(pending)
    parts, wanted = 0.0, 1
    while pending:
        seconds, part, lane = heapq.heappop(pending)
        parts += part
        while parts >= wanted - 1e-9:  # parts of a third, three times, are a little less than one
            yield seconds
            wanted += 1
        if math.isfinite(next_tokens := lengths.mean(lane)):
            heapq.heappush(pending, (seconds + next_tokens * seconds_per_token, part, lane))
