"""The book of open requests: what phase each is in, who holds it up, and whose turn it is."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import ClassBounds, ClassLimits, KeyLimits
from gateway.answer_timings import HELD_BY_CLASS, HELD_BY_KEY, HELD_BY_RESTART
from gateway.handed_over import HandedOver
from gateway.in_flight import InFlight
from gateway.in_flight_log import log_fields, timings_of
from gateway.in_flight_request import InFlightRequest, advance
from gateway.latency_class import WorkClass
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    Delta,
    Failed,
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

TIMINGS = Timings(
    queue_seconds=0.5,
    prefill_seconds=2.0,
    decode_seconds=4.0,
    prefill_slices=3,
    preemptions=1,
    held_seconds=1.75,
    held_by="other_model",
    held={"other_model": 1.5, "rows": 0.25},
)


def request(
    number: int = 1, *, key: str = "ada", limits: KeyLimits | None = None, work_class: WorkClass = "standard"
) -> InFlightRequest:
    return InFlightRequest(
        request_id=RequestId(f"req_{number}"),
        key_name=key,
        limits=limits or KeyLimits(),
        model=ModelName("m"),
        work_class=work_class,
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
    book.grant_turns(1.0)
    book.follow(entry, ID, "own")
    for event in events:
        advance(entry, event, 10.0)
    return book, entry


def test_whose_process_is_replaced_waits_for_the_model_again() -> None:
    """Its progress is forgotten, it runs no more, and the next process takes it through the same phases."""
    book, entry = after(QUEUED, PREFILLING)
    advance(entry, Waiting(request_id=ID, ahead=0, held_by=HELD_BY_RESTART), 11.0)
    view = book.view(entry, loading=Loading(done_bytes=1, total_bytes=2), now=12.0)
    assert (view.phase, view.held_by, view.loading_percent, view.progress) == (
        "waiting_for_model",
        HELD_BY_RESTART,
        50,
        None,
    )
    assert not entry.is_running
    advance(entry, QUEUED, 13.0)
    view = book.view(entry, loading=None, now=13.0)
    assert (view.phase, view.held_by, view.eta_seconds) == ("queued", "", None)


def test_the_phases_of_a_life() -> None:
    """Each event moves it on, and what the last phase waited for is forgotten."""
    book, entry = after()
    loading = Loading(done_bytes=40, total_bytes=100)
    view = book.view(entry, loading=loading, now=3.5)
    assert (view.phase, view.seconds, view.ahead, view.loading_percent) == ("waiting_for_model", 2.5, 0, 40)
    advance(entry, QUEUED, 4.0)
    view = book.view(entry, loading=loading, now=5.0)
    assert (view.phase, view.prompt_tokens, view.ahead, view.loading_percent) == ("queued", 100, None, None)
    advance(entry, WAITING, 5.0)
    view = book.view(entry, loading=None, now=5.0)
    assert (view.phase, view.ahead, view.eta_seconds, view.held_by) == ("queued", 2, 14.0, "rows")
    advance(entry, PREFILLING, 6.0)
    view = book.view(entry, loading=None, now=6.0)
    assert view.progress is not None
    assert (view.phase, view.ahead, view.eta_seconds, view.held_by) == ("prefilling", None, 3.0, "")
    assert (view.progress.done_tokens, view.progress.total_tokens, view.progress.cached_tokens) == (60, 100, 20)
    advance(entry, DELTA, 7.0)
    view = book.view(entry, loading=None, now=7.0)
    assert (view.phase, view.eta_seconds, view.progress, view.completion_tokens) == ("decoding", None, None, 2)
    advance(entry, Waiting(request_id=ID, ahead=0, held_by="higher_class"), 8.0)
    assert book.view(entry, loading=None, now=8.0).held_by == "higher_class"
    assert entry.phase == "decoding"


@pytest.mark.parametrize(
    ("done_tokens", "held_by", "phase"),
    [(99, "rows", "queued"), (60, "rows", "prefilling"), (99, "higher_class", "prefilling")],
)
def test_a_done_prompt_that_waits_for_a_row_is_queued(done_tokens: int, held_by: str, phase: str) -> None:
    """Nothing of it is read any more, so it says for what it waits; an unfinished prompt stays one. Then it decodes."""
    progress = Prefilling(request_id=ID, done_tokens=done_tokens, total_tokens=100, cached_tokens=0, eta_seconds=None)
    book, entry = after(QUEUED, progress, Waiting(request_id=ID, ahead=0, held_by=held_by))
    view = book.view(entry, loading=None, now=9.0)
    assert (view.phase, view.held_by) == (phase, held_by)
    assert entry.has_cost  # a prompt that was read is on the bill, also of one that is cancelled now
    advance(entry, DELTA, 10.0)
    assert entry.phase == "decoding"


def test_tokens_are_the_bill_once_there_is_one() -> None:
    """Before: the prompt's and those that came."""
    assert after()[1].tokens == 0
    assert after(QUEUED)[1].tokens == 100
    assert after(QUEUED, DELTA)[1].tokens == 102
    assert after(QUEUED, DELTA, FINISHED)[1].tokens == 108


