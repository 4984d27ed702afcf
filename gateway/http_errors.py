"""How a Failure looks over HTTP: the only module that knows statuses and error envelopes."""

import math
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException
from msgspec import Struct

from protocol.failures import Failure, FailureKind

_DEFAULT_RETRY_SECONDS = 1.0
_RETRIED_WITHIN_SECONDS = 120.0

_log = structlog.stdlib.get_logger(__name__)
_encoder = msgspec.json.Encoder()


_OPENAI_WORDS: dict[FailureKind, tuple[int, str, str | None]] = {
    FailureKind.INVALID_REQUEST: (400, "invalid_request_error", None),
    FailureKind.UNSUPPORTED: (400, "invalid_request_error", "unsupported"),
    FailureKind.CONTEXT_LENGTH_EXCEEDED: (400, "invalid_request_error", "context_length_exceeded"),
    FailureKind.UNAUTHENTICATED: (401, "invalid_request_error", "invalid_api_key"),
    FailureKind.FORBIDDEN: (403, "invalid_request_error", "forbidden"),
    FailureKind.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    FailureKind.MODEL_NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    FailureKind.METHOD_NOT_ALLOWED: (405, "invalid_request_error", "method_not_allowed"),
    FailureKind.BODY_TOO_LARGE: (413, "invalid_request_error", "body_too_large"),
    FailureKind.UNSUPPORTED_MEDIA_TYPE: (415, "invalid_request_error", "unsupported_media_type"),
    FailureKind.OVERLOADED: (429, "rate_limit_error", "rate_limit_exceeded"),
    FailureKind.CANCELLED: (499, "invalid_request_error", "cancelled"),
    FailureKind.INTERNAL: (500, "server_error", "internal_error"),
    FailureKind.MODEL_UNAVAILABLE: (503, "server_error", "model_unavailable"),
    FailureKind.CACHE_UNAVAILABLE: (503, "server_error", "cache_unavailable"),
    FailureKind.WORKER_DIED: (503, "server_error", "worker_died"),
    FailureKind.SHUTTING_DOWN: (503, "server_error", "shutting_down"),
    FailureKind.OUT_OF_MEMORY: (503, "server_error", "out_of_memory"),
}
"""Status, `type` and `code`. A test holds that no kind is missing."""


class ErrorAnswer(Struct, frozen=True, kw_only=True):
    """A whole HTTP answer."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class OpenAIError(Struct, frozen=True, kw_only=True):
    """The inside of OpenAI's envelope. All four keys are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(Struct, frozen=True, kw_only=True):
    """OpenAI's error envelope, as an answer's body and as an event in the middle of a stream."""

    error: OpenAIError


def openai_error(failure: Failure) -> ErrorAnswer:
    """The answer to a request that fails before its status line, for clients of OpenAI's API."""
    status, _, _ = _OPENAI_WORDS[failure.kind]
    return ErrorAnswer(
        status=status,
        headers=(("content-type", "application/json"), *_headers(failure)),
        body=openai_error_body(failure),
    )


def openai_error_body(failure: Failure) -> bytes:
    """OpenAI's error envelope as JSON: the data of the event that ends a stream early."""
    _, type_, code = _OPENAI_WORDS[failure.kind]
    return _encoder.encode(
        OpenAIErrorBody(error=OpenAIError(message=failure.message, type=type_, param=failure.param, code=code))
    )


def unexpected_failure(error: BaseException, request_id: str) -> Failure:
    """Log a fault of ours and say it to the client.

    The log has types and places, not the exceptions' own words: those may quote a prompt.
    """
    chain: list[dict[str, object]] = []
    link: BaseException | None = error
    while link is not None and len(chain) < 8:
        chain.append({"type": type(link).__qualname__, "frames": traceback.format_tb(link.__traceback__)})
        link = link.__cause__ or link.__context__
    _log.error("request_raised", request_id=request_id, error_type=type(error).__qualname__, chain=chain)
    return Failure(
        kind=FailureKind.INTERNAL,
        message=f"The server made a mistake. Try again; if it stays, show its owner request id {request_id}.",
    )


def _headers(failure: Failure) -> tuple[tuple[str, str], ...]:
    """What tells a client whether, and when, to come back. SDKs retry 429 and 5xx by themselves unless told not to."""
    match failure.kind:
        case (
            FailureKind.OVERLOADED | FailureKind.CACHE_UNAVAILABLE | FailureKind.WORKER_DIED | FailureKind.SHUTTING_DOWN
        ):
            return _come_back(failure.retry_after_seconds or _DEFAULT_RETRY_SECONDS)
        case FailureKind.MODEL_UNAVAILABLE | FailureKind.OUT_OF_MEMORY:
            # A broken folder does not mend itself: only who knows a time says that coming back helps.
            if failure.retry_after_seconds is None:
                return (("x-should-retry", "false"),)
            return _come_back(failure.retry_after_seconds)
        case FailureKind.UNAUTHENTICATED:
            return (("www-authenticate", "Bearer"),)
        case _:
            return ()


def _come_back(seconds: float) -> tuple[tuple[str, str], ...]:
    # One that comes back by itself does so within a minute or two. What takes longer is for a person to know.
    should_retry = "true" if seconds <= _RETRIED_WITHIN_SECONDS else "false"
    return (("retry-after", str(max(1, math.ceil(seconds)))), ("x-should-retry", should_retry))


# --- what Litestar itself refuses ------------------------------------------------------------------------------------

_WORDS_OF_STATUS = {
    400: (FailureKind.INVALID_REQUEST, "This request cannot be read. Check its URL, headers and body."),
    401: (FailureKind.UNAUTHENTICATED, "No valid API key. Send one in the header `Authorization: Bearer <key>`."),
    403: (FailureKind.FORBIDDEN, "This is not allowed with this key or from this host. Ask the owner of the server."),
    404: (FailureKind.NOT_FOUND, "No such route. Check the path; OpenAI clients want a base URL that ends in /v1."),
    405: (FailureKind.METHOD_NOT_ALLOWED, "This route is for another method. The header `Allow` names it."),
    413: (FailureKind.BODY_TOO_LARGE, "The body is over this server's limit. Send less, or ask its owner to raise it."),
    415: (FailureKind.UNSUPPORTED_MEDIA_TYPE, "Send the body as `Content-Type: application/json`."),
    429: (FailureKind.OVERLOADED, "Too many requests. Come back after the time in the header `Retry-After`."),
}


def _refused_by_litestar(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    if not isinstance(error, HTTPException) or error.status_code not in _WORDS_OF_STATUS:
        return _raised(request, error)
    kind, message = _WORDS_OF_STATUS[error.status_code]
    answer = openai_error(Failure(kind=kind, message=message))
    allowed = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
    return _response(answer, extra_headers=allowed)


def _raised(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    request_id = str(request.scope["state"].get("request_id", "unknown"))
    return _response(openai_error(unexpected_failure(error, request_id)), extra_headers={})


def _response(answer: ErrorAnswer, *, extra_headers: dict[str, str]) -> Response[bytes]:
    headers = {name: value for name, value in answer.headers if name != "content-type"} | extra_headers
    return Response(answer.body, status_code=answer.status, headers=headers, media_type="application/json")


OPENAI_EXCEPTION_HANDLERS: dict[
    int | type[Exception], Callable[[Request[Any, Any, Any], Exception], Response[bytes]]
] = {HTTPException: _refused_by_litestar, Exception: _raised}
"""For the app: whatever Litestar refuses, and whatever a handler raises, leaves in OpenAI's envelope."""
