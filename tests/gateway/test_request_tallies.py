"""What requests leave in the books, and what Prometheus' own parser reads of them."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gateway.admission import KeyLimits
from gateway.in_flight import InFlight
from gateway.in_flight_request import InFlightRequest, advance
from gateway.metrics_exposition import cachestore_families, model_families, open_families, request_families
from gateway.request_tallies import TOKEN_SECONDS, Histogram, RequestTallies, count_tokens
from gateway.status import CachestoreStatus, ModelStatus
from protocol.blocks import Described
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    CacheReport,
    CallArguments,
    Delta,
    Embedded,
    Failed,
    Finished,
    FinishReason,
    Pong,
    Prefilling,
    Queued,
    Reasoning,
    RequestEvent,
    Timings,
    Usage,
)
from protocol.ids import ModelName, RequestId

ID = RequestId("req_1")
MODEL = ModelName('org/a "quoted" \\ model')
TIMINGS = Timings(queue_seconds=0.0, prefill_seconds=0.0, decode_seconds=0.0, prefill_slices=0)


class Fixed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposed(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What a scraper sees, by the library's parser."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Fixed(families))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"mlxd_{name}", frozenset((label.rstrip("_"), value) for label, value in labels.items())


def finished(*, cached: int = 0, disk: int = 0, reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(
        request_id=ID,
        reason=reason,
        usage=Usage(prompt_tokens=100, completion_tokens=8, cached_tokens=cached, reasoning_tokens=3),
        timings=TIMINGS,
        cache=CacheReport(ram_tokens=cached - disk, disk_tokens=disk),
    )


def lived(tallies: RequestTallies, events: Sequence[tuple[float, RequestEvent]]) -> InFlightRequest:
    """A request that arrived at 10 and met these events."""
    book = InFlight()
    request = InFlightRequest(
        request_id=ID,
        key_name="a secret key's name",
        limits=KeyLimits(),
        model=MODEL,
        work_class="batch",
        arrived=10.0,
        tallies=tallies.of(MODEL, "batch"),
    )
    book.enter(request)
    book.follow(request, ID, "own")
    for at, event in events:
        advance(request, event, at)
    return request


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5))))
def test_a_histogram_counts_everything_once(observed: list[tuple[float, int]]) -> None:
    """Each bound has all that is no greater; the last, infinity, has all."""
    histogram = Histogram(TOKEN_SECONDS)
    for value, times in observed:
        histogram.add(value, times)
    for bound, count in histogram.cumulative():
        assert count == sum(times for value, times in observed if value <= bound)
    assert histogram.count == sum(times for _, times in observed)
    assert histogram.total == pytest.approx(sum(value * times for value, times in observed))


def test_times_are_taken_as_events_come() -> None:
    """Queue until the first progress, first token from admission, then every token's share of what lies between events,
    whichever part of the answer it is of. Events without a token are no moments."""
    tallies = RequestTallies()
    progress = Prefilling(request_id=ID, done_tokens=0, total_tokens=100, cached_tokens=0)
    lived(
        tallies,
        [
            (10.1, Queued(request_id=ID, prompt_tokens=100)),
            (10.5, progress),
            (11.0, progress),
            (12.0, Reasoning(request_id=ID, text="a", tokens=1)),
            (12.1, Delta(request_id=ID, text="", tokens=0)),
            (12.4, Delta(request_id=ID, text="b", tokens=1)),
            (13.4, CallArguments(request_id=ID, index=0, text="c", tokens=4)),
        ],
    )
    of = tallies.of(MODEL, "batch")
    assert (of.queue.count, of.queue.total) == (1, pytest.approx(0.5))
    assert (of.first_token.count, of.first_token.total) == (1, pytest.approx(2.0))
    assert (of.between_tokens.count, of.between_tokens.total) == (5, pytest.approx(1.4))
    seen = exposed(request_families(tallies))
    labels = {"model": MODEL, "class_": "batch"}
    assert seen[key("inter_token_latency_seconds_count", **labels)] == 5
    assert seen[key("inter_token_latency_seconds_bucket", **labels, le="0.2")] == 0
    assert seen[key("inter_token_latency_seconds_bucket", **labels, le="0.3")] == 4
    assert seen[key("inter_token_latency_seconds_bucket", **labels, le="+Inf")] == 5


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (finished(), "stop"),
        (finished(reason=FinishReason.TOOL_CALLS), "tool_calls"),
        (Embedded(request_id=ID, dimensions=1, vectors=b"", prompt_tokens=7), "done"),
        (Failed(request_id=ID, failure=Failure(kind=FailureKind.WORKER_DIED, message="m")), "worker_died"),
        (Queued(request_id=ID, prompt_tokens=1), "cancelled"),
    ],
)
def test_how_it_ended(event: RequestEvent, outcome: str) -> None:
    """One word of ours, whatever happened; who left before the end was cancelled."""
    assert lived(RequestTallies(), [(11.0, event)]).outcome == outcome


def test_tokens_are_counted_as_billed() -> None:
    """A prompt that choices share is counted once; cached tokens by the tier they came from."""
    tallies = RequestTallies()
    lived(tallies, [(11.0, finished(cached=60, disk=20))])
    count_tokens(tallies.of(MODEL, "batch"), finished(cached=100), "shared")
    seen = exposed(request_families(tallies))
    labels = {"model": MODEL, "class_": "batch"}
    assert seen[key("prompt_tokens_total", **labels)] == 100
    assert seen[key("generation_tokens_total", **labels)] == 16
    assert seen[key("reasoning_tokens_total", **labels)] == 6
    assert seen[key("cached_prompt_tokens_total", **labels, tier="ram")] == 40
    assert seen[key("cached_prompt_tokens_total", **labels, tier="disk")] == 20


def test_what_is_open_falls_back_to_zero() -> None:
    """By class, running and waiting apart; a kind that was seen stays, since a gap in a graph is no zero."""
    tallies = RequestTallies()
    waits = lived(tallies, [(11.0, Queued(request_id=ID, prompt_tokens=1))])
    runs = lived(tallies, [(11.0, Delta(request_id=ID, text="a", tokens=1))])
    labels = {"model": MODEL, "class_": "batch"}
    now = exposed(open_families(tallies, [waits, runs, runs]))
    assert (now[key("requests_running", **labels)], now[key("requests_waiting", **labels)]) == (2, 1)
    later = exposed(open_families(tallies, []))
    assert (later[key("requests_running", **labels)], later[key("requests_waiting", **labels)]) == (0, 0)


def test_processes_and_their_books() -> None:
    """Exactly one state is 1; a process without books, or a bound that is none, has no sample and not a false one."""
    books = Pong(
        nonce=1,
        steps=9,
        running_rows=1,
        waiting_requests=2,
        active_bytes=3,
        hot_cache_bytes=4,
        hot_cache_blocks=5,
        misses={"absent": 6},
        not_written={"disk_slower": 8},
        preemptions=7,
    )
    models = (
        ModelStatus(name=ModelName("a"), state="ready", since_unix=0.0, restarts=2, books=books),
        ModelStatus(name=ModelName("b"), state="starting", since_unix=0.0, held_reason="h"),
        ModelStatus(name=ModelName("c"), state="ready", since_unix=0.0, held_reason="h", stuck_reason="h"),
    )
    seen = exposed(model_families(models))
    assert [seen[key("worker_held", model=model)] for model in "abc"] == [0, 1, 1]
    assert [seen[key("worker_stuck", model=model)] for model in "abc"] == [0, 0, 1]
    states = {labels: value for (name, labels), value in seen.items() if name == "mlxd_model_state" and value}
    assert states == {
        frozenset({("model", "a"), ("state", "ready")}): 1.0,
        frozenset({("model", "b"), ("state", "starting")}): 1.0,
        frozenset({("model", "c"), ("state", "ready")}): 1.0,
    }
    assert seen[key("worker_restarts_total", model="a")] == 2
    assert seen[key("worker_memory_bytes", model="a")] == 3
    assert seen[key("prefix_cache_misses_total", model="a", reason="absent")] == 6
    assert seen[key("prefix_cache_blocks_not_written_total", model="a", reason="disk_slower")] == 8
    assert seen[key("preemptions_total", model="a")] == 7
    assert key("live_kv_budget_bytes", model="a") not in seen
    assert key("hot_cache_bytes", model="b") not in seen


def test_the_disk() -> None:
    """The cachestore's own numbers; before it has said any, its state alone."""
    assert len(exposed(cachestore_families(CachestoreStatus(state="starting", since_unix=0.0)))) == 8
    books = Described(
        call_id=1,
        blocks=2,
        file_bytes=3,
        quota_bytes=4,
        leases=5,
        published=6,
        written_bytes=7,
        evicted=8,
        quarantined=9,
        written_today_bytes=10,
    )
    seen = exposed(cachestore_families(CachestoreStatus(state="ready", since_unix=0.0, books=books)))
    assert (seen[key("cachestore_blocks")], seen[key("cachestore_evicted_blocks_total")]) == (2, 8)
    assert (seen[key("cachestore_written_bytes_total")], seen[key("cachestore_written_today_bytes")]) == (7, 10)
    assert key("cachestore_daily_write_bytes") not in seen
