"""How a Failure looks to clients of the Responses API: as a status, and inside a stream. Decides only.

Two things differ from OpenAI's other routes. Codex retries a 503 and not a 429, so whoever may come back in a moment
hears 503. And a stream's end carries one of few codes, by which Codex knows whether to try again.
"""

import math

import msgspec
from msgspec.structs import replace

from gateway.error_answers import ErrorAnswer, OpenAIErrorBody, openai_error, openai_words
from gateway.responses.answers import ResponseError
from protocol.failures import Failure, FailureKind

PREVIOUS_RESPONSE = "previous_response_id"

_MOMENT_SECONDS = 120.0
"""What is waited for longer is for a person to know: a day's tokens, for instance."""


def responses_error(failure: Failure) -> ErrorAnswer:
    """The answer to a request that fails before its status line."""
    answer = openai_error(failure)
    words = openai_words(failure)
    if failure.kind is FailureKind.NOT_FOUND and failure.param == PREVIOUS_RESPONSE:
        words = replace(words, code="previous_response_not_found")
    elif _is_momentary(failure):
        answer, words = replace(answer, status=503), replace(words, type="server_error")
    else:
        return answer
    return replace(answer, body=msgspec.json.encode(OpenAIErrorBody(error=words)))


def stream_error(failure: Failure) -> ResponseError:
    """What ends a stream that has begun, or a response in the background."""
    match failure.kind:
        case FailureKind.CONTEXT_LENGTH_EXCEEDED:
            return ResponseError(code="context_length_exceeded", message=failure.message)
        case FailureKind.OVERLOADED | FailureKind.RATE_LIMITED if _is_momentary(failure):
            seconds = max(1, math.ceil(failure.retry_after_seconds or 1.0))
            return ResponseError(
                code="rate_limit_exceeded", message=f"{failure.message} Please try again in {seconds}s."
            )
        case FailureKind.OVERLOADED | FailureKind.RATE_LIMITED:
            return ResponseError(code="insufficient_quota", message=failure.message)
        case FailureKind.INVALID_REQUEST | FailureKind.UNSUPPORTED:
            return ResponseError(code="invalid_prompt", message=failure.message)
        case _:
            return ResponseError(code="server_error", message=failure.message)


def _is_momentary(failure: Failure) -> bool:
    """Whether coming back by itself helps a client: a full queue, the service's or its own key's, but no spent day."""
    is_full = failure.kind in (FailureKind.OVERLOADED, FailureKind.RATE_LIMITED)
    return is_full and (failure.retry_after_seconds or 0.0) <= _MOMENT_SECONDS
