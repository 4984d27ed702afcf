"""Calls written as Python: `[get_weather(city="Oslo"), get_time(tz="CET")]`. Pure."""

import ast
from collections.abc import Sequence
from typing import Any

from protocol.tools import Tool
from worker.answers.python_values import NotAValue, python_expression, value_of
from worker.answers.readings import ReadCall, Reading, as_json, schema_of


def read_pythonic_calls(inside: str, tools: Sequence[Tool]) -> Reading | None:
    """A call or a list of calls with literals as arguments; positional ones are named after the tool's parameters."""
    try:
        tree = python_expression(inside)
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        calls = tuple(_call(node, tools) for node in nodes)
    except (NotAValue, RecursionError):
        return None
    return Reading(calls) if calls else None


def _call(node: ast.expr, tools: Sequence[Tool]) -> ReadCall:
    if not isinstance(node, ast.Call):
        raise NotAValue("not a call")
    name = _name(node.func)
    arguments = {}
    if node.args:
        properties: Any = (schema_of(name, tools) or {}).get("properties")
        keys: list[Any] = list(properties) if isinstance(properties, dict) else []  # pyright: ignore[reportUnknownArgumentType]
        if len(keys) < len(node.args):
            raise NotAValue("more positional arguments than parameters")
        arguments = {str(key): value_of(value) for key, value in zip(keys, node.args, strict=False)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise NotAValue("unpacked arguments")
        arguments[keyword.arg] = value_of(keyword.value)
    return ReadCall(name, as_json(arguments))


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=parent, attr=name):
            return f"{_name(parent)}.{name}"
        case _:
            raise NotAValue("not a name")
