"""What the routes of the Responses API do: answer, in the foreground or the background, and keep what is to be kept."""

import sqlite3
from asyncio import create_task
from typing import Any, Literal

import msgspec
import structlog
from litestar import Response
from litestar.types import Receive, Scope, Send

from gateway.answering import Answering, send_answer, send_error, unless_disconnected
from gateway.caller import Caller
from gateway.dialects import Asked
from gateway.json_body import ClientGone
from gateway.request_body import Decoded
from gateway.request_recorder import RequestRecorder
from gateway.responses.answers import CacheDiagnostics, InputTokens, ResponseDeleted
from gateway.responses.background import BackgroundResponses
from gateway.responses.diagnostics import NOT_FOUND, UNAVAILABLE, diagnose
from gateway.responses.dialect import ResponsesDialect
from gateway.responses.failures import responses_error
from gateway.responses.rendering import ResponseRendering
from gateway.responses.resolve import Items, not_stored, resolved_items
from gateway.responses.schema import CountRequest, CreateRequest, decode_request
from gateway.responses.store import ResponseStore
from gateway.responses.stored import StoredResponse, holder_of, identified, page_of, with_status
from gateway.responses.translate import input_items, understand
from gateway.sse import until_disconnected
from protocol.failures import Failure, FailureKind
from protocol.generation import Tokenize, Tokenized

_PAGE_DEFAULT = 20
_PAGE_MAX = 100
_JSON = (b"content-type", b"application/json")

_log = structlog.stdlib.get_logger("mlxd.responses")


class ResponseDoors:
    """One for the whole gateway. Used on the event loop only."""

    def __init__(
        self, answering: Answering, store: ResponseStore, recorder: RequestRecorder | None, *, max_body_bytes: int
    ) -> None:
        self._answering = answering
        self._store = store
        self._recorder = recorder
        self._max_body_bytes = max_body_bytes
        self._background = BackgroundResponses(answering, store)

    # --- POST --------------------------------------------------------------------------------------------------------

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/responses."""
        asked = self._answering.asked(scope)
        read = await self._read(scope, receive, CreateRequest)
        if read is None:
            return
        if isinstance(read, Failure):
            self._answering.reject(read)
            await send_error(send, responses_error(read))
            return
        decoded, items = read
        request = decoded.request
        refused = _refused_background(request, self._store) if request.background else None
        if refused is not None:
            self._answering.reject(refused)
            await send_error(send, responses_error(refused))
            return
        is_stored = bool(request.store) and self._store.is_on
        dialect = ResponsesDialect(
            decoded,
            items,
            store="asked" if is_stored else "unasked",
            diagnose=lambda other_id: self._diagnose(asked, other_id),
        )
        if request.background:
            await self._create_in_background(dialect, request, asked, send)
            return

        async def settle(rendering: ResponseRendering, last: bytes) -> bytes:
            return await self._settle(rendering, last, request, asked)

        await self._answering.answer(dialect, b"", scope, receive, send, settle=settle if is_stored else None)

    async def _read(
        self, scope: Scope, receive: Receive, request_type: type[Any]
    ) -> tuple[Decoded[Any], Items] | Failure | None:
        """A request with all items that it refers to. None: its client is gone."""
        body = await self._answering.read_body(scope, receive)
        if isinstance(body, ClientGone):
            return None
        decoded = body if isinstance(body, Failure) else decode_request(body, request_type)
        if isinstance(decoded, Failure):
            return decoded
        holder = holder_of(scope["state"]["caller"])
        try:
            items = await resolved_items(decoded.request, self._store, holder, max_bytes=self._max_body_bytes)
        except (sqlite3.Error, OSError) as why:
            return _storefailed(why)
        return items if isinstance(items, Failure) else (decoded, items)

    async def _settle(self, rendering: ResponseRendering, last: bytes, request: CreateRequest, asked: Asked) -> bytes:
        """Store the response before its client can refer to it. What cannot be stored says so, and is not lost."""
        final = rendering.final
        if final is None:
            return last
        try:
            await self._store.put(_stored(rendering, request, asked))
        except (sqlite3.Error, OSError) as why:
            _storefailed(why)
            return rendering.unkept()
        return last

    async def _create_in_background(
        self, dialect: ResponsesDialect, request: CreateRequest, asked: Asked, send: Send
    ) -> None:
        accepted = self._answering.accept(dialect, b"", asked)
        if isinstance(accepted, Failure):
            self._answering.reject(accepted)
            await send_error(send, responses_error(accepted))
            return
        place = self._answering.enter(dialect, accepted, asked)
        headers = self._answering.headers(dialect, accepted, asked)
        if isinstance(place, Failure):
            await send_error(send, responses_error(place), headers)
            return
        rendering = dialect.rendering(accepted, asked)
        holder = holder_of(asked.caller)
        try:
            await self._store.put(_stored(rendering, request, asked))
        except BaseException as why:
            place.leave()
            if not isinstance(why, sqlite3.Error | OSError):
                raise
            await send_error(send, responses_error(_storefailed(why)), headers)
            return
        self._background.start(accepted, place, rendering, holder=holder, request_id=asked.request_id)
        await send_answer(send, 200, [_JSON, *headers], msgspec.json.encode(rendering.frame))

    async def count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/responses/input_tokens."""
        read = await self._read(scope, receive, CountRequest)
        if read is None:
            return
        asked = self._answering.asked(scope)
        counted = read
        if not isinstance(read, Failure):
            decoded, items = read
            counted = understand(decoded.request, items, cache_scope=asked.caller.cache_scope)
            if not isinstance(counted, Failure):
                question = Tokenize(request_id=asked.request_id, prompt=counted.prompt)
                disconnected = create_task(until_disconnected(receive))
                try:
                    asking = self._answering.ask(decoded.request.model, question)
                    counted = await unless_disconnected(asking, disconnected)
                finally:
                    disconnected.cancel()
        match counted:
            case None:
                return
            case Failure():
                await send_error(send, responses_error(counted))
            case Tokenized(token_ids=ids):
                await send_answer(send, 200, [_JSON], msgspec.json.encode(InputTokens(input_tokens=len(ids))))
            case _:
                raise AssertionError("a Tokenize ends with Tokenized or Failed")

    # --- what is stored ----------------------------------------------------------------------------------------------

    async def show(self, caller: Caller, response_id: str) -> Response[bytes]:
        """GET."""
        stored = await self._find(caller, response_id)
        return failed(stored) if isinstance(stored, Failure) else self._shown(stored)

    async def remove(self, caller: Caller, response_id: str) -> Response[bytes]:
        """DELETE."""
        holder = holder_of(caller)
        try:
            await self._background.cancel(holder, response_id)
            was_there = await self._store.delete(holder, response_id)
        except (sqlite3.Error, OSError) as why:
            return failed(_storefailed(why))
        return _json(ResponseDeleted(id=response_id)) if was_there else failed(not_stored(None, self._store))

    async def cancel(self, caller: Caller, response_id: str) -> Response[bytes]:
        """POST …/cancel."""
        stored = await self._find(caller, response_id)
        if isinstance(stored, Failure):
            return failed(stored)
        if not stored.background:
            return failed(
                invalid(
                    None, "Only responses asked for with `background: true` can be cancelled. Close the connection."
                )
            )
        try:
            await self._background.cancel(stored.holder, response_id)
        except (sqlite3.Error, OSError) as why:
            return failed(_storefailed(why))
        return await self.show(caller, response_id)

    async def input_items(self, caller: Caller, response_id: str, query: dict[str, str]) -> Response[bytes]:
        """GET …/input_items."""
        stored = await self._find(caller, response_id)
        if isinstance(stored, Failure):
            return failed(stored)
        limit = query.get("limit", str(_PAGE_DEFAULT))
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= _PAGE_MAX):
            return failed(invalid("limit", f"`limit`: must be 1 to {_PAGE_MAX}. Correct it."))
        order: Literal["asc", "desc"] = "asc" if query.get("order") == "asc" else "desc"
        page = page_of(stored, after=query.get("after"), limit=int(limit), order=order)
        if page is None:
            return failed(invalid("after", "`after`: is no item of this response. Send an id from the list."))
        return _json(page)

    async def _find(self, caller: Caller, response_id: str) -> StoredResponse | Failure:
        try:
            stored = await self._store.get(holder_of(caller), response_id)
        except (sqlite3.Error, OSError) as why:
            return _storefailed(why)
        return not_stored(None, self._store) if stored is None else stored

    def _shown(self, stored: StoredResponse) -> Response[bytes]:
        now = self._background.status(stored.holder, stored.id)
        body = stored.response if now is None else with_status(stored.response, now)
        return Response(body, media_type="application/json")

    def _diagnose(self, asked: Asked, other_id: str) -> CacheDiagnostics:
        recorder, owner = self._recorder, asked.caller.cache_owner
        if recorder is None:
            return UNAVAILABLE
        earlier = recorder.find(owner, other_id)
        if earlier is None:
            return NOT_FOUND
        record = recorder.find(owner, asked.request_id)
        return UNAVAILABLE if record is None else diagnose(record, earlier)


