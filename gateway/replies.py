"""One request's events on their way from its worker to its HTTP handler."""

import asyncio
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from gateway.handed_over import HandedOver
from protocol.generation import CallArguments, Delta, LastEvent, Prefilling, Queued, Reasoning, RequestEvent, Waiting
from protocol.ids import RequestId


class Reply:
    """An async iterator of one request's events, which ends after exactly one LastEvent.

    Bounded: deltas that nobody has read yet are merged into one, and of progress only the newest is kept, so a slow
    reader holds one string, not a queue.
    Only the dispatch task calls `put`; only the handler iterates. `cancel` is idempotent and safe after the end.
    """

    def __init__(self, request_id: RequestId, on_cancel: Callable[[RequestId], None]) -> None:
        self.request_id = request_id
        self._on_cancel = on_cancel
        self._events: deque[RequestEvent] = deque()
        self._arrived = asyncio.Event()
        self._complete = False
        self._accepted = False
        self._watch: Callable[[RequestEvent | HandedOver], None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the last event was put (read or not)."""
        return self._complete

    def watch(self, watch: Callable[[RequestEvent | HandedOver], None]) -> None:
        """Tell `watch` of every event as it is put, those that were put already first. At most one can watch.

        So the state of a request is known even while its client reads nothing.
        """
        for event in self._events:
            watch(event)
        self._watch = watch

    def put(self, event: RequestEvent) -> None:
        """Add an event; ignored once the reply is complete, so nothing can end twice.

        A request that a second process begins anew is accepted twice: the reader hears of it once.
        """
        if self._complete:
            return
        if self._watch is not None:
            self._watch(event)
        if isinstance(event, Queued):
            if self._accepted:
                return
            self._accepted = True
        last = self._events[-1] if self._events else None
        if (merged := _merged(last, event)) is not None:
            self._events[-1] = merged
        elif isinstance(event, Prefilling | Waiting) and isinstance(last, Prefilling | Waiting):
            self._events[-1] = event  # only the newest progress is of interest
        else:
            self._events.append(event)
        self._complete = isinstance(event, LastEvent)
        self._arrived.set()

    def hand_over(self) -> None:
        """Its model's process gets the request now; not for the first time, if the one before has died."""
        if self._watch is not None:
            self._watch(HandedOver(request_id=self.request_id))

    def cancel(self) -> None:
        """The client is gone."""
        if not self._complete:
            self._on_cancel(self.request_id)

    def __aiter__(self) -> "Reply":
        return self

    async def __anext__(self) -> RequestEvent:
        while not self._events:
            if self._complete:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


def _merged(last: RequestEvent | None, event: RequestEvent) -> RequestEvent | None:
    """Both in one event, where the second only goes on with the first."""
    match last, event:
        case (Delta(), Delta()) | (Reasoning(), Reasoning()):
            pass
        case CallArguments(index=mine), CallArguments(index=theirs) if mine == theirs:
            pass
        case _:
            return None
    return replace(
        last, text=last.text + event.text, tokens=last.tokens + event.tokens, logprobs=last.logprobs + event.logprobs
    )
