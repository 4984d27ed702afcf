"""Field cases over POST /v1/responses: real services, both modes, raw events and the openai SDK as agents use it."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cases.conftest import MODEL, TAGGED
from tests.fakes.http_answers import assert_serves
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.responses_app import RESPONSES, events_in, types_in
from tests.fakes.script_model import CONTEXT_TOKENS, said_by

SC04 = said_by("SC04")


def function(name: str, *parameters: str, kind: str = "function") -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in parameters}}
    return {"type": kind, "name": name, **({"parameters": schema} if kind == "function" else {})}


def choosing(name: str, key: str, *values: str) -> dict[str, Any]:
    """A function whose arguments are few, so that a model that can only chatter ends some time."""
    schema = {
        "type": "object",
        "properties": {key: {"enum": list(values)}},
        "required": [key],
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "parameters": schema}


FINITE = [choosing("get_weather", "city", "Oslo", "Bergen"), choosing("get_time", "tz", "CET")]
TOOLS = [function("get_weather", "city"), function("get_time", "tz"), function("grep", "pattern")]


def asked(said: object, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": said, "max_output_tokens": 300, **fields}


ENDLESS = asked("SC20", store=True, background=True, max_output_tokens=1_000_000)


def respond(client: httpx.Client, said: object, **fields: Any) -> dict[str, Any]:
    """Ask twice, whole and as a stream: but for ids the two must say the same. Gives the stream's last response."""
    whole = client.post(RESPONSES, json=asked(said, **fields))
    assert whole.status_code == 200, whole.text
    stream = client.post(RESPONSES, json=asked(said, stream=True, **fields))
    assert stream.status_code == 200, stream.text
    last = events_in(stream.content)[-1]["response"]
    assert shown(last) == shown(whole.json())
    return last


def shown(response: dict[str, Any]) -> list[Any]:
    """What was said, without ids and bills."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return [response["status"], response["incomplete_details"], items, response["usage"]["output_tokens"]]


def refused(client: httpx.Client, said: object, status: int, param: str | None, **fields: Any) -> dict[str, Any]:
    """Both modes refuse it with the same words. Gives the error."""
    whole = client.post(RESPONSES, json=asked(said, **fields))
    stream = client.post(RESPONSES, json=asked(said, stream=True, **fields))
    assert (whole.status_code, whole.json()) == (stream.status_code, stream.json())
    error = whole.json()["error"]
    assert (whole.status_code, error["param"]) == (status, param), error
    return error


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def calls_of(response: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]


def reasoning_of(response: dict[str, Any]) -> str:
    return "".join(item["content"][0]["text"] for item in response["output"] if item["type"] == "reasoning")


# --- texts -----------------------------------------------------------------------------------------------------------


def test_g06_the_order_of_events(client: httpx.Client) -> None:
    """G06: over a real service, with a call and its output in the history and foreign kinds of tools."""
    history = [
        {"role": "user", "content": "weather?"},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "SC04"}]},
        {"role": "user", "content": "SC04"},
    ]
    tools = [
        *TOOLS,
        {"type": "web_search"},
        {"type": "namespace", "name": "crm", "description": "", "tools": [function("find")]},
    ]
    answer = client.post(RESPONSES, json=asked(history, tools=tools, stream=True))
    assert answer.headers["x-mlxd-ignored-params"] == "tools.web_search"
    assert answer.headers["content-type"].startswith("text/event-stream")
    types = types_in(events_in(answer.content))
    without_deltas = [kind for kind in types if not kind.endswith(".delta")]
    assert [kind for kind in without_deltas if kind != "queued"] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert types.count("output_text.delta") >= 1
    last = events_in(answer.content)[-1]["response"]
    assert (text_of(last), last["id"][:5], last["usage"]["output_tokens"] > 0) == (SC04, "resp_", True)
    assert len(last["tools"]) == 5


def test_b08_c09_too_long_a_prompt(client: httpx.Client) -> None:
    """C09: 400 before the status line, with the code agents act upon and both numbers; what fits is cut at the end."""
    error = refused(client, "word " * 6000, 400, "input")
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT_TOKENS) in error["message"]
    response = respond(client, "SC19", max_output_tokens=5)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert said_by("SC19").startswith(text_of(response))
    assert response["usage"]["output_tokens"] == 5


def test_c11_the_model_asked_for(client: httpx.Client) -> None:
    """C11: a name with slash and tag comes back as it was sent; an unknown one is 404 at once."""
    assert respond(client, "SC04", model=TAGGED)["model"] == TAGGED
    for name in ("", "no/such"):
        assert refused(client, "SC04", 404, "model", model=name)["code"] == "model_not_found"


def test_c07_c08_c12(client: httpx.Client) -> None:
    """C07, C08, C12: null content, a picture and a neighbour's field are 400, each naming the field."""
    refused(client, [{"role": "user", "content": None}], 400, "input[0].content")
    image = {"type": "input_image", "image_url": "http://127.0.0.1:9/x"}
    refused(client, [{"role": "user", "content": [image]}], 400, "input[0].content[0]")
    refused(client, "SC04", 400, "stop", stop=["x"])
    answer = client.post(RESPONSES, json=asked("SC04", brand_new_field=1))
    assert (answer.status_code, answer.headers["x-mlxd-ignored-params"]) == (200, "brand_new_field")


