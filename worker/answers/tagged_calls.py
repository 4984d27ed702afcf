"""Calls written with tags around a name and around each value. The tables below are the families. Pure."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from protocol.tools import Tool
from worker.answers.coercion import coerced, parameter_schema
from worker.answers.readings import ReadCall, Reading, as_json, schema_of


class TaggedShape(NamedTuple):
    """`call` finds each call: groups `name` and `body`. `parameter` finds each value in a body: groups `key`, `value`
    and, where the tags say it, `type` ("string": the value is text, else JSON)."""

    call: re.Pattern[str]
    parameter: re.Pattern[str]


def _shape(call: str, parameter: str) -> TaggedShape:
    return TaggedShape(re.compile(call, re.DOTALL), re.compile(parameter, re.DOTALL))


# A value may hold what looks like its own end: it ends where the next tag, or the body's end, follows.
QWEN_CODER = _shape(
    r"<function=(?P<name>[^>\s]+)\s*>(?P<body>.*?)</function>(?=\s*(?:<function=|$))",
    r"<parameter=(?P<key>[^>\s]+)\s*>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|$))",
)
"""Qwen3-Coder, Qwen3.5, Nemotron 3, Seed-OSS."""

MINIMAX = _shape(
    r"<invoke name=[\"']?(?P<name>[^>\"']+?)[\"']?\s*>(?P<body>.*?)</invoke>(?=\s*(?:<invoke |$))",
    r"<parameter name=[\"']?(?P<key>[^>\"']+?)[\"']?\s*>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter |$))",
)
"""MiniMax M2."""

GLM = _shape(
    r"^\s*(?P<name>[^\s<{]+)\s*(?P<body>(?:<arg_key>.*)?)$",
    r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|$))",
)
"""GLM 4.5 and later, Laguna."""

LONGCAT = _shape(
    r"^\s*(?P<name>[^\s<{]+)\s*(?P<body>(?:<longcat_arg_key>.*)?)$",
    r"<longcat_arg_key>(?P<key>[^<]*)</longcat_arg_key>\s*"
    r"<longcat_arg_value>(?P<value>.*?)</longcat_arg_value>(?=\s*(?:<longcat_arg_key>|$))",
)

DEEPSEEK_V32 = _shape(
    r"<｜DSML｜invoke name=\"(?P<name>[^\"]+)\"\s*>(?P<body>.*?)</｜DSML｜invoke>(?=\s*(?:<｜DSML｜invoke |$))",
    r"<｜DSML｜parameter name=\"(?P<key>[^\"]+)\"(?:\s+string=\"(?P<type>true|false)\")?\s*>"
    r"(?P<value>.*?)</｜DSML｜parameter>(?=\s*(?:<｜DSML｜parameter |$))",
)


def read_tagged_calls(shape: TaggedShape, inside: str, tools: Sequence[Tool]) -> Reading | None:
    """All calls of an envelope. None if anything stands between the tags that would be lost.

    Each match begins where the last one ended: a search would look at the same nonsense over and over.
    """
    calls: list[ReadCall] = []
    text = inside.strip()
    at = 0
    while at < len(text):
        found = shape.call.match(text, at)
        if found is None:
            return None
        arguments = _arguments(shape, found["name"], found["body"].strip(), tools)
        if arguments is None:
            return None
        calls.append(ReadCall(found["name"], as_json(arguments)))
        at = _skip_blank(text, found.end())
    return Reading(tuple(calls)) if calls else None


def _arguments(shape: TaggedShape, name: str, body: str, tools: Sequence[Tool]) -> dict[str, Any] | None:
    schema = schema_of(name, tools)
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(body):
        found = shape.parameter.match(body, at)
        if found is None:
            return None
        key = found["key"].strip()
        wanted = parameter_schema(schema, key)
        match found.groupdict().get("type"):
            case "true":
                arguments[key] = found["value"]
            case "false":
                arguments[key] = coerced(found["value"], None, {})
            case _:
                arguments[key] = coerced(found["value"], wanted, schema or {})
        at = _skip_blank(body, found.end())
    return arguments


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
