"""The outermost layer of the HTTP side: every request passes here first, and leaves one line in the log."""

import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import structlog
from msgspec import Struct

from gateway.auth import SCRAPER, Admitted, House, Knock, admit, echoed_request_id, is_admin_path, is_metrics_path
from gateway.config import Settings
from gateway.cross_origin import Headers, page_headers, preflight_headers
from gateway.error_envelopes import SpokenApi, error_answer, spoken_api
from gateway.http_errors import unexpected_failure
from gateway.keys import Keyring, match_key
from gateway.request_tallies import RequestTallies
from protocol.failures import Failure, FailureKind
from protocol.ids import RequestId

# ASGI's own shape. Litestar's types for it tell the kinds of scope apart, which a layer around everything cannot.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_log = structlog.stdlib.get_logger("mlxd.access")


class AnswerCutShort(Exception):
    """The app raised in the middle of its answer. Tells the server to break the connection, so that the client sees
    it; the reason is in the log already, without the exception's own words."""


class DrainNotice(Protocol):
    """Whoever knows that the service is stopping."""

    def is_draining(self) -> bool: ...


class ClientIds(Protocol):
    """Whoever wants to know a request by the id that its client gave it."""

    def also_known_as(self, owner: str, request_id: RequestId, client_id: str) -> None: ...


class GateSecrets(Struct, frozen=True, kw_only=True):
    """`local_scope` is the cache scope of callers without a key."""

    admin_token: str
    local_scope: bytes


class DrainFlag:
    """Up once, never down again."""

    def __init__(self) -> None:
        self._raised = False

    def start(self) -> None:
        self._raised = True

    def is_draining(self) -> bool:
        return self._raised


class Gate:
    """An ASGI app around another. What it lets in has `request_id`, `caller`, `role`, `path` and `log_fields` in its
    `scope["state"]`.

    `log_fields` takes what a route measured, for the request's line in the log: numbers and words of ours only.
    `request_id` is always our own and unique; the header `x-request-id` repeats the client's, if it sent a sane one.
    Clients of Anthropic's API find our own in the header `request-id`, as they expect.
    `path` is as it was asked for: the router tidies slashes away in its own.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        keyring: Keyring,
        secrets: GateSecrets,
        drain: DrainNotice,
        client_ids: ClientIds | None = None,
        tallies: RequestTallies | None = None,
    ) -> None:
        self._tallies = tallies or RequestTallies()
        self._app = app
        self._settings = settings
        self._keyring = keyring
        self._secrets = secrets
        self._drain = drain
        self._client_ids = client_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._serve(scope, receive, send)
            case "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": "no websockets here"})
            case _:
                await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        request_id = RequestId(f"req_{uuid.uuid4().hex}")
        knock = Knock(
            method=scope["method"],
            path=scope["path"],
            raw_path=scope.get("raw_path"),
            headers=tuple((name.lower(), value) for name, value in scope["headers"]),
        )
        client_id = echoed_request_id(knock.values(b"x-request-id"))
        api = spoken_api(knock.path, {name for name, _ in knock.headers})
        origins = () if is_admin_path(knock.path) or is_metrics_path(knock.path) else self._settings.allowed_origins
        answer = _Answer(
            send,
            request_id=request_id,
            shown_id=client_id or request_id,
            api=api,
            started=started,
            page_headers=page_headers(knock, origins),
        )
        preflight = preflight_headers(knock, origins)
        if preflight is not None:
            await answer.send_nothing(preflight)
            self._record(scope, answer, "preflight", request_id, client_id, started)
            return
        verdict = self._decide(knock)
        match verdict:
            case Admitted():
                state: dict[str, object] = {
                    "request_id": request_id,
                    "caller": verdict.caller,
                    "role": verdict.role,
                    "path": knock.path,
                    "log_fields": {},
                }
                scope["state"] = {**scope.get("state", {}), **state}
                if client_id is not None and verdict.role == "caller" and self._client_ids is not None:
                    self._client_ids.also_known_as(verdict.caller.cache_owner, request_id, client_id)
                try:
                    await self._app(scope, receive, answer.send)
                except Exception as error:  # noqa: BLE001  the last place where it can become an answer
                    failure = unexpected_failure(error, request_id)
                    if answer.status is not None:
                        raise AnswerCutShort from None
                    await answer.send_failure(failure)
                finally:
                    self._record(scope, answer, verdict.caller.key_name, request_id, client_id, started)
            case Failure():
                self._tallies.reject(verdict.kind)
                await answer.send_failure(verdict)
                self._record(scope, answer, "-", request_id, client_id, started)

    def _decide(self, knock: Knock) -> Admitted | Failure:
        self._keyring.refresh()
        house = House(
            settings=self._settings,
            records=self._keyring.records,
            local_scope=self._secrets.local_scope,
            admin_token=self._secrets.admin_token,
            phase="draining" if self._drain.is_draining() else "serving",
        )
        return admit(knock, house, match_key)

    def _record(
        self, scope: Scope, answer: "_Answer", key_name: str, request_id: str, client_id: str | None, started: float
    ) -> None:
        """The route's template, not the path: a path is the client's text and may hold anything."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = scope.get("path_template") or "-"
        status = answer.status if answer.status is not None else "client_gone"
        self._tallies.answer(method=method, route=route, status=str(status))
        level = _log.debug if key_name in ("probe", "preflight", SCRAPER) else _log.info
        level(
            "request",
            request_id=request_id,
            client_request_id=client_id or "-",
            method=method,
            route=route,
            status=status,
            seconds=round(time.monotonic() - started, 4),
            key=key_name,
            sent_bytes=answer.sent_bytes,
            **scope.get("state", {}).get("log_fields", {}),
        )


class _Answer:
    """Watches one answer go out, and says in its headers what both APIs' clients look for there: the request's id, and
    OpenAI's how long it took until now, the status line. `started` is of the monotonic clock."""

    def __init__(
        self,
        send: Send,
        *,
        request_id: RequestId,
        shown_id: str,
        api: SpokenApi,
        started: float,
        page_headers: Headers,
    ) -> None:
        self._send = send
        self._request_id = request_id
        self._api: SpokenApi = api
        self._started = started
        self._headers = [(b"x-request-id", shown_id.encode()), *page_headers]
        if api == "anthropic":
            self._headers.append((b"request-id", request_id.encode()))
        self.status: int | None = None
        self.sent_bytes = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kept = [(name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"]
            message["headers"] = [*kept, *self._headers]
            if self._api == "openai":
                milliseconds = round((time.monotonic() - self._started) * 1000)
                message["headers"].append((b"openai-processing-ms", b"%d" % milliseconds))
        elif message["type"] == "http.response.body":
            self.sent_bytes += len(message.get("body", b""))
        await self._send(message)

    async def send_nothing(self, headers: Headers) -> None:
        """204: all that is to be said is in the headers."""
        await self.send({"type": "http.response.start", "status": 204, "headers": list(headers)})
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_failure(self, failure: Failure) -> None:
        answer = error_answer(failure, api=self._api, request_id=self._request_id)
        headers = [(name.encode(), value.encode()) for name, value in answer.headers]
        headers.append((b"content-length", str(len(answer.body)).encode()))
        if failure.kind is FailureKind.BODY_TOO_LARGE:
            headers.append((b"connection", b"close"))  # the body is on its way and nobody will read it
        await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": answer.body, "more_body": False})
