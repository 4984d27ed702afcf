"""Routes about the cache: warm, pin, forget, explain; and the operator's view of all of it.

Every caller acts on its own blocks only. The operator's routes need the admin token, as all of /admin does.
"""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar, assert_never

import msgspec
from litestar import Request, Response, Router, delete, get, post
from litestar.datastructures import State
from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec import UNSET, UnsetType

from gateway import sse
from gateway.answering import cannot_serve, send_answer, send_error, unless_disconnected
from gateway.cache_doors import CacheDoors, CacheRefusal
from gateway.cache_terms import (
    AdminCache,
    BudgetRequest,
    BudgetSet,
    CacheForgotten,
    CacheWarm,
    ForgetRequest,
    OwnForgetRequest,
    PinDeleted,
    PinList,
    PinRequest,
    UnpinRequest,
    WarmChat,
    WarmCompletion,
    pin_of,
)
from gateway.caller import Caller
from gateway.dialects import pointing_at
from gateway.error_answers import openai_error
from gateway.front_desk import FrontDesk
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS, failure_response
from gateway.json_body import ClientGone, not_plain_json, read_json_body
from gateway.latency_class import CLASS_HEADER
from gateway.openai.decode import decode
from gateway.openai.translate import chat_to_generate, completion_to_generate
from gateway.operations import requires_admin
from gateway.request_body import decode_plain
from protocol.failures import Failure, FailureKind
from protocol.generation import Warm
from protocol.ids import ModelName, RequestId

Asking = Request[object, object, State]
Body = TypeVar("Body")

_SMALL_BODY_BYTES = 64 * 1024


def cache_router(doors: CacheDoors, desk: FrontDesk, *, max_body_bytes: int) -> Router:
    """The callers' routes. The gate before them has put `request_id` and `caller` into the scope's state.

    A warm takes a place in the book as a request of the class `warm`, and costs its key as many of the day's tokens as
    its prompt has.
    """

    @post("/cache/warm", status_code=200)
    async def warm() -> ASGIApp:
        """Compute a prompt's prefix and keep it."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await _answer_warm(doors, desk, scope, receive, send, max_body_bytes=max_body_bytes)

        return answer

    @get("/cache/pins")
    async def list_pins(request: Asking) -> PinList:
        """The caller's own pins."""
        return await doors.pins(_caller(request).cache_owner)

    @delete("/cache/pins/{name:str}", status_code=200)
    async def delete_pin(request: Asking) -> Response[bytes]:
        """Let it age like any other prefix."""
        return await _answered(doors.unpin(_caller(request).cache_owner, str(request.path_params["name"])))

    @post("/cache/forget", status_code=200)
    async def forget(request: Asking) -> Response[bytes]:
        """Drop the caller's own blocks, in memory and on disk."""
        asked = await _read(request, OwnForgetRequest)
        if isinstance(asked, Failure):
            return failure_response(asked)
        caller = _caller(request)
        return await _answered(
            doors.forget(
                owner=caller.cache_owner, unused_for_seconds=asked.unused_for_seconds, asked_by=caller.key_name
            )
        )

    @get("/requests/{asked_id:str}/explain")
    async def explain(request: Asking) -> Response[bytes]:
        """Why a request of the caller's own reused no more of its prompt."""
        asked_id = str(request.path_params["asked_id"])
        explanation = doors.recorder.explain(_caller(request).cache_owner, asked_id)
        if explanation is None:
            failure = Failure(
                kind=FailureKind.NOT_FOUND,
                message="No such request of this key is remembered. Finished ones are, for `explain.keep_minutes`; "
                "its id is in the header x-request-id and in the answer.",
            )
            return failure_response(failure)
        return _json(explanation)

    return Router(
        "/v1",
        route_handlers=[warm, list_pins, delete_pin, forget, explain],
        exception_handlers=OPENAI_EXCEPTION_HANDLERS,
    )


def cache_admin_router(doors: CacheDoors) -> Router:
    """The operator's routes."""

    @get("/")
    async def show() -> AdminCache:
        """Books, pins, misses and budgets of all tiers."""
        return await doors.books()

    @post("/forget", status_code=200)
    async def forget(request: Asking) -> Response[bytes]:
        """Drop blocks by model, owner and age, or all."""
        asked = await _read(request, ForgetRequest)
        return failure_response(asked) if isinstance(asked, Failure) else await _answered(_forget(doors, asked))

    @post("/unpin", status_code=200)
    async def unpin(request: Asking) -> Response[bytes]:
        """Unpin somebody's prefix."""
        asked = await _read(request, UnpinRequest)
        return failure_response(asked) if isinstance(asked, Failure) else await _answered(_unpin(doors, asked))

    @post("/budget", status_code=200)
    async def budget(request: Asking) -> Response[bytes]:
        """How much memory a model's hot tier may take."""
        asked = await _read(request, BudgetRequest)
        return failure_response(asked) if isinstance(asked, Failure) else await _answered(_set_budget(doors, asked))

    return Router(
        "/admin/cache",
        route_handlers=[show, forget, unpin, budget],
        guards=[requires_admin],
        exception_handlers=OPENAI_EXCEPTION_HANDLERS,
    )


