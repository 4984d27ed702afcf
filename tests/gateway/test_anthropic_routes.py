"""The Messages routes from the request's first byte to the answer's last, in process and over a real socket."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import ClassBounds, ClassLimits, KeyLimits
from gateway.anthropic.instants import rfc3339
from gateway.anthropic.models import ModelInfo, ModelPage, model_info, model_page
from gateway.anthropic_errors import anthropic_error
from gateway.caller import Caller
from gateway.error_envelopes import spoken_api
from gateway.prompt_comparison import PromptComparison
from gateway.replies import Reply
from protocol.failures import Failure, FailureKind
from protocol.generation import Failed, Generate, Prefilling, Queued, RequestEvent, Tokenize, Tokenized, Warm, Work
from protocol.ids import ModelName, RequestId
from tests.fakes.anthropic_app import COUNT, MESSAGES, anthropic_app, joined, named_events
from tests.fakes.openai_app import BROKEN, CREATED, MAX_BODY_BYTES, MODEL, SCOPE, Answer, call, make_desk, served, until
from tests.fakes.scripted_generator import ScriptedGenerator, fails, is_queued_only, says


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}


def error_of(answer: Answer) -> tuple[int, str, str]:
    """Status, type and message; asserts the envelope."""
    assert answer.json.keys() == {"type", "error", "request_id"}
    assert answer.json["type"] == "error"
    assert answer.json["request_id"].startswith("req_")
    return answer.status, answer.error["type"], answer.error["message"]


class Tokenizer:
    """A stand-in for dispatch that answers `Tokenize` with as many tokens as the prompt has messages."""

    def __init__(self, failure: Failure | None = None) -> None:
        self.asked: list[Work] = []
        self._failure = failure

    def submit(self, model: ModelName, work: Work) -> Reply:
        assert model == MODEL
        assert isinstance(work, Tokenize)
        self.asked.append(work)
        reply = Reply(work.request_id, lambda _: None)
        if self._failure is not None:
            reply.put(Failed(request_id=work.request_id, failure=self._failure))
        else:
            reply.put(
                Tokenized(request_id=work.request_id, token_ids=(1, 2, 3), tokens=("a", "b", "c"), context_tokens=9)
            )
        return reply


class Remembers:
    """A stand-in for the recorder."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Queued | None]] = []

    def compare(
        self, earlier_id: str, work: Generate | Warm, queued: Queued | None, *, model: ModelName
    ) -> PromptComparison:
        assert model == MODEL
        self.asked.append((earlier_id, work.cache.owner, queued))
        return PromptComparison(difference="tools", missed_tokens=5)


# --- good answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [MESSAGES, MESSAGES + "/"])
async def test_both_modes_say_the_same(path: str) -> None:
    """200, the id asked for as model, the class that was granted, and the caller's scope on its way to the worker."""
    for stream in (False, True):
        generator = ScriptedGenerator(says("Hel", "lo", cached_tokens=3), pace="one_by_one")
        answer = await call(anthropic_app(generator), path, body(stream=stream))
        assert answer.status == 200
        assert answer.headers["x-mlxd-class"] == "standard"
        message = joined(named_events(answer.body)) if stream else answer.json
        assert (message["id"], message["model"], message["stop_reason"]) == ("msg_1", MODEL, "end_turn")
        assert message["content"] == [{"type": "text", "text": "Hello"}]
        assert (message["usage"]["input_tokens"], message["usage"]["cache_read_input_tokens"]) == (4, 3)
        ((_, generate),) = generator.asked
        assert generate.cache.scope == SCOPE


async def test_what_is_ignored_is_named() -> None:
    """C12: in the header, with the kinds of tools that only Anthropic's servers run."""
    request = body(container="c", tools=[{"type": "web_search_20250305", "name": "web_search"}])
    answer = await call(anthropic_app(ScriptedGenerator(says("a"))), MESSAGES, request)
    assert answer.headers["x-mlxd-ignored-params"] == "container, tools.web_search_20250305"


async def test_details_are_for_who_asks() -> None:
    """The header asks; the last event or the body has them."""
    headers = {"content-type": "application/json", "x-mlxd-details": "1"}
    answer = await call(anthropic_app(ScriptedGenerator(says("a"))), MESSAGES, body(), headers=headers)
    assert answer.json["mlxd"]["request_id"] == "req_1"
    assert answer.json["mlxd"]["timings"]["prefill_slices"] == 1
    assert "mlxd" not in (await call(anthropic_app(ScriptedGenerator(says("a"))), MESSAGES, body())).json


async def test_a_silent_stream_begins_and_pings() -> None:
    """B05, B06: message_start, then pings, from the gateway's own clock; then the answer goes on."""
    generator = ScriptedGenerator(is_queued_only)
    received = b""
    async with (
        served(anthropic_app(generator, keepalive_seconds=0.02)) as base_url,
        httpx.AsyncClient(base_url=base_url, timeout=10) as client,
        client.stream("POST", MESSAGES, json=body(stream=True)) as response,
    ):
        assert response.status_code == 200
        async for piece in response.aiter_bytes():
            received += piece
            (reply,) = generator.replies
            if received.count(b"event: ping") >= 2 and not reply.is_complete:
                for event in _rest(reply.request_id):
                    reply.put(event)
    events = named_events(received)
    assert [event["type"] for event in events[:3]] == ["message_start", "ping", "ping"]
    assert joined(events)["content"] == [{"type": "text", "text": "late"}]


def _rest(request_id: RequestId) -> Sequence[RequestEvent]:
    generate = Generate(request_id=request_id, prompt=None, sampling=None)  # type: ignore[arg-type]
    return says("late")(generate)[1:]


async def test_diagnostics_are_asked_of_who_remembers() -> None:
    """Bound to the key: the owner's earlier requests only; without anybody who remembers it is `unavailable`."""
    remembers = Remembers()
    asking = body(diagnostics={"previous_message_id": "msg_0"})
    said = {"cache_miss_reason": {"type": "tools_changed", "cache_missed_input_tokens": 5}}
    for stream in (False, True):
        generator = ScriptedGenerator(says("a"))
        answer = await call(anthropic_app(generator, earlier=remembers), MESSAGES, {**asking, "stream": stream})
        message = named_events(answer.body)[0]["message"] if stream else answer.json
        assert message["diagnostics"] == said
        assert remembers.asked.pop() == ("msg_0", generator.asked[0][1].cache.owner, _queued())
    forgetful = await call(anthropic_app(ScriptedGenerator(says("a"))), MESSAGES, asking)
    assert forgetful.json["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}
    first = await call(
        anthropic_app(ScriptedGenerator(says("a")), earlier=remembers),
        MESSAGES,
        body(diagnostics={"previous_message_id": None}),
    )
    assert first.json["diagnostics"] == {"cache_miss_reason": None}


def _queued() -> Queued:
    return Queued(request_id=RequestId("req_1"), prompt_tokens=7)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("request_body", "expected"),
    [
        (b'{"model":', (400, "invalid_request_error")),
        (b"\xff", (400, "invalid_request_error")),
        (body(max_tokens=None), (400, "invalid_request_error")),
        (body(model="no/such"), (404, "not_found_error")),
        (body(model=BROKEN), (503, "api_error")),
        (body(system="x" * MAX_BODY_BYTES), (413, "request_too_large")),
    ],
)
async def test_refusals_are_in_the_apis_envelope(
    request_body: Any,
    expected: tuple[int, str],
    stream: bool,  # noqa: FBT001
) -> None:
    """B08, C10, C11: the same in both modes, before the status line."""
    if isinstance(request_body, dict):
        request_body = {**request_body, "stream": stream}
    for path in (MESSAGES, COUNT):
        if path == COUNT and request_body == {**body(max_tokens=None), "stream": stream}:
            continue  # counting needs no limit
        answer = await call(anthropic_app(ScriptedGenerator(says("a"))), path, request_body)
        assert error_of(answer)[:2] == expected


@pytest.mark.parametrize("kind", FailureKind)
async def test_every_failure_of_a_worker_is_told(kind: FailureKind) -> None:
    """Before the status line as an answer, after it as an event, with the same envelope; every kind has its words."""
    failure = Failure(kind=kind, message="Why.")
    expected = json.loads(anthropic_error(failure, RequestId("req_1")).body)
    early = await call(anthropic_app(ScriptedGenerator(fails(failure))), MESSAGES, body(stream=True))
    assert (early.status, early.json) == (anthropic_error(failure, RequestId("req_1")).status, expected)
    late = await call(anthropic_app(ScriptedGenerator(fails(failure, after=["a"]))), MESSAGES, body(stream=True))
    assert named_events(late.body)[-1] == expected
    assert all(event["type"] != "message_stop" for event in named_events(late.body))


async def test_a_full_server_and_a_full_key_are_told_apart() -> None:
    """529 when the server is full, 429 when it is the key's own limit; both say when to come back."""
    full = make_desk(class_limits=ClassLimits(standard=ClassBounds(max_queued=0)))
    answer = await call(anthropic_app(ScriptedGenerator(says("a")), desk=full), MESSAGES, body())
    assert error_of(answer)[:2] == (529, "overloaded_error")
    assert int(answer.headers["retry-after"]) >= 1
    limited = Caller(key_name="bob", cache_scope=b"bob", limits=KeyLimits(max_running=1, max_queued=0))
    generator = ScriptedGenerator(is_queued_only)
    async with (
        served(anthropic_app(generator, caller=limited)) as base_url,
        httpx.AsyncClient(base_url=base_url, timeout=10) as client,
        client.stream("POST", MESSAGES, json=body(stream=True)) as first,
    ):
        await until(lambda: bool(generator.replies))
        assert first.headers["anthropic-ratelimit-requests-limit"] == "1"
        assert first.headers["anthropic-ratelimit-requests-remaining"] == "0"
        second = await client.post(MESSAGES, json=body())
        assert (second.status_code, second.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "retry-after" in second.headers
        reset = datetime.fromisoformat(second.headers["anthropic-ratelimit-requests-reset"])
        assert CREATED <= reset.timestamp() <= CREATED + 120


async def test_a_days_tokens_are_told_in_all_of_this_apis_headers() -> None:
    """One purse for prompts and answers: what is left is left for either, until midnight UTC."""
    limited = Caller(key_name="bob", cache_scope=b"bob", limits=KeyLimits(tokens_per_day=50))
    app = anthropic_app(ScriptedGenerator(says("a")), caller=limited)
    await call(app, MESSAGES, body())
    answer = await call(app, MESSAGES, body())
    for what in ("tokens", "input-tokens", "output-tokens"):
        limit, remaining, reset = (
            answer.headers[f"anthropic-ratelimit-{what}-{word}"] for word in ("limit", "remaining", "reset")
        )
        assert (limit, remaining) == ("50", "42")
        assert datetime.fromisoformat(reset).timestamp() % 86_400 == 0


async def test_an_unknown_urgency_falls_to_the_default() -> None:
    """A tier that this API does not know costs no answer, and is named; `priority` counts as on the other routes."""
    app = anthropic_app(ScriptedGenerator(says("a")))
    for tier in ("platinum", "flex"):
        answer = await call(app, MESSAGES, body(service_tier=tier))
        assert (answer.status, answer.headers["x-mlxd-class"]) == (200, "standard")
        assert answer.headers["x-mlxd-ignored-params"] == "service_tier"
    answer = await call(app, MESSAGES, body(priority=7))
    assert (answer.headers["x-mlxd-class"], answer.json["usage"]["service_tier"]) == ("batch", "batch")
    assert "x-mlxd-ignored-params" not in answer.headers
    assert (await call(app, MESSAGES, body(priority="high"))).headers["x-mlxd-ignored-params"] == "priority"


async def test_a_leaving_client_cancels() -> None:
    """B07: the worker hears of it."""
    generator = ScriptedGenerator(is_queued_only)
    async with served(anthropic_app(generator)) as base_url, httpx.AsyncClient(base_url=base_url, timeout=10) as client:
        async with client.stream("POST", MESSAGES, json=body(stream=True)):
            pass
        await until(lambda: bool(generator.cancelled))


# --- counting --------------------------------------------------------------------------------------------------------


async def test_counting_asks_the_tokenizer_only() -> None:
    """G02: the number of the prompt's tokens; no limit is needed, and what it does not know is ignored and named."""
    tokenizer = Tokenizer()
    request = body(whatever=1)
    del request["max_tokens"]
    answer = await call(anthropic_app(tokenizer), COUNT, request)
    assert (answer.status, answer.json) == (200, {"input_tokens": 3})
    assert answer.headers["x-mlxd-ignored-params"] == "whatever"
    assert len(tokenizer.asked) == 1


async def test_counting_what_the_template_refuses() -> None:
    """The worker's refusal is a 400 here as it is for the message itself."""
    refuses = Tokenizer(Failure(kind=FailureKind.INVALID_REQUEST, message="No."))
    assert error_of(await call(anthropic_app(refuses), COUNT, body())) == (400, "invalid_request_error", "No.")


# --- the list of models ----------------------------------------------------------------------------------------------


def models(count: int) -> list[ModelInfo]:
    return [
        model_info(ModelName(f"m{number}"), created_unix=number, context_tokens=4096, capabilities=None)
        for number in range(count)
    ]


@given(st.integers(0, 12), st.integers(1, 5))
def test_pages_have_every_model_once(count: int, limit: int) -> None:
    """Forward from the start, and back from the end, both end and both see the whole list, newest first."""
    ids = [f"m{number}" for number in reversed(range(count))]
    forward: list[str] = []
    query = {"limit": str(limit)}
    while True:
        page = model_page(models(count), query)
        assert isinstance(page, ModelPage)
        forward += [model.id for model in page.data]
        if not page.has_more:
            break
        query = {"limit": str(limit), "after_id": str(page.last_id)}
    assert forward == ids
    back: list[str] = ids[-1:]
    while back and back[0] != ids[0]:
        page = model_page(models(count), {"limit": str(limit), "before_id": back[0]})
        assert isinstance(page, ModelPage)
        assert page.first_id == page.data[0].id
        back = [model.id for model in page.data] + back
        assert page.has_more == (back[0] != ids[0])
    assert back == ids


@pytest.mark.parametrize(
    "query",
    [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"after_id": "?"}, {"after_id": "m0", "before_id": "m1"}],
)
def test_pages_that_are_none(query: dict[str, str]) -> None:
    """400 that names the parameter."""
    failure = model_page(models(3), query)
    assert isinstance(failure, Failure)
    assert failure.param in query


