"""A reply ends once, is bounded, and loses no text."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.replies import Reply
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    Prefilling,
    Queued,
    RequestEvent,
    Timings,
    Usage,
)
from protocol.ids import RequestId

ID = RequestId("request")
FINISHED = Finished(
    request_id=ID,
    reason=FinishReason.STOP,
    usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
    timings=Timings(queue_seconds=0, prefill_seconds=0, decode_seconds=0, prefill_slices=1),
)
FAILED = Failed(request_id=ID, failure=Failure(kind=FailureKind.INTERNAL, message="m"))
QUEUED = Queued(request_id=ID, prompt_tokens=1)


def delta(text: str) -> Delta:
    return Delta(request_id=ID, text=text, tokens=1)


def progress(done: int) -> Prefilling:
    return Prefilling(request_id=ID, done_tokens=done, total_tokens=9, cached_tokens=0)


def new_reply() -> Reply:
    return Reply(ID, lambda _: None)


async def read(reply: Reply) -> list[RequestEvent]:
    async with asyncio.timeout(5):
        return [event async for event in reply]


def test_a_request_is_accepted_once_however_many_processes_had_it() -> None:
    """A second `Queued` is for the watcher, which keeps the books; the reader's answer has begun already."""
    seen: list[RequestEvent] = []
    reply = new_reply()
    reply.watch(seen.append)
    for event in (QUEUED, progress(1), QUEUED, progress(0), delta("a"), FINISHED):
        reply.put(event)
    assert asyncio.run(read(reply)) == [QUEUED, progress(0), delta("a"), FINISHED]
    assert seen.count(QUEUED) == 2


def test_a_watcher_sees_what_a_slow_reader_does_not() -> None:
    """Every event as it is put, those before it too, and none after the end; the reader's are merged all the same."""
    seen: list[RequestEvent] = []
    reply = new_reply()
    reply.put(QUEUED)
    reply.watch(seen.append)
    for event in (progress(1), progress(2), delta("a"), delta("b"), FINISHED, delta("c")):
        reply.put(event)
    assert seen == [QUEUED, progress(1), progress(2), delta("a"), delta("b"), FINISHED]
    assert len(asyncio.run(read(reply))) == 4


EVENTS = st.one_of(
    st.text(max_size=3).map(delta), st.integers(0, 9).map(progress), st.sampled_from([QUEUED, FINISHED, FAILED])
)


@given(st.lists(EVENTS, max_size=30))
def test_a_reply_ends_once_and_keeps_all_text_up_to_its_end(events: list[RequestEvent]) -> None:
    """Whatever is put, the reader gets everything before the first end, that end, and nothing more."""

    async def scenario() -> list[RequestEvent]:
        reply = new_reply()
        for event in [*events, FINISHED]:
            reply.put(event)
        assert reply.is_complete
        return await read(reply)

    got = asyncio.run(scenario())
    first_end = next(i for i, event in enumerate([*events, FINISHED]) if isinstance(event, (Finished, Failed)))
    expected = [*events, FINISHED][: first_end + 1]
    assert got[-1] == expected[-1]
    assert sum(isinstance(event, (Finished, Failed)) for event in got) == 1

    def text(of: list[RequestEvent]) -> str:
        return "".join(event.text for event in of if isinstance(event, Delta))

    def tokens(of: list[RequestEvent]) -> int:
        return sum(event.tokens for event in of if isinstance(event, Delta))

    assert text(got) == text(expected)
    assert tokens(got) == tokens(expected)


async def test_unread_text_is_one_event_and_unread_progress_the_newest() -> None:
    """A reader that is slow costs one string and one number, not a queue."""
    reply = new_reply()
    for number in range(1000):
        reply.put(progress(number))
    for _ in range(1000):
        reply.put(delta("x"))
    reply.put(FINISHED)
    assert await read(reply) == [
        progress(999),
        Delta(request_id=ID, text="x" * 1000, tokens=1000),
        FINISHED,
    ]


async def test_a_waiting_reader_is_woken() -> None:
    """Events reach a reader that came first."""
    reply = new_reply()
    reading = asyncio.create_task(read(reply))
    await asyncio.sleep(0)
    reply.put(delta("a"))
    await asyncio.sleep(0)
    reply.put(FAILED)
    assert await reading == [delta("a"), FAILED]


async def test_cancel_is_told_until_the_end_and_never_after() -> None:
    """Idempotent for the caller, whose worker takes an unknown id anyway; silent once complete."""
    told: list[RequestId] = []
    reply = Reply(ID, told.append)
    reply.cancel()
    assert told == [ID]
    reply.put(FAILED)
    reply.cancel()
    assert told == [ID]
