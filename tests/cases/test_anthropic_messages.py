"""Field cases through Anthropic's Messages API: calls (A), streams (B), validation (C), reasoning (D), dialect (G)."""

import json
import os
import signal
from typing import Any

import anthropic
import httpx
import pytest

from tests.cases.conftest import MODEL, TAGGED
from tests.fakes.anthropic_app import named_events
from tests.fakes.live_service import LiveService
from tests.fakes.messages_answers import ask_both, ask_message, envelope, messages_body
from tests.fakes.script_model import CONTEXT_TOKENS, said_by

COUNT = "/v1/messages/count_tokens"


def tool(name: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"name": name, "description": f"Does {name}.", "input_schema": schema}


TOOLS = [tool("get_weather", "city"), tool("get_time", "tz"), tool("grep", "pattern"), tool("edit", "text")]


def asked(said: object = None, **fields: Any) -> dict[str, Any]:
    return messages_body(MODEL, said=said, **fields)


# --- A: tool calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "arguments"),
    [
        ("SC08", {"city": "Oslo"}),
        ("SC07", {"city": 'Zürich "Altstadt"', "opts": {"days": [1, {"h": "}]"}]}}),
    ],
)
def test_a01_a_call_is_a_block_in_both_modes(client: httpx.Client, tag: str, arguments: dict[str, Any]) -> None:
    """A01: whichever tokens spell the tags, there is no markup in any text, and `input` is the object."""
    answer = ask_both(client, asked(tag, tools=TOOLS))
    assert (answer.calls, answer.text, answer.stop_reason) == ([("get_weather", arguments)], "", "tool_use")


def test_a02_two_calls_are_two_blocks(client: httpx.Client) -> None:
    """A02, G04: two blocks with two ids and no stray text between them; at most one when that is asked for."""
    answer = ask_both(client, asked("SC09", tools=TOOLS))
    assert answer.calls == [("get_weather", {"city": "A"}), ("get_time", {"tz": "B"})]
    assert len({block["id"] for block in answer.message["content"]}) == 2
    one = ask_both(client, asked("SC09", tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}))
    assert one.calls == [("get_weather", {"city": "A"})]


def test_a03_bad_arguments_are_not_lost(client: httpx.Client) -> None:
    """A03: a call with an object, or the text as the model wrote it; never nothing."""
    answer = ask_both(client, asked("SC10", tools=TOOLS))
    assert answer.calls or "\\d+" in answer.text
    assert answer.stop_reason == ("tool_use" if answer.calls else "end_turn")
    assert "d+" in json.dumps(answer.message["content"])


@pytest.mark.parametrize(("tag", "max_tokens"), [("SC12", 300), ("SC08", 3)])
def test_a04_no_character_disappears(client: httpx.Client, tag: str, max_tokens: int) -> None:
    """A04: a call that is never closed, or cut, reaches the client, and never as one that can be run."""
    answer = ask_both(client, asked(tag, tools=TOOLS, max_tokens=max_tokens))
    assert answer.message["content"]
    assert answer.stop_reason == ("end_turn" if max_tokens == 300 else "max_tokens")
    if tag == "SC12":
        assert "Ri" in json.dumps(answer.message["content"])


@pytest.mark.parametrize("fields", [{"tools": TOOLS, "tool_choice": {"type": "none"}}, {"tools": []}, {}])
def test_a05_no_calls_where_none_may_be(client: httpx.Client, fields: dict[str, Any]) -> None:
    """A05: without tools, or with `none`, what looks like a call is text."""
    answer = ask_both(client, asked("SC07", **fields))
    assert (answer.calls, answer.stop_reason) == ([], "end_turn")
    assert answer.text == said_by("SC07")


