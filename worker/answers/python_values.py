"""Python literals as models write them: also with JSON's true, false and null among them. Pure."""

import ast
from typing import Any

_NAMES = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_MOST_CHARACTERS = 200_000


class NotAValue(ValueError):
    """The text is something else, or too much."""


def python_expression(text: str) -> ast.expr:
    """The syntax tree of an expression. Raises NotAValue."""
    if len(text) > _MOST_CHARACTERS:
        raise NotAValue("too long")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as why:
        raise NotAValue("not an expression") from why


def python_value(text: str) -> Any:
    """The value of a literal, made of JSON's kinds only. Raises NotAValue."""
    try:
        return value_of(python_expression(text))
    except RecursionError as why:
        raise NotAValue("too deep") from why


def value_of(node: ast.expr) -> Any:
    """The value of a literal's syntax tree. Raises NotAValue."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): value_of(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case _:
            raise NotAValue("not a literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
        case _:
            raise NotAValue("not a key")
