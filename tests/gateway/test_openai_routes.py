"""The two routes from the request's first byte to the answer's last, in process and over a real socket."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission import DayTokens
from gateway.replies import Reply
from protocol.failures import Failure, FailureKind
from protocol.generation import Delta, Failed, Finished, FinishReason, Generate, RequestEvent, Usage, Work
from protocol.ids import ModelName
from tests.fakes.openai_app import (
    BROKEN,
    CREATED,
    MAX_BODY_BYTES,
    MODEL,
    SCOPE,
    call,
    make_desk,
    openai_app,
    served,
    until,
)
from tests.fakes.scripted_generator import (
    TIMINGS,
    ScriptedGenerator,
    fails,
    is_queued_only,
    is_silent,
    says,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def completion_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **fields}


ROUTES = pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body), (COMPLETIONS, completion_body)])
MODES = pytest.mark.parametrize("stream", [False, True])


# --- good answers ----------------------------------------------------------------------------------------------------


async def test_a_whole_chat_answer() -> None:
    """200, the id asked for as model, and the caller's scope on its way to the worker."""
    generator = ScriptedGenerator(says("Hel", "lo"))
    answer = await call(openai_app(generator), CHAT, chat_body(temperature=0))
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert (answer.json["model"], answer.json["created"]) == (MODEL, CREATED)
    assert answer.json["id"].startswith("chatcmpl-")
    assert answer.json["system_fingerprint"] == "mlxd-test"
    assert answer.json["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    ((model, generate),) = generator.asked
    assert (model, generate.cache.scope, generate.sampling.temperature) == (MODEL, SCOPE, 0)
    assert generator.cancelled == []
    assert "x-mlxd-ignored-params" not in answer.headers


@ROUTES
async def test_details_come_to_who_asks(path: str, body: Callable[..., dict[str, Any]]) -> None:
    """With the header: request id, timings and what the cache did, in the whole answer and in a stream's last chunk,
    be that the usage's or the one with the finish reason. Without it: no such key at all."""
    app = openai_app(ScriptedGenerator(says("word")))
    asked = {"content-type": "application/json", "x-mlxd-details": "1"}
    whole = (await call(app, path, body(), headers=asked)).json
    assert whole["mlxd"]["request_id"].startswith("req_")
    assert whole["mlxd"]["timings"]["prefill_slices"] == TIMINGS.prefill_slices
    assert whole["mlxd"]["timings"]["queue"].keys() == {
        "key_limit_seconds",
        "class_limit_seconds",
        "model_seconds",
        "lost_seconds",
        "restart_seconds",
        "worker_seconds",
    }
    assert whole["mlxd"]["timings"]["tokens_per_second"] > 0
    assert "choices" not in whole["mlxd"]
    several = (await call(app, path, body(n=2), headers=asked)).json["mlxd"]
    assert [timings["prefill_slices"] for timings in several["choices"]] == [TIMINGS.prefill_slices] * 2
    assert whole["mlxd"]["cache"]["ram_tokens"] == 0
    for options in ({}, {"stream_options": {"include_usage": True}}):
        *events, done = (await call(app, path, body(stream=True, **options), headers=asked)).events
        assert done == "[DONE]"
        assert ["mlxd" in json.loads(event) for event in events] == [False] * (len(events) - 1) + [True]
        plain = await call(app, path, body(stream=True, **options))
        assert len(plain.events) == len(events) + 1
        assert b'mlxd":' not in plain.body
    assert "mlxd" not in (await call(app, path, body())).json


@ROUTES
async def test_a_joined_stream_equals_the_whole_answer(path: str, body: Callable[..., dict[str, Any]]) -> None:
    """B01, B04: no half character in any chunk, one finish_reason, [DONE], and the same text as without stream."""
    script = says("ok 👩", "‍🚀", " 東京", "", "end01", reason=FinishReason.LENGTH)
    whole = await call(openai_app(ScriptedGenerator(script)), path, body())
    stream = await call(openai_app(ScriptedGenerator(script, pace="one_by_one")), path, body(stream=True))
    *chunks, done = stream.events
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    joined = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)
    (choice,) = whole.json["choices"]
    assert joined == (choice["message"]["content"] if "message" in choice else choice["text"]) == "ok 👩‍🚀 東京end01"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert done == "[DONE]"
    assert stream.is_whole
    assert "\ufffd" not in stream.body.decode()
    assert stream.headers["content-type"].startswith("text/event-stream")


