"""`tools` and how they may be called: what is meant reaches the worker, and a mistake names its field."""

import json
from typing import Any

import pytest

from gateway.openai.decode import decode
from gateway.openai.schema import ChatRequest
from gateway.openai.translate import chat_to_generate
from protocol.failures import Failure, FailureKind
from protocol.generation import ChatPrompt, Generate
from protocol.ids import RequestId
from protocol.tools import JsonObject, Tool, ToolUse

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"tz": {"type": "string"}, "a": {}}, "required": ["tz"]}


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TWO = [function("get_weather"), function("get_time", description="d", parameters=SCHEMA, strict=True)]


def chat(**fields: Any) -> Generate | Failure:
    decoded = decode(json.dumps({"model": "m", "messages": [USER], **fields}).encode(), ChatRequest)
    if isinstance(decoded, Failure):
        return decoded
    translated = chat_to_generate(decoded.request, request_id=RequestId("r"), cache_scope=b"")
    return translated if isinstance(translated, Failure) else translated[0]


def asked(**fields: Any) -> tuple[tuple[Tool, ...], ToolUse | None]:
    generate = chat(**fields)
    assert isinstance(generate, Generate), generate
    assert isinstance(generate.prompt, ChatPrompt)
    return generate.prompt.tools, generate.tool_use


def test_tools_reach_the_template_as_they_were_sent() -> None:
    """In the client's order, with its keys' order: a prefix is only the same if its bytes are."""
    tools, use = asked(tools=TWO)
    assert tools == (Tool(name="get_weather"), Tool(name="get_time", description="d", parameters=SCHEMA))
    assert list((tools[1].parameters or {})["properties"]) == ["tz", "a"]
    assert use == ToolUse()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TWO, "tool_choice": "none"},
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"functions": []},
        {"parallel_tool_calls": False},
    ],
)
def test_without_tools_nothing_is_rendered_and_nothing_is_a_call(fields: dict[str, Any]) -> None:
    """A05: no tools, or the choice "none": no parser runs, and the prompt is that of a request without tools."""
    assert asked(**fields) == ((), None)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({"tool_choice": "auto"}, ToolUse()),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ToolUse()),
        ({"parallel_tool_calls": False}, ToolUse(calls="one")),
        ({"tool_choice": "required"}, ToolUse(choice="required")),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ToolUse(choice="required", calls="one")),
        ({"tool_choice": named("get_time")}, ToolUse(choice="required", allowed=("get_time",), calls="one")),
        (
            {"tool_choice": {"type": "function", "name": "get_time"}},
            ToolUse(choice="required", allowed=("get_time",), calls="one"),
        ),
        ({"tool_choice": allowed("auto", named("get_time"))}, ToolUse(allowed=("get_time",))),
        (
            {"tool_choice": allowed("required", named("get_time"), {"type": "function", "name": "get_weather"})},
            ToolUse(choice="required", allowed=("get_time", "get_weather")),
        ),
    ],
)
def test_each_choice(fields: dict[str, Any], use: ToolUse) -> None:
    """A06: the worker is told what may be called and what must be; all tools are rendered whatever the choice, so that
    a narrower one keeps the prefix."""
    tools, found = asked(tools=TWO, **fields)
    assert found == use
    assert len(tools) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": named("get_time")},
        {"tool_choice": "sometimes", "tools": TWO},
        {"tool_choice": "", "tools": TWO},
        {"tool_choice": named("get_tide"), "tools": TWO},
        {"tool_choice": {"type": "function"}, "tools": TWO},
        {"tool_choice": {"type": "custom", "custom": {"name": "x"}}, "tools": TWO},
        {"tool_choice": {"type": "allowed_tools"}, "tools": TWO},
        {"tool_choice": allowed("auto"), "tools": TWO},
        {"tool_choice": allowed("auto", named("get_tide")), "tools": TWO},
        {"tool_choice": allowed("auto", {"type": "mcp", "name": "x"}), "tools": TWO},
        {"tool_choice": allowed("sometimes", named("get_time")), "tools": TWO},
        {"tool_choice": 5, "tools": TWO},
        {"tool_choice": {}, "tools": TWO},
        {"tool_choice": "required", "tools": TWO, "response_format": {"type": "json_object"}},
    ],
)
def test_a_choice_that_cannot_be_met_is_a_400(fields: dict[str, Any]) -> None:
    """A06: never prose where a call was required: the field is named."""
    failure = chat(**fields)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.INVALID_REQUEST
    assert (failure.param or "").startswith("tool_choice")


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("tool", "param", "kind"),
    [
        ({}, "tools[1].type", FailureKind.INVALID_REQUEST),
        ({"type": "function"}, "tools[1].function", FailureKind.INVALID_REQUEST),
        ({"type": "function", "name": "f"}, "tools[1].function", FailureKind.INVALID_REQUEST),
        ({"type": "custom", "custom": {"name": "x"}}, "tools[1].type", FailureKind.UNSUPPORTED),
        ({"type": "web_search"}, "tools[1].type", FailureKind.UNSUPPORTED),
        ({"type": "function", "function": {}}, "tools[1].function.name", FailureKind.INVALID_REQUEST),
        (function(""), "tools[1].function.name", FailureKind.INVALID_REQUEST),
        (function("two words"), "tools[1].function.name", FailureKind.INVALID_REQUEST),
        (function("x" * 129), "tools[1].function.name", FailureKind.INVALID_REQUEST),
        (function("f\n"), "tools[1].function.name", FailureKind.INVALID_REQUEST),
        (function("first"), "tools[1].function.name", FailureKind.INVALID_REQUEST),
        (function(description=5), "tools[1].function.description", FailureKind.INVALID_REQUEST),
        (function(parameters=[]), "tools[1].function.parameters", FailureKind.INVALID_REQUEST),
        (function(parameters={"type": "array"}), "tools[1].function.parameters", FailureKind.INVALID_REQUEST),
        (function(parameters={"a": 2**64}), "tools[1].function.parameters", FailureKind.INVALID_REQUEST),
        (function(parameters=nested(70)), "tools[1].function.parameters", FailureKind.INVALID_REQUEST),
    ],
)
def test_a_wrong_tool_is_named(tool: dict[str, Any], param: str, kind: FailureKind) -> None:
    """B08: a bad tool is refused before anything runs, by its place."""
    failure = chat(tools=[function("first"), tool])
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.param) == (kind, param)


