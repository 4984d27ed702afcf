"""Field cases of tool calls (A): real services, both modes, and the openai SDK as agents use it."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.cases.conftest import MODEL
from tests.fakes.http_answers import CHAT, Answer, ask, ask_whole, body, user
from tests.fakes.live_service import LiveService
from tests.fakes.script_model import said_by


def function(name: str, *parameters: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in parameters}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    function("get_weather", "city"),
    function("get_time", "tz"),
    function("grep", "pattern"),
    function("edit", "text"),
]


def called(client: httpx.Client, said: str, **fields: Any) -> Answer:
    return ask(client, body(MODEL, said=said, **{"tools": TOOLS, **fields}))


def test_a01_a_call_is_no_text_whatever_its_tokens(client: httpx.Client) -> None:
    """A01: markers of one token or of many: no markup in the text, one call, arguments as a JSON string."""
    split = called(client, "SC08")
    ((name, arguments),) = (call.said for call in split.calls)
    assert (name, json.loads(arguments), split.finish) == ("get_weather", {"city": "Oslo"}, "tool_calls")
    assert split.text == ""
    whole = called(client, "SC07")
    ((name, arguments),) = (call.said for call in whole.calls)
    expected = {"city": 'Zürich "Altstadt"', "opts": {"days": [1, {"h": "}]"}]}}
    assert (name, json.loads(arguments), whole.text) == ("get_weather", expected, "")


def test_a01_ids_are_unique(client: httpx.Client) -> None:
    """A01: agents keep calls of many turns in one history, by id."""
    ids = [call.call_id for _ in range(5) for call in called(client, "SC09").calls]
    assert len(set(ids)) == len(ids) == 10
    assert all(ids)


def test_a02_two_calls_are_two(client: httpx.Client) -> None:
    """A02: each with an index of its own, and no stray text between them; `ask` holds how they are streamed."""
    answer = called(client, "SC09")
    said = [(name, json.loads(arguments)) for name, arguments in (call.said for call in answer.calls)]
    assert said == [("get_weather", {"city": "A"}), ("get_time", {"tz": "B"})]
    assert (answer.text, answer.finish) == ("", "tool_calls")


def test_a02_one_call_where_one_was_allowed(client: httpx.Client) -> None:
    """A02: `parallel_tool_calls: false` ends the answer with its first call."""
    answer = called(client, "SC09", parallel_tool_calls=False)
    assert [call.name for call in answer.calls] == ["get_weather"]
    assert answer.finish == "tool_calls"


def test_a02_the_sdk_gets_two_calls(service: LiveService, client: httpx.Client) -> None:
    """A02: the SDK's own accumulator makes two calls of the stream, and they equal those of a whole answer."""
    del client  # afterwards the service must still serve
    request: dict[str, Any] = {"model": MODEL, "messages": user("SC09"), "tools": TOOLS}
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="any", max_retries=0) as sdk:
        with sdk.chat.completions.stream(**request) as stream:
            kinds = {event.type for event in stream}
            (streamed,) = stream.get_final_completion().choices
        (whole,) = sdk.chat.completions.create(**request).choices
    assert "tool_calls.function.arguments.done" in kinds
    for choice in (streamed, whole):
        calls = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls"
        assert [call.function.name for call in calls] == ["get_weather", "get_time"]  # pyright: ignore
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "A"}, {"tz": "B"}]  # pyright: ignore


def test_a03_wrong_json_is_not_lost(client: httpx.Client) -> None:
    """A03: `\\d` is no JSON escape: the client still sees the call, repaired or as it was written, or its text."""
    answer = called(client, "SC10")
    if answer.calls:
        (call,) = answer.calls
        assert call.name == "grep"
        assert "d+" in call.arguments
        assert answer.finish == "tool_calls"
    else:
        assert (answer.text, answer.finish) == (said_by("SC10"), "stop")
    assert answer.warnings


def test_a03_the_conversation_goes_on_after_wrong_json(client: httpx.Client) -> None:
    """A03, A08: the client sends the wrong arguments back with its error; the next turn is served."""
    (call,) = called(client, "SC10").calls or (None,)
    arguments = '{"pattern": "\\d+"}' if call is None else call.arguments
    answer = ask(client, body(MODEL, messages=history(arguments), tools=TOOLS))
    assert (answer.status, answer.text) == (200, said_by("SC04"))