async def _forget(doors: CacheDoors, asked: ForgetRequest) -> CacheForgotten:
    criteria = (asked.model, asked.key, asked.owner, asked.unused_for_seconds)
    if (asked.all is None) == (criteria == (None, None, None, None)):
        raise CacheRefusal(
            FailureKind.INVALID_REQUEST,
            "Say what to forget: `model`, `key` or `owner`, `unused_for_seconds`, or `all` and nothing else.",
        )
    return await doors.forget(
        owner=doors.owner(key=asked.key, owner=asked.owner),
        model=asked.model,
        unused_for_seconds=asked.unused_for_seconds,
        asked_by="admin",
    )


async def _unpin(doors: CacheDoors, asked: UnpinRequest) -> PinDeleted:
    owner = doors.owner(key=asked.key, owner=asked.owner)
    if owner is None:
        raise CacheRefusal(FailureKind.INVALID_REQUEST, "Say whose pin it is: `key` or `owner`.", "key")
    return await doors.unpin(owner, asked.name)


async def _set_budget(doors: CacheDoors, asked: BudgetRequest) -> BudgetSet:
    return doors.set_budget(asked)


# --- warm ------------------------------------------------------------------------------------------------------------


async def _answer_warm(
    doors: CacheDoors, desk: FrontDesk, scope: Scope, receive: Receive, send: Send, *, max_body_bytes: int
) -> None:
    body = await read_json_body(scope["headers"], receive, max_body_bytes=max_body_bytes)
    if isinstance(body, ClientGone):
        return
    caller: Caller = scope["state"]["caller"]
    accepted = body if isinstance(body, Failure) else _accept_warm(doors, body, scope)
    if isinstance(accepted, Failure):
        desk.tallies.reject(accepted.kind)
        await send_error(send, openai_error(accepted))
        return
    prompt_field, model, warm, pin = accepted
    place = desk.enter(caller, request_id=warm.request_id, model=model, work_class="warm", dialect="warm")
    headers = ((CLASS_HEADER, b"warm"), *desk.headers(caller, "warm"))
    if isinstance(place, Failure):
        await send_error(send, openai_error(place), headers)
        return
    disconnected = asyncio.create_task(sse.until_disconnected(receive))
    try:
        answer = await unless_disconnected(doors.warm(model, warm, pin, place), disconnected)
    finally:
        disconnected.cancel()
        place.leave()
        scope["state"].get("log_fields", {}).update(place.log_fields())
    match answer:
        case None:
            return
        case Failure():
            await send_error(send, openai_error(pointing_at(prompt_field, answer)), headers)
        case CacheWarm():
            headers = [(b"content-type", b"application/json"), *headers]
            await send_answer(send, 200, headers, msgspec.json.encode(answer))
        case _:
            assert_never(answer)


def _accept_warm(
    doors: CacheDoors, body: bytes, scope: Scope
) -> tuple[str, ModelName, Warm, PinRequest | None] | Failure:
    request_id: RequestId = scope["state"]["request_id"]
    caller: Caller = scope["state"]["caller"]
    shape = decode_plain(body, _PromptFields)
    if isinstance(shape, Failure):
        return shape
    is_chat = shape.prompt is UNSET
    if not is_chat and shape.messages is not UNSET:
        return Failure(
            kind=FailureKind.INVALID_REQUEST, message="Send `messages` or `prompt`, not both.", param="prompt"
        )
    if is_chat:
        decoded = decode(body, WarmChat)
        generate = (
            decoded
            if isinstance(decoded, Failure)
            else chat_to_generate(
                decoded.request,
                request_id=request_id,
                cache_scope=caller.cache_scope,
                disk_ttl_seconds=caller.cache_ttl_seconds,
            )
        )
    else:
        decoded = decode(body, WarmCompletion)
        generate = (
            decoded
            if isinstance(decoded, Failure)
            else completion_to_generate(
                decoded.request,
                request_id=request_id,
                cache_scope=caller.cache_scope,
                disk_ttl_seconds=caller.cache_ttl_seconds,
            )
        )
    if isinstance(decoded, Failure):
        return decoded
    if isinstance(generate, Failure):
        return generate
    if any(command.prompt is not generate[0].prompt for command in generate):
        return Failure(
            kind=FailureKind.UNSUPPORTED, message="`prompt`: one at a time. Send several requests.", param="prompt"
        )
    unservable = cannot_serve(doors.models, decoded.request.model)
    if unservable is not None:
        return unservable
    pin = decoded.request.pin
    warm = Warm(request_id=request_id, prompt=generate[0].prompt, cache=generate[0].cache, pin=pin_of(pin))
    return "messages" if is_chat else "prompt", ModelName(decoded.request.model), warm, pin


class _PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the two bodies it is."""

    messages: msgspec.Raw | UnsetType = UNSET
    prompt: msgspec.Raw | UnsetType = UNSET


# --- answers ---------------------------------------------------------------------------------------------------------


def _caller(request: Asking) -> Caller:
    caller: Caller = request.scope["state"]["caller"]
    return caller


async def _read(request: Asking, body_type: type[Body]) -> Body | Failure:
    """A small body; an empty one is an empty object."""
    headers = request.scope["headers"]
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _SMALL_BODY_BYTES:
            return Failure(
                kind=FailureKind.BODY_TOO_LARGE, message=f"The body is over {_SMALL_BODY_BYTES} bytes. Send less."
            )
    if not body:
        return decode_plain(b"{}", body_type)
    return not_plain_json(headers) or decode_plain(body, body_type)


async def _answered(work: Coroutine[object, object, msgspec.Struct]) -> Response[bytes]:
    try:
        return _json(await work)
    except CacheRefusal as refusal:
        return failure_response(refusal.failure)


def _json(answer: msgspec.Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(answer), media_type="application/json")