def test_the_log_has_the_times_and_no_text() -> None:
    """Of a finished one: each wait by whom it was for, prefill, slices, holds by reason, decode, tokens a second."""
    _, entry = after(QUEUED, DELTA, FINISHED)
    assert log_fields(entry, 20.0) == {
        "class": "standard",
        "ended": "finished",
        "phase": "finished",
        "prompt_tokens": 100,
        "cached_tokens": 20,
        "completion_tokens": 8,
        "queue_seconds": 9.5,
        "queue_key_limit_seconds": 0.0,
        "queue_class_limit_seconds": 0.0,
        "queue_model_seconds": 9.0,
        "queue_lost_seconds": 0.0,
        "queue_restart_seconds": 0.0,
        "queue_worker_seconds": 0.5,
        "prefill_seconds": 2.0,
        "prefill_slices": 3,
        "held_seconds": 1.75,
        "held_by": "other_model",
        "held_other_model_seconds": 1.5,
        "held_rows_seconds": 0.25,
        "preemptions": 1,
        "decode_seconds": 4.0,
        "tokens_per_second": 2.0,
    }


def test_what_waits_for_its_key_and_its_model_says_how_long_for_each() -> None:
    """The queue is all of the wait, and its parts are named: the key's limit, the model's load, the worker's own."""
    book = InFlight()
    first, second = (request(number, limits=KeyLimits(max_running=1)) for number in (1, 2))
    for entry in (first, second):
        book.enter(entry)
    book.grant_turns(2.0)
    book.leave(first, 7.0)
    assert book.grant_turns(7.0) == ("req_2",)
    book.follow(second, second.request_id, "own")
    advance(second, HandedOver(request_id=second.request_id), 10.0)
    advance(second, Queued(request_id=second.request_id, prompt_tokens=9), 10.5)
    usage = Usage(prompt_tokens=9, completion_tokens=8, cached_tokens=0)
    finished = Finished(request_id=second.request_id, reason=FinishReason.STOP, usage=usage, timings=TIMINGS)
    advance(second, finished, 20.0)
    timings = timings_of(second, 20.0)
    assert (timings.queue.key_limit_seconds, timings.queue.model_seconds) == (5.0, 3.0)
    assert (timings.queue.worker_seconds, timings.queue_seconds) == (0.5, 8.5)
    assert timings.held == {HELD_BY_KEY: 5.0, "other_model": 1.5, "rows": 0.25}
    assert (timings.held_by, timings.held_seconds) == (HELD_BY_KEY, 6.75)


def test_what_did_not_end_well_says_how_far_it_came() -> None:
    """By the gateway's clock: queue, holds, prefill by slices, decode. And whether it failed, of what, or was left."""
    book, entry = after()
    advance(entry, HandedOver(request_id=ID), 3.0)
    advance(entry, QUEUED, 3.5)
    advance(entry, WAITING, 4.0)
    advance(entry, Prefilling(request_id=ID, done_tokens=20, total_tokens=100, cached_tokens=20), 6.0)
    advance(entry, PREFILLING, 7.0)
    advance(entry, DELTA, 9.0)
    book.leave(entry, 13.0)
    fields = log_fields(entry, 13.0)
    assert (fields["ended"], fields["phase"], fields["completion_tokens"]) == ("cancelled", "decoding", 2)
    assert (fields["queue_model_seconds"], fields["queue_worker_seconds"], fields["queue_seconds"]) == (2.0, 3.0, 5.0)
    assert (fields["prefill_seconds"], fields["prefill_slices"], fields["decode_seconds"]) == (3.0, 1, 4.0)
    assert (fields["held_rows_seconds"], fields["held_by"], fields["tokens_per_second"]) == (2.0, "rows", 0.5)
    _, entry = after(QUEUED, Failed(request_id=ID, failure=Failure(kind=FailureKind.WORKER_DIED, message="gone")))
    fields = log_fields(entry, 13.0)
    assert (fields["ended"], fields["failure"], fields["phase"]) == ("failed", "worker_died", "queued")


def begun_anew(work_seconds: float) -> tuple[InFlight, InFlightRequest]:
    """One whose process had it from 3 on, worked on it for so long, and died at 10."""
    book, entry = after()
    advance(entry, HandedOver(request_id=ID), 3.0)
    advance(entry, QUEUED, 3.5)
    advance(entry, PREFILLING, 10.0 - work_seconds)
    advance(entry, Waiting(request_id=ID, ahead=0, held_by=HELD_BY_RESTART), 10.0)
    return book, entry


