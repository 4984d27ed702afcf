"""JSON schemas that leave a small model no room to ramble. Pure."""

from typing import Any

_COMPOSING = frozenset(
    ["allOf", "oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "patternProperties"]
)
_OF_SCHEMAS = frozenset(["properties", "$defs", "definitions"])
_OF_ONE_SCHEMA = frozenset(["items", "additionalProperties", "additionalItems"])
_OF_SEVERAL = frozenset(["anyOf", "prefixItems"])


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with no other properties than the named ones, wherever it names some and says nothing of others.

    Whatever keeps to it keeps to the schema itself, and a small model does not invent properties until its tokens are
    used up. A schema that puts objects together from parts is left as it is: there each part would forbid the others'.
    """
    if _mentions(schema, _COMPOSING):
        return schema
    return _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():  # pyright: ignore[reportUnknownVariableType]
        if key in _OF_SCHEMAS and isinstance(value, dict):
            result[key] = {name: _closed(part) for name, part in value.items()}  # pyright: ignore[reportUnknownVariableType]
        elif key in _OF_SEVERAL and isinstance(value, list):
            result[key] = [_closed(part) for part in value]  # pyright: ignore[reportUnknownVariableType]
        else:
            result[key] = _closed(value) if key in _OF_ONE_SCHEMA else value
    if _names_all(result) and not any(key in result for key in ("additionalProperties", "$ref", "anyOf")):
        result["additionalProperties"] = False
    return result


def _names_all(schema: dict[str, Any]) -> bool:
    """It names properties, and what it requires is among them: else others are meant to come."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)  # pyright: ignore[reportUnknownVariableType]


def _mentions(value: Any, keywords: frozenset[str]) -> bool:
    """As a key anywhere: of a property's name, too, which costs nothing but that the schema stays open."""
    match value:
        case dict():
            return any(key in keywords or _mentions(part, keywords) for key, part in value.items())  # pyright: ignore[reportUnknownVariableType]
        case list():
            return any(_mentions(part, keywords) for part in value)  # pyright: ignore[reportUnknownVariableType]
        case _:
            return False
