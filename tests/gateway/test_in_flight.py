"""The book of open requests: what phase each is in, who holds it up, and whose turn it is."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import KeyLimits
from gateway.in_flight import HELD_BY_KEY, HELD_BY_RESTART, InFlight, InFlightRequest, log_fields
from protocol.generation import (
    Delta,
    Finished,
    FinishReason,
    Loading,
    Prefilling,
    Queued,
    RequestEvent,
    Timings,
    Usage,
    Waiting,
)
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass

TIMINGS = Timings(
    queue_seconds=0.5,
    prefill_seconds=2.0,
    decode_seconds=4.0,
    prefill_slices=3,
    preemptions=1,
    held_seconds=1.5,
    held_by="other_model",
)


def request(number: int = 1, *, key: str = "ada", limits: KeyLimits | None = None) -> InFlightRequest:
    return InFlightRequest(
        request_id=RequestId(f"req_{number}"),
        key_name=key,
        limits=limits or KeyLimits(),
        model=ModelName("m"),
        latency_class=LatencyClass.STANDARD,
        arrived=float(number),
    )


ID = RequestId("req_1")
QUEUED = Queued(request_id=ID, prompt_tokens=100)
WAITING = Waiting(request_id=ID, ahead=2, eta_seconds=14.0, held_by="rows")
PREFILLING = Prefilling(request_id=ID, done_tokens=60, total_tokens=100, cached_tokens=20, eta_seconds=3.0)
DELTA = Delta(request_id=ID, text="a", tokens=2)
FINISHED = Finished(
    request_id=ID,
    reason=FinishReason.STOP,
    usage=Usage(prompt_tokens=100, completion_tokens=8, cached_tokens=20),
    timings=TIMINGS,
)


def after(*events: RequestEvent) -> tuple[InFlight, InFlightRequest]:
    book, entry = InFlight(), request()
    book.enter(entry)
    book.grant_turns("ada")
    for event in events:
        book.advance(event, 10.0)
    return book, entry


def test_whose_process_is_replaced_waits_for_the_model_again() -> None:
    """Its progress is forgotten, it runs no more, and the next process takes it through the same phases."""
    book, entry = after(QUEUED, PREFILLING)
    book.advance(Waiting(request_id=ID, ahead=0, held_by=HELD_BY_RESTART), 11.0)
    view = book.view(entry, loading=Loading(done_bytes=1, total_bytes=2), now=12.0)
    assert (view.phase, view.held_by, view.loading_percent, view.progress) == (
        "waiting_for_model",
        HELD_BY_RESTART,
        50,
        None,
    )
    assert not entry.is_running
    book.advance(QUEUED, 13.0)
    view = book.view(entry, loading=None, now=13.0)
    assert (view.phase, view.held_by, view.eta_seconds) == ("queued", "", None)


def test_the_phases_of_a_life() -> None:
    """Each event moves it on, and what the last phase waited for is forgotten."""
    book, entry = after()
    loading = Loading(done_bytes=40, total_bytes=100)
    view = book.view(entry, loading=loading, now=3.5)
    assert (view.phase, view.seconds, view.ahead, view.loading_percent) == ("waiting_for_model", 2.5, 0, 40)
    book.advance(QUEUED, 4.0)
    view = book.view(entry, loading=loading, now=5.0)
    assert (view.phase, view.prompt_tokens, view.ahead, view.loading_percent) == ("queued", 100, None, None)
    book.advance(WAITING, 5.0)
    view = book.view(entry, loading=None, now=5.0)
    assert (view.phase, view.ahead, view.eta_seconds, view.held_by) == ("queued", 2, 14.0, "rows")
    book.advance(PREFILLING, 6.0)
    view = book.view(entry, loading=None, now=6.0)
    assert view.progress is not None
    assert (view.phase, view.ahead, view.eta_seconds, view.held_by) == ("prefilling", None, 3.0, "")
    assert (view.progress.done_tokens, view.progress.total_tokens, view.progress.cached_tokens) == (60, 100, 20)
    book.advance(DELTA, 7.0)
    view = book.view(entry, loading=None, now=7.0)
    assert (view.phase, view.eta_seconds, view.progress, view.completion_tokens) == ("decoding", None, None, 2)
    book.advance(Waiting(request_id=ID, ahead=0, held_by="higher_class"), 8.0)
    assert book.view(entry, loading=None, now=8.0).held_by == "higher_class"
    assert entry.phase == "decoding"


def test_tokens_are_the_bill_once_there_is_one() -> None:
    """Before: the prompt's and those that came."""
    assert after()[1].tokens == 0
    assert after(QUEUED)[1].tokens == 100
    assert after(QUEUED, DELTA)[1].tokens == 102
    assert after(QUEUED, DELTA, FINISHED)[1].tokens == 108