def test_logprobs_of_a_real_model(client: httpx.Client) -> None:
    """Each token's, in the item and in the deltas."""
    response = respond(client, "SC04", include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = response["output"][0]["content"][0]["logprobs"]
    assert "".join(token["token"] for token in tokens).startswith(SC04)
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


# --- tools -----------------------------------------------------------------------------------------------------------


def test_a01_a02_calls(client: httpx.Client) -> None:
    """A01, A02: no markup in any text; arguments as a JSON string; two calls are two, with ids of their own."""
    ((name, arguments),) = calls_of(respond(client, "SC08", tools=TOOLS))
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Oslo"})
    response = respond(client, "SC09", tools=TOOLS)
    assert [(name, json.loads(text)) for name, text in calls_of(response)] == [
        ("get_weather", {"city": "A"}),
        ("get_time", {"tz": "B"}),
    ]
    assert [item["type"] for item in response["output"]] == ["function_call"] * 2
    assert len({item["call_id"] for item in response["output"]}) == 2
    one = respond(client, "SC09", tools=TOOLS, parallel_tool_calls=False)
    assert [name for name, _ in calls_of(one)] == ["get_weather"]


def test_a03_a04_nothing_is_lost(client: httpx.Client) -> None:
    """A03, A04: bad escapes, a call that never closes, one that is cut: every character is in an item."""
    bad = respond(client, "SC10", tools=TOOLS)
    assert "d+" in json.dumps(bad["output"])
    unclosed = respond(client, "SC12", tools=TOOLS)
    assert "Ri" in json.dumps(unclosed["output"])
    cut = respond(client, "SC08", tools=TOOLS, max_output_tokens=3)
    assert cut["status"] == "incomplete"
    assert "".join(text_of(cut).split()) or calls_of(cut)


def test_a05_no_tools_no_calls(client: httpx.Client) -> None:
    """A05: with none, without any, or with foreign kinds only, what looks like a call is text."""
    for fields in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {}, {"tools": [{"type": "web_search"}]}):
        response = respond(client, "SC08", **fields)
        assert (calls_of(response), "get_weather" in text_of(response)) == ([], True)


def test_a06_forced_calls(client: httpx.Client) -> None:
    """A06: required and named are held, whatever the model would rather say; impossible choices are 400."""
    finite = {"tools": FINITE, "parallel_tool_calls": False, "temperature": 0}
    required = respond(client, "hello", tool_choice="required", **finite)
    ((name, arguments),) = calls_of(required)
    assert (name in ("get_weather", "get_time"), len(json.loads(arguments))) == (True, 1)
    named = respond(client, "SC04", tool_choice={"type": "function", "name": "get_time"}, **finite)
    assert calls_of(named)[0][0] == "get_time"
    assert (named["status"], text_of(named)) == ("completed", "")
    refused(client, "SC04", 400, "tool_choice", tools=TOOLS, tool_choice={"type": "function", "name": "no"})
    refused(client, "SC04", 400, "tool_choice", tool_choice="required")
    refused(client, "SC04", 400, "tool_choice", tools=TOOLS, tool_choice="sometimes")


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', "", "{", {"city": "Oslo"}, None])
def test_a08_arguments_of_the_history(client: httpx.Client, arguments: object) -> None:
    """A08: the template renders whatever a model once wrote."""
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": "7 °C"}
    items = [{"role": "user", "content": "u"}, call, output, {"role": "user", "content": "SC04"}]
    assert text_of(respond(client, items, tools=TOOLS)) == SC04


def test_a_custom_tool(client: httpx.Client) -> None:
    """It is called as a function of one text, and comes back as the client knows it, with that text alone. (This model
    never closes the text by itself.)"""
    forced = {
        "tools": [function("apply_patch", kind="custom")],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
    }
    response = respond(client, "SC19", **forced, temperature=0, max_output_tokens=120)
    (item,) = (item for item in response["output"] if item["type"] != "reasoning")
    assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "apply_patch", "incomplete")
    assert item["input"]
    assert '"input"' not in item["input"]
    weather = respond(client, "SC08", tools=[function("get_weather", kind="custom")])
    (item,) = weather["output"]
    assert (item["type"], json.loads(item["input"]), item["status"]) == (
        *("custom_tool_call", {"city": "Oslo"}, "completed"),
    )


