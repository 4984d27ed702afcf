"""The field cases of what must be refused, for every client: the same error whole, streamed, over HTTP and in the SDKs.

A refusal is a 4xx in the envelope of the dialect that was asked, before any status line of a stream, and nobody's later
request is the worse for it.
"""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.conftest import MODEL
from tests.fakes.every_client import PATHS, EveryClient
from tests.fakes.live_service import LiveService
from tests.fakes.outcomes import failed
from tests.fakes.same_conversation import DIALECTS, Dialect, in_dialect
from tests.fakes.script_model import CONTEXT_TOKENS


@pytest.fixture(scope="module")
def shared_clients(service: LiveService) -> Iterator[EveryClient]:
    clients = EveryClient(service)
    yield clients
    clients.close()


@pytest.fixture
def clients(shared_clients: EveryClient) -> Iterator[EveryClient]:
    yield shared_clients
    shared_clients.assert_served(MODEL)


def chat(content: object = "SC04", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": content}], **fields}


def messages(*said: tuple[str, object]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in said]}


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
OTHER = {"type": "function", "function": {"name": "get_weather"}}

# what everybody refuses, written as chat has it, and what the three call the field at fault
SHARED: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "A06 a name not in tools": (
        {"tools": [TOOL], "tool_choice": OTHER},
        ("tool_choice", "tool_choice.name", "tool_choice"),
    ),
    "A06 no tools": ({"tool_choice": "required"}, ("tool_choice", "tool_choice", "tool_choice")),
    "A06 no such word": (
        {"tools": [TOOL], "tool_choice": "sometimes"},
        ("tool_choice", "tool_choice.type", "tool_choice"),
    ),
    "C01 negative": ({"max_tokens": -1}, ("max_tokens", "max_tokens", "max_output_tokens")),
    "C01 bool": ({"max_tokens": True}, ("max_tokens", "max_tokens", "max_output_tokens")),
    "C01 float": ({"max_tokens": 5.5}, ("max_tokens", "max_tokens", "max_output_tokens")),
    "C03 no text": (
        messages(("user", [{"type": "text", "text": 123}])),
        ("messages[0].content[0].text", "messages[0].content[0].text", "input[0].content[0].text"),
    ),
    "C03 empty list": (
        messages(("user", [])),
        ("messages[0].content", "messages[0].content", "input[0].content"),
    ),
    "C05 wizard": (
        messages(("user", "SC04"), ("wizard", "x")),
        ("messages[1].role", "messages[1].role", "input[1].role"),
    ),
    "C07 a user says nothing": (
        messages(("user", None)),
        ("messages[0].content", "messages[0].content", "input[0].content"),
    ),
    "too hot": ({"temperature": 3}, ("temperature", "temperature", "temperature")),
    "C11 null": ({"model": None}, ("model", "model", "model")),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", SHARED)
def test_everybody_refuses(clients: EveryClient, name: str, dialect: Dialect) -> None:
    """A06, B08, C01, C03, C05, C07, C11: a 400 that names the field as this dialect calls it."""
    fields, params = SHARED[name]
    outcome = clients.ask(dialect, chat() | fields)
    at = params[DIALECTS.index(dialect)]
    assert (outcome.status, outcome.code) == (400, "invalid_request_error"), outcome
    assert outcome.message.startswith(f"`{at}`: ")
    assert outcome.param == (None if dialect == "messages" else at)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_c09_a_prompt_over_the_context(clients: EveryClient, dialect: Dialect) -> None:
    """C09, B08: refused before the status line, with both numbers, in words that this dialect's clients look for."""
    outcome = clients.ask(dialect, chat("y" * 6000))
    assert outcome.status == 400
    assert str(CONTEXT_TOKENS) in outcome.message
    assert any(str(6000 + more) in outcome.message for more in range(50))
    if dialect == "messages":
        assert outcome.message.startswith("prompt is too long")
    else:
        assert (outcome.code, outcome.param) == (
            "context_length_exceeded",
            "messages" if dialect == "chat" else "input",
        )