@ROUTES
@MODES
async def test_ignored_fields_are_listed_in_a_header(
    path: str, body: Callable[..., dict[str, Any]], *, stream: bool
) -> None:
    """C12: ignoring is said, in both modes, and a name cannot write a header of its own."""
    fields = {"user": "u", "x\r\nset-cookie: a=b": 1, "temperature": 1, "stream": stream}
    answer = await call(openai_app(ScriptedGenerator(says("a"))), path, body(**fields))
    assert answer.status == 200
    assert answer.headers["x-mlxd-ignored-params"] == "user, x__set-cookie__a_b"


@ROUTES
@MODES
async def test_one_choice_too_many_refuses_all(path: str, body: Callable[..., dict[str, Any]], *, stream: bool) -> None:
    """B08: when the queue takes only some of a request's choices, both modes say 429, and the others are cancelled."""
    full = Failure(kind=FailureKind.OVERLOADED, message="The queue is full. Try again later.")

    def script(generate: Generate) -> Sequence[RequestEvent]:
        if generate.request_id.endswith("-2"):
            return [Failed(request_id=generate.request_id, failure=full)]
        return is_queued_only(generate)

    generator = ScriptedGenerator(script)
    answer = await call(openai_app(generator), path, body(n=3, stream=stream))
    assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
    assert generator.cancelled == [reply.request_id for reply in generator.replies[:2]]


async def test_each_prompt_is_charged_once() -> None:
    """A key pays for every prompt of a request, and for each once, as the bill says, or a day's tokens could be walked
    around."""
    tokens = DayTokens()
    app = openai_app(ScriptedGenerator(says("a")), desk=make_desk(tokens=tokens))
    answer = await call(app, COMPLETIONS, {"model": MODEL, "prompt": ["x", "y"], "n": 2})
    assert answer.json["usage"]["total_tokens"] == 2 * 7 + 4
    assert tokens.used("alice", unix_now=CREATED + 0.5) == 2 * 7 + 4


# --- refusals --------------------------------------------------------------------------------------------------------


@ROUTES
@MODES
@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": ""}, 404, "model_not_found", "model"),
        ({"model": "no/such"}, 404, "model_not_found", "model"),
        ({"model": None}, 400, None, "model"),
        ({"model": BROKEN}, 503, "model_unavailable", "model"),
        ({"n": 0}, 400, None, "n"),
        ({"n": 33}, 400, None, "n"),
        ({"max_tokens": True}, 400, None, "max_tokens"),
    ],
)
async def test_what_can_be_known_is_refused_before_the_status_line(
    path: str,
    body: Callable[..., dict[str, Any]],
    *,
    stream: bool,
    fields: dict[str, Any],
    status: int,
    code: str | None,
    param: str,
) -> None:
    """B08, C11: the same status with and without stream, and no worker is asked."""
    generator = ScriptedGenerator(says("a"))
    answer = await call(openai_app(generator), path, body(stream=stream, **fields))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param)
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert generator.asked == []
    if status == 503:
        assert answer.headers["x-should-retry"] == "false"
        assert "model.safetensors" in answer.error["message"]


@ROUTES
@MODES
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (FailureKind.CONTEXT_LENGTH_EXCEEDED, 400),
        (FailureKind.INVALID_REQUEST, 400),
        (FailureKind.OVERLOADED, 429),
        (FailureKind.WORKER_DIED, 503),
    ],
)
async def test_what_the_worker_refuses_has_its_real_status(
    path: str, body: Callable[..., dict[str, Any]], *, stream: bool, kind: FailureKind, status: int
) -> None:
    """B08, C09: a 200 is sent only once the request is accepted, and a too long prompt points at the prompt's field."""
    generator = ScriptedGenerator(fails(Failure(kind=kind, message="6000 tokens, the limit is 4096. Shorten it.")))
    answer = await call(openai_app(generator), path, body(stream=stream))
    assert answer.status == status
    assert "4096" in answer.error["message"]
    if kind is FailureKind.CONTEXT_LENGTH_EXCEEDED:
        assert answer.error["code"] == "context_length_exceeded"
        assert answer.error["param"] == ("messages" if path == CHAT else "prompt")


async def test_no_byte_is_sent_before_the_request_is_accepted() -> None:
    """B08: the status line waits for the first event."""
    generator = ScriptedGenerator(is_silent)
    exchange = asyncio.create_task(call(openai_app(generator), CHAT, chat_body(stream=True)))
    await until(lambda: bool(generator.replies))
    (reply,) = generator.replies
    reply.put(
        Failed(request_id=reply.request_id, failure=Failure(kind=FailureKind.OVERLOADED, message="Come back later."))
    )
    assert (await exchange).status == 429