@pytest.mark.parametrize(("tag", "max_tokens"), [("SC12", 300), ("SC12", 2), ("SC08", 3), ("SC07", 2), ("SC09", 2)])
def test_a04_a_cut_call_is_seen(client: httpx.Client, tag: str, max_tokens: int) -> None:
    """A04: what the model wrote reaches the client as text or as a call; `tool_calls` only with a call to make."""
    answer = called(client, tag, max_tokens=max_tokens)
    assert answer.text or answer.calls
    assert (answer.finish == "tool_calls") <= bool(answer.calls)
    if max_tokens < 300:
        assert answer.finish == "length"
    elif not answer.calls:
        assert (answer.text, answer.finish) == (said_by(tag), "stop")


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
@pytest.mark.parametrize("tag", ["SC07", "SC09"])
def test_a05_without_tools_a_call_is_text(client: httpx.Client, tag: str, fields: dict[str, Any]) -> None:
    """A05: nobody asked for a parser: plain text, finish stop; and the choice none costs no token of the prompt."""
    answer = called(client, tag, **fields)
    assert (answer.text, answer.calls, answer.finish) == (said_by(tag), (), "stop")
    assert answer.prompt_tokens == ask_whole(client, body(MODEL, said=tag)).prompt_tokens


def test_a07_an_unknown_tool_is_passed_on(client: httpx.Client) -> None:
    """A07: the client answers "unknown tool" and the model recovers; nothing is dropped."""
    answer = called(client, "SC13")
    assert [call.said for call in answer.calls] == [("no_such_tool", "{}")]
    assert answer.finish == "tool_calls"


# --- A06: what must be called is -------------------------------------------------------------------------------------


def finite(name: str, key: str, *values: str) -> dict[str, Any]:
    """A tool whose arguments end, whatever the model would rather say."""
    properties = {key: {"enum": list(values)}}
    schema = {"type": "object", "properties": properties, "required": [key], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


FINITE = [finite("get_weather", "city", "Oslo", "Bergen"), finite("get_time", "tz", "CET")]
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": "required", "tools": FINITE[:1]}, {"get_weather"}),
        ({"tool_choice": "required"}, {"get_weather", "get_time"}),
        ({"tool_choice": NAMED}, {"get_time"}),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
            {"get_time"},
        ),
    ],
)
def test_a06_a_required_call_is_made(client: httpx.Client, fields: dict[str, Any], names: set[str]) -> None:
    """A06: whatever the model would have said, the answer is a call of an allowed function with arguments that follow
    its schema, and nothing else."""
    request = {"tools": FINITE, "parallel_tool_calls": False, "temperature": 0, **fields}
    answer = called(client, "hello", **request)
    (call,) = answer.calls
    assert call.name in names
    assert json.loads(call.arguments) in ({"city": "Oslo"}, {"city": "Bergen"}, {"tz": "CET"})
    assert (answer.text, answer.finish) == ("", "tool_calls")


def test_a06_every_tool_is_rendered_whatever_is_allowed(client: httpx.Client) -> None:
    """A narrower choice keeps the prompt's prefix."""
    narrow = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    tokens = {called(client, "SC04", tool_choice=choice).prompt_tokens for choice in ("auto", None, narrow)}
    assert len(tokens) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "get_tide"}}},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": "required", "tools": None},
        {"tool_choice": "sometimes"},
    ],
)
def test_a06_what_cannot_be_required_is_refused(client: httpx.Client, fields: dict[str, Any]) -> None:
    """A06: 400 that names `tool_choice`, in both modes."""
    answer = called(client, "hello", **fields)
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["param"] == "tool_choice"


