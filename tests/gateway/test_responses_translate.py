"""What a request of the Responses API asks of a worker, and which of its fields is at fault."""

import json
from typing import Any

import pytest

from gateway.responses.schema import CreateRequest, Decoded, decode_request
from gateway.responses.sealed_reasoning import seal
from gateway.responses.translate import Understood, command_of, input_items, understand
from protocol.failures import Failure, FailureKind
from protocol.generation import CacheUse, ChatMessage, Generate, ToolCall, Warm
from protocol.ids import RequestId
from protocol.tools import JsonObject, JsonSchema, Tool, ToolUse
from tests.fakes.responses_app import asking

SCOPE = b"scope of alice"
GREP = {"type": "function", "name": "grep", "description": "Find.", "parameters": {"type": "object", "b": 1, "a": 2}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit."}


def meant(said: object = "hi", **fields: Any) -> tuple[CreateRequest, Understood] | Failure:
    decoded = decode_request(json.dumps(asking(said, **fields)).encode(), CreateRequest)
    if isinstance(decoded, Failure):
        return decoded
    assert isinstance(decoded, Decoded)
    understood = understand(decoded.request, input_items(decoded.request), cache_scope=SCOPE)
    return understood if isinstance(understood, Failure) else (decoded.request, understood)


def understood(said: object = "hi", **fields: Any) -> Understood:
    result = meant(said, **fields)
    assert not isinstance(result, Failure), result
    return result[1]


def command(said: object = "hi", **fields: Any) -> Generate | Warm:
    result = meant(said, **fields)
    assert not isinstance(result, Failure), result
    return command_of(*result, request_id=RequestId("req_1"), cache=CacheUse(scope=SCOPE, owner="o"))


def generate(said: object = "hi", **fields: Any) -> Generate:
    made = command(said, **fields)
    assert isinstance(made, Generate)
    return made


def refused(said: object = "hi", **fields: Any) -> Failure:
    result = meant(said, **fields)
    assert isinstance(result, Failure), result
    return result


def messages(*items: object, **fields: Any) -> list[ChatMessage]:
    return list(understood(list(items), **fields).prompt.messages)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def calls(*names: str, content: str = "", reasoning: str | None = None) -> ChatMessage:
    made = tuple(ToolCall(id=f"call_{name}", name=name, arguments={"x": 1}) for name in names)
    return ChatMessage(role="assistant", content=content, reasoning_content=reasoning, tool_calls=made)


def function_call(name: str, arguments: object = '{"x": 1}', **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": arguments, **fields}


def call_output(name: str, output: object = "out", kind: str = "function") -> dict[str, Any]:
    return {"type": f"{kind}_call_output", "call_id": f"call_{name}", "output": output}


# --- messages --------------------------------------------------------------------------------------------------------


def test_instructions_come_first() -> None:
    """A string is one message of the user; instructions are the system's; a developer stays one."""
    assert understood("hi", instructions="be brief").prompt.messages == (
        ChatMessage(role="system", content="be brief"),
        user("hi"),
    )
    assert messages({"role": "developer", "content": "d"}, {"role": "user", "content": "u"}) == [
        ChatMessage(role="developer", content="d"),
        user("u"),
    ]


def test_parts_are_joined() -> None:
    """Texts in order, with nothing between them; an earlier refusal is what was said."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    answer = [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "d"}]
    assert messages(
        {"type": "message", "role": "user", "content": parts},
        {"type": "message", "role": "assistant", "content": answer, "id": "msg_1", "status": "completed"},
    ) == [user("ab"), ChatMessage(role="assistant", content="cd")]


def test_a_turn_of_the_model_is_one_message() -> None:
    """G06: reasoning, text and calls that follow each other; each call keeps its id, and its output answers it."""
    assert messages(
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        function_call("grep"),
        function_call("read", namespace="mcp__files__"),
        call_output("grep", "one"),
        call_output("read", [{"type": "input_text", "text": "t"}, {"type": "input_text", "text": "wo"}]),
        function_call("grep"),
        call_output("grep", []),
    ) == [
        user("u"),
        ChatMessage(
            role="assistant",
            content="so",
            reasoning_content="why",
            tool_calls=(
                ToolCall(id="call_grep", name="grep", arguments={"x": 1}),
                ToolCall(id="call_read", name="mcp__files__read", arguments={"x": 1}),
            ),
        ),
        ChatMessage(role="tool", content="one", tool_call_id="call_grep"),
        ChatMessage(role="tool", content="two", tool_call_id="call_read"),
        calls("grep"),
        ChatMessage(role="tool", content="", tool_call_id="call_grep"),
    ]


def test_a_custom_call_is_rendered_as_its_function() -> None:
    """Its input is the one argument that the model knows it by."""
    call = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"}
    assert messages(call, output) == [
        ChatMessage(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id="c", name="apply_patch", arguments={"input": "*** Begin"}),),
        ),
        ChatMessage(role="tool", content="Done", tool_call_id="c"),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" ", {}),
        (None, {}),
        ("{", {"_raw": "{"}),
        ("[1]", {"_raw": "[1]"}),
        ('{"n": 99999999999999999999}', {"_raw": '{"n": 99999999999999999999}'}),
    ],
)
def test_arguments_of_the_history(arguments: object, expected: dict[str, Any]) -> None:
    """A08: templates want a mapping; what a model wrote wrongly is shown as it wrote it, so the session goes on."""
    (message,) = messages(function_call("grep", arguments))
    assert message.tool_calls[0].arguments == expected


def test_reasoning_comes_back_in_any_form() -> None:
    """As text, sealed by us for this caller; what somebody else sealed, and a summary, are left out and named."""
    item = {"type": "reasoning", "id": "rs_1", "summary": []}
    answer = {"role": "assistant", "content": "so"}
    expected = [ChatMessage(role="assistant", content="so", reasoning_content="why")]
    assert messages({**item, "content": [{"type": "reasoning_text", "text": "why"}]}, answer) == expected
    assert messages({**item, "encrypted_content": seal("why", SCOPE)}, answer) == expected
    for foreign in ({"encrypted_content": "gAAAA"}, {"summary": [{"type": "summary_text", "text": "s"}]}):
        result = understood([{**item, **foreign}, answer])
        assert result.prompt.messages == (ChatMessage(role="assistant", content="so"),)
        assert result.ignored == ("input.reasoning",)


def test_images() -> None:
    """C08: refused where a person sent one; named in its place in an old tool's result; never its data."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    failure = refused([{"role": "user", "content": [{"type": "input_text", "text": "x"}, image]}])
    assert (failure.kind, failure.param) == (FailureKind.UNSUPPORTED, "input[0].content[1]")
    (_, output) = messages(function_call("grep"), call_output("grep", [image, {"type": "input_text", "text": "t"}]))
    assert output.content == "[image: left out, since this model reads text only]t"


def test_foreign_items_are_skipped_and_named() -> None:
    """What OpenAI's own servers noted down holds nothing for another model."""
    result = understood([{"role": "user", "content": "u"}, {"type": "web_search_call", "id": "ws_1", "action": {}}])
    assert (result.prompt.messages, result.ignored) == ((user("u"),), ("input.web_search_call",))


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"role": "user", "content": "u"}, {"type": "computer_call"}], "input[1].type"),
        ([{"type": "compaction", "encrypted_content": "x"}], "input[0].type"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": None}], "input[0].content"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": []}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "x"}]}], "input[0].content[0].type"),
        ([{"type": "function_call", "name": "f"}], "input[0].call_id"),
        ([{"type": "function_call", "call_id": "c", "name": ""}], "input[0].name"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output"),
        ([{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 1}], "input[0].input"),
        ([7], "input[0]"),
        ([], "input"),
        (None, "input"),
        ([{"type": "web_search_call"}], "input"),
    ],
)
def test_a_bad_item_is_named(items: object, param: str) -> None:
    """C07, G03: 400, with the place in the body that has to be mended."""
    failure = refused(items)
    assert (failure.kind in (FailureKind.INVALID_REQUEST, FailureKind.UNSUPPORTED), failure.param) == (True, param)
    assert f"`{param}`" in failure.message


