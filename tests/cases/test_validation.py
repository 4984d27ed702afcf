"""Field cases of request validation (C), over real HTTP and a real worker's template."""

import gzip
import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.cases.conftest import MODEL, TAGGED
from tests.fakes.http_answers import CHAT, COMPLETIONS, Answer, ask, ask_whole, body
from tests.fakes.live_service import LiveService
from tests.fakes.script_model import CONTEXT_TOKENS, said_by

SC04 = said_by("SC04")
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}


def refused(client: httpx.Client, status: int, param: str | None, path: str = CHAT, **fields: Any) -> Answer:
    """Both modes refuse this, and name the field."""
    prompt: dict[str, Any] = {"prompt": "<|SC04|>"} if path == COMPLETIONS else {"said": "SC04"}
    answer = ask(client, body(MODEL, **prompt, **fields), path=path)
    assert answer.status == status, answer
    assert answer.error is not None
    assert answer.error["param"] == param, answer.error
    return answer


# --- C01, C02 --------------------------------------------------------------------------------------------------------

NULLABLE = (
    *(
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "tools",
        "n",
        "user",
        "logit_bias",
    ),
    *("presence_penalty", "frequency_penalty", "response_format", "tool_choice", "stream_options", "metadata"),
)


def test_c01_null_is_absent(client: httpx.Client) -> None:
    """C01: the SDKs' types allow null for what is optional, and clients send it."""
    answer = ask(client, body(MODEL, said="SC04", **dict.fromkeys(NULLABLE)))
    assert (answer.status, answer.text) == (200, SC04)


@pytest.mark.parametrize("value", [0, -1, True, "5", 5.5, [5]])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c01_a_count_is_a_positive_integer(client: httpx.Client, path: str, name: str, value: object) -> None:
    """C01: zero, negative, bool, string and float are the client's mistakes, and the field is named."""
    refused(client, 400, name, path, **{name: value})


def test_c01_a_huge_count_means_what_is_left(client: httpx.Client) -> None:
    """C01: a huge max_tokens is clipped to the context; no buffer of that size is ever made."""
    answer = ask(client, body(MODEL, said="SC04", max_tokens=999_999_999_999_999))
    assert (answer.text, answer.finish) == (SC04, "stop")


def test_c01_the_newer_name_wins(client: httpx.Client) -> None:
    """C01: max_completion_tokens wins when both are there."""
    answer = ask(client, body(MODEL, said="SC19", max_tokens=300, max_completion_tokens=3))
    assert (answer.completion_tokens, answer.finish) == (3, "length")