# --- reasoning -------------------------------------------------------------------------------------------------------


def test_d01_d02_d03_reasoning(client: httpx.Client) -> None:
    """D01-D03: items of their own; a cut inside loses nothing; an empty block makes none."""
    thought = respond(client, "SC15")
    assert (reasoning_of(thought), text_of(thought)) == ("why15 because", "answer15")
    assert 0 < thought["usage"]["output_tokens_details"]["reasoning_tokens"] < thought["usage"]["output_tokens"]
    cut = respond(client, "SC18", max_output_tokens=10)
    assert (cut["status"], text_of(cut)) == ("incomplete", "")
    assert said_by("SC18").removeprefix("<think>").startswith(reasoning_of(cut))
    empty = respond(client, "SC21")
    assert ([item["type"] for item in empty["output"]], text_of(empty)) == (["message"], "answer21")


def test_sealed_reasoning_keeps_the_prefix(client: httpx.Client) -> None:
    """What an agent without a store gives back costs the same prompt as what a store keeps."""
    fields = {"include": ["reasoning.encrypted_content"]}
    first = respond(client, "SC15", **fields)
    reasoning, message = first["output"]
    del reasoning["content"]
    items = [{"role": "user", "content": "SC15"}, reasoning, message, {"role": "user", "content": "SC04"}]
    sealed = respond(client, items)
    stored = client.post(RESPONSES, json=asked("SC15", store=True)).json()
    by_id = respond(client, "SC04", previous_response_id=stored["id"])
    assert sealed["usage"]["input_tokens"] == by_id["usage"]["input_tokens"]
    client.delete(f"{RESPONSES}/{stored['id']}")


# --- counts, prewarm, diagnostics ------------------------------------------------------------------------------------


def test_counted_as_billed(client: httpx.Client) -> None:
    """With instructions and tools."""
    prompt = {"model": MODEL, "input": "SC04", "instructions": "Be brief.", "tools": TOOLS}
    counted = client.post(f"{RESPONSES}/input_tokens", json=prompt).json()
    billed = client.post(RESPONSES, json=prompt).json()["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": billed}