# --- A08: histories with calls ---------------------------------------------------------------------------------------


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "grep", "arguments": arguments}}
    return [
        *user("look"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
        *user("SC04"),
    ]


@pytest.mark.parametrize("arguments", ['{"pattern":"x"}', {"pattern": "x"}, "", None, "{", "nonsense", "[1]"])
def test_a08_histories_are_rendered(client: httpx.Client, arguments: Any) -> None:
    """A08: decoded for the template, empty is no arguments, and what cannot be decoded is shown as it is."""
    answer = ask(client, body(MODEL, messages=history(arguments), tools=TOOLS))
    assert (answer.status, answer.text) == (200, said_by("SC04")), answer


def test_a08_the_same_arguments_are_the_same_prompt(client: httpx.Client) -> None:
    """A08: a string and the object that it holds render alike, so the prefix stays cached whichever a client sends."""
    as_text = ask_whole(client, body(MODEL, messages=history('{"pattern": "x"}'), tools=TOOLS))
    as_object = ask_whole(client, body(MODEL, messages=history({"pattern": "x"}), tools=TOOLS))
    assert as_text.prompt_tokens == as_object.prompt_tokens


def test_a08_the_next_turn_reuses_the_last(client: httpx.Client) -> None:
    """A turn of an agent: what the model called, sent back as it came, is found in the cache again."""
    asked = [{"role": "user", "content": "please " * 60 + "SC08"}]
    first = ask_whole(client, body(MODEL, messages=asked, tools=TOOLS))
    (call,) = first.calls
    sent_back = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    more = [
        {"role": "assistant", "content": None, "tool_calls": [sent_back]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "SC04"},
    ]
    second = ask_whole(client, body(MODEL, messages=[*asked, *more], tools=TOOLS))
    assert second.cached_tokens >= first.prompt_tokens - 64


# --- several at once, and the legacy names ---------------------------------------------------------------------------


def test_the_legacy_functions(client: httpx.Client) -> None:
    """`functions` is answered with `function_call`, and the client's next turn in the same old words is understood."""
    request = body(MODEL, said="SC08", functions=[tool["function"] for tool in TOOLS])
    (choice,) = client.post(CHAT, json=request).json()["choices"]
    made = choice["message"]["function_call"]
    assert (made["name"], json.loads(made["arguments"])) == ("get_weather", {"city": "Oslo"})
    assert choice["finish_reason"] == "function_call"
    turns = [
        *user("SC08"),
        {"role": "assistant", "content": None, "function_call": made},
        {"role": "function", "name": made["name"], "content": "rain"},
        *user("SC04"),
    ]
    assert ask_whole(client, body(MODEL, messages=turns)).text == said_by("SC04")


def test_choices_with_calls_stay_apart(client: httpx.Client) -> None:
    """n > 1: every choice has its calls under its own index, in both modes."""
    request = body(MODEL, said="SC09", tools=TOOLS, n=3)
    whole = client.post(CHAT, json=request).json()
    assert [len(choice["message"]["tool_calls"]) for choice in whole["choices"]] == [2, 2, 2]
    arguments = [["", ""] for _ in range(3)]
    for line in client.post(CHAT, json={**request, "stream": True}).text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            for piece in choice["delta"].get("tool_calls", ()):
                arguments[choice["index"]][piece["index"]] += piece["function"]["arguments"]
    made = [choice["message"]["tool_calls"] for choice in whole["choices"]]
    assert arguments == [[call["function"]["arguments"] for call in calls] for calls in made]


MIXED: list[tuple[str, dict[str, Any]]] = [
    ("SC07", {"tools": TOOLS}),
    ("SC09", {"tools": TOOLS, "parallel_tool_calls": False}),
    ("SC15", {}),
    ("SC04", {"stop": ["gamma"]}),
    ("SC12", {"tools": TOOLS}),
    ("SC19", {"max_tokens": 7}),
    ("SC18", {"tools": TOOLS, "max_tokens": 20}),
    ("SC01", {"temperature": 0.7, "seed": 3}),
]


def test_h02_eight_at_once_answer_as_if_alone(service: LiveService, client: httpx.Client) -> None:
    """H02: rows with and without tools, thoughts, stops and limits share a batch and no state."""

    def one(at: int) -> tuple[object, ...]:
        tag, fields = MIXED[at % len(MIXED)]
        with service.client() as own:
            answer = ask(own, body(MODEL, said=tag, **fields))
        return answer.text, answer.reasoning, [call.said for call in answer.calls], answer.finish

    del client
    alone = [one(at) for at in range(len(MIXED))]
    with ThreadPoolExecutor(len(MIXED)) as pool:
        together = list(pool.map(one, range(2 * len(MIXED))))
    assert together == alone * 2