@pytest.mark.parametrize("model", ["no/such", "", "../../etc", "script/"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_c11_an_unknown_model(clients: EveryClient, dialect: Dialect, model: str) -> None:
    """C11: 404 in the dialect's own words; no other model answers in its place."""
    outcome = clients.ask(dialect, chat(model=model))
    code = "not_found_error" if dialect == "messages" else "model_not_found"
    assert (outcome.status, outcome.code) == (404, code)


IMAGES: dict[Dialect, dict[str, Any]] = {
    "chat": {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_c08_an_image(clients: EveryClient, dialect: Dialect) -> None:
    """C08: refused by every API with the place where it stands, never dropped, and nothing of it repeated."""
    outcome = clients.ask(dialect, chat([{"type": "text", "text": "SC04"}, IMAGES[dialect]]))
    assert outcome.status == 400
    assert "content[1]" in outcome.message
    assert "iVBOR" not in outcome.message
    assert "127.0.0.1" not in outcome.message


# --- C12: options that change the answer, of whichever API -----------------------------------------------------------

C12: dict[Dialect, tuple[dict[str, Any], ...]] = {
    "chat": (
        {"best_of": 2},
        {"logit_bias": {"x": 1}},
        {"top_logprobs": 2},
        {"response_format": {"type": "json_schema"}},
        {"stream_options": {"include_usage": "yes"}},
        {"suffix": "x"},
    ),
    "messages": (
        {"n": 2},
        {"best_of": 2},
        {"logit_bias": {"1": 1}},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"stop": ["x"]},
        {"functions": [{"name": "f"}]},
    ),
    "responses": (
        {"n": 2},
        {"best_of": 2},
        {"logit_bias": {"1": 1}},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"stop": ["x"]},
        {"functions": [{"name": "f"}]},
    ),
}


@pytest.mark.parametrize(("dialect", "fields"), [(dialect, fields) for dialect in DIALECTS for fields in C12[dialect]])
def test_c12_nothing_that_changes_the_answer_is_ignored(
    clients: EveryClient, dialect: Dialect, fields: dict[str, Any]
) -> None:
    """C12: what this API has no way to honour is a 400 that names it, on every route alike."""
    outcome = clients.send(dialect, in_dialect(dialect, chat()) | fields, clients="http")
    (name,) = fields
    assert outcome.status == 400
    assert outcome.message.startswith(f"`{name}")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_c12_the_future_is_ignored_and_named(clients: EveryClient, dialect: Dialect) -> None:
    """C12: fields that nobody knows yet, and known ones that ask for what is so anyway, end no request."""
    body = in_dialect(dialect, chat()) | {"field_of_next_week": {"a": 1}}
    if dialect == "messages":
        body |= {"n": 1, "logprobs": False, "stop": None, "response_format": None}
    answer = clients.http.post(PATHS[dialect], json=body)
    assert answer.status_code == 200
    assert "field_of_next_week" in answer.headers["x-mlxd-ignored-params"]


# --- C10 -------------------------------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}


def broken(good: bytes) -> dict[str, tuple[bytes, dict[str, str], int]]:
    return {
        "cut": (b'{"model":', JSON, 400),
        "a list": (b"[]", JSON, 400),
        "null": (b"null", JSON, 400),
        "empty": (b"", JSON, 400),
        "byte ff": (good.replace(b"SC04", b"\xff"), JSON, 400),
        "NaN": (good.replace(b"300", b'300, "temperature": NaN'), JSON, 400),
        "BOM": (b"\xef\xbb\xbf" + good, JSON, 400),
        "surrogate": (good.replace(b"SC04", b"\\ud83d"), JSON, 400),
        "deep": (good.replace(b'"SC04"', b"[" * 50_000 + b"]" * 50_000), JSON, 400),
        "gzip": (gzip.compress(good), {**JSON, "Content-Encoding": "gzip"}, 415),
        "text": (good, {"Content-Type": "text/plain"}, 415),
    }


COUNTING: dict[Dialect, str] = {"messages": "/v1/messages/count_tokens", "responses": "/v1/responses/input_tokens"}
ROUTES = [(dialect, path) for paths in (PATHS, COUNTING) for dialect, path in paths.items()]


@pytest.mark.parametrize(("dialect", "path"), ROUTES)
def test_c10_broken_bodies(clients: EveryClient, dialect: Dialect, path: str) -> None:
    """C10: every broken body is told so in the route's own envelope, and the connection goes on."""
    good = json.dumps(in_dialect(dialect, chat())).encode()
    for name, (content, headers, status) in broken(good).items():
        answer = clients.http.post(path, content=content, headers=headers)
        assert failed(dialect, answer.status_code, answer.json()).status == status, name
        assert "connection" not in answer.headers, name
