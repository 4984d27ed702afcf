"""What the contracts say beside the answer itself: headers, bills, lists, keys; and the SDKs' own helpers, live."""
# pyright: basic

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from tests.cases.conftest import MODEL, TAGGED
from tests.fakes.every_client import PATHS, EveryClient
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.same_conversation import DIALECTS, Dialect, in_dialect
from tests.fakes.script_model import said_by

SC04 = said_by("SC04")
PAGE = "https://chat.example.org"
SAID: list[Any] = [{"role": "user", "content": "SC04"}]


@pytest.fixture(scope="module")
def shared_clients(service: LiveService) -> Iterator[EveryClient]:
    clients = EveryClient(service)
    yield clients
    clients.close()


@pytest.fixture
def clients(shared_clients: EveryClient) -> Iterator[EveryClient]:
    yield shared_clients
    shared_clients.assert_served(MODEL)


def body(dialect: Dialect, **fields: Any) -> dict[str, Any]:
    return in_dialect(dialect, {"model": MODEL, "max_tokens": 300, "messages": SAID}) | fields


# --- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_headers_of_an_answer(clients: EveryClient, dialect: Dialect, stream: bool) -> None:  # noqa: FBT001
    """A sane id of the client's comes back, any other is replaced; each SDK finds its own header; streams are not
    buffered; a key without limits hears of none; what SDKs say of themselves is tolerated."""
    sent = {
        "x-request-id": "mine-1",
        "x-client-request-id": "c1",
        "x-stainless-retry-count": "1",
        "x-stainless-read-timeout": "600",
        "anthropic-beta": "some-beta-2031-01-01,another",
        "anthropic-version": "2099-01-01",
    }
    answer = clients.http.post(PATHS[dialect] + "?beta=true", json=body(dialect, stream=stream), headers=sent)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine-1")
    if dialect == "messages":
        assert answer.headers["request-id"].startswith("req_")
    else:
        assert int(answer.headers["openai-processing-ms"]) >= 0
    if stream:
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
    assert [name for name in answer.headers if "ratelimit" in name or name.startswith("access-control")] == []
    odd = clients.http.post(PATHS[dialect], json=body(dialect, max_tokens=0), headers={"x-request-id": "a b" * 50})
    assert odd.headers["x-request-id"].startswith("req_")


def test_bills_have_every_field(clients: EveryClient) -> None:
    """The details of each dialect's usage are whole, so that no client stumbles over what is not there."""
    chat = clients.http.post(PATHS["chat"], json=body("chat")).json()["usage"]
    assert chat["prompt_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens", "audio_tokens"}
    assert chat["completion_tokens_details"].keys() == {
        "reasoning_tokens",
        "audio_tokens",
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
    }
    message = clients.http.post(PATHS["messages"], json=body("messages")).json()["usage"]
    assert message["cache_creation"].keys() == {"ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"}
    response = clients.http.post(PATHS["responses"], json=body("responses")).json()["usage"]
    assert response["input_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens"}
    assert response["output_tokens_details"].keys() == {"reasoning_tokens"}
    assert chat["prompt_tokens"] == response["input_tokens"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/", 200),
        ("HEAD", "/v1/models", 200),
        ("OPTIONS", "/v1/chat/completions", 204),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/messages", 405),
        ("POST", "/v1/none", 404),
    ],
)
def test_other_methods(clients: EveryClient, method: str, path: str, status: int) -> None:
    """HEAD and OPTIONS are answered without a body; a wrong method names the right ones, in the envelope."""
    answer = clients.http.request(method, path)
    assert answer.status_code == status
    if status == 405:
        assert "POST" in answer.headers["allow"]
    if status >= 400:
        assert answer.json()["error"]["message"]
    else:
        assert answer.content == b""


# --- lists ------------------------------------------------------------------------------------------------------------