# --- tools -----------------------------------------------------------------------------------------------------------


def test_tools_of_three_kinds() -> None:
    """A function as it is, its schema's keys in the client's order; a custom tool as a function of one text, with its
    grammar to read; a namespace's tools under its name. Others are skipped and named."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
    result = understood(
        tools=[
            GREP,
            {**PATCH, "format": grammar},
            {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "read"}]},
            {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]},
            {"type": "web_search", "filters": {"n": 99999999999999999999}},
        ]
    )
    grep, patch, read, find = result.prompt.tools
    assert grep == Tool(name="grep", description="Find.", parameters={"type": "object", "b": 1, "a": 2})
    assert list(grep.parameters or {}) == ["type", "b", "a"]
    assert patch.parameters is not None
    assert patch.parameters["required"] == ["input"]
    assert "Edit." in patch.description
    assert "start: WORD" in patch.description
    assert (read.name, find.name) == ("mcp__files__read", "crm__find")
    assert result.tools.use == ToolUse()
    assert result.ignored == ("tools.format", "tools.web_search")


def test_tools_in_the_input_count_too() -> None:
    """An agent adds some in the middle of a conversation."""
    item = {"type": "additional_tools", "role": "developer", "tools": [PATCH]}
    result = understood([{"role": "user", "content": "u"}, item], tools=[GREP])
    assert [tool.name for tool in result.prompt.tools] == ["grep", "apply_patch"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolUse()),
        (None, ToolUse()),
        ("required", ToolUse(choice="required")),
        ({"type": "function", "name": "grep"}, ToolUse(choice="required", allowed=("grep",), calls="one")),
        ({"type": "custom", "name": "apply_patch"}, ToolUse(choice="required", allowed=("apply_patch",), calls="one")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "grep"}]},
            ToolUse(choice="required", allowed=("grep",)),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
            },
            ToolUse(allowed=("apply_patch",)),
        ),
    ],
)
def test_tool_choice(choice: object, expected: ToolUse) -> None:
    """Every tool stays in the prompt, whichever may be called."""
    result = understood(tools=[GREP, PATCH], tool_choice=choice)
    assert result.tools.use == expected
    assert len(result.prompt.tools) == 2


def test_no_tools_without_use_and_no_use_without_tools() -> None:
    """A05: with `none`, without tools, or with foreign kinds only, none is rendered and nothing counts as a call."""
    for fields in ({"tools": [GREP], "tool_choice": "none"}, {"tools": []}, {}, {"tools": [{"type": "web_search"}]}):
        made = generate(**fields)
        assert (made.tool_use, understood(**fields).prompt.tools) == (None, ())


def test_one_call_at_a_time() -> None:
    """A02: with `parallel_tool_calls: false` at most one."""
    assert generate(tools=[GREP], parallel_tool_calls=False).tool_use == ToolUse(calls="one")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [GREP]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "no"}, "tools": [GREP]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [GREP]}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search_preview"}, "tools": [GREP]}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [GREP]}, "tool_choice.tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "x"}]}, "tools": [GREP]},
            "tool_choice.tools",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [GREP, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [GREP, GREP]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": ["f"]}, "tools[0]"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"text": {"format": {"type": "json_object"}}, "tools": [GREP], "tool_choice": "required"}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"stop": ["x"]}, "stop"),
        ({"model": 1}, "model"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    """A06, C12: 400 before anything is asked of a model; a neighbouring API's field says what to use instead."""
    failure = refused(**fields)
    assert failure.param == param, failure
    assert f"`{param}`" in failure.message


