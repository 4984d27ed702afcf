"""Embeddings, rerank and tokens from the real service: MiniLM beside a chat model, by the openai SDK and raw HTTP."""

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.http_answers import ask, body, user
from tests.fakes.live_service import LiveService, live_service

EMBEDDER = "minilm"
CHATTER = "script"
SENTENCES = ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
DOCUMENTS = ["Bees make honey.", "Paris is the capital of France.", "France is a country."]
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def service(minilm: Path, script_model: Path) -> Iterator[LiveService]:
    with live_service({EMBEDDER: minilm, CHATTER: script_model}) as live:
        yield live


@pytest.fixture
def client(service: LiveService) -> Iterator[httpx.Client]:
    with service.client() as made:
        yield made


def sdk(service: LiveService) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="any", max_retries=0, timeout=120)


def refused(response: httpx.Response) -> dict[str, Any]:
    """The inside of the error's envelope, which must be a 400 with all four keys."""
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_the_sdk_gets_the_models_published_similarities(service: LiveService) -> None:
    """The SDK asks for base64 unless told otherwise: both forms hold the very same floats, in the inputs' order."""
    with sdk(service) as client:
        by_default = client.embeddings.create(model=EMBEDDER, input=SENTENCES)
        as_floats = client.embeddings.create(model=EMBEDDER, input=SENTENCES, encoding_format="float")
        one = client.embeddings.create(model=EMBEDDER, input=SENTENCES[1])
        cut = client.embeddings.create(model=EMBEDDER, input=SENTENCES[1], dimensions=32)
    vectors = [item.embedding for item in by_default.data]
    assert [item.embedding for item in as_floats.data] == vectors
    assert [item.index for item in by_default.data] == [0, 1, 2, 3]
    assert (by_default.model, by_default.usage.prompt_tokens, by_default.usage.total_tokens) == (EMBEDDER, 29, 29)
    assert [round(dot(vectors[0], other), 3) for other in vectors[1:]] == [0.695, 0.943, 0.257]
    assert one.data[0].embedding == pytest.approx(vectors[1], abs=1e-5)
    length = dot(vectors[1][:32], vectors[1][:32]) ** 0.5
    assert cut.data[0].embedding == pytest.approx([value / length for value in vectors[1][:32]], abs=1e-5)


