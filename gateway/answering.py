"""From a request's body to its answer's last byte, the same for every dialect: accept, admit, submit, render, send.

A dialect (see `Dialect`) says how a body becomes work for a model, and how what the model says becomes bytes. All else
is here: admission, headers, several choices of one request, a client that leaves, keepalives, errors at any moment.

An answer is an ASGI app of its own rather than a Litestar response: it must hear that the client left while it
waits, in both modes, and a stream must not pay for a task per token.

A stream's status line goes out when the model has accepted the prompt, or has refused it. A request that its model
cannot take up yet, since that loads or the key has others running, is checked by the tokenizer if that is there, and
its stream begins when it passes. A model that says nothing at all is waited for only so long: then the stream begins,
for all that can be checked without it has been, and a refusal that comes after is an error event with the same words.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec import Struct
from msgspec.structs import replace

from gateway import sse
from gateway.answer_parts import Collected, Parts
from gateway.dialects import Accepted, Asked, Dialect, Header, Rendering, names_header, pointing_at
from gateway.early_checks import checked_early
from gateway.error_answers import ErrorAnswer
from gateway.front_desk import FrontDesk, Place
from gateway.http_errors import unexpected_failure
from gateway.json_body import ClientGone, read_json_body
from gateway.latency_class import CLASS_HEADER, class_asked, granted_class, not_understood
from gateway.ports import Generator, ModelLookup
from gateway.profiles import Profile, default_class, profiled_choices
from gateway.replies import Reply
from gateway.waiting_comment import waiting_comment
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    AnswerEvent,
    Detokenize,
    Detokenized,
    Failed,
    Finished,
    Generate,
    LastEvent,
    Prefilling,
    Queued,
    RequestEvent,
    Tokenize,
    Tokenized,
    Waiting,
    Warmed,
)
from protocol.ids import ModelName, RequestId

IGNORED_HEADER = b"x-mlxd-ignored-params"
WARNINGS_HEADER = b"x-mlxd-warnings"
DETAILS_ASKED = (b"x-mlxd-details", b"1")

_AT_ONCE_SECONDS = 0.25
"""A model that is ready has taken up a request by then, and one that is not has begun to load."""

Settle = Callable[[Any, bytes], Awaitable[bytes]]
"""What is to be done between an answer's end and its last bytes: gets its rendering and these, gives those to send."""

Body = TypeVar("Body")
Result = TypeVar("Result")


class Patience(Struct, frozen=True, kw_only=True):
    """How long a stream may be silent, and how long it may have no status line."""

    keepalive_seconds: float = 10.0
    headers_seconds: float = 3.0


class _Opened(Struct, frozen=True, kw_only=True):
    """A request that its model has answered for the first time, for each of its prompts: `firsts` are those events by
    choice, or one failure alone."""

    replies: tuple[Reply, ...]
    firsts: dict[int, RequestEvent]

    @property
    def failure(self) -> Failure | None:
        return next((first.failure for first in self.firsts.values() if isinstance(first, Failed)), None)


class Answering:
    """Answers requests. One for the whole gateway."""

    def __init__(
        self,
        generator: Generator,
        models: ModelLookup,
        desk: FrontDesk,
        *,
        profile: Callable[[str], Profile | None] = lambda _: None,
        max_body_bytes: int,
        unix_clock: Callable[[], float],
        patience: Patience,
        system_fingerprint: str | None = None,
    ) -> None:
        self._generator = generator
        self._models = models
        self._desk = desk
        self._profile = profile
        self._max_body_bytes = max_body_bytes
        self._unix_clock = unix_clock
        self._patience = patience
        self._system_fingerprint = system_fingerprint

    def app(self, dialect: Dialect[Any]) -> ASGIApp:
        """The ASGI app of one route. The gate before it has put `request_id`, `caller` and `log_fields` into the
        scope's state."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            body = await self.read_body(scope, receive)
            if not isinstance(body, ClientGone):
                await self.answer(dialect, body, scope, receive, send)

        return answer

    async def read_body(self, scope: Scope, receive: Receive) -> bytes | Failure | ClientGone:
        """The body's bytes, within this service's limit."""
        return await read_json_body(scope["headers"], receive, max_body_bytes=self._max_body_bytes)

    def accept(self, dialect: Dialect[Body], body: bytes, asked: Asked) -> Accepted[Body] | Failure:
        """Everything that can be known of a request without its model."""
        accepted = dialect.accept(body, asked)
        if isinstance(accepted, Failure):
            return accepted
        unservable = cannot_serve(self._models, accepted.model)
        if unservable is not None:
            return unservable
        rights = asked.caller.classes
        profile = self._profile(accepted.model)
        if profile is not None:
            # From here on it is the folder's; its renderer still knows which name its client asked for.
            work = profiled_choices(profile, accepted.work)
            accepted = replace(accepted, model=ModelName(profile.model), work=work)
            rights = replace(rights, default=default_class(profile, rights.default))
        urgency = class_asked(asked.headers, service_tier=accepted.service_tier, priority=accepted.priority)
        latency_class = granted_class(urgency, rights)
        work = tuple(
            replace(
                command, latency_class=latency_class, tenant=asked.caller.key_name, tenant_weight=asked.caller.weight
            )
            if isinstance(command, Generate)
            else command
            for command in accepted.work
        )
        unheard = not_understood(asked.headers, service_tier=accepted.service_tier, priority=accepted.priority)
        return replace(accepted, work=work, latency_class=latency_class, ignored=accepted.ignored + unheard)

    def asked(self, scope: Scope) -> Asked:
        """What a request's scope says of it."""
        state = scope["state"]
        headers = tuple((name.lower(), value) for name, value in scope["headers"])
        return Asked(
            request_id=state["request_id"],
            caller=state["caller"],
            headers=headers,
            created_unix=int(self._unix_clock()),
            system_fingerprint=self._system_fingerprint,
            details="asked" if DETAILS_ASKED in headers else "unasked",
        )

    def enter(self, dialect: Dialect[Any], accepted: Accepted[Any], asked: Asked) -> Place | Failure:
        """Ask for admission. Whoever gets a place must leave it."""
        return self._desk.enter(
            asked.caller,
            request_id=asked.request_id,
            model=accepted.model,
            work_class=accepted.work_class,
            dialect=dialect.name,
        )

    def reject(self, failure: Failure) -> None:
        """Count what is refused before its model sees it. Who asks for admission need not: that is counted there."""
        self._desk.tallies.reject(failure.kind)

    def headers(self, dialect: Dialect[Any], accepted: Accepted[Any], asked: Asked) -> tuple[Header, ...]:
        """What every answer to this request says in its headers. Ask after `enter`."""
        return (
            (CLASS_HEADER, accepted.work_class.encode()),
            *self._desk.headers(asked.caller, accepted.work_class, dialect.rate_headers),
            *_ignored_headers(accepted.ignored),
        )

    async def run(self, accepted: Accepted[Any], place: Place) -> tuple[Collected, ...] | Failure:
        """The whole answer, of each choice. Cancelling this cancels the work, once the place is left."""
        opened = await self._open(place, accepted)
        parts = [Parts() for _ in opened.replies]
        ends: dict[int, Finished | Warmed] = {}
        queued: dict[int, Queued] = {}
        async for choice, event in _all_events(opened):
            match event:
                case Failed(failure=failure):
                    return failure
                case Finished() | Warmed():
                    ends[choice] = _timed(event, place)
                case Queued():
                    queued[choice] = event
                case _:
                    if isinstance(event, AnswerEvent):
                        parts[choice].add(event)
        return tuple(parts[choice].collected(ends[choice], queued.get(choice)) for choice in range(len(parts)))

    async def ask(self, model: str, question: Tokenize | Detokenize) -> Tokenized | Detokenized | Failure:
        """What ends it. It takes no place: no row and no weights are needed for it. Leave by cancelling."""
        unservable = cannot_serve(self._models, model)
        if unservable is not None:
            return unservable
        reply = self._generator.submit(ModelName(model), question)
        try:
            async for event in reply:
                match event:
                    case Tokenized() | Detokenized():
                        return event
                    case Failed(failure=failure):
                        return failure
                    case _:
                        continue
            raise AssertionError("a reply ends with its last event")
        finally:
            reply.cancel()

    # --- one request -------------------------------------------------------------------------------------------------

    async def answer(
        self,
        dialect: Dialect[Any],
        body: bytes | Failure,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        settle: Settle | None = None,
    ) -> None:
        """Answer a request whose body was read."""
        asked = self.asked(scope)
        accepted = body if isinstance(body, Failure) else self.accept(dialect, body, asked)
        if isinstance(accepted, Failure):
            self.reject(accepted)
            await send_error(send, dialect.error(accepted, asked.request_id))
            return
        place = self.enter(dialect, accepted, asked)
        headers = self.headers(dialect, accepted, asked)
        if isinstance(place, Failure):
            await send_error(send, dialect.error(place, asked.request_id), headers)
            return
        disconnected = asyncio.create_task(sse.until_disconnected(receive))
        try:
            match accepted.answer:
                case "stream":
                    await self._send_stream(dialect, accepted, asked, place, send, headers, disconnected, settle)
                case "whole":
                    await self._send_whole(dialect, accepted, asked, place, send, headers, disconnected, settle)
        finally:
            place.leave()
            disconnected.cancel()
            scope["state"].get("log_fields", {}).update(place.log_fields())

    async def _open(self, place: Place, accepted: Accepted[Any]) -> _Opened:
        """Hand it to its model when its key may, and hear whether each of its prompts is accepted. Progress before that
        is not yet a yes. Choices of one prompt follow each other, and share its fate."""
        await place.turn()
        replies = tuple(self._generator.submit(accepted.model, command) for command in accepted.work)
        shared = [
            choice > 0 and command.prompt is accepted.work[choice - 1].prompt
            for choice, command in enumerate(accepted.work)
        ]
        for reply, shares in zip(replies, shared, strict=True):
            place.follow(reply, prompt="shared" if shares else "own")
        firsts: dict[int, RequestEvent] = {}
        for choice, (reply, shares) in enumerate(zip(replies, shared, strict=True)):
            # What was refused at once, since the queue is full for instance, was so before the first choice was heard.
            if shares and not reply.is_complete:
                continue
            first = await anext(reply)
            while isinstance(first, Waiting):
                first = await anext(reply)
            firsts[choice] = first
            if isinstance(first, Failed):
                break
        return _Opened(replies=replies, firsts=firsts)

    async def _send_stream(
        self,
        dialect: Dialect[Any],
        accepted: Accepted[Any],
        asked: Asked,
        place: Place,
        send: Send,
        headers: tuple[Header, ...],
        disconnected: "asyncio.Task[None]",
        settle: Settle | None,
    ) -> None:
        opening = asyncio.create_task(self._open(place, accepted))
        try:
            refused = await self._refused_before_headers(opening, accepted, place, disconnected)
            if refused is not None:
                # The check is no event of this request's own reply, which may not even have been asked for.
                place.advance(Failed(request_id=asked.request_id, failure=refused))
                failure = pointing_at(dialect.prompt_field, refused, accepted.constraint_field)
                await send_error(send, dialect.error(failure, asked.request_id), headers)
                return
            if disconnected.done():
                return
            rendering = dialect.rendering(accepted, asked)
            await sse.send_stream(
                send,
                _encoded(
                    rendering,
                    opening,
                    place,
                    request_id=asked.request_id,
                    prompt_field=dialect.prompt_field,
                    constraint_field=accepted.constraint_field,
                    settle=settle or _nothing_to_settle,
                ),
                headers=headers,
                disconnected=disconnected,
                keepalive_seconds=self._patience.keepalive_seconds,
                keepalive=lambda: rendering.keepalive(place.view),
            )
        finally:
            opening.cancel()

    async def _refused_before_headers(
        self,
        opening: "asyncio.Task[_Opened]",
        accepted: Accepted[Any],
        place: Place,
        disconnected: "asyncio.Task[None]",
    ) -> Failure | None:
        """Why this stream shall not begin. Returns when it may, may not, or has waited for so long that it must."""
        patience = self._patience.headers_seconds
        at_once = min(patience, _AT_ONCE_SECONDS) if place.has_turn else 0.0
        until: set[asyncio.Future[Any]] = {opening, disconnected}
        await asyncio.wait(until, timeout=at_once, return_when=asyncio.FIRST_COMPLETED)
        checking: asyncio.Task[Failure | None] | None = None
        # One that a process has in its hands is prepared in its turn: to check it would be to do that twice.
        if not (opening.done() or disconnected.done()) and not (place.has_turn and place.model_state != "starting"):
            checking = asyncio.create_task(checked_early(self._generator, accepted.model, accepted.work))
            until.add(checking)
        try:
            await asyncio.wait(until, timeout=patience - at_once, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                return opening.result().failure
            return checking.result() if checking is not None and checking.done() else None
        finally:
            if checking is not None:
                checking.cancel()

    async def _send_whole(
        self,
        dialect: Dialect[Any],
        accepted: Accepted[Any],
        asked: Asked,
        place: Place,
        send: Send,
        headers: tuple[Header, ...],
        disconnected: "asyncio.Task[None]",
        settle: Settle | None,
    ) -> None:
        answers = await unless_disconnected(self.run(accepted, place), disconnected)
        if answers is None:
            return
        if isinstance(answers, Failure):
            failure = pointing_at(dialect.prompt_field, answers, accepted.constraint_field)
            await send_error(send, dialect.error(failure, asked.request_id), headers)
            return
        rendering = dialect.rendering(accepted, asked)
        body = await (settle or _nothing_to_settle)(rendering, rendering.whole(answers))
        warnings = _warnings_headers(answers)
        await send_answer(send, 200, [(b"content-type", b"application/json"), *headers, *warnings], body)


def cannot_serve(models: ModelLookup, name: str) -> Failure | None:
    """Why no request for this model can be run, before anything is started for it."""
    model = models.find(name)
    if model is None:
        return Failure(
            kind=FailureKind.MODEL_NOT_FOUND,
            message=f"No model `{name[:128]}` here. GET /v1/models lists those there are.",
            param="model",
        )
    if model.problem is not None:
        return Failure(
            kind=FailureKind.MODEL_UNAVAILABLE,
            message=f"This model cannot be served: {model.problem}",
            param="model",
        )
    return None


async def unless_disconnected(
    waited_for: Coroutine[Any, Any, Result], disconnected: "asyncio.Task[None]"
) -> Result | None:
    """The result, or None as soon as the client is gone."""
    task = asyncio.create_task(waited_for)
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()


async def send_error(send: Send, answer: ErrorAnswer, more_headers: Sequence[Header] = ()) -> None:
    """A whole answer that says what went wrong."""
    headers = [(name.encode(), value.encode()) for name, value in answer.headers]
    await send_answer(send, answer.status, [*headers, *more_headers], answer.body)


async def send_answer(send: Send, status: int, headers: Sequence[Header], body: bytes) -> None:
    """A whole answer."""
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


# --- inside ----------------------------------------------------------------------------------------------------------


async def _encoded(
    rendering: Rendering,
    opening: "asyncio.Task[_Opened]",
    place: Place,
    *,
    request_id: RequestId,
    prompt_field: str,
    constraint_field: str,
    settle: Settle,
) -> AsyncIterator[bytes]:
    """The stream's bytes. After the status line even a fault of ours can only be told in an event."""
    try:
        yield rendering.opening()
        if not opening.done():
            yield waiting_comment(place.view)
        async for choice, event in _all_events(await opening):
            match event:
                case Failed(failure=failure):
                    yield await settle(
                        rendering, rendering.failed(pointing_at(prompt_field, failure, constraint_field))
                    )
                    return
                case Finished() | Warmed():
                    yield rendering.encode(_timed(event, place), choice)
                case Prefilling() if choice == 0:
                    yield rendering.progress(event, place.prefill_seconds)
                case _:
                    yield rendering.encode(event, choice)
        yield await settle(rendering, rendering.closing())
    except Exception as error:  # noqa: BLE001 - logged, and told to the client
        yield rendering.failed(unexpected_failure(error, request_id))


def _timed(end: Finished | Warmed, place: Place) -> Finished | Warmed:
    """With what it waited for in the gateway."""
    tokens = end.usage.completion_tokens if isinstance(end, Finished) else 0
    return replace(end, timings=place.timings(end.timings, tokens))


async def _nothing_to_settle(rendering: Rendering, last: bytes) -> bytes:
    del rendering
    return last


async def _all_events(opened: _Opened) -> AsyncGenerator[tuple[int, RequestEvent]]:
    """The events of all choices as they come, until all have ended or one has failed."""
    for choice, first in opened.firsts.items():
        yield choice, first
        if isinstance(first, Failed):
            return
    if len(opened.replies) == 1:  # the usual case, without a task for each event
        if not isinstance(opened.firsts[0], LastEvent):
            async for event in opened.replies[0]:
                yield 0, event
        return
    pending = {
        asyncio.ensure_future(anext(reply)): choice
        for choice, reply in enumerate(opened.replies)
        if not isinstance(opened.firsts.get(choice), LastEvent)
    }
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                choice = pending.pop(task)
                event = task.result()
                if not isinstance(event, LastEvent):
                    pending[asyncio.ensure_future(anext(opened.replies[choice]))] = choice
                yield choice, event
                if isinstance(event, Failed):
                    return
    finally:
        for task in pending:
            task.cancel()


def _ignored_headers(ignored: tuple[str, ...]) -> tuple[Header, ...]:
    return ((IGNORED_HEADER, names_header(ignored).encode()),) if ignored else ()


def _warnings_headers(answers: Sequence[Collected]) -> tuple[Header, ...]:
    ends = (answer.end for answer in answers)
    warnings = {warning: None for end in ends if isinstance(end, Finished) for warning in end.warnings}
    return ((WARNINGS_HEADER, names_header(tuple(warnings)).encode()),) if warnings else ()