@given(st.integers(0, 253_402_300_799))
def test_moments_are_the_librarys(unix_seconds: int) -> None:
    """The same as `datetime` writes, from 1970 to the year 9999."""
    expected = datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert rfc3339(unix_seconds) == expected.rjust(20, "0")


@pytest.mark.parametrize(
    ("path", "headers", "api"),
    [
        ("/v1/messages", (), "anthropic"),
        ("//v1//messages/count_tokens", (), "anthropic"),
        ("/v1/messages/none", (), "anthropic"),
        ("/v1/messagesx", (), "openai"),
        ("/v1/models", (), "openai"),
        ("/v1/models", (b"anthropic-version",), "anthropic"),
        ("/v1/models/org/m", (b"anthropic-version",), "anthropic"),
        ("/v1/chat/completions", (b"anthropic-version",), "openai"),
    ],
)
def test_who_is_spoken_to(path: str, headers: tuple[bytes, ...], api: str) -> None:
    """By the path; the models' routes are both APIs'."""
    assert spoken_api(path, headers) == api


# --- the SDK ---------------------------------------------------------------------------------------------------------


async def test_the_sdk_raises_what_it_should() -> None:
    """An error event raises with the envelope's message; statuses become the SDK's own classes."""
    failure = Failure(kind=FailureKind.WORKER_DIED, message="It restarts.")
    app = anthropic_app(ScriptedGenerator(fails(failure, after=["a"])))
    async with (
        served(app) as base_url,
        anthropic.AsyncAnthropic(api_key="any", base_url=base_url, max_retries=0) as sdk,
    ):
        request: dict[str, Any] = body()
        with pytest.raises(anthropic.APIStatusError, match="It restarts"):
            async with sdk.messages.stream(**request) as stream:
                async for _ in stream:
                    pass
        with pytest.raises(anthropic.NotFoundError):
            await sdk.messages.create(**{**request, "model": "no/such"})
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await sdk.messages.create(**{**request, "max_tokens": -1})


async def test_progress_before_an_answer_has_the_cached_tokens() -> None:
    """What the worker says of a prompt's work is in the first event, even when text follows at once."""

    def script(generate: Generate) -> Sequence[RequestEvent]:
        queued, *rest = says("a", cached_tokens=4)(generate)
        progress = Prefilling(request_id=generate.request_id, done_tokens=7, total_tokens=7, cached_tokens=4)
        return [queued, progress, *rest]

    answer = await call(anthropic_app(ScriptedGenerator(script)), MESSAGES, body(stream=True))
    assert named_events(answer.body)[0]["message"]["usage"]["cache_read_input_tokens"] == 4