def _stored(rendering: ResponseRendering, request: CreateRequest, asked: Asked) -> StoredResponse:
    """As it is now: not begun, or ended."""
    response = rendering.final or rendering.frame
    own = [item for _, item in input_items(request)]
    return StoredResponse(
        holder=holder_of(asked.caller),
        id=rendering.id,
        created_unix=asked.created_unix,
        status=response.status,
        background=response.background,
        previous_response_id=request.previous_response_id,
        input_items=identified(own, bare_id=asked.request_id.removeprefix("req_")),
        response=msgspec.json.encode(response),
    )


def _refused_background(request: CreateRequest, store: ResponseStore) -> Failure | None:
    if not store.is_on:
        return invalid("background", "`background`: this server stores no responses. Ask in the foreground.")
    if not request.store:
        return invalid("background", "`background`: needs `store: true`, or nobody could ask for the response later.")
    if request.stream:
        return invalid("stream", "`stream`: a response in the background is not streamed. Ask for it by its id.")
    if request.prompt_cache_options is not None and request.prompt_cache_options.prewarm:
        return invalid("background", "`background`: a prewarm is answered when it is done. Leave `background` out.")
    return None


def _storefailed(why: Exception) -> Failure:
    """Log it; the words of an error may quote what was stored."""
    _log.error("responses_store_failed", error_type=type(why).__qualname__)
    return Failure(
        kind=FailureKind.INTERNAL,
        message="What is stored cannot be read or written now; the server's log says why. Send all items in `input`, "
        "without `store`.",
    )


def invalid(param: str | None, message: str) -> Failure:
    return Failure(kind=FailureKind.INVALID_REQUEST, message=message, param=param)


def _json(answer: msgspec.Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def failed(failure: Failure) -> Response[bytes]:
    answer = responses_error(failure)
    return Response(answer.body, status_code=answer.status, media_type="application/json")
