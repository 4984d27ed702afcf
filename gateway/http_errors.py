"""What Litestar refuses and what a handler raises, as answers in the envelope of the API that was called."""

import traceback
from collections.abc import Callable
from typing import Any

import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException

from gateway.error_answers import ErrorAnswer, openai_error
from gateway.error_envelopes import error_answer, spoken_api
from protocol.failures import Failure, FailureKind
from protocol.ids import RequestId

_log = structlog.stdlib.get_logger(__name__)


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


# --- what Litestar itself refuses ------------------------------------------------------------------------------------

_WORDS_OF_STATUS = {
    400: (FailureKind.INVALID_REQUEST, "This request cannot be read. Check its URL, headers and body."),
    401: (FailureKind.UNAUTHENTICATED, "No valid API key. Send one in the header `Authorization: Bearer <key>`."),
    403: (FailureKind.FORBIDDEN, "This is not allowed with this key or from this host. Ask the owner of the server."),
    404: (
        FailureKind.NOT_FOUND,
        "No such route. Check the path: OpenAI clients want a base URL that ends in /v1, Anthropic clients one that "
        "does not.",
    ),
    405: (FailureKind.METHOD_NOT_ALLOWED, "This route is for another method. The header `Allow` names it."),
    413: (FailureKind.BODY_TOO_LARGE, "The body is over this server's limit. Send less, or ask its owner to raise it."),
    415: (FailureKind.UNSUPPORTED_MEDIA_TYPE, "Send the body as `Content-Type: application/json`."),
    429: (FailureKind.OVERLOADED, "Too many requests. Come back after the time in the header `Retry-After`."),
}


def failure_response(failure: Failure) -> Response[bytes]:
    """A failure that a handler answers with, in OpenAI's envelope."""
    return _response(openai_error(failure), extra_headers={})


def _refused_by_litestar(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    if not isinstance(error, HTTPException) or error.status_code not in _WORDS_OF_STATUS:
        return _raised(request, error)
    kind, message = _WORDS_OF_STATUS[error.status_code]
    answer = _told(request, Failure(kind=kind, message=message))
    allowed = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
    return _response(answer, extra_headers=allowed)


def _raised(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    return _response(_told(request, unexpected_failure(error, _request_id(request))), extra_headers={})


def _told(request: Request[Any, Any, Any], failure: Failure) -> ErrorAnswer:
    api = spoken_api(request.scope["path"], {name.lower() for name, _ in request.scope["headers"]})
    return error_answer(failure, api=api, request_id=_request_id(request))


def _request_id(request: Request[Any, Any, Any]) -> RequestId:
    return RequestId(str(request.scope["state"].get("request_id", "unknown")))


def _response(answer: ErrorAnswer, *, extra_headers: dict[str, str]) -> Response[bytes]:
    headers = {name: value for name, value in answer.headers if name != "content-type"} | extra_headers
    return Response(answer.body, status_code=answer.status, headers=headers, media_type="application/json")


OPENAI_EXCEPTION_HANDLERS: dict[
    int | type[Exception], Callable[[Request[Any, Any, Any], Exception], Response[bytes]]
] = {HTTPException: _refused_by_litestar, Exception: _raised}
"""For the app: whatever Litestar refuses, and whatever a handler raises, leaves in OpenAI's envelope, or in
Anthropic's on that API's routes."""