def test_models_in_both_shapes(clients: EveryClient) -> None:
    """Both SDKs list and retrieve every id, one with a slash and a tag too, and page through the list."""
    assert {model.id for model in clients.openai.models.list()} == {MODEL, TAGGED}
    assert {model.id for model in clients.anthropic.models.list(limit=1)} == {MODEL, TAGGED}
    for model_id in (MODEL, TAGGED):
        model = clients.openai.models.retrieve(model_id)
        assert (model.id, model.object, model.owned_by) == (model_id, "model", "mlxd")
        more = model.model_extra
        assert more is not None
        assert more["max_model_len"] == more["context_length"] == more["max_input_tokens"] == 4096
        named = clients.anthropic.models.retrieve(model_id)
        assert (named.id, named.type, named.max_input_tokens, bool(named.display_name)) == (
            model_id,
            "model",
            4096,
            True,
        )
        assert named.created_at.tzinfo is not None


def test_logprobs_of_the_legacy_route(clients: EveryClient) -> None:
    """Each token has its offset in the text, its probability and the alternatives asked for; a stream says the same."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": "<|SC04|>", "max_tokens": 30, "logprobs": 2}
    whole = clients.openai.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.tokens is not None
    assert "".join(whole.logprobs.tokens) == whole.text == SC04
    lengths = [len(token) for token in whole.logprobs.tokens]
    assert whole.logprobs.text_offset == [sum(lengths[:index]) for index in range(len(lengths))]
    assert all(len(top) == 2 for top in whole.logprobs.top_logprobs or [{}])
    chunks = clients.openai.completions.create(**asked, stream=True)
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    assert [offset for one in told if one for offset in one.text_offset or ()] == whole.logprobs.text_offset


# --- the SDKs' helpers ------------------------------------------------------------------------------------------------


class Verdict(pydantic.BaseModel):
    """What an answer must be."""

    right: bool


def test_openais_parse_helpers(clients: EveryClient) -> None:
    """A class goes in and an object of it comes out: both APIs, whole and streamed; a streamed call is one, too."""
    sdk = clients.openai
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    parsed = sdk.chat.completions.parse(**asked, response_format=Verdict).choices[0].message.parsed
    assert isinstance(parsed, Verdict)
    with sdk.chat.completions.stream(**asked, response_format=Verdict) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Verdict)
    response = sdk.responses.parse(model=MODEL, input="hello", temperature=0, text_format=Verdict)
    assert isinstance(response.output_parsed, Verdict)
    with sdk.responses.stream(model=MODEL, input="hello", temperature=0, text_format=Verdict) as events:
        assert isinstance(events.get_final_response().output_parsed, Verdict)


def test_anthropics_parse_helpers(clients: EveryClient) -> None:
    """The same of Anthropic's SDK, its beta half too; and its runner of tools goes through a whole loop."""
    sdk = clients.anthropic
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "hello"}]}
    assert isinstance(sdk.messages.parse(**asked, output_format=Verdict).parsed_output, Verdict)
    assert isinstance(sdk.beta.messages.parse(**asked, output_format=Verdict).parsed_output, Verdict)
    seen: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather."""
        seen.append(city)
        return "sunny"

    asked["messages"] = [{"role": "user", "content": "SC08"}]
    runner = sdk.beta.messages.tool_runner(**asked, tools=[get_weather], max_iterations=2)
    kinds = [[block.type for block in message.content] for message in runner]
    assert (kinds[0], seen[0]) == (["tool_use"], "Oslo")
    assert sdk.messages.count_tokens(model=MODEL, messages=SAID).input_tokens > 0
    assert (
        sdk.beta.messages.create(model=MODEL, max_tokens=30, messages=SAID, betas=["b-2031"]).stop_reason == "end_turn"
    )


def test_g05_stored_responses_through_the_sdk(clients: EveryClient) -> None:
    """G05: what was stored is replayed; what was not is an error, never an answer that forgot."""
    sdk = clients.openai.responses
    first = sdk.create(model=MODEL, input="remember this: " + "x" * 100, store=True)
    second = sdk.create(model=MODEL, input="SC04", previous_response_id=first.id)
    alone = sdk.create(model=MODEL, input="SC04")
    assert second.usage is not None
    assert alone.usage is not None
    assert second.usage.input_tokens > alone.usage.input_tokens + 100
    assert (sdk.retrieve(first.id).id, second.output_text) == (first.id, SC04)
    sdk.delete(first.id)
    for gone in (first.id, alone.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            sdk.create(model=MODEL, input="SC04", previous_response_id=gone)


# --- G03 --------------------------------------------------------------------------------------------------------------


def results(clients: EveryClient, content: object, **fields: Any) -> int:
    """The length of a prompt whose history holds a tool's result; None leaves its content out."""
    block = {"type": "tool_result", "tool_use_id": "t1", **fields} | ({} if content is None else {"content": content})
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}}
    said = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [block, text("SC04")]}]
    outcome = clients.send("messages", body("messages", messages=[{"role": "user", "content": "w"}, *said]))
    assert (outcome.status, outcome.text) == (200, SC04), outcome
    return outcome.prompt_tokens


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_g03_results_of_every_shape(clients: EveryClient) -> None:
    """G03: texts are joined in order, nothing is needed, an error is visible, and no picture's data is in the prompt.
    In this model's tokenizer every character is a token."""
    joined = results(clients, "ab")
    assert results(clients, [text("a"), text("b")]) == joined
    assert results(clients, []) == results(clients, None) == results(clients, "") == joined - 2
    assert results(clients, "ab", is_error=True) > joined
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 3000}}
    assert joined < results(clients, [picture, text("ab")]) < joined + 100