def test_what_a_lost_process_cost_is_a_part_of_its_own() -> None:
    """Neither the model's load nor the work of the next one: what was lost, and the wait for the next, by its name also
    of who ends well. In the histogram it was queued once, until the first process began."""
    _, entry = begun_anew(work_seconds=6.0)
    advance(entry, HandedOver(request_id=ID), 14.0)
    for at, event in ((14.5, QUEUED), (15.0, PREFILLING), (16.0, DELTA), (20.0, FINISHED)):
        advance(entry, event, at)
    timings = timings_of(entry, 20.0)
    parts = timings.queue
    assert (parts.model_seconds, parts.lost_seconds, parts.restart_seconds) == (2.0, 7.0, 4.0)
    assert (parts.worker_seconds, timings.queue_seconds) == (0.5, 13.5)
    assert timings.held == {"other_model": 1.5, "rows": 0.25, HELD_BY_RESTART: 4.0}
    assert (timings.held_by, timings.held_seconds) == (HELD_BY_RESTART, 5.75)
    assert (entry.tallies.queue.count, entry.tallies.queue.total) == (1, 3.0)


def test_who_leaves_before_the_next_process_has_it_waited_for_the_restart() -> None:
    book, entry = begun_anew(work_seconds=1.0)
    book.leave(entry, 12.0)
    timings = timings_of(entry, 12.0)
    parts = timings.queue
    assert (parts.model_seconds, parts.lost_seconds, parts.restart_seconds) == (2.0, 7.0, 2.0)
    assert (parts.worker_seconds, timings.held_seconds) == (0.0, 2.0)
    assert timings.held == {HELD_BY_RESTART: 2.0}


def test_several_choices_are_one_line_and_one_bill() -> None:
    """Their prompt once, their answers together; times are the longest, for they ran beside each other."""
    book, entry = after(QUEUED)
    other = RequestId("req_1-1")
    book.follow(entry, other, "shared")
    advance(entry, Delta(request_id=other, text="b", tokens=3), 11.0)
    advance(entry, DELTA, 11.0)
    assert (entry.tokens, entry.is_finished) == (105, False)
    advance(entry, FINISHED, 12.0)
    assert log_fields(entry, 12.0)["ended"] == "cancelled"
    usage = Usage(prompt_tokens=100, completion_tokens=12, cached_tokens=99)
    timings = Timings(queue_seconds=0.5, prefill_seconds=0.5, decode_seconds=5.0, prefill_slices=1)
    advance(entry, Finished(request_id=other, reason=FinishReason.STOP, usage=usage, timings=timings), 13.0)
    fields = log_fields(entry, 13.0)
    assert (fields["choices"], fields["prompt_tokens"], fields["completion_tokens"]) == (2, 100, 20)
    assert (fields["decode_seconds"], fields["tokens_per_second"], fields["prefill_slices"]) == (5.0, 4.0, 4)
    assert (entry.tokens, entry.is_finished) == (120, True)


def test_a_key_at_its_limit_waits_for_itself() -> None:
    """First come, first served; another key does not wait, and positions count this key's own."""
    book = InFlight()
    limits = KeyLimits(max_running=1)
    entries = [request(number, limits=limits) for number in (1, 2, 3)]
    for entry in entries:
        book.enter(entry)
    book.enter(request(4, key="bob"))
    assert book.grant_turns(5.0) == ("req_1", "req_4")
    view = book.view(entries[2], loading=None, now=9.0)
    assert (view.phase, view.held_by, view.ahead) == ("queued", HELD_BY_KEY, 1)
    assert book.grant_turns(6.0) == ()
    assert book.leave(entries[0], 7.0) == "left"
    assert book.grant_turns(7.0) == ("req_2",)
    assert book.leave(entries[0], 8.0) == "had left"


def test_a_class_at_its_limit_waits_whosever_it_is() -> None:
    """Over all keys; other classes do not wait, and positions count this class's."""
    book = InFlight(ClassLimits(batch=ClassBounds(max_running=1)))
    keys = enumerate(("ada", "bob", "cy"))
    batch = [request(number, key=key, work_class="batch") for number, key in keys]
    for entry in (*batch, request(9)):
        book.enter(entry)
    assert book.grant_turns(5.0) == ("req_0", "req_9")
    view = book.view(batch[2], loading=None, now=9.0)
    assert (view.phase, view.held_by, view.ahead, view.latency_class) == ("queued", HELD_BY_CLASS, 1, "batch")
    book.leave(batch[1], 6.0)
    book.leave(batch[0], 7.0)
    assert book.grant_turns(7.0) == ("req_2",)


