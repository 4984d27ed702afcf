"""The tools of a request and the shape its answer must have, the same for all dialects."""

from typing import Any, Literal

from msgspec import Struct


class Tool(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function the model may call. `parameters` is its JSON schema; None is a function without parameters.

    Templates render tools in the client's order and with its keys' order: a prefix is only the same if its bytes are.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None


class ToolUse(Struct, frozen=True, kw_only=True):
    """How the tools of a prompt may be called.

    `required` means that the answer is one call or more, and nothing else. `allowed` are the names that may be called,
    empty for all: every tool is rendered all the same, so that a narrower choice keeps the prefix. A request without
    ToolUse has no calls in its answer whatever its text looks like.
    """

    choice: Literal["auto", "required"] = "auto"
    allowed: tuple[str, ...] = ()
    calls: Literal["many", "one"] = "many"


# --- constraints -----------------------------------------------------------------------------------------------------


class JsonSchema(Struct, frozen=True, kw_only=True, tag=True):
    """The answer is one JSON value of this schema, `text` being the schema's JSON. `{}` is any JSON value."""

    text: str


class JsonObject(Struct, frozen=True, kw_only=True, tag=True):
    """The answer is any JSON object."""


class Regex(Struct, frozen=True, kw_only=True, tag=True):
    """The whole answer matches."""

    pattern: str


class OneOf(Struct, frozen=True, kw_only=True, tag=True):
    """The answer is one of these texts."""

    options: tuple[str, ...]


class Grammar(Struct, frozen=True, kw_only=True, tag=True):
    """The answer is a sentence of a context-free grammar, in llguidance's Lark dialect or llama.cpp's GBNF."""

    text: str


Constraint = JsonSchema | JsonObject | Regex | OneOf | Grammar
"""What the visible answer must be. Reasoning before it is free."""
