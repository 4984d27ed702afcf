"""A body's bytes → a typed request, or the Failure that names the field at fault. Pure."""

from typing import TypeVar

import msgspec

from gateway.anthropic.schema import PromptRequest
from gateway.request_body import Decoded, decode_plain
from protocol.failures import Failure

Body = TypeVar("Body", bound=PromptRequest)

_IGNORED = frozenset({"metadata", "service_tier"})
"""Typed fields that nothing is done with, since the answer is right without them."""


def decode(body: bytes, request_type: type[Body]) -> Decoded[Body] | Failure:
    """Read a body. Every malformed one, whatever its bytes, is a Failure."""
    request = decode_plain(body, request_type)
    if isinstance(request, Failure):
        return request
    values = decode_plain(body, dict[str, msgspec.Raw])
    if isinstance(values, Failure):
        return values
    honoured = set(request_type.__struct_fields__) - _IGNORED
    ignored = [name for name, value in values.items() if bytes(value) != b"null" and name not in honoured]
    return Decoded(request=request, ignored=tuple(ignored))
