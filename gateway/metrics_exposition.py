"""What is counted and what runs now → metric families, for Prometheus and all that read its format.

Names and units are the field's: seconds, bytes, `_total` for what only grows. Labels hold no key and no prompt.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import isinf
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.front_desk import FrontDesk
from gateway.in_flight_request import InFlightRequest
from gateway.operations import mlxd_version
from gateway.request_tallies import Histogram, Kind, KindTallies, RequestTallies
from gateway.status import CachestoreStatus, ModelState, ModelStatus, StatusSource

_KIND = ("model", "class")


class ServiceCollector(Collector):
    """Looks at the service when it is asked, on the event loop, and keeps nothing."""

    def __init__(self, desk: FrontDesk, status_source: StatusSource) -> None:
        self._desk = desk
        self._status_source = status_source

    def collect(self) -> Iterator[Metric]:
        """Everything, family by family."""
        status = self._status_source.status()
        yield _gauge("build_info", "The version that runs.", ("version",), [((mlxd_version(),), 1)])
        yield from request_families(self._desk.tallies)
        yield from open_families(self._desk.tallies, self._desk.standings())
        yield from model_families(status.models)
        if status.cachestore is not None:
            yield from cachestore_families(status.cachestore)


def request_families(tallies: RequestTallies) -> Iterator[Metric]:
    """Of requests that have ended, and of the tokens of all."""
    yield _counter(
        "requests",
        "Requests that were admitted and have ended.",
        ("model", "dialect", "class", "outcome"),
        (
            ((kind.model, dialect, kind.work_class, outcome), count)
            for (kind, dialect, outcome), count in tallies.ended.items()
        ),
    )
    yield _counter(
        "requests_rejected",
        "Requests that were refused before their model saw them.",
        ("reason",),
        (((reason.value,), count) for reason, count in tallies.rejected.items()),
    )
    yield _counter(
        "http_requests", "Answers to HTTP requests.", ("method", "route", "status"), iter(tallies.answered.items())
    )
    kinds = tallies.kinds.items()
    yield _histogram(
        "time_to_first_token_seconds",
        "From admission to the first token.",
        ((kind, of.first_token) for kind, of in kinds),
    )
    yield _histogram(
        "inter_token_latency_seconds",
        "Between two tokens of a request, as they come from its model.",
        ((kind, of.between_tokens) for kind, of in kinds),
    )
    yield _histogram(
        "request_queue_time_seconds",
        "From admission to the first work on the prompt, loading included.",
        ((kind, of.queue) for kind, of in kinds),
    )
    yield _histogram(
        "e2e_request_latency_seconds", "From admission to the last byte.", ((kind, of.whole) for kind, of in kinds)
    )
    yield _of_kinds("prompt_tokens", "Tokens of prompts, cached ones included.", kinds, "prompt_tokens")
    yield _of_kinds("generation_tokens", "Tokens of finished answers.", kinds, "completion_tokens")
    yield _of_kinds("reasoning_tokens", "Those of them that were reasoning.", kinds, "reasoning_tokens")
    yield _counter(
        "cached_prompt_tokens",
        "Tokens of prompts that were not computed again, by where their KV was.",
        (*_KIND, "tier"),
        (
            ((*_labels(kind), tier), tokens)
            for kind, of in kinds
            for tier, tokens in (("ram", of.cached_ram_tokens), ("disk", of.cached_disk_tokens))
        ),
    )


def open_families(tallies: RequestTallies, requests: Iterable[InFlightRequest]) -> Iterator[Metric]:
    """Of requests that are open now. A kind that was seen once is told of for ever: a gap is no zero."""
    counts = Counter(
        (Kind(model=request.model, work_class=request.work_class), request.is_running) for request in requests
    )
    for name, what, is_running in (
        ("requests_running", "Requests whose prompt is worked on or whose answer is drawn.", True),
        ("requests_waiting", "Requests that wait: for their model, a row, memory, or their key's turn.", False),
    ):
        samples = ((_labels(kind), counts[kind, is_running]) for kind in tallies.kinds)
        yield _gauge(name, what, _KIND, samples)


def model_families(models: tuple[ModelStatus, ...]) -> Iterator[Metric]:
    """Of models' processes. What a process counted begins at 0 again with the next."""
    states = [((model.name, state), int(model.state == state)) for model in models for state in get_args(ModelState)]
    yield _gauge("model_state", "1 for the state that the model's process is in.", ("model", "state"), states)
    by_model = ("model",)
    restarts = (((model.name,), model.restarts) for model in models)
    yield _counter("worker_restarts", "How often a model's process was started again.", by_model, restarts)
    stuck = (((model.name,), int(model.stuck_reason is not None)) for model in models)
    yield _gauge("worker_stuck", "1 while a model has work that does not get on.", by_model, stuck)
    held = (((model.name,), int(model.held_reason is not None)) for model in models)
    yield _gauge("worker_held", "1 while a process is stopped by a signal or a debugger.", by_model, held)
    books = [(model.name, model.books) for model in models if model.books is not None]
    for name, what, field in (
        ("worker_memory_bytes", "Memory of a process's arrays.", "active_bytes"),
        ("worker_running_rows", "Rows that decode or are prefilled.", "running_rows"),
        ("worker_waiting_requests", "Requests that a process has not begun.", "waiting_requests"),
        ("live_kv_bytes", "KV of running rows.", "live_kv_bytes"),
        ("live_kv_budget_bytes", "How much that may be.", "live_kv_budget_bytes"),
        ("hot_cache_bytes", "Prefix cache in RAM.", "hot_cache_bytes"),
        ("hot_cache_budget_bytes", "How much that may be.", "hot_cache_budget_bytes"),
        ("hot_cache_blocks", "Its blocks.", "hot_cache_blocks"),
        ("prefill_tokens_per_second", "How fast prompts are read, as measured.", "prefill_tokens_per_second"),
    ):
        samples = (((model,), value) for model, pong in books if (value := getattr(pong, field)) is not None)
        yield _gauge(name, what, by_model, samples)
    steps = (((model,), pong.steps) for model, pong in books)
    yield _counter("engine_steps", "Steps of the engine.", by_model, steps)
    preemptions = (((model,), pong.preemptions) for model, pong in books)
    yield _counter("preemptions", "How often a row gave up its KV to others.", by_model, preemptions)
    yield _counter(
        "prefix_cache_misses",
        "Requests that computed more than their last token, by why that was not cached; and refused pins.",
        ("model", "reason"),
        (((model, reason), count) for model, pong in books for reason, count in sorted(pong.misses.items())),
    )
    yield _counter(
        "prefix_cache_blocks_not_written",
        "Blocks that were to be written to disk and were not, by why.",
        ("model", "reason"),
        (((model, reason), count) for model, pong in books for reason, count in sorted(pong.not_written.items())),
    )