CLOSED = {"additionalProperties": False}
FINITE: list[dict[str, Any]] = [
    {"name": name, "input_schema": {"type": "object", "properties": properties, **CLOSED, "required": [*properties]}}
    for name, properties in (
        ("get_weather", {"city": {"enum": ["Oslo", "Bergen"]}}),
        ("get_time", {"tz": {"enum": ["CET"]}}),
    )
]


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"get_weather", "get_time"}), ({"type": "tool", "name": "get_time"}, {"get_time"})],
)
def test_a06_a_forced_call_is_made(client: httpx.Client, choice: dict[str, Any], names: set[str]) -> None:
    """A06: `any` and a named tool are enforced: the answer is one call, with arguments that follow its schema."""
    one = {**choice, "disable_parallel_tool_use": True}
    answer = ask_both(client, asked("hello", tools=FINITE, tool_choice=one, temperature=0))
    ((name, arguments),) = answer.calls
    assert name in names
    assert arguments in ({"city": "Oslo"}, {"city": "Bergen"}, {"tz": "CET"})
    assert (answer.text, answer.stop_reason) == ("", "tool_use")


def test_an_answer_of_a_schema(client: httpx.Client) -> None:
    """`output_config.format`: the text is one JSON value of the schema."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}}, "required": ["city"]}
    shape = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    answer = ask_both(client, asked("hello", output_config=shape, temperature=0))
    assert json.loads(answer.text) in ({"city": "Oslo"}, {"city": "Bergen"})
    assert answer.stop_reason == "end_turn"


def test_a08_a_second_turn_with_its_result(client: httpx.Client) -> None:
    """A08, C07, G03: a turn of calls only, its result in every form, and the conversation goes on."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD" * 500}}
    for content in ("9 C", [{"type": "text", "text": "9 "}, {"type": "text", "text": "C"}], [], ..., [image]):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, "is_error": True}
        if content is ...:
            del result["content"]
        messages = [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "SC04"}]},
        ]
        answer = ask_message(client, asked(messages=messages, tools=TOOLS))
        assert answer.text == said_by("SC04"), answer
        assert answer.prompt_tokens < 2500  # no base64 in the prompt


# --- B: streams ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tag", "stop", "text"), [("SC04", "beta gamma", "alpha "), ("SC20", "la la la", " ")])
def test_b02_a_stop_sequence_ends_the_answer_and_is_named(client: httpx.Client, tag: str, stop: str, text: str) -> None:
    """B02: the text ends before the match, and the answer says which string it was."""
    answer = ask_both(client, asked(tag, stop_sequences=["never", stop]))
    assert (answer.text, answer.stop_reason, answer.message["stop_sequence"]) == (text, "stop_sequence", stop)
    assert answer.message["usage"]["output_tokens"] <= 7


def test_b04_every_way_to_end(client: httpx.Client) -> None:
    """B04: the model's own end, the client's limit, the context's end."""
    assert ask_both(client, asked("SC04")).stop_reason == "end_turn"
    assert ask_both(client, asked("SC19", max_tokens=5)).stop_reason == "max_tokens"
    near_the_end = asked("x" * (CONTEXT_TOKENS - 100) + "SC20", max_tokens=5000)
    answer = ask_message(client, near_the_end)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.prompt_tokens + answer.message["usage"]["output_tokens"] == CONTEXT_TOKENS


# --- C: validation ---------------------------------------------------------------------------------------------------


def test_c04_a_system_note_in_mid_conversation(client: httpx.Client) -> None:
    """C04: it is in the prompt once, whatever the template thinks of it."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "SC04"},
    ]
    with_note = ask_both(client, asked(messages=messages, system="You are kind."))
    assert with_note.text == said_by("SC04")
    without = ask_message(client, asked(messages=messages[:2] + messages[3:], system="You are kind."))
    assert with_note.prompt_tokens > without.prompt_tokens


def test_c06_an_answer_goes_on_from_its_beginning(client: httpx.Client) -> None:
    """C06: the last assistant's text is not repeated, and its turn not closed."""
    begun = asked(messages=[{"role": "user", "content": "SC04"}, {"role": "assistant", "content": "alpha"}])
    answer = ask_both(client, begun)
    assert answer.status == 200
    assert not answer.text.startswith("alpha alpha")


