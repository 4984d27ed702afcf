"""Warms that share a run: what each hears of it, and that it is counted once."""

import asyncio

import pytest

from gateway.answer_timings import HELD_BY_RESTART
from gateway.handed_over import HandedOver
from gateway.replies import Reply
from gateway.warm_flights import WarmFlights
from protocol.generation import Prefilling, Queued, RequestEvent, TextPrompt, Timings, Waiting, Warm, Warmed, Work
from protocol.ids import ModelName, RequestId

ID = RequestId("req_1")
MODEL = ModelName("m")
WARM = Warm(request_id=ID, prompt=TextPrompt(text="a"))
QUEUED = Queued(request_id=ID, prompt_tokens=9)
WAITING = Waiting(request_id=ID, ahead=1, held_by="rows")
RESTART = Waiting(request_id=ID, ahead=0, held_by=HELD_BY_RESTART)
WARMED = Warmed(
    request_id=ID,
    prompt_tokens=9,
    cached_tokens=0,
    blocks=1,
    size_bytes=1,
    durable_blocks=0,
    timings=Timings(queue_seconds=0.0, prefill_seconds=0.0, decode_seconds=0.0, prefill_slices=1),
)


def progress(done_tokens: int) -> Prefilling:
    return Prefilling(request_id=ID, done_tokens=done_tokens, total_tokens=9, cached_tokens=0)


class OneReply:
    """A run whose events the test puts; None is that its process gets it."""

    def __init__(self) -> None:
        self.reply = Reply(ID, lambda _: None)

    def submit(self, model: ModelName, work: Work) -> Reply:
        return self.reply

    def say(self, *events: RequestEvent | None) -> None:
        for event in events:
            if event is None:
                self.reply.hand_over()
            else:
                self.reply.put(event)


async def settle() -> None:
    """Tasks that were just made have run to where they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


HANDED_OVER = HandedOver(request_id=ID)
Heard = RequestEvent | HandedOver


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ([None, QUEUED, progress(1), WAITING, progress(5)], [HANDED_OVER, QUEUED, WAITING, progress(5)]),
        ([None, QUEUED, WAITING, progress(1), WAITING], [HANDED_OVER, QUEUED, progress(1), WAITING]),
        ([None, QUEUED, progress(5), RESTART], [RESTART]),
        ([None, QUEUED, progress(5), RESTART, None, QUEUED], [RESTART, HANDED_OVER, QUEUED]),
    ],
)
async def test_who_comes_late_hears_how_it_stands(said: list[RequestEvent | None], heard: list[Heard]) -> None:
    """The last of each kind in the order in which they were said, and nothing of a process that is lost."""
    generator = OneReply()
    flights = WarmFlights(generator)
    late: list[Heard] = []
    first = asyncio.create_task(flights.run(MODEL, WARM, lambda _: None, lambda _: None))
    await settle()
    generator.say(*said)
    second = asyncio.create_task(flights.run(MODEL, WARM, late.append, lambda _: None))
    await settle()
    assert late == heard
    generator.say(WARMED)
    assert await asyncio.gather(first, second) == [WARMED, WARMED]


@pytest.mark.parametrize("who_leaves", ["nobody", "the first"])
async def test_a_run_is_counted_once_whoever_is_left(who_leaves: str) -> None:
    """Also when the client is gone whose request began it."""
    generator = OneReply()
    flights = WarmFlights(generator)
    counted: list[Warmed] = []
    runs = [asyncio.create_task(flights.run(MODEL, WARM, lambda _: None, counted.append)) for _ in range(3)]
    await settle()
    if who_leaves == "the first":
        runs.pop(0).cancel()
        await settle()
    generator.say(WARMED)
    assert await asyncio.gather(*runs) == [WARMED] * len(runs)
    assert counted == [WARMED]
