"""Bodies of the Messages API become commands, or a refusal that names the field."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.anthropic.conversation import CacheMark
from gateway.anthropic.decode import decode
from gateway.anthropic.schema import MessagesRequest, PromptRequest
from gateway.anthropic.translate import Translated, messages_to_work, prompt_of
from protocol.failures import Failure, FailureKind
from protocol.generation import ChatMessage, ChatPrompt, Generate, Pin, ToolCall, Warm
from protocol.ids import RequestId
from protocol.tools import JsonSchema, Tool, ToolUse

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
CLOCK = {"name": "get_time", "input_schema": {"type": "object"}}
HI = [{"role": "user", "content": "hi"}]


def understood(**fields: Any) -> Translated | Failure:
    """As the dialect does it."""
    body = {"model": "m", "max_tokens": 5000, "messages": HI, **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    decoded = decode(json.dumps(body).encode(), MessagesRequest)
    if isinstance(decoded, Failure):
        return decoded
    return messages_to_work(decoded.request, request_id=RequestId("req_1"), cache_scope=b"alice")


def translated(**fields: Any) -> Translated:
    made = understood(**fields)
    assert isinstance(made, Translated), made
    return made


def generate(**fields: Any) -> Generate:
    work = translated(**fields).work
    assert isinstance(work, Generate)
    return work


def refused(**fields: Any) -> Failure:
    made = understood(**fields)
    assert isinstance(made, Failure), made
    assert made.kind in (FailureKind.INVALID_REQUEST, FailureKind.UNSUPPORTED)
    return made


def chat(**fields: Any) -> ChatPrompt:
    prompt = generate(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def said(*messages: dict[str, Any], **fields: Any) -> list[tuple[str, str]]:
    """Roles and texts."""
    return [(message.role, message.content) for message in chat(messages=list(messages), **fields).messages]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def tool_use(call_id: str = "toolu_1", name: str = "get_weather", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def tool_result(content: Any = ..., **fields: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": "toolu_1", **fields}
    return block if content is ... else {**block, "content": content}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJDRA=="}}
MARK = {"type": "ephemeral"}


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_plain_request() -> None:
    """The caller's scope, this API's defaults, and no thinking that nobody asked for."""
    work = generate()
    assert work.prompt == ChatPrompt(
        messages=(ChatMessage(role="user", content="hi"),), template_arguments={"enable_thinking": False}
    )
    assert (work.cache.scope, work.cache.retention) == (b"alice", "disk")
    assert (work.max_tokens, work.sampling.temperature, work.reasoning) == (5000, 1.0, "split")
    assert (work.tool_use, work.constraint, work.stop) == (None, None, ())


def test_text_blocks_are_joined() -> None:
    """C03: in order, nothing lost, nothing between, for every role."""
    assert said(user([text("SC"), text("04")]), system=[text("be "), text("brief")]) == [
        ("system", "be brief"),
        ("user", "SC04"),
    ]
    assert said(user("a"), assistant([text("b"), text("c")]), user("d")) == [
        ("user", "a"),
        ("assistant", "bc"),
        ("user", "d"),
    ]


def test_neighbours_of_one_role_are_one_turn() -> None:
    """As this API has it: templates refuse two users in a row."""
    assert said(user("a"), user("b"), assistant("c"), assistant("d"), user("e")) == [
        ("user", "a\n\nb"),
        ("assistant", "c\n\nd"),
        ("user", "e"),
    ]


def test_system_text_stays_where_it_stands() -> None:
    """C04, K08: a note in mid-conversation changes no token before it."""
    messages = (user("a"), assistant("b"), {"role": "system", "content": [text("z")]}, user("c"))
    assert said(*messages, system="s") == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("system", "z"),
        ("user", "c"),
    ]


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_head_that_changes_with_every_request_is_taken_off(in_blocks: bool) -> None:  # noqa: FBT001
    """K08: Claude Code's billing line, whether it has a block of its own or the system's first line."""
    prompts = []
    for salt in ("a1", "b2"):
        head = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={salt};"
        system = [text(head), text("You are helpful.")] if in_blocks else f"{head}\nYou are helpful."
        prompts.append(said(user("hi"), system=system))
    assert prompts[0] == prompts[1] == [("system", "You are helpful."), ("user", "hi")]


def test_calls_and_results_go_round() -> None:
    """A08, C07: a turn of calls only has empty text; results are messages of their own, in order, with text after."""
    prompt = chat(
        messages=[
            user("weather?"),
            assistant([{"type": "thinking", "thinking": "hm", "signature": "x"}, tool_use(city="Oslo")]),
            user([tool_result([text("9 "), text("C")]), text("and now?")]),
        ],
        tools=[WEATHER],
    )
    assert prompt.messages[1:] == (
        ChatMessage(
            role="assistant",
            content="",
            reasoning_content="hm",
            tool_calls=(ToolCall(id="toolu_1", name="get_weather", arguments={"city": "Oslo"}),),
        ),
        ChatMessage(role="tool", content="9 C", name="get_weather", tool_call_id="toolu_1"),
        ChatMessage(role="user", content="and now?"),
    )


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (tool_result("ok"), "ok"),
        (tool_result([text("a"), text("b")]), "ab"),
        (tool_result([]), ""),
        (tool_result(), ""),
        (tool_result("no such file", is_error=True), "error: no such file"),
        (tool_result(is_error=True), "error"),
        (tool_result([IMAGE, text("seen")]), "[image omitted: this model reads text only]seen"),
        (tool_result([{"type": "document", "source": {"type": "text", "data": "words"}}]), "words"),
    ],
)
def test_every_form_of_a_result(block: dict[str, Any], content: str) -> None:
    """G03, C08: texts joined, an error visible, what is no text named in its place, and never base64 in the prompt."""
    messages = chat(messages=[user("x"), assistant([tool_use()]), user([block])]).messages
    assert (messages[-1].role, messages[-1].content) == ("tool", content)


def test_documents_of_text_are_read() -> None:
    """A plain document is its title, context and text."""
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}
    parts = {"type": "document", "context": "C", "source": {"type": "content", "content": [text("a"), text("b")]}}
    assert said(user([plain, text("\n"), parts])) == [("user", "T\nwords\nC\nab")]


def test_an_answer_can_be_begun() -> None:
    """C06: the last assistant's text is gone on with; an empty one is none."""
    begun = chat(messages=[user("France?"), assistant("The capital is")])
    assert (begun.ending, begun.messages[-1].content) == ("continue", "The capital is")
    empty = chat(messages=[user("France?"), assistant("")])
    assert (empty.ending, len(empty.messages)) == ("new_message", 1)