def test_prewarm_and_diagnosis(client: httpx.Client) -> None:
    """A prewarm generates nothing, and the next request finds its prompt; asked why, the answer says hit, or what was
    changed, and of whom nothing is known."""
    instructions = "prewarm " + "word " * 700
    prompt = {"instructions": instructions, "prompt_cache_options": {"prewarm": True}}
    warmed = client.post(RESPONSES, json=asked("SC04", **prompt)).json()
    assert (warmed["status"], warmed["output"], warmed["usage"]["output_tokens"]) == ("completed", [], 0)

    def compared(earlier: str, **fields: Any) -> dict[str, Any]:
        options = {"prompt_cache_options": {"comparison_response_id": earlier}}
        return client.post(RESPONSES, json=asked("SC04", **{"instructions": instructions, **options, **fields})).json()

    hit = compared(warmed["id"])
    assert hit["usage"]["input_tokens_details"]["cached_tokens"] >= 512
    assert hit["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    changed = compared(hit["id"], instructions="Another. " + instructions)["prompt_cache_diagnostics"]
    assert (changed["type"], changed["reason"]) == ("cache_miss", "input_changed")
    tools = compared(hit["id"], tools=TOOLS)["prompt_cache_diagnostics"]
    assert (tools["type"], tools["reason"], tools["cache_missed_tokens"] > 0) == ("cache_miss", "tools_changed", True)
    assert compared("resp_nobody")["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    assert client.get(f"/v1/requests/{hit['id']}/explain").status_code == 200


# --- stored ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(script_model: Path) -> Iterator[LiveService]:
    """A service with two keys, and one row, so that one request keeps it busy."""
    with live_service({MODEL: script_model}, settings_toml="worker.max_rows = 1\n") as live:
        live.add_key("alice")
        live.add_key("bob")
        yield live
        assert_serves(live, MODEL, key=live.keys["alice"])


def test_g05_two_turns_and_somebody_else(keyed: LiveService) -> None:
    """G05: what was said is replayed, by its key's id only; what was not stored, or is unknown, is 404."""
    with keyed.client(key=keyed.keys["alice"]) as alice, keyed.client(key=keyed.keys["bob"]) as bob:
        first = alice.post(RESPONSES, json=asked("SC04", store=True)).json()
        second = alice.post(RESPONSES, json=asked("SC19", previous_response_id=first["id"])).json()
        whole = [{"role": "user", "content": "SC04"}, *first["output"], {"role": "user", "content": "SC19"}]
        sent = alice.post(RESPONSES, json=asked(whole)).json()
        assert text_of(second) == text_of(sent) == said_by("SC19")
        assert second["usage"]["input_tokens"] == sent["usage"]["input_tokens"]
        assert (first["store"], second["store"]) == (True, False)
        for client, previous in ((bob, first["id"]), (alice, second["id"]), (alice, "resp_unknown")):
            error = refused(client, "SC04", 404, "previous_response_id", previous_response_id=previous)
            assert (error["code"], "store: true" in error["message"]) == ("previous_response_not_found", True)
        assert bob.get(f"{RESPONSES}/{first['id']}").status_code == 404
        assert alice.get(f"{RESPONSES}/{first['id']}").json() == first


def test_what_is_stored_is_private_and_outlives_a_restart(script_model: Path) -> None:
    """The file is its owner's only; no text is in the log; a stop loses nothing, and a kill leaves no response that is
    for ever in progress."""
    with live_service({MODEL: script_model}) as service:
        with service.client() as client:
            kept = client.post(RESPONSES, json=asked("SC04 stored-secret", store=True)).json()
            files = [path for path in service.home.iterdir() if path.name.startswith("responses.sqlite3")]
            assert files
            assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
            assert "stored-secret" not in service.log
        service.stop()
        service.start()
        with service.client() as client:
            assert client.get(f"{RESPONSES}/{kept['id']}").json() == kept
            running = client.post(RESPONSES, json=ENDLESS).json()
            path = f"{RESPONSES}/{running['id']}"
            until("it runs", lambda: client.get(path).json()["status"] == "in_progress")
        service.kill_everything()
        service.start()
        with service.client() as client:
            lost = client.get(path).json()
            assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
            again = client.post(RESPONSES, json=asked("SC04", previous_response_id=kept["id"])).json()
            assert text_of(again) == SC04


def test_a_stop_fails_what_runs_in_the_background(script_model: Path) -> None:
    """It has the drain's time to end, and is then failed, not forgotten."""
    with live_service({MODEL: script_model}, settings_toml="drain_seconds = 0.2\n") as service:
        with service.client() as client:
            running = client.post(RESPONSES, json=ENDLESS).json()
            path = f"{RESPONSES}/{running['id']}"
            until("it runs", lambda: client.get(path).json()["status"] == "in_progress")
        service.stop()
        service.start()
        with service.client() as client:
            assert client.get(path).json()["status"] == "failed"


def test_in_the_background(keyed: LiveService) -> None:
    """Answered at once though the only row is taken, found done later though its client had left; cancelling frees
    the row."""
    with keyed.client(key=keyed.keys["alice"]) as client:
        hog = client.post(RESPONSES, json=ENDLESS).json()
        until("it runs", lambda: client.get(f"{RESPONSES}/{hog['id']}").json()["status"] == "in_progress")
        waiting = client.post(RESPONSES, json=asked("SC04", store=True, background=True)).json()
        assert (waiting["status"], waiting["service_tier"]) == ("queued", "flex")
        cancelled = client.post(f"{RESPONSES}/{hog['id']}/cancel").json()
        assert cancelled["status"] == "cancelled"

        def done() -> bool:
            return client.get(f"{RESPONSES}/{waiting['id']}").json()["status"] == "completed"

        until("the one that waited is done", done)
        assert text_of(client.get(f"{RESPONSES}/{waiting['id']}").json()) == SC04
    keyed.until_idle(MODEL)


# --- the SDK ---------------------------------------------------------------------------------------------------------


def test_the_sdk_runs_an_agents_loop(service: LiveService, client: httpx.Client) -> None:
    """openai-python: stream, take the items, answer the call, go on; and the same by ids."""
    del client  # afterwards the service must still serve
    tools: list[Any] = TOOLS
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="any", max_retries=0) as sdk:
        with sdk.responses.stream(model=MODEL, input="SC08", tools=tools, store=True) as stream:
            kinds = {event.type for event in stream}
            first = stream.get_final_response()
        assert {"response.function_call_arguments.done", "response.completed"} <= kinds
        (call,) = first.output
        assert call.type == "function_call"
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7 °C"}
        said: Any = {"role": "user", "content": "SC04"}
        by_id = sdk.responses.create(model=MODEL, previous_response_id=first.id, input=[output, said], tools=tools)
        items: Any = [{"role": "user", "content": "SC08"}, call.to_dict(), output, said]
        by_items = sdk.responses.create(model=MODEL, input=items, tools=tools)
        assert by_id.output_text == by_items.output_text == SC04
        assert by_id.usage is not None
        assert by_items.usage is not None
        assert by_id.usage.input_tokens == by_items.usage.input_tokens
        listed = sdk.responses.input_items.list(first.id)
        assert [item.type for item in listed.data] == ["message"]
        sdk.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(first.id)
        assert sdk.responses.input_tokens.count(model=MODEL, input="SC04").input_tokens > 0