# --- G01, and pages ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(service: LiveService) -> Iterator[tuple[LiveService, str]]:
    """A service with one key and one page that may call."""
    folder = (service.home / "models" / MODEL).resolve()
    with live_service({MODEL: folder}, settings_toml=f'allowed_origins = ["{PAGE}"]\n') as live:
        key = live.add_key("ann")
        with live.client() as stranger:
            until("the key is asked for", lambda: stranger.get("/v1/models").status_code == 401)
        yield live, key


def test_g01_either_header_opens_every_dialect(keyed: tuple[LiveService, str]) -> None:
    """G01: each SDK's way to send a key opens each dialect, whatever foreign key stands beside it; none is a 401."""
    live, key = keyed
    ways: tuple[tuple[dict[str, str], dict[str, str]], ...] = (
        ({"api_key": key}, {}),
        ({"auth_token": key}, {}),
        ({"auth_token": key}, {"x-api-key": "sk-ant-foreign"}),
        ({"auth_token": "foreign"}, {"x-api-key": key}),
    )
    for arguments, headers in ways:
        with anthropic.Anthropic(base_url=live.base_url, max_retries=0, **arguments) as sdk:  # pyright: ignore[reportArgumentType]
            message = sdk.messages.create(model=MODEL, max_tokens=30, messages=SAID, extra_headers=headers)
            assert message.stop_reason == "end_turn"
    with openai.OpenAI(base_url=f"{live.base_url}/v1", api_key=key, max_retries=0) as sdk:
        assert sdk.chat.completions.create(model=MODEL, messages=SAID).choices[0].message.content == SC04
        assert sdk.responses.create(model=MODEL, input="SC04").output_text == SC04
    with openai.OpenAI(base_url=f"{live.base_url}/v1", api_key="sk-foreign", max_retries=0) as sdk:
        found = sdk.chat.completions.create(model=MODEL, messages=SAID, extra_headers={"x-api-key": key})
        assert found.choices[0].message.content == SC04
        with pytest.raises(openai.AuthenticationError):
            sdk.responses.create(model=MODEL, input="SC04")
    with (
        anthropic.Anthropic(base_url=live.base_url, api_key="wrong", max_retries=0) as sdk,
        pytest.raises(anthropic.AuthenticationError),
    ):
        sdk.messages.create(model=MODEL, max_tokens=30, messages=SAID)


def test_a_listed_page_can_call(keyed: tuple[LiveService, str]) -> None:
    """CORS: a browser's question needs no key; the stream, the answer and the refusal may all be read by the page, and
    another page gets nothing."""
    live, key = keyed
    with live.client() as client:
        question = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        asked = client.options(PATHS["chat"], headers=question)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, PAGE)
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for headers, fields, status in (
            ({"authorization": f"Bearer {key}"}, {"stream": True}, 200),
            ({"authorization": f"Bearer {key}"}, {}, 200),
            ({"authorization": f"Bearer {key}"}, {"model": "none"}, 404),
            ({}, {}, 401),
        ):
            answer = client.post(PATHS["chat"], json=body("chat", **fields), headers={**headers, "origin": PAGE})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        other = client.options(PATHS["chat"], headers=question | {"origin": "https://evil.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers
