"""POST /v1/chat/completions and /v1/completions: parse, submit, render.

An answer is an ASGI app of its own rather than a Litestar response: it must hear that the client left while it
waits, in both modes, and a stream must not pay for a task per token.

A stream's status line goes out when the model has accepted the prompt, or has refused it. A model that takes long to
say anything, since it loads for instance, is waited for only so long: then the stream begins, for all that can be
checked without it has been, and a refusal that comes after is an error event with the same body.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from litestar import Router, post
from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec import Struct
from msgspec.structs import replace

from gateway import sse
from gateway.caller import Caller
from gateway.front_desk import FrontDesk, Place
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS, openai_error, unexpected_failure
from gateway.json_body import ClientGone, read_json_body
from gateway.latency_class import CLASS_HEADER, class_asked, granted_class, service_tier_of
from gateway.openai.decode import decode, ignored_header
from gateway.openai.render import ChatStream, Envelope, TextStream, UsageChunk, chat_completion, text_completion
from gateway.openai.schema import ChatRequest, CompletionRequest, GenerationOptions
from gateway.openai.translate import chat_to_generate, completion_to_generate
from gateway.openai.waiting import PromptProgressObject, prompt_progress, waiting_comment
from gateway.ports import Generator, ModelLookup
from gateway.replies import Reply
from protocol.failures import Failure, FailureKind
from protocol.generation import Delta, Failed, Finished, Generate, Prefilling, Queued, RequestEvent, Waiting, Warmed
from protocol.ids import ModelName, RequestId

IGNORED_HEADER = b"x-mlxd-ignored-params"
DETAILS_HEADER = b"x-mlxd-details"

Body = TypeVar("Body", bound=GenerationOptions)
Result = TypeVar("Result")
Header = tuple[bytes, bytes]
Asked = TypeVar("Asked", bound=GenerationOptions, contravariant=True)


class Patience(Struct, frozen=True, kw_only=True):
    """How long a stream may be silent, and how long it may have no status line."""

    keepalive_seconds: float = 10.0
    headers_seconds: float = 30.0


def openai_router(
    generator: Generator,
    models: ModelLookup,
    desk: FrontDesk,
    *,
    max_body_bytes: int,
    unix_clock: Callable[[], float],
    patience: Patience,
    system_fingerprint: str | None = None,
) -> Router:
    """The routes. The gate before them has put `request_id`, `caller` and `log_fields` into the scope's state."""
    answers = _Answers(
        generator,
        models,
        desk,
        max_body_bytes=max_body_bytes,
        unix_clock=unix_clock,
        patience=patience,
        system_fingerprint=system_fingerprint,
    )

    @post("/chat/completions", status_code=200)
    async def chat_completions() -> ASGIApp:
        """OpenAI Chat Completions."""
        return answers.app(_CHAT)

    @post("/completions", status_code=200)
    async def completions() -> ASGIApp:
        """OpenAI's legacy completions."""
        return answers.app(_COMPLETIONS)

    return Router("/v1", route_handlers=[chat_completions, completions], exception_handlers=OPENAI_EXCEPTION_HANDLERS)


class _Translate(Protocol[Asked]):
    def __call__(
        self, request: Asked, *, request_id: RequestId, cache_scope: bytes, disk_ttl_seconds: float | None = None
    ) -> Generate | Failure: ...


class _WholeAnswer(Protocol):
    def __call__(
        self, envelope: Envelope, deltas: Sequence[Delta], finished: Finished, *, top_logprobs: int | None
    ) -> bytes: ...


class _Stream(Protocol):
    def opening(self) -> bytes: ...
    def progress(self, progress: PromptProgressObject) -> bytes: ...
    def encode(self, event: RequestEvent) -> bytes: ...


class _Endpoint(Struct, Generic[Body], frozen=True, kw_only=True):
    """In what the two routes differ. `prompt_field` is where a client looks for the text that was too long."""

    request_type: type[Body]
    translate: _Translate[Body]
    id_prefix: str
    prompt_field: str
    stream: Callable[[Envelope, UsageChunk, int | None], _Stream]
    whole: _WholeAnswer


_CHAT = _Endpoint(
    request_type=ChatRequest,
    translate=chat_to_generate,
    id_prefix="chatcmpl-",
    prompt_field="messages",
    stream=lambda envelope, usage, _: ChatStream(envelope, usage=usage),
    whole=chat_completion,
)
_COMPLETIONS = _Endpoint(
    request_type=CompletionRequest,
    translate=completion_to_generate,
    id_prefix="cmpl-",
    prompt_field="prompt",
    stream=lambda envelope, usage, top_logprobs: TextStream(envelope, usage=usage, top_logprobs=top_logprobs),
    whole=text_completion,
)