@pytest.mark.parametrize("name", ["f", "mcp__files__read", "a.b:c/d-e", "X" * 128])
def test_names_of_the_field_are_taken(name: str) -> None:
    """Clients prefix names with where a tool comes from."""
    assert asked(tools=[function(name, parameters=None)])[0] == (Tool(name=name),)


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({}, ToolUse(calls="one")),
        ({"function_call": "auto"}, ToolUse(calls="one")),
        ({"function_call": {"name": "g"}}, ToolUse(choice="required", allowed=("g",), calls="one")),
    ],
)
def test_legacy_functions_are_tools(fields: dict[str, Any], use: ToolUse) -> None:
    """The old names mean the same, with one call at most."""
    tools, found = asked(functions=[{"name": "f", "description": "d"}, {"name": "g", "parameters": SCHEMA}], **fields)
    assert tools == (Tool(name="f", description="d"), Tool(name="g", parameters=SCHEMA))
    assert found == use


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}], "tools": TWO}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
        ({"functions": [{"name": "f g"}]}, "functions[0].name"),
        ({"function_call": {"name": "g"}}, "function_call"),
    ],
)
def test_a_wrong_legacy_function_is_named(fields: dict[str, Any], param: str) -> None:
    """Two generations of names at once, or a function that is not there."""
    failure = chat(**fields)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.param) == (FailureKind.INVALID_REQUEST, param)


def test_a_format_beside_tools_that_may_be_called() -> None:
    """The text has the format where the model writes text; the worker is told both."""
    generate = chat(tools=TWO, response_format={"type": "json_object"})
    assert isinstance(generate, Generate)
    assert (generate.tool_use, generate.constraint) == (ToolUse(), JsonObject())