def test_the_log_has_the_times_and_no_text() -> None:
    """Of a finished one: queue, prefill, slices, holds, decode, tokens a second. Of another: how far it came."""
    fields = log_fields(after(QUEUED, DELTA, FINISHED)[1])
    assert fields == {
        "class": "standard",
        "phase": "finished",
        "prompt_tokens": 100,
        "cached_tokens": 20,
        "completion_tokens": 8,
        "queue_seconds": 0.5,
        "prefill_seconds": 2.0,
        "prefill_slices": 3,
        "held_seconds": 1.5,
        "held_by": "other_model",
        "preemptions": 1,
        "decode_seconds": 4.0,
        "tokens_per_second": 2.0,
    }
    assert log_fields(after(QUEUED, DELTA)[1]) == {
        "class": "standard",
        "phase": "decoding",
        "prompt_tokens": 100,
        "completion_tokens": 2,
    }


def test_a_key_at_its_limit_waits_for_itself() -> None:
    """First come, first served; another key does not wait, and positions count this key's own."""
    book = InFlight()
    limits = KeyLimits(max_running=1)
    for number in (1, 2, 3):
        book.enter(request(number, limits=limits))
    book.enter(request(4, key="bob"))
    assert book.grant_turns("ada") == ("req_1",)
    assert book.grant_turns("bob") == ("req_4",)
    third = book.find(RequestId("req_3"))
    assert third is not None
    view = book.view(third, loading=None, now=9.0)
    assert (view.phase, view.held_by, view.ahead) == ("queued", HELD_BY_KEY, 1)
    assert book.grant_turns("ada") == ()
    book.leave(RequestId("req_1"))
    assert book.grant_turns("ada") == ("req_2",)
    assert book.leave(RequestId("req_1")) is None


@given(
    st.lists(st.tuples(st.sampled_from(["ada", "bob"]), st.integers(1, 3) | st.none()), max_size=12),
    st.lists(st.integers(0, 11), max_size=30),
)
def test_turns_are_bounded_and_nobody_is_forgotten(
    arrivals: Sequence[tuple[str, int | None]], departures: Sequence[int]
) -> None:
    """No key ever runs more than its limit; and when those before it have left, everyone has had a turn."""
    book = InFlight()
    limits = {"ada": KeyLimits(max_running=2), "bob": KeyLimits()}
    entries = [request(number, key=key, limits=limits[key]) for number, (key, _) in enumerate(arrivals)]
    for entry in entries:
        book.enter(entry)
        book.grant_turns(entry.key_name)
    for at in (*departures, *range(len(entries))):
        assert sum(entry.has_turn for entry in book.of_key("ada")) <= 2
        if at < len(entries) and entries[at].has_turn and book.leave(entries[at].request_id):
            book.grant_turns(entries[at].key_name)
    for entry in entries:
        book.leave(entry.request_id)
        book.grant_turns(entry.key_name)
    assert all(entry.has_turn for entry in entries)
    assert len(book) == 0


@given(st.lists(st.sampled_from([QUEUED, WAITING, PREFILLING, DELTA, FINISHED]), max_size=12))
def test_any_order_of_events_can_be_shown(events: Sequence[RequestEvent]) -> None:
    """Whatever a worker says: there is a view and a line for the log, and tokens never shrink below zero."""
    book, entry = after(*events)
    view = book.view(entry, loading=None, now=20.0)
    assert view.seconds >= 0
    assert entry.tokens >= 0
    assert log_fields(entry)["class"] == "standard"
