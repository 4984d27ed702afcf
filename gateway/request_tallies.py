"""What was asked of this gateway since it started, counted as Prometheus counts: sums and histograms. Decides only.

Every label is one of a few words of ours or a model's name: no key, no prompt, nothing else that a client wrote.
"""

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import Literal

from msgspec import Struct

from gateway.latency_class import WorkClass
from protocol.failures import FailureKind
from protocol.generation import CacheReport, Finished, Usage, Warmed
from protocol.ids import ModelName

Dialect = Literal["chat", "completions", "messages", "responses", "embeddings", "rerank", "warm"]
"""The API that a request came by."""

TOKEN_SECONDS = (
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    """How many observations were at most each of `bounds`, and their sum. One costs less than a microsecond: every
    token of every stream is one."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """`times` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound, and how many observations were no greater. The last bound is infinity."""
        return list(zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True))


class Kind(Struct, frozen=True, kw_only=True):
    """What times and tokens are told apart by."""

    model: ModelName
    work_class: WorkClass


class KindTallies:
    """Those of one kind. Times are in seconds of this process's monotonic clock.

    `first_token` is from admission to the first token, `between_tokens` between two of them as they came from the
    worker, `queue` from admission to the first work on the prompt, `whole` from admission to the end.
    """

    def __init__(self) -> None:
        self.first_token = Histogram(REQUEST_SECONDS)
        self.between_tokens = Histogram(TOKEN_SECONDS)
        self.queue = Histogram(REQUEST_SECONDS)
        self.whole = Histogram(REQUEST_SECONDS)
        self.prompt_tokens = 0
        self.cached_ram_tokens = 0
        self.cached_disk_tokens = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0


class RequestTallies:
    """All of it. Read the attributes; they are changed by the methods alone."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, KindTallies] = {}
        self.ended: Counter[tuple[Kind, Dialect, str]] = Counter()
        """Admitted requests by kind, dialect and outcome."""
        self.rejected: Counter[FailureKind] = Counter()
        """Requests that were refused before a model saw them."""
        self.answered: Counter[tuple[str, str, str]] = Counter()
        """HTTP requests by method, route and status."""

    def of(self, model: ModelName, work_class: WorkClass) -> KindTallies:
        """Those of one kind, from nothing if need be."""
        kind = Kind(model=model, work_class=work_class)
        tallies = self.kinds.get(kind)
        if tallies is None:
            tallies = self.kinds[kind] = KindTallies()
        return tallies

    def reject(self, kind: FailureKind) -> None:
        self.rejected[kind] += 1

    def answer(self, *, method: str, route: str, status: str) -> None:
        self.answered[method, route, status] += 1

    def end(self, *, model: ModelName, work_class: WorkClass, dialect: Dialect, outcome: str) -> None:
        """An admitted request ended, whichever way."""
        self.ended[Kind(model=model, work_class=work_class), dialect, outcome] += 1


def count_tokens(tallies: KindTallies, finished: Finished, prompt: Literal["own", "shared"] = "own") -> None:
    """A choice ended well. A `shared` prompt is another choice's and was counted with that."""
    usage: Usage = finished.usage
    cache: CacheReport = finished.cache
    tallies.completion_tokens += usage.completion_tokens
    tallies.reasoning_tokens += usage.reasoning_tokens
    if prompt == "own":
        _count_prompt(tallies, usage.prompt_tokens, usage.cached_tokens, cache)


def count_warm(tallies: KindTallies, warmed: Warmed) -> None:
    """A run ended well that was there for its prompt alone."""
    _count_prompt(tallies, warmed.prompt_tokens, warmed.cached_tokens, warmed.cache)


def _count_prompt(tallies: KindTallies, prompt_tokens: int, cached_tokens: int, cache: CacheReport) -> None:
    tallies.prompt_tokens += prompt_tokens
    disk_tokens = min(cache.disk_tokens, cached_tokens)
    tallies.cached_disk_tokens += disk_tokens
    tallies.cached_ram_tokens += cached_tokens - disk_tokens