def test_foreign_tools_blocks_do_not_end_a_conversation() -> None:
    """A conversation that began on Anthropic's servers can go on here."""
    block = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": [{"type": "web_search_result"}]}
    call = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}}
    ((_, _), (_, content), _) = said(user("a"), assistant([call, block, text("found")]), user("b"))
    assert content.endswith("found")
    assert "web_search_tool_result" in content


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([user(None)], "messages[0].content"),
        ([user([])], "messages[0].content"),
        ([user([text(123)])], "messages[0].content[0].text"),  # type: ignore[arg-type]
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user([{"type": "poem"}])], "messages[0].content[0].type"),
        ([user([text("a"), IMAGE])], "messages[0].content[1]"),
        ([user([{"type": "document", "source": {"type": "base64", "data": "QQ=="}}])], "messages[0].content[0]"),
        ([user([tool_result("x", tool_use_id=None)])], "messages[0].content[0].tool_use_id"),
        ([user("a"), assistant([{"type": "tool_use", "id": "1", "name": "f"}])], "messages[1].content[0].input"),
        ([user("a"), assistant([{**tool_use(), "input": "{}"}])], "messages[1].content[0].input"),
        ([user("a"), assistant([tool_use(n=10**30)])], "messages[1].content[0].input"),
        ([user("a"), assistant([tool_use()])], "messages[1]"),
        ([user("a"), assistant("The capital ")], "messages[1]"),
        ([assistant("")], "messages"),
    ],
)
def test_bad_messages_name_their_place(messages: list[Any], param: str) -> None:
    """C05, C08: 400 that says which message, which block, which field."""
    failure = refused(messages=messages)
    assert failure.param is not None
    assert failure.param.startswith(param) or (param == "messages[0].content" and "content" in failure.param)


# --- tools -----------------------------------------------------------------------------------------------------------


def test_tools_keep_their_order_and_keys() -> None:
    """A prefix is only the same if its bytes are."""
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    prompt = chat(tools=[{**WEATHER, "input_schema": schema}, CLOCK])
    assert [tool.name for tool in prompt.tools] == ["get_weather", "get_time"]
    assert list(prompt.tools[0].parameters["properties"]) == ["z", "a"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("choice", "tool_use", "rendered"),
    [
        (..., ToolUse(), 2),
        ({"type": "auto"}, ToolUse(), 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolUse(calls="one"), 2),
        ({"type": "any"}, ToolUse(choice="required"), 2),
        ({"type": "tool", "name": "get_time"}, ToolUse(choice="required", allowed=("get_time",)), 2),
        ({"type": "none"}, None, 0),
    ],
)
def test_how_tools_may_be_called(choice: Any, tool_use: ToolUse | None, rendered: int) -> None:
    """A05, A06: a narrower choice renders all tools, `none` renders none and reads no call."""
    work = generate(tools=[WEATHER, CLOCK], tool_choice=choice)
    assert isinstance(work.prompt, ChatPrompt)
    assert (work.tool_use, len(work.prompt.tools)) == (tool_use, rendered)


def test_no_tools_no_calls() -> None:
    """A05."""
    assert generate(tools=[]).tool_use is None
    assert generate(tools=[], tool_choice={"type": "auto"}).tool_use is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}, "tools": [CLOCK]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [CLOCK]}, "tool_choice.name"),
        ({"tool_choice": {"type": "sometimes"}, "tools": [CLOCK]}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}, "tools": [{"type": "web_search_20250305", "name": "s"}]}, "tool_choice"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
    ],
)
def test_bad_tools_name_their_place(fields: dict[str, Any], param: str) -> None:
    """A06."""
    assert refused(**fields).param == param


def test_tools_of_the_apis_own_are_named_as_ignored() -> None:
    """A request with a web search among its tools is served without it."""
    made = translated(tools=[{"type": "web_search_20250305", "name": "web_search"}, {**CLOCK, "type": "custom"}])
    assert isinstance(made.work, Generate)
    assert isinstance(made.work.prompt, ChatPrompt)
    assert made.work.prompt.tools == (Tool(name="get_time", parameters={"type": "object"}),)
    assert made.ignored == ("tools.web_search_20250305",)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thinking", "thinks", "ignored"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True, ()),
        ({"type": "adaptive"}, True, ()),
        ({"type": "adaptive", "display": "omitted"}, True, ("thinking.display",)),
        ({"type": "disabled"}, False, ()),
        (None, False, ()),
    ],
)
def test_thinking_is_the_templates_to_switch(thinking: Any, thinks: bool, ignored: tuple[str, ...]) -> None:  # noqa: FBT001
    """D03: on or off in the template; what cannot be held is said."""
    made = translated(thinking=thinking)
    assert isinstance(made.work, Generate)
    assert isinstance(made.work.prompt, ChatPrompt)
    assert made.work.prompt.template_arguments == {"enable_thinking": thinks}
    assert made.ignored == ignored


def test_a_budget_is_passed_on() -> None:
    """Of enabled thinking alone: adaptive thinking is the model's to bound."""
    enabled = {"type": "enabled", "budget_tokens": 2000}
    assert generate(thinking=enabled, max_tokens=3000).reasoning_budget_tokens == 2000
    assert generate(thinking={"type": "adaptive"}).reasoning_budget_tokens is None
    assert generate(thinking={"type": "disabled"}).reasoning_budget_tokens is None


def test_effort_and_format() -> None:
    """Both are in `output_config`; the format also by the name it had in its beta."""
    schema = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {}}}
    wanted = JsonSchema(text=msgspec.json.encode(schema).decode())
    work = generate(output_config={"effort": "max", "format": {"type": "json_schema", "schema": schema}})
    assert isinstance(work.prompt, ChatPrompt)
    assert work.prompt.template_arguments["reasoning_effort"] == "high"
    assert work.constraint == wanted == generate(output_format={"type": "json_schema", "schema": schema}).constraint


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"temperature": 1.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"stop_sequences": [" \n"]}, "stop_sequences[0]"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"metadata": {"user_id": "x" * 257}}, "metadata.user_id"),
        ({"service_tier": 5}, "service_tier"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2d"}}, "cache_control.ttl"),
        ({"model": None}, "model"),
        ({"max_tokens": 0, "stream": True}, "stream"),
        ({"max_tokens": 0, "thinking": {"type": "adaptive"}}, "thinking"),
        ({"max_tokens": 0, "tools": [CLOCK], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": 0, "output_format": {"type": "json_schema", "schema": {}}}, "output_config.format"),
    ],
)
def test_bad_options_name_their_field(fields: dict[str, Any], param: str) -> None:
    """C01 and the ranges of this API."""
    assert refused(**fields).param == param


def test_null_is_absent() -> None:
    """C01: the SDKs' types allow it and clients send it."""
    optional = set(MessagesRequest.__struct_fields__) - {"model", "max_tokens", "messages"}
    assert generate(**dict.fromkeys(optional)) == generate()


def test_a_huge_limit_is_no_mistake() -> None:
    """C01: the worker stops at the context's end."""
    assert generate(max_tokens=10**15).max_tokens == 2**31 - 1


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        *(("n", 2, 1), ("best_of", 3, 1), ("logprobs", True, False), ("top_logprobs", 2, None)),
        *(("logit_bias", {"1": 2}, {}), ("stop", "x", []), ("functions", [{"name": "f"}], [])),
        *(("function_call", "auto", None), ("response_format", {"type": "json_object"}, None)),
    ],
)
def test_the_neighbouring_apis_fields_are_no_secret(name: str, value: object, harmless: object) -> None:
    """C12: what would change the answer elsewhere is refused by its name, unless it asks for what is so anyway."""
    assert refused(**{name: value}).param == name
    translated(**{name: harmless})


def test_unknown_fields_are_ignored_and_named() -> None:
    """C12: new SDKs add some weekly."""
    fields = {"container": "x", "context_management": {"edits": []}, "mcp_servers": None, "metadata": {"user_id": "u"}}
    body = {"model": "m", "max_tokens": 1, "messages": HI, **fields}
    decoded = decode(json.dumps(body).encode(), MessagesRequest)
    assert not isinstance(decoded, Failure)
    assert set(decoded.ignored) == {"container", "context_management", "metadata"}


# --- the cache -------------------------------------------------------------------------------------------------------


def test_markers_are_counted_in_messages() -> None:
    """Those of tools, system, blocks, and the top level's, which is the last block's."""
    made = translated(
        tools=[{**CLOCK, "cache_control": MARK}],
        system=[text("s", cache_control={**MARK, "ttl": "1h"})],
        messages=[user([text("a", cache_control=MARK), text("b")]), assistant("c"), user("d")],
        cache_control=MARK,
    )
    assert made.marks == (
        CacheMark(messages=0, ttl="5m"),
        CacheMark(messages=1, ttl="1h"),
        CacheMark(messages=2, ttl="5m"),
        CacheMark(messages=4, ttl="5m"),
    )


def test_no_tokens_is_a_warm() -> None:
    """`max_tokens: 0` computes the prompt; with markers it is pinned for the longest one's time, the same one again."""
    plain = translated(max_tokens=0).work
    assert isinstance(plain, Warm)
    assert (plain.prompt, plain.pin) == (generate().prompt, None)
    pins: list[Pin] = []
    for _ in range(2):
        marked = translated(max_tokens=0, system=[text("s", cache_control={**MARK, "ttl": "1h"})], cache_control=MARK)
        assert isinstance(marked.work, Warm)
        assert marked.work.pin is not None
        pins.append(marked.work.pin)
    assert pins[0] == pins[1]
    assert pins[0].ttl_seconds == 3600
    assert pins[0].name.startswith("messages-")


def test_counting_needs_no_limit_and_is_the_same_prompt() -> None:
    """G02: what is counted is what is billed."""
    fields: dict[str, Any] = {
        "model": "m",
        "system": "s",
        "tools": [WEATHER],
        "messages": [user("a"), assistant([tool_use()]), user([tool_result("x")])],
        "thinking": {"type": "enabled", "budget_tokens": 2000},
    }
    decoded = decode(json.dumps(fields).encode(), PromptRequest)
    assert not isinstance(decoded, Failure)
    assert prompt_of(decoded.request) == generate(**fields).prompt


# --- anything --------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "document", "tool_use", "tool_result", "thinking", "search_result"])},
    optional=dict.fromkeys(("text", "content", "source", "id", "name", "input", "tool_use_id", "thinking"), JSON),
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.text(max_size=3) | st.lists(BLOCKS),
    }
)


@given(st.lists(MESSAGE, max_size=4) | JSON, JSON, JSON)
def test_every_body_is_understood_or_refused(messages: Any, tools: Any, system: Any) -> None:
    """C10: no body raises; what is understood can travel to a worker."""
    made = understood(messages=messages, tools=tools, system=system)
    if isinstance(made, Translated):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made.work), type=type(made.work)) == made.work


@given(st.binary(max_size=40))
def test_every_bytes_are_refused(body: bytes) -> None:
    """C10: nothing that is no request gets through."""
    assert isinstance(decode(body, MessagesRequest), Failure)
