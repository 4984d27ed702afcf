"""What reading the inside of an envelope gives, and how its values are written. Pure."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from protocol.tools import Tool


class ReadCall(NamedTuple):
    """A call: `arguments` is a JSON object as text."""

    name: str
    arguments: str


class Reading(NamedTuple):
    """All calls of one envelope. `quality` "mended": they are not quite as the model wrote them."""

    calls: tuple[ReadCall, ...]
    quality: Literal["as_written", "mended"] = "as_written"


Reader = Callable[[str, Sequence[Tool]], Reading | None]
"""Reads the inside of a whole envelope; None when it is not what it should be. Never raises."""


def schema_of(name: str, tools: Sequence[Tool]) -> dict[str, Any] | None:
    """The parameters' schema of a tool; None if there is no such tool."""
    return next((tool.parameters or {} for tool in tools if tool.name == name), None)


def as_json(value: Any) -> str:
    """JSON text; every character stands for itself."""
    return json.dumps(value, ensure_ascii=False)
