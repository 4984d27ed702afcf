"""A body's bytes → a typed request, or the Failure that names the field at fault. Pure."""

from typing import TypeVar

import msgspec

from gateway.anthropic.schema import PromptRequest
from gateway.request_body import Decoded, decode_plain
from protocol.failures import Failure, FailureKind

Body = TypeVar("Body", bound=PromptRequest)

_IGNORED = frozenset({"metadata", "service_tier"})
"""Typed fields that nothing is done with, since the answer is right without them."""

_ELSEWHERE = {
    "best_of": "Send several requests.",
    "function_call": "Use `tool_choice`.",
    "functions": "Use `tools`.",
    "logit_bias": "Use /v1/chat/completions for it.",
    "logprobs": "Use /v1/chat/completions for them.",
    "n": "Send several requests.",
    "response_format": "Use `output_config.format`.",
    "stop": "Use `stop_sequences`.",
    "top_logprobs": "Use /v1/chat/completions for them.",
}
"""Fields of the neighbouring API that change the answer, so that ignoring them would be a lie, and what to do."""

_SAYS_NOTHING = frozenset({b"null", b"false", b"[]", b"{}"})


def decode(body: bytes, request_type: type[Body]) -> Decoded[Body] | Failure:
    """Read a body. Every malformed one, whatever its bytes, is a Failure."""
    request = decode_plain(body, request_type)
    if isinstance(request, Failure):
        return request
    values = decode_plain(body, dict[str, msgspec.Raw])
    if isinstance(values, Failure):
        return values
    for name, value in values.items():
        if name in _ELSEWHERE and not _says_nothing(name, bytes(value)):
            return Failure(
                kind=FailureKind.UNSUPPORTED,
                message=f"`{name}`: is no field of the Messages API. {_ELSEWHERE[name]}",
                param=name,
            )
    honoured = set(request_type.__struct_fields__) - _IGNORED
    ignored = [name for name, value in values.items() if bytes(value) != b"null" and name not in honoured]
    return Decoded(request=request, ignored=tuple(ignored))


def _says_nothing(name: str, value: bytes) -> bool:
    """Whether a field asks for what there would be without it."""
    return value in _SAYS_NOTHING or (name in ("n", "best_of") and value == b"1")
