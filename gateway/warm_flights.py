"""Warms on their way: equal ones share a run, which is cancelled when the last of them leaves."""

import asyncio
from collections.abc import Callable

from gateway.answer_timings import HELD_BY_RESTART
from gateway.cache_terms import warm_key
from gateway.handed_over import HandedOver
from gateway.ports import Generator
from gateway.replies import Reply
from protocol.failures import Failure, FailureKind
from protocol.generation import Failed, RequestEvent, Waiting, Warm, Warmed
from protocol.ids import ModelName

Watch = Callable[[RequestEvent | HandedOver], None]
Count = Callable[[Warmed], None]


class WarmFlights:
    """Used on the event loop only."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._flights: dict[bytes, _Flight] = {}

    async def run(self, model: ModelName, warm: Warm, watch: Watch, count: Count) -> Warmed | Failed:
        """How the warm ends, or how the equal one ends that was on its way. Leave by cancelling. `watch` hears of all
        that is said of it on the way. `count` hears of the good end of a run, once, whoever is there by then."""
        key = warm_key(model, warm)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(self._generator.submit(model, warm), count)
            flight.ended.add_done_callback(lambda _: self._land(key, flight))
        flight.passengers += 1
        flight.board(watch)
        try:
            return await asyncio.shield(flight.ended)
        finally:
            flight.passengers -= 1
            flight.watchers.remove(watch)
            if not flight.passengers and not flight.ended.done():
                flight.reply.cancel()
                self._land(key, flight)  # who comes now must not join what is being cancelled

    def _land(self, key: bytes, flight: "_Flight") -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


class _Flight:
    def __init__(self, reply: Reply, count: Count) -> None:
        self.reply = reply
        self._count = count
        self.passengers = 0
        self.watchers: list[Watch] = []
        self._said: dict[type[RequestEvent | HandedOver], RequestEvent | HandedOver] = {}
        self.ended = asyncio.create_task(_end_of(reply))
        reply.watch(self._say)

    def board(self, watch: Watch) -> None:
        """Who comes late hears the last of each kind first, in the order in which they were said."""
        for event in self._said.values():
            watch(event)
        self.watchers.append(watch)

    def _say(self, event: RequestEvent | HandedOver) -> None:
        if isinstance(event, Waiting) and event.held_by == HELD_BY_RESTART:
            self._said.clear()  # what the process said that is lost holds no more
        self._said.pop(type(event), None)  # else it would keep the place of the one before
        self._said[type(event)] = event
        if isinstance(event, Warmed):
            self._count(event)
        for watch in self.watchers:
            watch(event)


async def _end_of(reply: Reply) -> Warmed | Failed:
    async for event in reply:
        if isinstance(event, (Warmed, Failed)):
            return event
    failure = Failure(kind=FailureKind.INTERNAL, message="The warm ended as something else. Try again.")
    return Failed(request_id=reply.request_id, failure=failure)