# --- options ---------------------------------------------------------------------------------------------------------


def test_null_is_absent() -> None:
    """C01: the SDKs' types allow null for what is optional, and clients send it."""
    names = set(CreateRequest.__struct_fields__) - {"model", "input"}
    assert generate(**dict.fromkeys(names)) == generate()


def test_sampling_and_limits() -> None:
    """As asked; the rest as everywhere. A huge limit is no mistake."""
    made = generate(temperature=0, top_p=0.5, max_output_tokens=10**15, top_logprobs=3, seed=-1)
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.seed) == (0, 0.5, 2**64 - 1)
    assert (made.max_tokens, made.top_logprobs, made.reasoning) == (2**31 - 1, 3, "split")
    assert generate().top_logprobs is None
    assert generate(include=["message.output_text.logprobs"]).top_logprobs == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning": {"effort": "minimal"}}, {"reasoning_effort": "minimal", "enable_thinking": False}),
        (
            {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
        ({"chat_template_kwargs": {"thinking_budget": 0}}, {"thinking_budget": 0, "enable_thinking": False}),
    ],
)
def test_effort_is_for_the_template(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """D03: off is off; what a client tells the template itself counts more."""
    assert understood(**fields).prompt.template_arguments == expected


def test_a_templates_budget_is_held() -> None:
    """This API has no name for it; the one that templates know counts."""
    assert generate(chat_template_kwargs={"thinking_budget": 7}).reasoning_budget_tokens == 7
    assert generate().reasoning_budget_tokens is None


def test_text_formats() -> None:
    """A schema keeps its keys' order, since an answer follows it."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    asked = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    made = generate(text=asked)
    assert made.constraint == JsonSchema(text='{"type":"object","properties":{"b":{},"a":{}}}')
    assert generate(text={"format": {"type": "json_object"}}).constraint == JsonObject()
    assert generate(text={"format": {"type": "text"}}).constraint is None


def test_a_prewarm_is_a_warm() -> None:
    """And prompts stay off the disk where that is asked for."""
    made = command(prompt_cache_options={"prewarm": True}, prompt_cache_retention="in_memory", tools=[GREP])
    assert isinstance(made, Warm)
    assert (made.cache.retention, made.cache.owner) == ("in_memory", "o")
    assert generate().cache.retention == "disk"


def test_what_is_ignored_is_named() -> None:
    """C12: by its name, or by the value that nothing is done with."""
    body = asking(
        truncation="auto",
        text={"verbosity": "low"},
        reasoning={"summary": "auto"},
        include=["file_search_call.results"],
    )
    decoded = decode_request(json.dumps({**body, "user": "u", "new_field": 1}).encode(), CreateRequest)
    assert isinstance(decoded, Decoded)
    assert decoded.ignored == ("user", "new_field")
    assert understood(**{name: value for name, value in body.items() if name not in ("model", "input")}).ignored == (
        *("truncation", "text.verbosity", "reasoning.summary", "include"),
    )
    assert understood(truncation="disabled").ignored == ()
