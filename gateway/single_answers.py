"""Requests that their model answers with one event, and no stream: vectors, scores, tokens. For every route of these.

As in `gateway.answering` an answer is an ASGI app of its own, since it must hear that the client left while it waits.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal

from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec.structs import replace

from gateway import sse
from gateway.answering import DETAILS_ASKED, IGNORED_HEADER, cannot_serve, send_answer, send_error, unless_disconnected
from gateway.caller import Caller
from gateway.dialects import Header, names_header
from gateway.error_answers import ErrorAnswer, openai_error
from gateway.front_desk import FrontDesk, Place
from gateway.json_body import ClientGone, read_json_body
from gateway.latency_class import CLASS_HEADER, class_asked, granted_class, not_understood, work_class
from gateway.ports import Generator, ModelLookup
from gateway.replies import Reply
from gateway.single_work import SingleRoute, SingleWork
from protocol.failures import Failure
from protocol.generation import Embed, Embedded, Failed, LastEvent, RequestEvent, Rerank, Reranked
from protocol.ids import RequestId

_PIECES_AT_ONCE = 64
"""Pieces of a body made before the event loop has a turn: a big answer must not stop other clients' streams."""

ErrorDialect = Callable[[Failure, RequestId], ErrorAnswer]
"""How a failure looks to the clients of an API."""


def _openai(failure: Failure, request_id: RequestId) -> ErrorAnswer:
    del request_id  # the gate's header has it
    return openai_error(failure)


class SingleAnswers:
    """Answers such requests. One for the whole gateway.

    What needs only the tokenizer takes no place at the front desk: a client may count tokens while its key is busy.
    """

    def __init__(self, generator: Generator, models: ModelLookup, desk: FrontDesk, *, max_body_bytes: int) -> None:
        self._generator = generator
        self._models = models
        self._desk = desk
        self._max_body_bytes = max_body_bytes

    def app(self, route: SingleRoute[Any], *, error: ErrorDialect = _openai) -> ASGIApp:
        """The ASGI app of one route, whose errors look as `error` says. The gate before it has put `request_id`,
        `caller` and `log_fields` into the scope's state."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await self._answer(route, error, scope, receive, send)

        return answer

    async def _answer(
        self, route: SingleRoute[Any], error: ErrorDialect, scope: Scope, receive: Receive, send: Send
    ) -> None:
        request_id: RequestId = scope["state"]["request_id"]
        body = await read_json_body(scope["headers"], receive, max_body_bytes=self._max_body_bytes)
        if isinstance(body, ClientGone):
            return
        asked = body if isinstance(body, Failure) else self._accept(route, body, scope)
        if isinstance(asked, Failure):
            self._desk.tallies.reject(asked.kind)
            await send_error(send, error(asked, request_id))
            return
        caller: Caller = scope["state"]["caller"]
        place = self._enter(asked, caller)
        headers = self._headers(asked, caller)
        if isinstance(place, Failure):
            await send_error(send, error(place, request_id), headers)
            return
        disconnected = asyncio.create_task(sse.until_disconnected(receive))
        try:
            end = await unless_disconnected(self._end(asked, place), disconnected)
            match end:
                case None:
                    return
                case Failed(failure=failure):
                    await send_error(send, error(route.failure(asked, failure), request_id), headers)
                case _:
                    end = _timed(end, place)
                    whole = await _joined(route.answer(asked, end))
                    await send_answer(send, 200, [(b"content-type", b"application/json"), *headers], whole)
        finally:
            disconnected.cancel()
            if place != "needs none":
                place.leave()
                scope["state"].get("log_fields", {}).update(place.log_fields())

    def _accept(self, route: SingleRoute[Any], body: bytes, scope: Scope) -> SingleWork[Any] | Failure:
        asked = route.accept(body, scope["state"]["request_id"])
        if isinstance(asked, Failure):
            return asked
        unservable = cannot_serve(self._models, asked.model)
        if unservable is not None:
            return unservable
        if not isinstance(asked.work, Embed | Rerank):
            return asked
        caller: Caller = scope["state"]["caller"]
        headers = tuple((name.lower(), value) for name, value in scope["headers"])
        urgency = class_asked(headers, service_tier=asked.service_tier, priority=asked.priority)
        latency_class = granted_class(urgency, caller.classes)
        unheard = not_understood(headers, service_tier=asked.service_tier, priority=asked.priority)
        work = replace(asked.work, latency_class=latency_class, tenant=caller.key_name, tenant_weight=caller.weight)
        details = "asked" if DETAILS_ASKED in headers else "unasked"
        return replace(asked, work=work, ignored=asked.ignored + unheard, details=details)

    def _enter(self, asked: SingleWork[Any], caller: Caller) -> Place | Literal["needs none"] | Failure:
        work = asked.work
        if not isinstance(work, Embed | Rerank):
            return "needs none"
        return self._desk.enter(
            caller,
            request_id=work.request_id,
            model=asked.model,
            work_class=work_class(work.latency_class),
            dialect="embeddings" if isinstance(work, Embed) else "rerank",
        )

    def _headers(self, asked: SingleWork[Any], caller: Caller) -> tuple[Header, ...]:
        ignored = ((IGNORED_HEADER, names_header(asked.ignored).encode()),) if asked.ignored else ()
        if not isinstance(asked.work, Embed | Rerank):
            return ignored
        class_ = work_class(asked.work.latency_class)
        return (
            (CLASS_HEADER, class_.encode()),
            *self._desk.headers(caller, class_),
            *ignored,
        )

    async def _end(self, asked: SingleWork[Any], place: Place | Literal["needs none"]) -> RequestEvent:
        """Its last event. Cancelling this cancels the work."""
        if place != "needs none":
            await place.turn()
        reply: Reply = self._generator.submit(asked.model, asked.work)
        if place != "needs none":
            place.follow(reply, prompt="own")
        try:
            async for event in reply:
                if isinstance(event, LastEvent):
                    return event
        finally:
            reply.cancel()
        raise RuntimeError("a reply ended without its last event")


def _timed(end: RequestEvent, place: Place | Literal["needs none"]) -> RequestEvent:
    """With what it waited for in the gateway."""
    if place == "needs none" or not isinstance(end, Embedded | Reranked) or end.timings is None:
        return end
    return replace(end, timings=place.timings(end.timings, completion_tokens=0))


async def _joined(pieces: Iterator[bytes]) -> bytes:
    whole = bytearray()
    for number, piece in enumerate(pieces, start=1):
        whole += piece
        if number % _PIECES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return bytes(whole)