def test_raw_embeddings(client: httpx.Client) -> None:
    """Floats by default; base64 is float32, little-endian; token ids give what their text gives; what nothing is done
    with is named; the class that was granted as well."""
    asked = {"model": EMBEDDER, "input": "happy dog", "user": "u"}
    response = client.post("/v1/embeddings", json=asked, headers={"x-mlxd-class": "batch"})
    assert response.status_code == 200, response.text
    document = response.json()
    assert document.keys() == {"object", "data", "model", "usage"}
    assert document["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    (item,) = document["data"]
    assert (document["object"], item["object"], item["index"], len(item["embedding"])) == ("list", "embedding", 0, 384)
    assert response.headers["x-mlxd-ignored-params"] == "user"
    assert response.headers["x-mlxd-class"] == "batch"

    packed = client.post("/v1/embeddings", json={**asked, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert struct.unpack("<384f", base64.b64decode(packed)) == pytest.approx(item["embedding"], abs=1e-6)

    tokens = client.post("/tokenize", json={"model": EMBEDDER, "prompt": "happy dog"}).json()["tokens"]
    for given in (tokens, [tokens, tokens]):
        answer = client.post("/v1/embeddings", json={"model": EMBEDDER, "input": given}).json()
        assert answer["data"][-1]["embedding"] == pytest.approx(item["embedding"], abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 385}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [101, 40_000]}, "input"),
        ({"input": [[101], [40_000]]}, "input[1]"),
        ({"input": "word " * 300}, "input"),
        ({"input": ["short", "word " * 300]}, "input[1]"),
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_embeddings_of_nonsense_are_refused_by_field(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """C: a 400 that names the field, never a 500 and never a vector of something else."""
    error = refused(client.post("/v1/embeddings", json={"model": EMBEDDER, **fields}))
    assert error["param"] == param
    if "word" in str(fields):
        assert error["code"] == "context_length_exceeded"
        assert "256" in error["message"]


def test_what_is_too_long_is_cut_only_when_asked(client: httpx.Client) -> None:
    """No text is dropped behind a client's back, and the way out that the refusal names works."""
    asked = {"model": EMBEDDER, "input": "word " * 300, "truncate": True}
    response = client.post("/v1/embeddings", json=asked)
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] == 256


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank(client: httpx.Client, path: str) -> None:
    """Best first, by its place in the request; scores between 0 and 1; as many and with as much as was asked for."""
    asked: dict[str, Any] = {"model": EMBEDDER, "query": QUESTION, "documents": DOCUMENTS}
    whole = client.post(path, json=asked).json()
    assert [result["index"] for result in whole["results"]] == [1, 2, 0]
    scores = [result["relevance_score"] for result in whole["results"]]
    assert scores == sorted(scores, reverse=True)
    assert 0 <= scores[-1] <= scores[0] <= 1
    assert (whole["model"], whole["id"][:7]) == (EMBEDDER, "rerank-")
    assert all("document" not in result for result in whole["results"])
    assert whole["meta"]["tokens"]["input_tokens"] == whole["usage"]["total_tokens"] > 0

    objects = [{"text": text} for text in DOCUMENTS]
    best = client.post(path, json={**asked, "documents": objects, "top_n": 1, "return_documents": True}).json()
    assert [(result["index"], result["document"]) for result in best["results"]] == [(1, {"text": DOCUMENTS[1]})]
    assert best["results"][0]["relevance_score"] == pytest.approx(scores[0], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", {"title": "b"}]}, "documents[1].text"),
        ({"top_n": 0}, "top_n"),
        ({"documents": ["a", "word " * 300]}, "documents[1]"),
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_rerank_of_nonsense_is_refused_by_field(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """As for embeddings."""
    asked = {"model": EMBEDDER, "query": "q", "documents": ["a"], **fields}
    assert refused(client.post("/v1/rerank", json=asked))["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "cannot", "can"),
    [
        ("/v1/chat/completions", {"model": EMBEDDER, "messages": user("hi")}, "generate text", "/v1/embeddings"),
        ("/v1/completions", {"model": EMBEDDER, "prompt": "hi"}, "generate text", "/v1/rerank"),
        ("/v1/embeddings", {"model": CHATTER, "input": "hi"}, "embed", "/v1/chat/completions"),
        ("/v1/rerank", {"model": CHATTER, "query": "q", "documents": ["d"]}, "rerank", "/v1/completions"),
    ],
)
def test_a_model_of_another_kind_says_what_it_is_for(
    client: httpx.Client, path: str, fields: dict[str, Any], cannot: str, can: str
) -> None:
    """A 400 that names the model's own routes, in a stream as well."""
    for more in ({}, {"stream": True}):
        error = refused(client.post(path, json={**fields, **more}))
        assert (error["param"], error["code"]) == ("model", "unsupported")
        assert f"cannot {cannot}" in error["message"]
        assert can in error["message"]


def test_models_say_what_they_can_do(client: httpx.Client) -> None:
    """Before a load by the folder, after it by the process: the same."""
    listed = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    assert listed[EMBEDDER]["capabilities"] == ["embeddings", "rerank"]
    assert {"chat", "completions"} <= set(listed[CHATTER]["capabilities"])
    assert listed[EMBEDDER]["max_model_len"] == 256


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokens(client: httpx.Client, prefix: str) -> None:
    """Text → tokens → text; a chat has exactly the tokens that its answer will be billed for (G02)."""
    asked = {"model": EMBEDDER, "prompt": "happy dog", "return_token_strs": True}
    whole = client.post(f"{prefix}/tokenize", json=asked).json()
    assert whole["token_strs"] == ["[CLS]", "happy", "dog", "[SEP]"]
    assert (whole["count"], whole["max_model_len"]) == (4, 256)
    bare = client.post(f"{prefix}/tokenize", json={**asked, "add_special_tokens": False}).json()
    assert bare["tokens"] == whole["tokens"][1:-1]
    assert client.post(f"{prefix}/tokenize", json={"model": EMBEDDER, "prompt": ""}).json()["count"] == 2
    back = client.post(f"{prefix}/detokenize", json={"model": EMBEDDER, "tokens": bare["tokens"]})
    assert back.json() == {"prompt": "happy dog"}
    nothing = client.post(f"{prefix}/detokenize", json={"model": EMBEDDER, "tokens": []})
    assert nothing.json() == {"prompt": ""}

    chat = body(CHATTER, said="say SC04 in 東京")
    counted = client.post(f"{prefix}/tokenize", json=chat).json()
    assert counted["token_strs"] is None
    assert counted["count"] == len(counted["tokens"]) == ask(client, chat).prompt_tokens


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": user("a")}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": user("a"), "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 2**30]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_tokens_of_nonsense_are_refused_by_field(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    """As for embeddings."""
    error = refused(client.post(path, json={"model": CHATTER, **fields}))
    assert error["param"] == param


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_a_404_and_a_bad_body_a_4xx(client: httpx.Client, path: str) -> None:
    """The same strictness as on every route: E: model names, C: media types and JSON."""
    fields = {"input": "a", "query": "q", "documents": ["d"], "prompt": "p", "tokens": [1]}
    response = client.post(path, json={"model": "nobody", **fields})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert client.post(path, content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert client.post(path, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.get(path).status_code == 405


def test_nothing_of_the_texts_is_logged(service: LiveService, client: httpx.Client) -> None:
    """S02: the log has class, tokens and status of each request, and not one word of it."""
    marker = "MARKERWORD"
    client.post("/v1/embeddings", json={"model": EMBEDDER, "input": f"{marker} one"})
    client.post("/v1/embeddings", json={"model": EMBEDDER, "input": [f"{marker} two " * 200]})
    client.post("/v1/rerank", json={"model": EMBEDDER, "query": f"{marker} q", "documents": [f"{marker} d"]})
    client.post("/tokenize", json={"model": CHATTER, "prompt": f"{marker} three"})
    client.post("/v1/embeddings", json={"model": EMBEDDER, "input": {marker: 1}})
    assert "/v1/embeddings" in service.log
    assert marker.lower() not in service.log.lower()
