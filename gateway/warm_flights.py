"""Warms on their way: equal ones share a run, which is cancelled when the last of them leaves."""

import asyncio

from gateway.cache_terms import warm_key
from gateway.ports import Generator
from gateway.replies import Reply
from protocol.failures import Failure, FailureKind
from protocol.generation import Failed, Warm, Warmed
from protocol.ids import ModelName


class WarmFlights:
    """Used on the event loop only."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._flights: dict[bytes, _Flight] = {}

    async def run(self, model: ModelName, warm: Warm) -> Warmed | Failed:
        """How the warm ends, or how the equal one ends that was on its way. Leave by cancelling."""
        key = warm_key(model, warm)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(self._generator.submit(model, warm))
            flight.ended.add_done_callback(lambda _: self._land(key, flight))
        flight.passengers += 1
        try:
            return await asyncio.shield(flight.ended)
        finally:
            flight.passengers -= 1
            if not flight.passengers and not flight.ended.done():
                flight.reply.cancel()
                self._land(key, flight)  # who comes now must not join what is being cancelled

    def _land(self, key: bytes, flight: "_Flight") -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


class _Flight:
    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.passengers = 0
        self.ended = asyncio.create_task(_end_of(reply))


async def _end_of(reply: Reply) -> Warmed | Failed:
    async for event in reply:
        if isinstance(event, (Warmed, Failed)):
            return event
    failure = Failure(kind=FailureKind.INTERNAL, message="The warm ended as something else. Try again.")
    return Failed(request_id=reply.request_id, failure=failure)