class _Accepted(Struct, Generic[Body], frozen=True, kw_only=True):
    """A request that may be submitted."""

    request: Body
    generate: Generate
    ignored: tuple[str, ...]
    details: Literal["asked", "unasked"]
    caller: Caller

    @property
    def model(self) -> ModelName:
        return ModelName(self.request.model)


class _Opened(Struct, frozen=True, kw_only=True):
    """A request that its model has answered for the first time."""

    reply: Reply
    first: RequestEvent


class _Answers:
    """Answers requests, each from its body to its last byte."""

    def __init__(
        self,
        generator: Generator,
        models: ModelLookup,
        desk: FrontDesk,
        *,
        max_body_bytes: int,
        unix_clock: Callable[[], float],
        patience: Patience,
        system_fingerprint: str | None,
    ) -> None:
        self._generator = generator
        self._models = models
        self._desk = desk
        self._max_body_bytes = max_body_bytes
        self._unix_clock = unix_clock
        self._patience = patience
        self._system_fingerprint = system_fingerprint

    def app(self, endpoint: _Endpoint[Body]) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await self._answer(endpoint, scope, receive, send)

        return answer

    async def _answer(self, endpoint: _Endpoint[Body], scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json_body(scope["headers"], receive, max_body_bytes=self._max_body_bytes)
        if isinstance(body, ClientGone):
            return
        accepted = body if isinstance(body, Failure) else self._accept(endpoint, body, scope)
        if isinstance(accepted, Failure):
            await send_error(send, accepted)
            return
        generate = accepted.generate
        place = self._desk.enter(
            accepted.caller,
            request_id=generate.request_id,
            model=accepted.model,
            latency_class=generate.latency_class,
        )
        headers = self._headers(accepted)
        if isinstance(place, Failure):
            await send_error(send, place, headers)
            return
        disconnected = asyncio.create_task(sse.until_disconnected(receive))
        opening = asyncio.create_task(self._open(place, accepted))
        try:
            patience_seconds = self._patience.headers_seconds if accepted.request.stream else None
            await asyncio.wait({opening, disconnected}, timeout=patience_seconds, return_when=asyncio.FIRST_COMPLETED)
            if opening.done() and isinstance(failed := opening.result().first, Failed):
                await send_error(send, pointing_at(endpoint.prompt_field, failed.failure), headers)
            elif disconnected.done():
                return
            elif accepted.request.stream:
                await self._send_stream(endpoint, accepted, place, opening, send, headers, disconnected)
            else:
                await self._send_whole(endpoint, accepted, opening.result(), send, headers, disconnected)
        finally:
            opening.cancel()
            place.leave()
            disconnected.cancel()
            scope["state"].get("log_fields", {}).update(place.log_fields())

    async def _open(self, place: Place, accepted: _Accepted[Any]) -> _Opened:
        """Hand it to its model when its key may, and hear whether the prompt is accepted. Progress before that is not
        yet a yes."""
        await place.turn()
        reply = self._generator.submit(accepted.model, accepted.generate)
        place.follow(reply)
        first = await anext(reply)
        while isinstance(first, Waiting):
            first = await anext(reply)
        return _Opened(reply=reply, first=first)

    def _accept(self, endpoint: _Endpoint[Body], body: bytes, scope: Scope) -> _Accepted[Body] | Failure:
        request_id: RequestId = scope["state"]["request_id"]
        caller: Caller = scope["state"]["caller"]
        decoded = decode(body, endpoint.request_type)
        if isinstance(decoded, Failure):
            return decoded
        generate = endpoint.translate(
            decoded.request,
            request_id=request_id,
            cache_scope=caller.cache_scope,
            disk_ttl_seconds=caller.cache_ttl_seconds,
        )
        if isinstance(generate, Failure):
            return generate
        unservable = cannot_serve(self._models, decoded.request.model)
        if unservable is not None:
            return unservable
        details = "asked" if (DETAILS_HEADER, b"1") in scope["headers"] else "unasked"
        asked = class_asked(
            tuple(scope["headers"]), service_tier=decoded.request.service_tier, priority=decoded.request.priority
        )
        latency_class = granted_class(asked, caller.classes)
        return _Accepted(
            request=decoded.request,
            generate=replace(generate, latency_class=latency_class, tenant=caller.key_name),
            ignored=decoded.ignored,
            details=details,
            caller=caller,
        )

    def _headers(self, accepted: _Accepted[Any]) -> tuple[Header, ...]:
        latency_class = accepted.generate.latency_class
        return (
            (CLASS_HEADER, latency_class.value.encode()),
            *self._desk.headers(accepted.caller, latency_class),
            *_ignored_headers(accepted.ignored),
        )

    def _envelope(self, endpoint: _Endpoint[Body], accepted: _Accepted[Body]) -> Envelope:
        return Envelope(
            id=endpoint.id_prefix + accepted.generate.request_id.removeprefix("req_"),
            created=int(self._unix_clock()),
            model=accepted.request.model,
            system_fingerprint=self._system_fingerprint,
            details_of=accepted.generate.request_id if accepted.details == "asked" else None,
            service_tier=service_tier_of(accepted.generate.latency_class),
        )

    async def _send_stream(
        self,
        endpoint: _Endpoint[Body],
        accepted: _Accepted[Body],
        place: Place,
        opening: "asyncio.Task[_Opened]",
        send: Send,
        headers: tuple[Header, ...],
        disconnected: "asyncio.Task[None]",
    ) -> None:
        options = accepted.request.stream_options
        usage: UsageChunk = "asked" if options is not None and options.include_usage else "unasked"
        stream = endpoint.stream(self._envelope(endpoint, accepted), usage, accepted.generate.top_logprobs)
        await sse.send_stream(
            send,
            _encoded(
                stream,
                opening,
                place,
                request_id=accepted.generate.request_id,
                prompt_field=endpoint.prompt_field,
                progress="asked" if accepted.request.return_progress else "unasked",
            ),
            headers=headers,
            disconnected=disconnected,
            keepalive_seconds=self._patience.keepalive_seconds,
            keepalive=lambda: waiting_comment(place.view),
        )

    async def _send_whole(
        self,
        endpoint: _Endpoint[Body],
        accepted: _Accepted[Body],
        opened: _Opened,
        send: Send,
        headers: tuple[Header, ...],
        disconnected: "asyncio.Task[None]",
    ) -> None:
        collected = await unless_disconnected(_collected(opened.first, opened.reply), disconnected)
        if collected is None:
            return
        deltas, last = collected
        if isinstance(last, Failed):
            await send_error(send, pointing_at(endpoint.prompt_field, last.failure), headers)
            return
        body = endpoint.whole(
            self._envelope(endpoint, accepted), deltas, last, top_logprobs=accepted.generate.top_logprobs
        )
        await send_answer(send, 200, [(b"content-type", b"application/json"), *headers], body)


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


async def _encoded(
    stream: _Stream,
    opening: "asyncio.Task[_Opened]",
    place: Place,
    *,
    request_id: RequestId,
    prompt_field: str,
    progress: Literal["asked", "unasked"],
) -> AsyncIterator[bytes]:
    """The stream's bytes. After the status line even a fault of ours can only be told in an event."""
    try:
        yield stream.opening()
        opened = await opening
        first = opened.first
        if isinstance(first, Failed):
            first = replace(first, failure=pointing_at(prompt_field, first.failure))
        yield stream.encode(first)
        async for event in opened.reply:
            if progress == "asked" and isinstance(event, Prefilling):
                yield stream.progress(prompt_progress(event, prefill_seconds=place.prefill_seconds))
            else:
                yield stream.encode(event)
    except Exception as error:  # noqa: BLE001 - logged, and told to the client
        failure = unexpected_failure(error, request_id)
        yield stream.encode(Failed(request_id=request_id, failure=failure))


async def _collected(first: RequestEvent, reply: Reply) -> tuple[list[Delta], Finished | Failed]:
    deltas: list[Delta] = []
    event = first
    while True:
        match event:
            case Delta():
                deltas.append(event)
            case Finished() | Failed():
                return deltas, event
            case Queued() | Waiting() | Prefilling() | Warmed():
                pass
            case _:
                pass
        event = await anext(reply)


def pointing_at(prompt_field: str, failure: Failure) -> Failure:
    """The worker does not know how this API names the prompt."""
    if failure.kind is FailureKind.CONTEXT_LENGTH_EXCEEDED:
        return replace(failure, param=prompt_field)
    return failure


def _ignored_headers(ignored: tuple[str, ...]) -> tuple[Header, ...]:
    return ((IGNORED_HEADER, ignored_header(ignored).encode()),) if ignored else ()


async def send_error(send: Send, failure: Failure, more_headers: Sequence[Header] = ()) -> None:
    """A whole answer in OpenAI's envelope."""
    answer = openai_error(failure)
    headers = [(name.encode(), value.encode()) for name, value in answer.headers]
    await send_answer(send, answer.status, [*headers, *more_headers], answer.body)


async def send_answer(send: Send, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
    """A whole answer."""
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