@ROUTES
async def test_a_failure_after_the_status_line_is_an_error_event(
    path: str, body: Callable[..., dict[str, Any]]
) -> None:
    """B08, E01: an error event ends the stream without [DONE]; without stream it is a plain 503."""
    script = fails(Failure(kind=FailureKind.WORKER_DIED, message="It restarts. Try again."), after=["partial"])
    stream = await call(openai_app(ScriptedGenerator(script)), path, body(stream=True))
    assert stream.status == 200
    assert json.loads(stream.events[-1])["error"]["code"] == "worker_died"
    assert "[DONE]" not in stream.events
    assert stream.is_whole
    whole = await call(openai_app(ScriptedGenerator(script)), path, body())
    assert (whole.status, whole.error["code"]) == (503, "worker_died")


class RaisingGenerator:
    """A generator with a fault."""

    def submit(self, model: ModelName, work: Work) -> Reply:
        raise RuntimeError("my secret prompt")


async def test_a_fault_of_ours_is_a_500_with_the_request_id() -> None:
    """Anything unexpected answers in the envelope, and is logged without the exception's words."""
    with structlog.testing.capture_logs() as lines:
        answer = await call(openai_app(RaisingGenerator()), CHAT, chat_body())
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert "req_1" in answer.error["message"]
    assert "secret" not in answer.body.decode()
    assert [line["request_id"] for line in lines] == ["req_1"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_other_methods_are_refused(method: str) -> None:
    """405 in the envelope."""
    answer = await call(openai_app(ScriptedGenerator(says("a"))), CHAT, b"", method=method)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")


# --- bodies ----------------------------------------------------------------------------------------------------------


@ROUTES
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": 'Application/JSON; Charset="UTF-8"'}, 200),
        ({}, 200),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json; charset=utf-16"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
    ],
)
async def test_media_types(
    path: str, body: Callable[..., dict[str, Any]], headers: dict[str, str], status: int
) -> None:
    """C10: only plain JSON; a client that says nothing is believed."""
    answer = await call(openai_app(ScriptedGenerator(says("a"))), path, body(), headers=headers)
    assert answer.status == status
    if status == 415:
        assert answer.error["code"] == "unsupported_media_type"


@ROUTES
async def test_a_body_over_the_limit_is_refused(path: str, body: Callable[..., dict[str, Any]]) -> None:
    """Bounded while it is read, whatever Content-Length says or does not say."""
    long = body(user="x" * MAX_BODY_BYTES)
    answer = await call(openai_app(ScriptedGenerator(says("a"))), path, long)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


BROKEN_BODIES = [b'{"model":', b"[]", b"", b"\xff", b"\xef\xbb\xbf{}", b'{"a":' + b"[" * 50_000, b'{"x":"\\ud83d"}']


async def test_a_broken_body_leaves_the_connection_usable() -> None:
    """C10: each is a 400 in the envelope, on one connection, which serves a good request afterwards."""
    app = openai_app(ScriptedGenerator(says("fine")))
    async with served(app) as url, httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=1)) as client:
        json_type = {"content-type": "application/json"}
        for path in (CHAT, COMPLETIONS):
            for body in BROKEN_BODIES:
                answer = await client.post(path, content=body, headers=json_type)
                assert answer.status_code == 400, body[:20]
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            plain = await client.post(path, content=b"hello", headers={"content-type": "text/plain"})
            assert plain.status_code == 415
            assert "connection" not in plain.headers
        good = await client.post(CHAT, json=chat_body())
        assert good.json()["choices"][0]["message"]["content"] == "fine"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["temperature", "n", "stop", "seed", "stream", "logit_bias", "tools", "messages", "prompt", "logprobs", "metadata"]
)


@settings(max_examples=150)
@given(st.sampled_from([CHAT, COMPLETIONS]), JSON | st.dictionaries(FIELDS, JSON, max_size=4))
def test_no_json_makes_a_500(path: str, value: Any) -> None:
    """Any JSON value, alone or as fields of an otherwise good request, gets a 200 or a 4xx in the envelope."""
    app = openai_app(ScriptedGenerator(says("a")))
    bodies = [value]
    if isinstance(value, dict):
        bodies.append(chat_body(prompt="hi") | value)
    for body in bodies:
        answer = asyncio.run(call(app, path, json.dumps(body).encode()))
        assert answer.status in (200, 400, 404), answer.body
        if answer.status != 200:
            assert set(answer.error) == {"message", "type", "param", "code"}


# --- clients that leave ----------------------------------------------------------------------------------------------


def more_text(reply: Reply) -> RequestEvent:
    return Delta(request_id=reply.request_id, text="x", tokens=1)


async def leave_while(
    script: Any, *, stream: bool, arrived: Callable[[ScriptedGenerator, httpx.AsyncClient], Awaitable[None]]
) -> ScriptedGenerator:
    """One request over a real socket, whose client closes it as soon as `arrived` returns."""
    generator = ScriptedGenerator(script)
    async with served(openai_app(generator)) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            exchange = asyncio.create_task(client.post(CHAT, json=chat_body(stream=stream)))
            await arrived(generator, client)
            exchange.cancel()
        await until(lambda: bool(generator.cancelled))
    return generator