@pytest.mark.parametrize(("name", "value"), [("n", 33), ("n", 0), ("n", "1"), ("best_of", 2)])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c02_never_silently_one_choice(client: httpx.Client, path: str, name: str, value: object) -> None:
    """C02: what cannot be had is refused, not answered with one choice."""
    refused(client, 400, name, path, **{name: value})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c02_as_many_choices_as_were_asked_for(client: httpx.Client, path: str) -> None:
    """C02: n choices, each whole and under its own index, in one bill; a stream of them says the same."""
    request = {"model": MODEL, "n": 3, "max_tokens": 300}
    if path == CHAT:
        request["messages"] = [{"role": "user", "content": "SC04"}]
    else:
        request["prompt"] = "SC04"
    whole = client.post(path, json=request).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in whole["choices"]]
    assert len(set(texts)) == 1
    assert whole["usage"]["completion_tokens"] % 3 == 0
    streamed = ["", "", ""]
    finishes: list[int] = []
    lines = client.post(path, json={**request, "stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    for line in lines[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "") if path == CHAT else choice["text"]
            finishes += [choice["index"]] if choice["finish_reason"] else []
    assert (streamed, sorted(finishes)) == (texts, [0, 1, 2])


@pytest.mark.parametrize("value", [1, None])
def test_c02_one_choice_is_fine(client: httpx.Client, value: object) -> None:
    """C02: n of 1 or null is what everybody gets."""
    assert ask(client, body(MODEL, said="SC04", n=value)).text == SC04


# --- C03 to C08: messages --------------------------------------------------------------------------------------------


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def conversation(*messages: dict[str, Any]) -> dict[str, Any]:
    return body(MODEL, messages=list(messages))


def said(role: str, content: object, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def test_c03_parts_are_joined_in_order(client: httpx.Client) -> None:
    """C03: text parts of any role are joined, nothing between them, nothing lost: as one string they count the same."""
    split = ask(
        client,
        conversation(
            said("system", parts("be ", "brief")),
            said("user", parts("hel", "lo")),
            said("assistant", parts("let me ", "look"), tool_calls=[CALL]),
            said("tool", parts("su", "nny"), tool_call_id="call_1"),
            said("user", parts("SC", "04")),
        ),
    )
    joined = ask(
        client,
        conversation(
            said("system", "be brief"),
            said("user", "hello"),
            said("assistant", "let me look", tool_calls=[CALL]),
            said("tool", "sunny", tool_call_id="call_1"),
            said("user", "SC04"),
        ),
    )
    assert split.text == joined.text == SC04
    assert split.prompt_tokens == joined.prompt_tokens
    assert split.cached_tokens == 0 or joined.cached_tokens > 0


@pytest.mark.parametrize("content", [[], [{"type": "text", "text": 123}], [{"type": "text"}], [{"text": "x"}], 5, {}])
def test_c03_what_is_no_text_is_refused(client: httpx.Client, content: object) -> None:
    """C03: an empty list, a non-string text or an untyped part is a 400, never a crash and never dropped."""
    answer = ask(client, conversation(said("user", content)))
    assert answer.status == 400
    assert answer.error is not None
    assert str(answer.error["param"]).startswith("messages[")


def completed(client: httpx.Client, *messages: dict[str, Any]) -> Answer:
    answer = ask(client, conversation(*messages))
    assert (answer.status, answer.text) == (200, SC04), answer
    return answer


def test_c04_a_system_message_in_the_middle(client: httpx.Client) -> None:
    """C04: a later system message is kept, once, and earlier tokens stay what they were, so their cache stays good."""
    head = [said("user", "first " + "word " * 80), said("assistant", "yes")]
    completed(client, *head, said("user", "SC04"))
    with_note = completed(client, *head, said("system", "znote"), said("user", "SC04"))
    without = completed(client, *head, said("user", "SC04"))
    # In this tokenizer every character is a token: the note and a blank line, once.
    assert with_note.prompt_tokens - without.prompt_tokens == len("znote\n\n")
    assert with_note.cached_tokens > 400


def test_c04_two_leading_system_messages(client: httpx.Client) -> None:
    """C04: both instructions are in the prompt, once each."""
    two = completed(client, said("system", "aaaa"), said("system", "bbbb"), said("user", "SC04"))
    one = completed(client, said("system", "aaaa\n\nbbbb"), said("user", "SC04"))
    assert two.prompt_tokens == one.prompt_tokens


def test_c05_developer_is_system(client: httpx.Client) -> None:
    """C05: the role developer is handled as system, alone or before a system message; it is never dropped."""
    developer = completed(client, said("developer", "aaaa"), said("user", "SC04"))
    system = completed(client, said("system", "aaaa"), said("user", "SC04"))
    assert developer.prompt_tokens == system.prompt_tokens
    both = completed(client, said("developer", "aaaa"), said("system", "bbbb"), said("user", "SC04"))
    assert both.prompt_tokens == system.prompt_tokens + len("\n\nbbbb")


@pytest.mark.parametrize("role", ["wizard", "", "System"])
def test_c05_an_unknown_role_is_named(client: httpx.Client, role: str) -> None:
    """C05: an unknown role is a 400 that says which message."""
    answer = ask(client, conversation(said("user", "SC04"), said(role, "x")))
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["param"] == "messages[1].role"


@pytest.mark.parametrize("turn", [{"content": None}, {}])
def test_c07_an_assistant_without_content(client: httpx.Client, turn: dict[str, Any]) -> None:
    """C07: null or missing content beside tool calls is empty text, never the word None."""
    empty = said("assistant", "", tool_calls=[CALL])
    result = said("tool", "sunny", tool_call_id="call_1")
    absent = {"role": "assistant", "tool_calls": [CALL], **turn}
    first = completed(client, said("user", "weather?"), absent, result, said("user", "SC04"))
    second = completed(client, said("user", "weather?"), empty, result, said("user", "SC04"))
    assert first.prompt_tokens == second.prompt_tokens


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": "user"}])
def test_c07_a_user_must_say_something(client: httpx.Client, message: dict[str, Any]) -> None:
    """C07: null content of a user is a 400."""
    answer = ask(client, conversation(message))
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["param"] == "messages[0].content"


@pytest.mark.parametrize("url", ["data:image/png;base64,iVBORw0KGgo=", "http://127.0.0.1:9/x"])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_c08_no_image_for_a_text_model(client: httpx.Client, role: str, url: str) -> None:
    """C08: an image is refused, not dropped, and no URL is ever fetched."""
    image = {"type": "image_url", "image_url": {"url": url}}
    message = said(role, [*parts("SC04"), image])
    answer = ask(client, conversation(said("user", "look"), message))
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["param"] == "messages[1].content[1]"
    assert "127.0.0.1" not in answer.error["message"]


def test_c08_a_tools_image_leaves_a_visible_gap(client: httpx.Client) -> None:
    """C08: a tool's picture does not end the conversation: the model reads that there was one, and none of its data."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
    call = said("assistant", None, tool_calls=[CALL])
    seen = completed(
        client,
        said("user", "look"),
        call,
        said("tool", [*parts("x"), image], tool_call_id="call_1"),
        said("user", "SC04"),
    )
    bare = completed(
        client, said("user", "look"), call, said("tool", parts("x"), tool_call_id="call_1"), said("user", "SC04")
    )
    assert seen.prompt_tokens == bare.prompt_tokens + len("[image: left out, since this model reads text only]")


# --- C09 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c09_a_prompt_over_the_context(client: httpx.Client, path: str) -> None:
    """C09: refused before any prefill, with both numbers and the code that clients look for."""
    text = "y" * 6000
    prompt: dict[str, Any] = {"prompt": text} if path == COMPLETIONS else {"said": text}
    answer = ask(client, body(MODEL, **prompt), path=path)
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["code"] == "context_length_exceeded"
    assert answer.error["param"] == ("prompt" if path == COMPLETIONS else "messages")
    assert str(CONTEXT_TOKENS) in answer.error["message"]
    assert any(str(6000 + more) in answer.error["message"] for more in range(50))


def test_c09_generation_stops_at_the_limit(client: httpx.Client) -> None:
    """C09: a prompt that fits is served, up to the context's end: finish length, and the sum is the limit."""
    answer = ask(client, body(MODEL, said="SC20 " + "y" * 4000, max_tokens=3000))
    assert answer.finish == "length"
    assert answer.prompt_tokens + answer.completion_tokens == CONTEXT_TOKENS


# --- C10 -------------------------------------------------------------------------------------------------------------

GOOD = json.dumps(body(MODEL, said="SC04")).encode()
JSON = {"Content-Type": "application/json"}
BROKEN_BODIES: dict[str, tuple[bytes, dict[str, str], int]] = {
    "cut": (b'{"model":', JSON, 400),
    "a list": (b"[]", JSON, 400),
    "empty": (b"", JSON, 400),
    "byte ff": (GOOD.replace(b"SC04", b"\xff"), JSON, 400),
    "NaN": (GOOD.replace(b"300", b'300, "temperature": NaN'), JSON, 400),
    "infinite": (GOOD.replace(b"300", b'300, "temperature": 1e999'), JSON, 400),
    "huge integer": (GOOD.replace(b"300", b"1" + b"0" * 30), JSON, 200),
    "BOM": (b"\xef\xbb\xbf" + GOOD, JSON, 400),
    "surrogate": (GOOD.replace(b"SC04", b"\\ud83d"), JSON, 400),
    "deep": (GOOD.replace(b'"SC04"', b"[" * 100_000 + b"]" * 100_000), JSON, 400),
    "gzip": (gzip.compress(GOOD), {**JSON, "Content-Encoding": "gzip"}, 415),
    "text": (GOOD, {"Content-Type": "text/plain"}, 415),
    "form": (b"model=script", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
}


@pytest.mark.parametrize("name", BROKEN_BODIES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.usefixtures("client")
def test_c10_broken_bodies(service: LiveService, path: str, name: str) -> None:
    """C10: 400 or 415 in the API's envelope, and the same connection serves the next request."""
    data, headers, status = BROKEN_BODIES[name]
    address = urlsplit(service.base_url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    connection.connect()
    socket = connection.sock
    try:
        if not (status == 200 and path == COMPLETIONS):
            connection.request("POST", path, data, headers)
            answer = connection.getresponse()
            document = json.loads(answer.read())
            assert answer.status == status, document
            if status != 200:
                assert document["error"].keys() == {"message", "type", "param", "code"}
                assert document["error"]["type"] == "invalid_request_error"
        connection.request("POST", CHAT, GOOD, JSON)
        again = connection.getresponse()
        assert (again.status, connection.sock) == (200, socket)
        assert json.loads(again.read())["choices"][0]["message"]["content"] == SC04
    finally:
        connection.close()


# --- C11, C12 --------------------------------------------------------------------------------------------------------


def test_c11_every_listed_id_can_be_retrieved(client: httpx.Client) -> None:
    """C11: slashes, colons and their escapes: whatever the list shows can be looked up, and comes back as asked."""
    listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert listed == sorted([MODEL, TAGGED])
    for name in listed:
        for spelled in {name, name.replace("/", "%2F"), name.replace("/", "%2f").replace(":", "%3A")}:
            found = client.get(f"/v1/models/{spelled}")
            assert (found.status_code, found.json()["id"]) == (200, name)


def test_c11_the_answer_names_the_id_asked_for(service: LiveService, client: httpx.Client) -> None:
    """C11: `model` in the answer is the id asked for, slash and tag and all, for the SDK too."""
    assert ask(client, body(TAGGED, said="SC04")).model == TAGGED
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="any", max_retries=0) as sdk:
        assert sdk.models.retrieve(TAGGED).id == TAGGED
        assert TAGGED in [model.id for model in sdk.models.list()]


@pytest.mark.parametrize("name", ["", "no/such", "script ", "Script", "mlx-community/SmolLM2-135M", "org/name"])
def test_c11_an_unknown_model_is_unknown_at_once(service: LiveService, client: httpx.Client, name: str) -> None:
    """C11: 404 model_not_found without a look-up anywhere: no default model, no other model, no process."""
    started = time.monotonic()
    answer = ask(client, body(name, said="SC04"))
    assert time.monotonic() - started < 2.0
    assert answer.status == 404
    assert answer.error is not None
    assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")
    assert {model.name for model in service.status().models} == {MODEL, TAGGED}


def test_c11_the_sdk_asks_once(service: LiveService) -> None:
    """C11: a 404 is not retried, and raises what callers catch."""
    with (
        openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="any") as sdk,
        pytest.raises(openai.NotFoundError) as raised,
    ):
        sdk.chat.completions.create(model="no/such", messages=[{"role": "user", "content": "x"}])
    assert raised.value.code == "model_not_found"


def test_c11_null_is_no_model(client: httpx.Client) -> None:
    """C11: model null, or none at all, is a 400 that names the field."""
    assert ask(client, {**body(MODEL, said="x"), "model": None}).status == 400
    request = body(MODEL, said="x")
    del request["model"]
    answer = ask_whole(client, request)
    assert (answer.status, (answer.error or {}).get("param")) == (400, "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"temperature": 3}, "temperature"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c12_no_option_is_silently_ignored(client: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    """C12: what would change the answer is honoured or refused, on both routes alike."""
    prompt: dict[str, Any] = {"prompt": "<|SC04|>"} if path == COMPLETIONS else {"said": "SC04"}
    answer = ask(client, body(MODEL, **prompt, **fields), path=path)
    assert answer.status == 400, answer
    assert answer.error is not None
    assert answer.error["param"] == param


def test_c12_honoured_options_are_honoured(client: httpx.Client) -> None:
    """C12: logit_bias changes what is drawn; logprobs are there when asked for."""
    end_token = 256  # any token the script does not say: forbidding it changes nothing
    answer = ask(client, body(MODEL, said="SC04", logit_bias={str(end_token): -100}))
    assert answer.text == SC04
    response = client.post(CHAT, json=body(MODEL, said="SC04", logprobs=True, top_logprobs=2))
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == SC04
    assert {len(token["top_logprobs"]) for token in content} == {2}


def test_c12_unknown_fields_are_ignored_and_named(client: httpx.Client) -> None:
    """C12: new SDKs add fields weekly, so an unknown one is no error; the answer says that nothing was done with it."""
    answer = ask(client, body(MODEL, said="SC04", brand_new_field={"a": 1}))
    assert answer.text == SC04
    assert answer.headers["x-mlxd-ignored-params"] == "brand_new_field"
