"""A body's bytes → a typed request, or the Failure that names the field at fault. Pure."""

from typing import TypeVar

import msgspec
from msgspec import Struct

from gateway.request_body import Decoded, decode_plain
from protocol.failures import Failure, FailureKind

Body = TypeVar("Body", bound=Struct)

_IGNORED = frozenset(
    {
        "metadata",
        "modalities",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "safety_identifier",
        "store",
        "ttl",
        "user",
        "verbosity",
    }
)
"""Typed fields that nothing is done with, since the answer is right without them."""

_REFUSED = frozenset(
    {
        "audio",
        "ebnf",
        "echo",
        "function_call",
        "functions",
        "regex",
        "suffix",
        "tool_choice",
        "tools",
        "web_search_options",
    }
)
"""Options of a neighbouring API or route that change the answer, so that ignoring them would be a lie."""

_NOTHING = frozenset({b"false", b'""', b"[]", b'"none"', b'"auto"'})
"""Values that ask for none of it."""


def decode(body: bytes, request_type: type[Body]) -> Decoded[Body] | Failure:
    """Read a body. Every malformed one, whatever its bytes, is a Failure."""
    request = decode_plain(body, request_type)
    values = decode_plain(body, dict[str, msgspec.Raw])
    if isinstance(request, Failure):
        return request
    if isinstance(values, Failure):
        return values
    present = [name for name, value in values.items() if bytes(value) != b"null"]
    for name in present:
        if name in _REFUSED and name not in request_type.__struct_fields__ and bytes(values[name]) not in _NOTHING:
            return Failure(
                kind=FailureKind.UNSUPPORTED,
                message=f"`{name}` is not supported on this route. Leave it out.",
                param=name,
            )
    honoured = set(request_type.__struct_fields__) - _IGNORED
    return Decoded(request=request, ignored=tuple(name for name in present if name not in honoured))