@MODES
@pytest.mark.parametrize("script", [is_silent, is_queued_only])
async def test_a_client_that_leaves_cancels_its_request(script: Any, *, stream: bool, caplog: Any) -> None:
    """B07: while queued, while prefilling, in both modes: the worker is told, once, and the log has no traceback."""

    async def arrived(generator: ScriptedGenerator, _: httpx.AsyncClient) -> None:
        await until(lambda: bool(generator.replies))

    generator = await leave_while(script, stream=stream, arrived=arrived)
    assert generator.cancelled == [generator.replies[0].request_id]
    assert "Traceback" not in caplog.text


async def test_a_client_that_leaves_in_mid_stream_cancels_its_request(caplog: Any) -> None:
    """B07: an abort between two tokens is heard although no token comes."""
    generator = ScriptedGenerator(is_queued_only)
    async with served(openai_app(generator)) as url:
        async with (
            httpx.AsyncClient(base_url=url) as client,
            client.stream("POST", CHAT, json=chat_body(stream=True)) as answer,
        ):
            lines = answer.aiter_lines()
            assert "assistant" in await anext(lines)
            generator.replies[0].put(more_text(generator.replies[0]))
            await anext(lines)
            assert '"x"' in await anext(lines)
        await until(lambda: bool(generator.cancelled))
    assert "Traceback" not in caplog.text


async def test_fifty_opens_and_closes_leave_nothing_behind() -> None:
    """B07 (v): every one of them is cancelled, and no task stays."""
    generator = ScriptedGenerator(is_queued_only)
    async with served(openai_app(generator)) as url:
        before = len(asyncio.all_tasks())
        async with httpx.AsyncClient(base_url=url) as client:
            for _ in range(50):
                async with client.stream("POST", CHAT, json=chat_body(stream=True)) as answer:
                    assert answer.status_code == 200
        await until(lambda: len(generator.cancelled) == 50)
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_silence_is_filled_with_comments() -> None:
    """B05: comments only, never an `id:` line, and the stream goes on after them."""
    generator = ScriptedGenerator(is_queued_only)
    async with (
        served(openai_app(generator, keepalive_seconds=0.02)) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", CHAT, json=chat_body(stream=True)) as answer,
    ):
        (reply,) = generator.replies
        lines: list[str] = []
        async for line in answer.aiter_lines():
            lines.append(line)
            if lines.count(": keepalive") == 3 and not reply.is_complete:
                reply.put(more_text(reply))
                usage = Usage(prompt_tokens=7, completion_tokens=1, cached_tokens=0)
                reply.put(Finished(request_id=reply.request_id, reason=FinishReason.STOP, usage=usage, timings=TIMINGS))
    assert lines[-2] == "data: [DONE]"
    assert not any(line.startswith(("id:", "retry:", "event:")) for line in lines)


# --- the SDK ---------------------------------------------------------------------------------------------------------


def sdk(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


async def test_the_sdk_reads_whole_answers_and_streams() -> None:
    """openai-python parses both modes of both routes into its own types."""
    generator = ScriptedGenerator(says("Hel", "lo", cached_tokens=3), pace="one_by_one")
    async with served(openai_app(generator)) as url, sdk(url) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert chat.choices[0].message.content == "Hello"
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 3
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        text = await client.completions.create(model=MODEL, prompt="hi")
        assert text.choices[0].text == "Hello"
        pieces = [piece async for piece in await client.completions.create(model=MODEL, prompt="hi", stream=True)]
        assert "".join(piece.choices[0].text for piece in pieces) == "Hello"


async def test_the_sdk_raises_what_the_server_says() -> None:
    """Statuses become the SDK's own exceptions, and a failure in mid-stream raises instead of cutting the answer."""
    overloaded = Failure(kind=FailureKind.OVERLOADED, message="Come back later.", retry_after_seconds=3)
    died = Failure(kind=FailureKind.WORKER_DIED, message="It restarts. Try again.")
    scripts = {"overloaded": fails(overloaded), "died": fails(died, after=["par"])}

    def script(generate: Generate) -> Any:
        return scripts["overloaded" if generate.max_tokens == 1 else "died"](generate)

    async with served(openai_app(ScriptedGenerator(script))) as url, sdk(url) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.chat.completions.create(model="no/such", messages=[{"role": "user", "content": "hi"}])
        assert not_found.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], n=33)
        assert bad.value.param == "n"
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model=MODEL, prompt="hi", max_tokens=1)
        assert limited.value.response.headers["retry-after"] == "3"
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="It restarts"):
            async for _ in stream:
                pass