def cachestore_families(store: CachestoreStatus) -> Iterator[Metric]:
    """Of the cache on disk."""
    states = [((state,), int(store.state == state)) for state in get_args(ModelState)]
    yield _gauge("cachestore_state", "1 for the state that the cachestore is in.", ("state",), states)
    yield _counter("cachestore_restarts", "How often it was started again.", (), [((), store.restarts)])
    books = store.books
    if books is None:
        return
    for name, what, gauge in (
        ("cachestore_blocks", "Blocks on disk.", books.blocks),
        ("cachestore_bytes", "What they take.", books.file_bytes),
        ("cachestore_quota_bytes", "How much that may be.", books.quota_bytes),
        ("cachestore_leases", "Blocks that are being read.", books.leases),
        ("cachestore_written_today_bytes", "Written since midnight UTC.", books.written_today_bytes),
        ("cachestore_daily_write_bytes", "How much that may be.", books.daily_write_bytes),
    ):
        yield _gauge(name, what, (), [] if gauge is None else [((), gauge)])
    for name, what, counted in (
        ("cachestore_published_blocks", "Blocks that were written.", books.published),
        ("cachestore_written_bytes", "Bytes that were written.", books.written_bytes),
        ("cachestore_evicted_blocks", "Blocks that went for others.", books.evicted),
        ("cachestore_expired_blocks", "Blocks whose time was over.", books.expired),
        ("cachestore_quarantined_blocks", "Blocks that failed their check.", books.quarantined),
    ):
        yield _counter(name, what, (), [((), counted)])


# --- families --------------------------------------------------------------------------------------------------------

_Samples = Iterable[tuple[tuple[str, ...], float]]


def _labels(kind: Kind) -> tuple[str, str]:
    return kind.model, kind.work_class


def _of_kinds(name: str, what: str, kinds: Iterable[tuple[Kind, KindTallies]], field: str) -> Metric:
    return _counter(name, what, _KIND, ((_labels(kind), getattr(of, field)) for kind, of in kinds))


def _counter(name: str, what: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    family = CounterMetricFamily(f"mlxd_{name}", what, labels=labels)
    for values, count in samples:
        family.add_metric(values, count)
    return family


def _gauge(name: str, what: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    family = GaugeMetricFamily(f"mlxd_{name}", what, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, what: str, kinds: Iterable[tuple[Kind, Histogram]]) -> Metric:
    family = HistogramMetricFamily(f"mlxd_{name}", what, labels=_KIND)
    for kind, histogram in kinds:
        buckets = [("+Inf" if isinf(bound) else str(bound), count) for bound, count in histogram.cumulative()]
        family.add_metric(_labels(kind), buckets, histogram.total)
    return family
