"""How a Failure looks to clients of Anthropic's API. Decides only."""

from typing import Literal

import msgspec
from msgspec import Struct

from gateway.error_answers import ErrorAnswer, retry_headers
from protocol.failures import Failure, FailureKind
from protocol.ids import RequestId

_WORDS: dict[FailureKind, tuple[int, str]] = {
    FailureKind.INVALID_REQUEST: (400, "invalid_request_error"),
    FailureKind.UNSUPPORTED: (400, "invalid_request_error"),
    FailureKind.CONTEXT_LENGTH_EXCEEDED: (400, "invalid_request_error"),
    FailureKind.UNAUTHENTICATED: (401, "authentication_error"),
    FailureKind.FORBIDDEN: (403, "permission_error"),
    FailureKind.NOT_FOUND: (404, "not_found_error"),
    FailureKind.MODEL_NOT_FOUND: (404, "not_found_error"),
    FailureKind.METHOD_NOT_ALLOWED: (405, "invalid_request_error"),
    FailureKind.BODY_TOO_LARGE: (413, "request_too_large"),
    FailureKind.UNSUPPORTED_MEDIA_TYPE: (415, "invalid_request_error"),
    FailureKind.RATE_LIMITED: (429, "rate_limit_error"),
    FailureKind.CANCELLED: (499, "api_error"),
    FailureKind.INTERNAL: (500, "api_error"),
    FailureKind.MODEL_UNAVAILABLE: (503, "api_error"),
    FailureKind.CACHE_UNAVAILABLE: (503, "api_error"),
    FailureKind.WORKER_DIED: (503, "api_error"),
    FailureKind.SHUTTING_DOWN: (503, "api_error"),
    FailureKind.OUT_OF_MEMORY: (503, "api_error"),
    FailureKind.OVERLOADED: (529, "overloaded_error"),
}
"""Status and `type`. A test holds that no kind is missing."""

_encode = msgspec.json.Encoder().encode


class ErrorInside(Struct, frozen=True, kw_only=True):
    """The inside of the envelope. The message names the field at fault, for the API has no place of its own for it."""

    type: str
    message: str


class ErrorBody(Struct, frozen=True, kw_only=True):
    """Anthropic's error envelope, as an answer's body and as an event in the middle of a stream."""

    type: Literal["error"] = "error"
    error: ErrorInside
    request_id: RequestId


def anthropic_error(failure: Failure, request_id: RequestId) -> ErrorAnswer:
    """The answer to a request that fails before its status line. The gate adds the header `request-id`."""
    status, _ = _WORDS[failure.kind]
    return ErrorAnswer(
        status=status,
        headers=(("content-type", "application/json"), *retry_headers(failure)),
        body=anthropic_error_body(failure, request_id),
    )


def anthropic_error_body(failure: Failure, request_id: RequestId) -> bytes:
    """The envelope as JSON: the data of the event that ends a stream early."""
    _, type_ = _WORDS[failure.kind]
    return _encode(ErrorBody(error=ErrorInside(type=type_, message=_message(failure)), request_id=request_id))


def _message(failure: Failure) -> str:
    """Agents that shorten their conversation by themselves know that it is time by these words of the API."""
    if failure.kind is FailureKind.CONTEXT_LENGTH_EXCEEDED:
        return f"prompt is too long: {failure.message}"
    return failure.message