def test_who_waits_for_a_turn_is_told_when_it_comes() -> None:
    """By how long requests of the key, or of the class, had their turn lately; nothing before one has ended well, and a
    refused one is none. What only warms is not the key's."""
    book = InFlight(ClassLimits(batch=ClassBounds(max_running=1)))
    alone = KeyLimits(max_running=1)
    warm = request(9, limits=alone, work_class="warm")
    entries = [request(1, limits=alone), request(2, limits=alone), request(3, limits=alone)]
    for entry in (warm, *entries):
        book.enter(entry)
    book.grant_turns(10.0)
    first, second, third = entries

    def told(entry: InFlightRequest, now: float) -> float | None:
        return book.view(entry, loading=None, now=now).eta_seconds

    assert told(second, 15.0) is None
    book.leave(warm, 15.0)
    assert told(second, 15.0) is None
    advance(first, Queued(request_id=first.request_id, prompt_tokens=9), 12.0)
    advance(first, Delta(request_id=first.request_id, text="a", tokens=1), 12.0)
    book.leave(first, 30.0)
    book.grant_turns(30.0)
    assert second.has_turn
    assert told(third, 34.0) == 16.0
    assert told(third, 55.0) is None  # longer than any that is known
    failure = Failure(kind=FailureKind.CONTEXT_LENGTH_EXCEEDED, message="too long")
    advance(second, Failed(request_id=second.request_id, failure=failure), 55.0)
    book.leave(second, 55.0)
    assert book.grant_turns(55.0) == (third.request_id,)

    for number in (4, 5, 6):
        book.enter(request(number, key=f"key {number}", work_class="batch"))
    book.grant_turns(60.0)
    running, *waiting = book.of_class("batch")
    assert [told(entry, 61.0) for entry in waiting] == [None, None]  # another class's requests are no measure
    advance(running, Delta(request_id=running.request_id, text="a", tokens=1), 62.0)
    book.leave(running, 70.0)
    book.grant_turns(70.0)
    book.enter(request(7, key="key 7", work_class="batch"))
    book.grant_turns(70.0)
    _, *waiting = book.of_class("batch")
    assert [told(entry, 72.0) for entry in waiting] == [8.0, 18.0]


def test_who_waits_for_a_load_is_told_how_long_it_takes() -> None:
    """While it waits for its model, also for the next process of it; not once that has it."""
    book, entry = after()
    view = book.view(entry, loading=None, loaded_in_seconds=7.25, now=3.0)
    assert (view.phase, view.eta_seconds) == ("waiting_for_model", 7.2)
    assert book.view(entry, loading=None, model_held_by="memory", now=3.0).held_by == "memory"
    advance(entry, WAITING, 5.0)
    view = book.view(entry, loading=None, loaded_in_seconds=7.25, model_held_by="memory", now=5.0)
    assert (view.eta_seconds, view.held_by) == (14.0, "rows")


def test_a_warm_takes_no_turn_of_its_keys() -> None:
    """It runs beside, and does not keep its key's answers waiting."""
    book = InFlight(ClassLimits(warm=ClassBounds(max_running=1)))
    limits = KeyLimits(max_running=1)
    entries = [request(number, limits=limits, work_class="warm") for number in (1, 2)]
    for entry in (*entries, request(3, limits=limits), request(4, limits=limits)):
        book.enter(entry)
    assert book.grant_turns(5.0) == ("req_1", "req_3")
    book.leave(entries[0], 6.0)
    assert book.grant_turns(6.0) == ("req_2",)


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
        book.grant_turns(5.0)
    for at in (*departures, *range(len(entries))):
        assert sum(entry.has_turn for entry in book.of_key("ada")) <= 2
        if at < len(entries) and entries[at].has_turn and book.leave(entries[at], 5.0) == "left":
            book.grant_turns(5.0)
    for entry in entries:
        book.leave(entry, 6.0)
        book.grant_turns(5.0)
    assert all(entry.has_turn for entry in entries)
    assert len(book) == 0


@given(st.lists(st.sampled_from([QUEUED, WAITING, PREFILLING, DELTA, FINISHED]), max_size=12))
def test_any_order_of_events_can_be_shown(events: Sequence[RequestEvent]) -> None:
    """Whatever a worker says: there is a view and a line for the log, and tokens never shrink below zero."""
    book, entry = after(*events)
    view = book.view(entry, loading=None, now=20.0)
    assert view.seconds >= 0
    assert entry.tokens >= 0
    assert log_fields(entry, 20.0)["class"] == "standard"
    timings = timings_of(entry, 20.0)
    assert min(timings.queue_seconds, timings.prefill_seconds, timings.decode_seconds, timings.held_seconds) >= 0
