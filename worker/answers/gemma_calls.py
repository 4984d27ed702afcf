"""Calls as Gemma writes them: `call:name{key:<|"|>text<|"|>,days:3,more:{a:[1,true]}}`. Pure."""

import json
import re
from collections.abc import Sequence
from typing import Any

from protocol.tools import Tool
from worker.answers.readings import ReadCall, Reading, as_json

_CALL = re.compile(r"\s*(?:,\s*)?call:\s*(?P<name>[\w.-]+)\s*(?=\{)")
_KEY = re.compile(r"\s*(?P<key>[^\s:{}\[\],]+)\s*:\s*")
_BARE = re.compile(r"[^,{}\[\]]+")
_BLANK = re.compile(r"\s*")


class _NotRead(ValueError):
    """Not a value of this notation."""


def read_gemma4_calls(inside: str, tools: Sequence[Tool]) -> Reading | None:
    """Gemma 4."""
    return _read(inside, '<|"|>')


def read_function_gemma_calls(inside: str, tools: Sequence[Tool]) -> Reading | None:
    """FunctionGemma."""
    return _read(inside, "<escape>")


def _read(inside: str, quote: str) -> Reading | None:
    calls: list[ReadCall] = []
    at = 0
    try:
        while at < len(inside.rstrip()):
            head = _CALL.match(inside, at)
            if head is None:
                return None
            arguments, at = _object(inside, head.end(), quote)
            calls.append(ReadCall(head["name"], as_json(arguments)))
    except (_NotRead, RecursionError):
        return None
    return Reading(tuple(calls)) if calls else None


def _object(text: str, at: int, quote: str) -> tuple[dict[str, Any], int]:
    result: dict[str, Any] = {}
    at = _blank(text, at + 1)
    while text[at : at + 1] != "}":
        if text.startswith(quote, at):
            key, at = _string(text, at, quote)
            colon = re.compile(r"\s*:\s*").match(text, at)
            if colon is None:
                raise _NotRead
            at = colon.end()
        else:
            head = _KEY.match(text, at)
            if head is None:
                raise _NotRead
            key, at = head["key"], head.end()
        result[key], at = _value(text, at, quote)
        at = _next(text, at, "}")
    return result, at + 1


def _list(text: str, at: int, quote: str) -> tuple[list[Any], int]:
    result: list[Any] = []
    at = _blank(text, at + 1)
    while text[at : at + 1] != "]":
        value, at = _value(text, at, quote)
        result.append(value)
        at = _next(text, at, "]")
    return result, at + 1


def _value(text: str, at: int, quote: str) -> tuple[Any, int]:
    if text.startswith(quote, at):
        return _string(text, at, quote)
    if text[at : at + 1] == "{":
        return _object(text, at, quote)
    if text[at : at + 1] == "[":
        return _list(text, at, quote)
    bare = _BARE.match(text, at)
    if bare is None:
        raise _NotRead
    word = bare[0].strip()
    try:
        return json.loads(word), bare.end()
    except ValueError:
        return word, bare.end()


def _string(text: str, at: int, quote: str) -> tuple[str, int]:
    start = at + len(quote)
    end = text.find(quote, start)
    if end < 0:
        raise _NotRead
    return text[start:end], end + len(quote)


def _next(text: str, at: int, closer: str) -> int:
    at = _blank(text, at)
    if text[at : at + 1] == ",":
        return _blank(text, at + 1)
    if text[at : at + 1] != closer:
        raise _NotRead
    return at


def _blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return at if found is None else found.end()
