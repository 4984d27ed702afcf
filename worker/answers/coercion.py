"""Values of formats that have no types (`<parameter=days>3</parameter>`) → JSON values, by the tool's schema. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from worker.answers.python_values import NotAValue, python_value

_INTEGER = re.compile(r"[+-]?\d{1,40}")
_DEEPEST_SCHEMA = 8
_KINDS: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def coerced(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that `text` stands for where `schema` is asked for; the text itself where it stands for no other.

    `root` is the schema that local references of `schema` point into. Without a schema, JSON that is not a string is
    taken for what it is.
    """
    wanted = _types(schema, root, _DEEPEST_SCHEMA)
    bare = text.strip()
    if wanted == {"string"}:
        return text
    if not wanted:
        found, value = _decoded(bare)
        return value if found and not isinstance(value, str) else text
    if "null" in wanted and bare.lower() in ("null", "none"):
        return None
    if "boolean" in wanted and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    if wanted & {"integer", "number"} and _INTEGER.fullmatch(bare):
        return int(bare)
    found, value = _decoded(bare)
    if found and _fits(value, wanted):
        return int(value) if isinstance(value, float) and "number" not in wanted else value
    return text


def parameter_schema(schema: Mapping[str, Any] | None, name: str) -> Any:
    """The schema of one parameter; None where there is none."""
    properties = (schema or {}).get("properties")
    return properties.get(name) if isinstance(properties, dict) else None  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]


def _decoded(text: str) -> tuple[bool, Any]:
    try:
        return True, json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        pass
    if text[:1] not in ("[", "{", "(", "'", '"'):
        return False, None
    try:
        return True, python_value(text)
    except NotAValue:
        return False, None


def _no_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity are not JSON


def _fits(value: Any, wanted: set[str]) -> bool:
    kind = _KINDS[type(value)]
    if kind == "number" and "integer" in wanted and value.is_integer():
        return True
    # A string that was written in quotes keeps them: the format writes strings bare.
    return kind != "string" and (kind in wanted or (kind == "integer" and "number" in wanted))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """The types that a schema allows, as far as they are plain; empty: any."""
    if not isinstance(schema, dict) or depth == 0:
        return set()
    fields = cast("dict[str, Any]", schema)
    types: set[str] = set()
    match fields.get("type"):
        case str() as one:
            types.add(one)
        case list() as several:  # pyright: ignore[reportUnknownVariableType]
            types.update(one for one in several if isinstance(one, str))  # pyright: ignore[reportUnknownVariableType]
        case _:
            pass
    if types:
        return types
    options: list[Any] = fields["enum"] if isinstance(fields.get("enum"), list) else []
    if "const" in fields:
        options = [*options, fields["const"]]
    types.update(_KINDS[type(option)] for option in options if type(option) in _KINDS)
    for combiner in ("anyOf", "oneOf", "allOf"):
        choices: Any = fields.get(combiner)
        if isinstance(choices, list):
            for choice in choices[:16]:  # pyright: ignore[reportUnknownVariableType]
                types |= _types(choice, root, depth - 1)
    if isinstance(reference := fields.get("$ref"), str):
        types |= _types(_referred(reference, root), root, depth - 1)
    return types


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    if not reference.startswith("#/"):
        return None
    place: Any = root
    for step in reference[2:].split("/"):
        if not isinstance(place, Mapping):
            return None
        place = place.get(step.replace("~1", "/").replace("~0", "~"))  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
    return place  # pyright: ignore[reportUnknownVariableType]
