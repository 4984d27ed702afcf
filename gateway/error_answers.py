"""How a Failure looks to clients of OpenAI's API: statuses, envelopes, and when to come back. Decides only."""

import math

import msgspec
from msgspec import Struct

from protocol.failures import Failure, FailureKind

_DEFAULT_RETRY_SECONDS = 1.0
_RETRIED_WITHIN_SECONDS = 120.0

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
    FailureKind.RATE_LIMITED: (429, "rate_limit_error", "rate_limit_exceeded"),
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
        headers=(("content-type", "application/json"), *retry_headers(failure)),
        body=openai_error_body(failure),
    )


def openai_error_body(failure: Failure) -> bytes:
    """OpenAI's error envelope as JSON: the data of the event that ends a stream early."""
    return _encoder.encode(OpenAIErrorBody(error=openai_words(failure)))


def openai_words(failure: Failure) -> OpenAIError:
    """The inside of the envelope."""
    _, type_, code = _OPENAI_WORDS[failure.kind]
    return OpenAIError(message=failure.message, type=type_, param=failure.param, code=code)


def retry_headers(failure: Failure) -> tuple[tuple[str, str], ...]:
    """What tells a client whether, and when, to come back. SDKs retry 429 and 5xx by themselves unless told not to."""
    match failure.kind:
        case (
            FailureKind.RATE_LIMITED
            | FailureKind.OVERLOADED
            | FailureKind.CACHE_UNAVAILABLE
            | FailureKind.WORKER_DIED
            | FailureKind.SHUTTING_DOWN
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
