"""Schemas that leave no room: what is closed, and what is left as it is."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.closed_schemas import closed

AB: dict[str, Any] = {"properties": {"a": {}, "b": {}}}
CLOSED = {**AB, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (AB, CLOSED),
        ({**AB, "required": ["a"]}, {**AB, "required": ["a"], "additionalProperties": False}),
        ({"items": AB}, {"items": CLOSED}),
        ({"anyOf": [AB, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"x": AB}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}),
        ({"additionalProperties": AB}, {"additionalProperties": CLOSED}),
        # a property may be called anything
        (
            {"properties": {"properties": AB, "items": {}}},
            {"properties": {"properties": CLOSED, "items": {}}, "additionalProperties": False},
        ),
    ],
)
def test_what_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    """An object that names properties has these only, however deep it stands."""
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {}},
        {**AB, "additionalProperties": True},
        {**AB, "additionalProperties": {"type": "integer"}},
        {**AB, "required": ["c"]},
        {**AB, "patternProperties": {"^x": {}}},
        {**AB, "$ref": "#/$defs/x"},
        {"allOf": [AB, {"properties": {"c": {}}}]},
        {"oneOf": [AB, {"properties": {"c": {}}}]},
        {"enum": [AB]},
        {"const": AB, "default": AB, "examples": [AB]},
        # no schemas: what to say of them is not decided here
        {"properties": 1, "required": 2, "items": 3, "anyOf": 4, "$defs": 5},
        {"properties": [AB], "required": [[]]},
        {**AB, "required": [["a"], {}]},
    ],
)
def test_what_stays_open(schema: dict[str, Any]) -> None:
    """What says so, names nothing, is put together from parts, or is data."""
    assert closed(schema) == schema


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(max_size=3),
        lambda part: (
            st.lists(part, max_size=3)
            | st.dictionaries(
                st.sampled_from(["properties", "items", "required", "anyOf", "$defs", "a", "allOf"]), part, max_size=4
            )
        ),
    )
)
def test_any_json_can_be_given(value: Any) -> None:
    """Clients send anything: nothing is lost or changed but that `additionalProperties` may be added."""
    made = closed({"x": value} if not isinstance(value, dict) else value)
    plain = json.loads(
        json.dumps(made), object_hook=lambda d: {k: v for k, v in d.items() if k != "additionalProperties"}
    )

    assert plain == ({"x": value} if not isinstance(value, dict) else value)