def test_c08_a_picture_is_refused(client: httpx.Client) -> None:
    """C08: 400 in words, and never silently dropped."""
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    answer = ask_both(client, asked([{"type": "text", "text": "SC04"}, image]))
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert "messages[0].content[1]" in answer.error["message"]


@pytest.mark.parametrize(
    "body", [b'{"model":', b"[]", b"", b'{"model": "\xff"}', b'{"temperature": NaN}', b"\xef\xbb\xbf{}", b'"\\ud83d"']
)
def test_c10_broken_bodies(client: httpx.Client, body: bytes) -> None:
    """C10: 400 in this API's envelope, and the connection goes on."""
    response = client.post("/v1/messages?beta=true", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["request_id"] == response.headers["request-id"]


def test_c11_names_of_models(client: httpx.Client) -> None:
    """C11: a name with slash and tag is answered by that name, an unknown one is not found at once."""
    assert ask_both(client, messages_body(TAGGED, said="SC04")).message["model"] == TAGGED
    for name in ("", "no/such"):
        unknown = ask_both(client, messages_body(name, said="SC04"))
        assert (unknown.status, unknown.error["type"]) == (404, "not_found_error")


# --- D: reasoning ----------------------------------------------------------------------------------------------------


def test_d01_thinking_is_a_block_of_its_own(client: httpx.Client) -> None:
    """D01, G04: before the text, with a signature, and no piece of a tag in either."""
    answer = ask_both(client, asked("SC15", thinking={"type": "adaptive"}))
    assert answer.kinds == ["thinking", "text"]
    assert (answer.thinking, answer.text) == ("why15 because", "answer15")
    assert answer.message["content"][0]["signature"]
    back = [
        {"role": "user", "content": "SC15"},
        {"role": "assistant", "content": answer.message["content"]},
        {"role": "user", "content": "SC04"},
    ]
    assert ask_message(client, asked(messages=back)).text == said_by("SC04")


def test_d02_cut_inside_thinking(client: httpx.Client) -> None:
    """D02: what was thought is thinking, nothing is sent twice."""
    answer = ask_both(client, asked("SC18", max_tokens=10))
    assert (answer.kinds, answer.stop_reason) == (["thinking"], "max_tokens")
    assert answer.thinking.startswith("never w00")


def test_d03_no_empty_thinking(client: httpx.Client) -> None:
    """D03: an empty thought gives no block, and a model without tags is never put into one."""
    assert ask_both(client, asked("SC21")).kinds == ["text"]
    assert ask_both(client, asked("SC04", thinking={"type": "disabled"})).kinds == ["text"]


# --- G: the dialect --------------------------------------------------------------------------------------------------


def test_g02_counting_is_what_is_billed(client: httpx.Client) -> None:
    """G02: tools, calls, results and system blocks count; `{}` is refused, an unknown model not found."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    prompt: dict[str, Any] = {
        "model": MODEL,
        "system": [{"type": "text", "text": "Be kind."}],
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "9 C"}]},
        ],
    }
    counted = client.post(COUNT, json=prompt)
    assert counted.status_code == 200
    billed = ask_message(client, {**prompt, "max_tokens": 1})
    assert counted.json() == {"input_tokens": billed.prompt_tokens}
    for body, status in (({}, 400), ({**prompt, "model": "no/such"}, 404), ({**prompt, "messages": []}, 400)):
        refused = client.post(COUNT, json=body)
        assert refused.status_code == status
        assert refused.json()["type"] == "error"


def test_g02_counting_takes_no_place(service: LiveService, client: httpx.Client) -> None:
    """G02: what is counted is never among the open requests."""
    with client.stream("POST", "/v1/messages", json={**asked("SC20", max_tokens=3000), "stream": True}) as stream:
        pieces = stream.iter_bytes()
        next(pieces)
        with service.client() as other:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
            assert other.post(COUNT, json=body).json()["input_tokens"] > 0
            assert len(other.get("/v1/requests").json()["data"]) == 1


def test_max_tokens_0_fills_the_cache(client: httpx.Client) -> None:
    """Nothing is generated; the next request reads what was computed; a marker is a pin for its time."""
    system = [{"type": "text", "text": "warm me " * 100, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    warm = ask_message(client, asked("SC04", system=system, max_tokens=0))
    assert (warm.message["content"], warm.stop_reason) == ([], "max_tokens")
    assert warm.message["usage"]["cache_creation_input_tokens"] > 0
    assert warm.message["usage"]["output_tokens"] == 0
    answer = ask_message(client, asked("SC04", system=system))
    assert answer.text == said_by("SC04")
    assert answer.cached_tokens >= 512
    (pin,) = client.get("/v1/cache/pins").json()["data"]
    assert pin["name"].startswith("messages-")
    client.delete(f"/v1/cache/pins/{pin['name']}")


def test_k09_usage_is_disjoint(client: httpx.Client) -> None:
    """K09: created the first time, read the second; the three numbers sum to the prompt both times."""
    system = [{"type": "text", "text": "k09 k09 " * 100, "cache_control": {"type": "ephemeral"}}]
    first = ask_message(client, asked("SC04", system=system))
    again = ask_message(client, asked("SC04", system=system))
    counted = client.post(
        COUNT, json={"model": MODEL, "system": system, "messages": [{"role": "user", "content": "SC04"}]}
    )
    assert first.prompt_tokens == again.prompt_tokens == counted.json()["input_tokens"]
    assert first.message["usage"]["cache_creation"]["ephemeral_5m_input_tokens"] >= 512
    assert again.cached_tokens >= 512
    assert again.message["usage"]["cache_creation_input_tokens"] < 300


def test_k08_a_changing_head_costs_nothing(client: httpx.Client) -> None:
    """K08: Claude Code's billing line is another one each time, and everything is read from the cache all the same;
    a note in mid-conversation leaves what stands before it where it was."""
    cached: list[int] = []
    for salt in ("a1", "b2", "c3"):
        head = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={salt};"}
        answer = ask_message(client, asked("SC04", system=[head, {"type": "text", "text": "k08 k08 " * 100}]))
        cached.append(answer.cached_tokens)
    assert cached[0] < 512 <= cached[1] == cached[2]


def test_diagnostics_name_what_changed(client: httpx.Client) -> None:
    """API.md 4: compared with the request that the client names, whatever the cache did."""
    base = asked("SC04 " * 60, system="be kind " * 60, tools=TOOLS, diagnostics={"previous_message_id": None})
    first = ask_message(client, base)
    assert first.message["diagnostics"] == {"cache_miss_reason": None}
    previous = {"previous_message_id": first.message["id"]}
    turns = [
        *base["messages"],
        {"role": "assistant", "content": first.message["content"]},
        {"role": "user", "content": "SC02"},
    ]
    changes: list[tuple[dict[str, Any], str | None]] = [
        ({"messages": turns}, None),
        ({"system": "be mean " * 60}, "system_changed"),
        ({"tools": TOOLS[::-1]}, "tools_changed"),
        ({"messages": [{"role": "user", "content": "SC04, please"}]}, "messages_changed"),
        ({"model": TAGGED}, "model_changed"),
        ({"thinking": {"type": "adaptive"}}, "unavailable"),
        ({"diagnostics": {"previous_message_id": "msg_unknown"}}, "previous_message_not_found"),
    ]
    for fields, reason in changes:
        answer = ask_both(client, {**base, "diagnostics": previous, **fields})
        found = answer.message["diagnostics"]["cache_miss_reason"]
        assert (found and found["type"]) == reason, (fields, found)
        if reason is not None and reason.endswith("_changed"):
            assert 0 < found["cache_missed_input_tokens"] <= first.prompt_tokens
    assert "diagnostics" not in ask_message(client, asked("SC04")).message


DOOR: list[tuple[str, str, dict[str, str], bytes, int, str]] = [
    ("GET", "/v1/messages", {}, b"", 405, "invalid_request_error"),
    ("POST", "/v1/messages/none", {}, b"{}", 404, "not_found_error"),
    ("POST", "/v1/messages", {"content-type": "text/plain"}, b"{}", 415, "invalid_request_error"),
    ("POST", "/v1/messages", {"content-encoding": "gzip"}, b"{}", 415, "invalid_request_error"),
    ("POST", "/v1/messages/count_tokens", {"host": "evil.example"}, b"{}", 403, "permission_error"),
    ("GET", "/v1/models?limit=0", {"anthropic-version": "2023-06-01"}, b"", 400, "invalid_request_error"),
    ("GET", "/v1/models/none", {"anthropic-version": "2026-10-21"}, b"", 404, "not_found_error"),
]


@pytest.mark.parametrize(("method", "path", "headers", "content", "status", "kind"), DOOR)
def test_what_the_gate_and_the_router_refuse(
    client: httpx.Client, method: str, path: str, headers: dict[str, str], content: bytes, status: int, kind: str
) -> None:
    """The envelope and the header `request-id` are this API's wherever the refusal comes from."""
    refused = client.request(method, path, headers={"content-type": "application/json", **headers}, content=content)
    assert (refused.status_code, envelope(refused.json(), dict(refused.headers))["type"]) == (status, kind)


def test_probes_tell_nothing(client: httpx.Client) -> None:
    """Claude Code looks whether anybody is there."""
    for method in ("GET", "HEAD"):
        answer = client.request(method, "/")
        assert (answer.status_code, answer.content) == (200, b"")


def test_e01_a_worker_that_dies_is_told_in_the_stream(service: LiveService, client: httpx.Client) -> None:
    """E01, B08: an error event with the envelope, soon, and nothing after it; the next request is served."""
    request = {**asked("SC20", max_tokens=4000), "stream": True}
    with client.stream("POST", "/v1/messages", json=request) as stream:
        pieces = stream.iter_bytes()
        received = next(pieces)
        while b"text_delta" not in received:  # who has no piece of an answer yet gets it of the next process
            received += next(pieces)
        os.kill(service.worker_pid(MODEL), signal.SIGKILL)
        received += b"".join(pieces)
    *_, last = named_events(received)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] == stream.headers["request-id"]
    assert ask_message(client, asked("SC04")).text == said_by("SC04")


