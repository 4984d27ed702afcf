"""Calls written as JSON: `{"name": …, "arguments": {…}}`, one or several or a list; and what can be mended. Pure."""

import json
import re
from collections.abc import Sequence
from typing import Any

from protocol.tools import Tool
from worker.answers.json_scanner import JsonScanner
from worker.answers.python_values import NotAValue, python_value
from worker.answers.readings import ReadCall, Reading, as_json

_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_BLANK = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n]*[;,]?[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_CLOSER_OF = {"{": "}", "[": "]"}


class _NotCalls(ValueError):
    """This JSON is no call."""


def read_json_calls(inside: str, tools: Sequence[Tool]) -> Reading | None:
    """Calls in strict JSON. The arguments are the very text that the model wrote."""
    del tools
    try:
        calls = _calls_in(inside.strip())
    except (ValueError, RecursionError):
        return None
    return Reading(tuple(calls)) if calls else None


def read_keyed_calls(inside: str, tools: Sequence[Tool]) -> Reading | None:
    """Calls as `[{"get_weather": {"city": "Oslo"}}]`: the name is the key."""
    del tools
    try:
        value = json.loads(inside)
        named = [pair for call in value for pair in call.items()]
    except (ValueError, RecursionError, TypeError, AttributeError):
        return None
    if not named or not all(name and isinstance(arguments, dict) for name, arguments in named):
        return None
    return Reading(tuple(ReadCall(name, as_json(arguments)) for name, arguments in named))


def mend_json_calls(inside: str, tools: Sequence[Tool]) -> Reading | None:
    """Calls in what is almost JSON: raw control characters, wrong escapes, wrong brackets at the end, wrong quotes."""
    text = inside.strip()
    in_strings = _mended_strings(text)
    for candidate in (in_strings, _balanced(in_strings)):
        if (reading := read_json_calls(candidate, tools)) is not None:
            return Reading(reading.calls, "mended")
    try:
        value = python_value(text)
    except NotAValue:
        return None
    reading = read_json_calls(as_json(value), tools)
    return None if reading is None else Reading(reading.calls, "mended")


def is_json_object(text: str) -> bool:
    """Whether the text is one JSON object, strictly."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


# --- strict ----------------------------------------------------------------------------------------------------------


def _calls_in(text: str) -> list[ReadCall]:
    """All values of the text, one after another, `;` or `,` between them. Raises ValueError."""
    calls: list[ReadCall] = []
    at = 0
    while at < len(text):
        if text[at] == "[":
            at = _list_at(text, at, calls)
        else:
            call, at = _call_at(text, at)
            calls.append(call)
        at = _skip(_BETWEEN, text, at)
    return calls


def _list_at(text: str, at: int, calls: list[ReadCall]) -> int:
    at = _skip(_BLANK, text, at + 1)
    while text[at : at + 1] != "]":
        call, at = _call_at(text, at)
        calls.append(call)
        at = _skip(_BLANK, text, at)
        if text[at : at + 1] == ",":
            at = _skip(_BLANK, text, at + 1)
        elif text[at : at + 1] != "]":
            raise _NotCalls
    return at + 1


def _call_at(text: str, at: int) -> tuple[ReadCall, int]:
    members, end = _members(text, at)
    nested = members.get("function")
    if nested is not None and isinstance(nested[0], dict):
        call, _ = _call_at(text, nested[1])
        return call, end
    name = next((members[key][0] for key in _NAME_KEYS if key in members), None)
    if not isinstance(name, str) or not name:
        raise _NotCalls
    found = next((members[key] for key in _ARGUMENT_KEYS if key in members), None)
    return ReadCall(name, "{}" if found is None else _arguments(text, *found)), end


def _arguments(text: str, value: Any, start: int, end: int) -> str:
    match value:
        case dict():
            return text[start:end]
        case str():
            # Some models write the arguments as a string that holds JSON.
            if not value.strip():
                return "{}"
            if not is_json_object(value):
                raise _NotCalls
            return value
        case None:
            return "{}"
        case _:
            raise _NotCalls


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, int, int]], int]:
    """The members of the object at `at`, each with where its value stands, and where the object ends."""
    if text[at : at + 1] != "{":
        raise _NotCalls
    members: dict[str, tuple[Any, int, int]] = {}
    at = _skip(_BLANK, text, at + 1)
    while text[at : at + 1] != "}":
        if text[at : at + 1] != '"':
            raise _NotCalls
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(_BLANK, text, at)
        if text[at : at + 1] != ":":
            raise _NotCalls
        start = _skip(_BLANK, text, at + 1)
        value, end = _DECODER.raw_decode(text, start)
        members[key] = (value, start, end)
        at = _skip(_BLANK, text, end)
        if text[at : at + 1] == ",":
            at = _skip(_BLANK, text, at + 1)
        elif text[at : at + 1] != "}":
            raise _NotCalls
    return members, at + 1


def _skip(what: re.Pattern[str], text: str, at: int) -> int:
    skipped = what.match(text, at)
    return at if skipped is None else skipped.end()


# --- mending ---------------------------------------------------------------------------------------------------------


def _mended_strings(text: str) -> str:
    """Strings as `JsonScanner` mends them, in every object of the text."""
    result: list[str] = []
    at = 0
    while (start := text.find("{", at)) >= 0:
        scanner = JsonScanner()
        mended, taken = scanner.feed(text[start:])
        result += [text[at:start], mended, scanner.take_held()]
        at = start + taken
        if scanner.state == "broken":
            break
    return "".join([*result, text[at:]])


def _balanced(text: str) -> str:
    """The text with brackets that close nothing left out, and those that are missing at its end put there."""
    result: list[str] = []
    opened: list[str] = []
    is_in_string, is_escaped = False, False
    for character in text:
        if is_in_string:
            is_in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            is_in_string = True
        elif character in "{[":
            opened.append(character)
        elif character in "}]":
            if not opened or _CLOSER_OF[opened[-1]] != character:
                continue
            opened.pop()
        result.append(character)
    closers = "".join(_CLOSER_OF[character] for character in reversed(opened))
    text = "".join(result)
    # A string that never ends has swallowed the brackets behind it.
    return (text.rstrip("}] \t\r\n") + '"' if is_in_string else text) + closers
