"""Whether a call's arguments are what its tool asks for. Pure."""

import json
from collections.abc import Sequence
from typing import Any, cast

from jsonschema import Draft202012Validator
from jsonschema.validators import extend  # pyright: ignore[reportUnknownVariableType]
from referencing import Registry

from protocol.tools import Tool
from worker.answers.readings import schema_of

_MOST_WORK = 1_000_000
"""Characters of the schema times those of the arguments. A check runs between two decode steps of everybody's rows."""

_EXPRESSIONS = ("pattern", "patternProperties")
"""Not looked at: a regular expression of a client can take for ever."""

_REFERENCES = ("$ref", "$dynamicRef")
"""A schema that has one passes: each can double the work."""

_Validator: Any = cast("Any", extend)(Draft202012Validator, dict.fromkeys(_EXPRESSIONS))


def are_arguments_valid(name: str, arguments: str, tools: Sequence[Tool]) -> bool:
    """False only if they surely are not: no JSON object, or against the schema. What costs much to check passes."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict):
        return False
    schema = schema_of(name, tools)
    if not schema:
        return True
    try:
        text = json.dumps(schema)
        if len(text) * len(arguments) > _MOST_WORK or any(f'"{keyword}"' in text for keyword in _REFERENCES):
            return True
        # An empty registry: the library would fetch a schema that a reference names from the network.
        return bool(_Validator(schema, registry=cast("Any", Registry)()).is_valid(value))
    except Exception:  # noqa: BLE001 - the library raises whatever a client's schema makes it run into
        return True