# --- the SDK ---------------------------------------------------------------------------------------------------------


def test_the_sdk_reads_every_kind_of_answer(service: LiveService, client: httpx.Client) -> None:
    """G04: streams of text, thinking and calls are put together without an exception, as the whole answers are."""
    del client
    with anthropic.Anthropic(api_key="any", base_url=service.base_url, max_retries=0) as sdk:
        for tag in ("SC01", "SC04", "SC07", "SC08", "SC09", "SC12", "SC15", "SC18", "SC21"):
            request: dict[str, Any] = {
                "model": MODEL,
                "max_tokens": 100,
                "messages": [{"role": "user", "content": tag}],
                "tools": TOOLS,
            }
            whole = sdk.messages.create(**request)
            with sdk.messages.stream(**request) as stream:
                events = [event.type for event in stream]
                final = stream.get_final_message()
            assert events[-1] == "message_stop"
            assert [_shown(block) for block in final.content] == [_shown(block) for block in whole.content], tag
            assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        count = sdk.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert count.input_tokens > 0
        with pytest.raises(anthropic.NotFoundError) as missing:
            sdk.messages.create(model="no/such", max_tokens=1, messages=[{"role": "user", "content": "hi"}])
        assert missing.value.request_id
        listed = sdk.models.list(limit=1)
        assert [model.id for model in sdk.models.list(limit=1)] == sorted([MODEL, TAGGED])
        assert (listed.has_more, len(listed.data)) == (True, 1)
        assert sdk.models.retrieve(TAGGED).display_name == TAGGED


def _shown(block: Any) -> dict[str, Any]:
    return {name: value for name, value in block.to_dict().items() if name not in ("id", "signature")}
