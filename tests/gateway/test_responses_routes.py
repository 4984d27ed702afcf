"""The Responses routes from a request's first byte to its answer's last, in process and over a real socket."""

import asyncio
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import structlog
from msgspec.structs import replace
from pydantic import BaseModel

from gateway.admission import ClassBounds, ClassLimits, KeyLimits
from gateway.caller import Caller
from gateway.replies import Reply
from gateway.responses.store import ResponseStore
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    ChatPrompt,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Prefilling,
    Queued,
    Reasoning,
    RequestEvent,
    Tokenize,
    Tokenized,
    Usage,
    Warm,
    Warmed,
    Work,
)
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass
from tests.fakes.openai_app import ALICE, BROKEN, MAX_BODY_BYTES, MODEL, Answer, call, make_desk, served, until
from tests.fakes.responses_app import (
    LIMITS,
    RESPONSES,
    ResponsesApp,
    SetClock,
    asking,
    events_in,
    make_store,
    streamed,
    types_in,
    whole,
)
from tests.fakes.scripted_generator import TIMINGS, ScriptedGenerator, fails, is_queued_only, is_silent, says

BOB = Caller(key_name="bob", cache_scope=b"scope of bob")
ALICE_2 = Caller(key_name="alice2", cache_scope=ALICE.cache_scope)
MODES = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def store(tmp_path: Path, clock: SetClock) -> Iterator[ResponseStore]:
    made = make_store(tmp_path, clock=clock)
    yield made
    made.close()


async def get(app: Any, path: str, query: str = "") -> Answer:
    return await call(Queried(app, query), f"{RESPONSES}/{path}", b"", method="GET")


class Queried:
    """The same app, asked with a query."""

    def __init__(self, app: Any, query: str) -> None:
        self._app, self._query = app, query.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app({**scope, "query_string": self._query}, receive, send)


def prompt_of(generator: ScriptedGenerator, at: int = -1) -> ChatPrompt:
    prompt = generator.asked[at][1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def calls_tools(generate: Generate) -> Sequence[RequestEvent]:
    """Thinks, says something, and calls a function and a custom tool."""
    of = {"request_id": generate.request_id}
    usage = Usage(prompt_tokens=7, completion_tokens=9, cached_tokens=3, reasoning_tokens=1)
    return [
        Queued(**of, prompt_tokens=7),
        Reasoning(**of, text="why", tokens=1),
        Delta(**of, text="Let me look.", tokens=3),
        CallStarted(**of, index=0, call_id="call_a", name="grep"),
        CallArguments(**of, index=0, text='{"pattern": ', tokens=1),
        CallArguments(**of, index=0, text='"x"}', tokens=1),
        CallEnded(**of, index=0),
        CallStarted(**of, index=1, call_id="call_b", name="apply_patch"),
        CallArguments(**of, index=1, text='{"input": "*** Begin', tokens=1),
        CallArguments(**of, index=1, text=' Patch\\n"}', tokens=1),
        CallEnded(**of, index=1),
        Finished(**of, reason=FinishReason.TOOL_CALLS, usage=usage, timings=TIMINGS),
    ]


TOOLS: list[Any] = [
    {"type": "function", "name": "grep", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "apply_patch"},
    {"type": "web_search"},
]

# --- answers ---------------------------------------------------------------------------------------------------------


async def test_a_whole_answer_and_a_stream_say_the_same(store: ResponseStore) -> None:
    """Once their ids are the same. The scope goes to the worker; nothing is stored; what is ignored is named."""
    generator = ScriptedGenerator(calls_tools)
    answer = await call(ResponsesApp(generator, store), RESPONSES, asking(tools=TOOLS))
    assert (answer.status, answer.headers["x-mlxd-ignored-params"]) == (200, "tools.web_search")
    stream = await streamed(ResponsesApp(ScriptedGenerator(calls_tools, pace="one_by_one"), store), tools=TOOLS)
    assert stream[-1]["response"] == answer.json
    assert answer.json["store"] is False
    assert (await get(ResponsesApp(generator, store), answer.json["id"])).status == 404
    ((model, generate),) = generator.asked
    assert (model, generate.cache.scope, generate.tenant) == (MODEL, ALICE.cache_scope, "alice")
    assert [event["delta"] for event in stream if "delta" in event] == [
        *("why", "Let me look.", '{"pattern": ', '"x"}', "*** Begin", " Patch\n"),
    ]


async def test_the_sdk_reads_streams(store: ResponseStore) -> None:
    """openai-python, through its accumulator: text, items and usage; and a schema parsed into a model."""

    class Weather(BaseModel):
        city: str

    app = ResponsesApp(ScriptedGenerator(calls_tools, pace="one_by_one"), store)
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        async with client.responses.stream(model=MODEL, input="hi", tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
        assert (final.output_text, final.status) == ("Let me look.", "completed")
        assert final.usage is not None
        assert (final.usage.input_tokens_details.cached_tokens, final.usage.total_tokens) == (3, 16)
        plain = await client.responses.create(model=MODEL, input="hi", tools=TOOLS)
        assert plain.output_text == final.output_text
    app = ResponsesApp(ScriptedGenerator(says('{"city": ', '"Oslo"}')), store)
    async with served(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        parsed = await client.responses.parse(model=MODEL, input="hi", text_format=Weather)
        assert parsed.output_parsed == Weather(city="Oslo")


async def test_an_agents_turns_without_a_store(store: ResponseStore) -> None:
    """G06: what an agent gives back of a stream is, for the template, the turn that the model had: same reasoning,
    text, calls and ids."""
    generator = ScriptedGenerator(calls_tools)
    app = ResponsesApp(generator, store)
    asked = {"tools": TOOLS, "include": ["reasoning.encrypted_content"], "store": False}
    first = await streamed(app, **asked)
    items = [event["item"] for event in first if event["type"] == "response.output_item.done"]
    for item in items:
        if item["type"] == "reasoning":
            del item["content"]
    said = [{"role": "user", "content": "hi"}, *items]
    outputs = [
        {"type": "function_call_output", "call_id": "call_a", "output": "found"},
        {"type": "custom_tool_call_output", "call_id": "call_b", "output": "Done"},
    ]
    await streamed(app, said=[*said, *outputs], **asked)
    user, assistant, found, done = prompt_of(generator).messages
    assert (user.content, found.content, found.tool_call_id, done.tool_call_id) == ("hi", "found", "call_a", "call_b")
    assert (assistant.reasoning_content, assistant.content) == ("why", "Let me look.")
    assert [(made.id, made.arguments) for made in assistant.tool_calls] == [
        ("call_a", {"pattern": "x"}),
        ("call_b", {"input": "*** Begin Patch\n"}),
    ]


async def test_keepalives_are_whole_events(store: ResponseStore) -> None:
    """B05: numbered and named like all others, so that a client which counts events sees the server alive."""
    generator = ScriptedGenerator(is_queued_only)
    app = ResponsesApp(generator, store, keepalive_seconds=0.02)
    async with (
        served(app) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", RESPONSES, json=asking(stream=True)) as response,
    ):
        seen, types = b"", list[str]()
        async for chunk in response.aiter_bytes():
            seen += chunk
            types = re.findall(r"^event: response\.(\S+)$", seen.decode(), re.MULTILINE)
            (reply,), ((_, work),) = generator.replies, generator.asked
            if types.count("queued") == 2 and "in_progress" not in types:
                of = reply.request_id
                reply.put(Prefilling(request_id=of, done_tokens=1, total_tokens=7, cached_tokens=0))
            if types.count("in_progress") == 3 and not reply.is_complete:
                for event in says("x")(work)[1:]:
                    reply.put(event)
    assert types_in(events_in(seen)) == types
    assert types[-1] == "completed"


async def test_a_prewarm_runs_a_warm(store: ResponseStore) -> None:
    """Nothing is generated, and the prompt is paid for."""
    generator = WarmingGenerator()
    answer = await call(ResponsesApp(generator, store), RESPONSES, asking(prompt_cache_options={"prewarm": True}))
    assert (answer.json["status"], answer.json["output"], answer.json["usage"]["input_tokens"]) == ("completed", [], 12)
    assert isinstance(generator.works[0], Warm)


class WarmingGenerator:
    """Answers warms and token counts."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def submit(self, model: ModelName, work: Work) -> Reply:
        del model
        self.works.append(work)
        reply = Reply(work.request_id, lambda _: None)
        match work:
            case Warm():
                reply.put(Queued(request_id=work.request_id, prompt_tokens=12))
                reply.put(
                    Warmed(
                        request_id=work.request_id,
                        prompt_tokens=12,
                        cached_tokens=0,
                        blocks=1,
                        size_bytes=1,
                        durable_blocks=0,
                        timings=TIMINGS,
                    )
                )
            case Tokenize():
                tokens = ("a", "b", "c")
                reply.put(Tokenized(request_id=work.request_id, token_ids=(1, 2, 3), tokens=tokens, context_tokens=99))
            case _:
                raise AssertionError(work)
        return reply


async def test_counting_tokens(store: ResponseStore) -> None:
    """With instructions and tools, as the template renders them; unknown models and bad fields as everywhere."""
    generator = WarmingGenerator()
    app = ResponsesApp(generator, store)
    path = f"{RESPONSES}/input_tokens"
    answer = await call(app, path, asking(instructions="be brief", tools=TOOLS))
    assert answer.json == {"object": "response.input_tokens", "input_tokens": 3}
    (work,) = generator.works
    assert isinstance(work, Tokenize)
    assert isinstance(work.prompt, ChatPrompt)
    assert (work.prompt.messages[0].content, len(work.prompt.tools)) == ("be brief", 2)
    assert (await call(app, path, asking(model="no/such"))).status == 404
    assert (await call(app, path, asking(said=[7]))).error["param"] == "input[0]"


# --- refusals --------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (asking(model="no/such"), 404, "model_not_found", "model"),
        (asking(model=""), 404, "model_not_found", "model"),
        (asking(model=BROKEN), 503, "model_unavailable", "model"),
        (asking(said=None), 400, None, "input"),
        (asking(previous_response_id="resp_nope"), 404, "previous_response_not_found", "previous_response_id"),
        (asking(said=[{"type": "item_reference", "id": "msg_1"}]), 404, "not_found", "input[0].id"),
        (asking(background=True), 400, None, "background"),
        (asking(tool_choice="required"), 400, None, "tool_choice"),
    ],
)
async def test_refusals_have_their_status(
    store: ResponseStore, body: dict[str, Any], status: int, code: str | None, param: str, *, stream: bool
) -> None:
    """B08: what can be known before is said before, in both modes with the same words."""
    generator = ScriptedGenerator(says("never"))
    answer = await call(ResponsesApp(generator, store), RESPONSES, {**body, "stream": stream})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param)
    assert answer.error.keys() == {"message", "type", "param", "code"}
    assert generator.asked == []


@pytest.mark.parametrize("data", [b"", b"[]", b'{"model":', b"\xff", b'{"model": "\\ud83d"}', b"{}", b'{"a": 1e999}'])
async def test_c10_broken_bodies(store: ResponseStore, data: bytes) -> None:
    """C10: 400 in OpenAI's envelope."""
    answer = await call(ResponsesApp(ScriptedGenerator(says("x")), store), RESPONSES, data)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


@MODES
async def test_too_long_a_prompt(store: ResponseStore, *, stream: bool) -> None:
    """C09: 400 with the code that agents act upon, at the field where the prompt is."""
    failure = Failure(kind=FailureKind.CONTEXT_LENGTH_EXCEEDED, message="6000 of 4096")
    answer = await call(ResponsesApp(ScriptedGenerator(fails(failure)), store), RESPONSES, asking(stream=stream))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", "input")


@MODES
async def test_busy_is_503_and_a_spent_day_429(store: ResponseStore, *, stream: bool) -> None:
    """Codex tries again after the one, and not after the other."""
    busy = Failure(kind=FailureKind.OVERLOADED, message="Busy.", retry_after_seconds=5.0)
    answer = await call(ResponsesApp(ScriptedGenerator(fails(busy)), store), RESPONSES, asking(stream=stream))
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert (answer.error["type"], answer.error["code"]) == ("server_error", "rate_limit_exceeded")
    full = ResponsesApp(
        ScriptedGenerator(is_silent),
        store,
        desk=make_desk(class_limits=ClassLimits(standard=ClassBounds(max_queued=0))),
    )
    assert (await call(full, RESPONSES, asking(stream=stream))).status == 503
    generator = ScriptedGenerator(is_silent)
    mine = ResponsesApp(generator, store)
    mine.caller = replace(ALICE, limits=KeyLimits(max_running=1, max_queued=0))
    held = asyncio.create_task(call(mine, RESPONSES, asking()))
    await until(lambda: bool(generator.replies))
    answer = await call(mine, RESPONSES, asking(stream=stream))
    assert (answer.status, answer.headers["x-should-retry"]) == (503, "true")
    assert (answer.error["type"], answer.error["code"]) == ("server_error", "rate_limit_exceeded")
    assert "max_running 1" in answer.error["message"]
    held.cancel()
    spent = ResponsesApp(ScriptedGenerator(says("x")), store)
    spent.caller = replace(ALICE, limits=KeyLimits(tokens_per_day=0))
    answer = await call(spent, RESPONSES, asking(stream=stream))
    assert (answer.status, answer.headers["x-should-retry"]) == (429, "false")


async def test_failing_in_the_middle_ends_the_stream(store: ResponseStore) -> None:
    """response.failed is the last event; a whole answer has its status."""
    failure = Failure(kind=FailureKind.WORKER_DIED, message="gone", retry_after_seconds=1.0)
    app = ResponsesApp(ScriptedGenerator(fails(failure, after=["par"])), store)
    events = await streamed(app)
    assert (events[-1]["type"], events[-1]["response"]["error"]["code"]) == ("response.failed", "server_error")
    assert (await call(app, RESPONSES, asking())).status == 503


async def test_a_client_that_leaves_is_not_worked_for(store: ResponseStore) -> None:
    """In both modes: the worker is told, and nothing is stored."""
    generator = ScriptedGenerator(is_queued_only)
    async with served(ResponsesApp(generator, store)) as url:
        for stream in (True, False):
            async with httpx.AsyncClient(base_url=url) as client:
                task = asyncio.create_task(client.post(RESPONSES, json=asking(stream=stream, store=True)))
                await until(lambda: bool(generator.replies) and len(generator.replies) > len(generator.cancelled))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until(lambda: len(generator.cancelled) == len(generator.replies))


async def test_no_prompt_in_the_log(store: ResponseStore) -> None:
    """Not when it fails, either."""
    with structlog.testing.capture_logs() as logs:
        app = ResponsesApp(RaisingGenerator(), store)
        answer = await call(app, RESPONSES, asking("SECRET", instructions="SECRET", store=True))
        assert answer.status == 500
        assert "SECRET" not in answer.body.decode()
        await call(app, RESPONSES, asking([{"type": "SECRET"}]))
    assert logs
    assert "SECRET" not in json.dumps(logs, default=str)


class RaisingGenerator:
    """A fault of ours."""

    def submit(self, model: ModelName, work: Work) -> Reply:
        raise ValueError(f"about {work}")


async def test_compaction_is_refused_in_words(store: ResponseStore) -> None:
    """It says what to do instead."""
    app = ResponsesApp(ScriptedGenerator(says("x")), store)
    answer = await call(app, f"{RESPONSES}/compact", asking())
    assert (answer.status, "Leave old items out" in answer.error["message"]) == (400, True)


# --- what is stored --------------------------------------------------------------------------------------------------


@MODES
async def test_a_conversation_by_ids(store: ResponseStore, *, stream: bool) -> None:
    """G05: what was stored comes before the new input, both sides of it, over several turns, and can be asked for at
    once; instructions are not carried over."""
    generator = ScriptedGenerator(calls_tools)
    app = ResponsesApp(generator, store)

    async def turn(said: object, **fields: Any) -> dict[str, Any]:
        if stream:
            return (await streamed(app, said=said, store=True, **fields))[-1]["response"]
        return await whole(app, said=said, store=True, **fields)

    first = await turn("one", instructions="be brief", tools=TOOLS)
    outputs = [{"type": "function_call_output", "call_id": "call_a", "output": "found"}]
    second = await turn(outputs, previous_response_id=first["id"])
    third = await turn("three", previous_response_id=second["id"])
    assert (third["previous_response_id"], third["store"]) == (second["id"], True)
    roles = [message.role for message in prompt_of(generator).messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    one, said, found, again, three = prompt_of(generator).messages
    assert (one.content, found.content, three.content) == ("one", "found", "three")
    assert (said.reasoning_content, said.content, again.content) == ("why", "Let me look.", "Let me look.")
    stored = await get(app, second["id"])
    assert stored.json == second


async def test_ids_belong_to_their_key(store: ResponseStore) -> None:
    """Another key's id is not there for anybody else, whatever they ask, even where they share a cache."""
    app = ResponsesApp(ScriptedGenerator(says("x")), store)
    made = await whole(app, store=True)
    item = made["output"][0]["id"]
    for stranger in (BOB, ALICE_2):
        app.caller = stranger
        assert (await get(app, made["id"])).status == 404
        assert (await get(app, f"{made['id']}/input_items")).status == 404
        assert (await call(app, f"{RESPONSES}/{made['id']}/cancel", b"")).status == 404
        assert (await call(app, f"{RESPONSES}/{made['id']}", b"", method="DELETE")).status == 404
        assert (await call(app, RESPONSES, asking(previous_response_id=made["id"]))).status == 404
        reference = [{"type": "item_reference", "id": item}]
        assert (await call(app, RESPONSES, asking(reference))).status == 404
    app.caller = ALICE
    assert (await get(app, made["id"])).status == 200


async def test_items_by_reference(store: ResponseStore) -> None:
    """Of a stored answer, in their place among the others."""
    generator = ScriptedGenerator(says("said before"))
    app = ResponsesApp(generator, store)
    made = await whole(app, store=True)
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    await whole(app, said=[{"role": "user", "content": "a"}, reference, {"role": "user", "content": "b"}])
    assert [message.content for message in prompt_of(generator).messages] == ["a", "said before", "b"]


async def test_input_items_in_pages(store: ResponseStore) -> None:
    """The newest first unless asked otherwise, each with an id, and page after page."""
    app = ResponsesApp(ScriptedGenerator(says("x")), store)
    items = [{"role": "user", "content": str(number)} for number in range(3)]
    made = await whole(app, said=[*items[:2], {"id": "mine", **items[2]}], store=True)
    page = (await get(app, f"{made['id']}/input_items", "limit=2")).json
    assert [item["content"] for item in page["data"]] == ["2", "1"]
    assert (page["first_id"], page["has_more"], page["data"][1]["type"]) == ("mine", True, "message")
    rest = (await get(app, f"{made['id']}/input_items", f"limit=2&after={page['last_id']}")).json
    assert ([item["content"] for item in rest["data"]], rest["has_more"]) == (["0"], False)
    forward = (await get(app, f"{made['id']}/input_items", "order=asc")).json
    assert [item["content"] for item in forward["data"]] == ["0", "1", "2"]
    assert (await get(app, f"{made['id']}/input_items", "limit=0")).error["param"] == "limit"
    assert (await get(app, f"{made['id']}/input_items", "after=nope")).error["param"] == "after"


async def test_deleted_is_gone(store: ResponseStore) -> None:
    """And stays gone; a stored response is not streamed again."""
    app = ResponsesApp(ScriptedGenerator(says("x")), store)
    made = await whole(app, store=True)
    assert (await get(app, made["id"], "stream=true")).error["param"] == "stream"
    deleted = await call(app, f"{RESPONSES}/{made['id']}", b"", method="DELETE")
    assert deleted.json == {"id": made["id"], "object": "response", "deleted": True}
    assert (await call(app, f"{RESPONSES}/{made['id']}", b"", method="DELETE")).status == 404
    assert (await get(app, made["id"])).status == 404


async def test_a_failed_answer_can_be_looked_at_but_not_built_upon(store: ResponseStore) -> None:
    """It has no answer to go on from."""
    failure = Failure(kind=FailureKind.WORKER_DIED, message="gone", retry_after_seconds=1.0)
    app = ResponsesApp(ScriptedGenerator(fails(failure, after=["par"])), store)
    failed = (await streamed(app, store=True))[-1]["response"]
    assert (await get(app, failed["id"])).json == failed
    answer = await call(app, RESPONSES, asking(previous_response_id=failed["id"]))
    assert (answer.status, answer.error["param"]) == (400, "previous_response_id")


@MODES
async def test_what_cannot_be_stored_is_answered_all_the_same(tmp_path: Path, *, stream: bool) -> None:
    """The answer says that it was not stored."""
    (tmp_path / "responses.sqlite3").mkdir()
    store = make_store(tmp_path)
    app = ResponsesApp(ScriptedGenerator(says("Hello")), store)
    made = (await streamed(app, store=True))[-1]["response"] if stream else await whole(app, store=True)
    assert (made["store"], made["output"][0]["content"][0]["text"]) == (False, "Hello")
    store.close()


async def test_a_store_that_is_off(tmp_path: Path) -> None:
    """Stores nothing, says so, and makes no file."""
    store = make_store(tmp_path, limits=replace(LIMITS, keep_seconds=0.0))
    app = ResponsesApp(ScriptedGenerator(says("x")), store)
    assert (await whole(app, store=True))["store"] is False
    assert (await call(app, RESPONSES, asking(store=True, background=True))).error["param"] == "background"
    answer = await call(app, RESPONSES, asking(previous_response_id="resp_1"))
    assert (answer.status, "stores no responses" in answer.error["message"]) == (404, True)
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - pathlib's way is refused in a coroutine
    store.close()


# --- background ------------------------------------------------------------------------------------------------------


async def in_background(app: Any, **fields: Any) -> dict[str, Any]:
    return await whole(app, store=True, background=True, **fields)


async def ended(app: Any, response_id: str) -> dict[str, Any]:
    """What it became."""
    seen: dict[str, Any] = {}
    async with asyncio.timeout(10):
        while seen.get("status") in (None, "queued", "in_progress"):
            seen = (await get(app, response_id)).json
            await asyncio.sleep(0)
    return seen


async def test_a_response_in_the_background(store: ResponseStore) -> None:
    """Answered at once; polled while it waits and while it is worked on; then there whole, and can be built upon.
    It is batch work unless it says otherwise."""
    generator = ScriptedGenerator(is_queued_only)
    app = ResponsesApp(generator, store)
    made = await in_background(app)
    assert (made["status"], made["background"], made["output"], made["service_tier"]) == ("queued", True, [], "flex")
    await until(lambda: len(generator.replies) == 1)
    (reply,), ((_, work),) = generator.replies, generator.asked
    assert work.latency_class is LatencyClass.BATCH
    assert (await get(app, made["id"])).json["status"] == "queued"
    early = await call(app, RESPONSES, asking(previous_response_id=made["id"]))
    assert (early.status, early.error["param"]) == (400, "previous_response_id")
    reply.put(Prefilling(request_id=reply.request_id, done_tokens=1, total_tokens=7, cached_tokens=0))
    assert (await get(app, made["id"])).json["status"] == "in_progress"
    for event in says("Hel", "lo")(work)[1:]:
        reply.put(event)
    done = await ended(app, made["id"])
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hello")
    assert done["usage"]["input_tokens"] == 7
    await in_background(app, previous_response_id=made["id"], service_tier="priority")
    await until(lambda: len(generator.asked) == 2)
    assert generator.asked[1][1].latency_class is LatencyClass.INTERACTIVE
    assert [message.content for message in prompt_of(generator).messages] == ["hi", "Hello", "hi"]


async def test_cancelling_what_runs_in_the_background(store: ResponseStore) -> None:
    """Its row is freed; it is cancelled for good; what has ended stays as it ended; others cannot be cancelled."""
    generator = ScriptedGenerator(is_queued_only)
    app = ResponsesApp(generator, store)
    made = await in_background(app)
    await until(lambda: len(generator.replies) == 1)
    cancelled = await call(app, f"{RESPONSES}/{made['id']}/cancel", b"")
    assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
    assert generator.cancelled == [RequestId(f"req_{made['id'].removeprefix('resp_')}")]
    assert (await get(app, made["id"])).json["status"] == "cancelled"
    app = ResponsesApp(ScriptedGenerator(says("x")), store)
    made = await in_background(app)
    assert (await ended(app, made["id"]))["status"] == "completed"
    assert (await call(app, f"{RESPONSES}/{made['id']}/cancel", b"")).json["status"] == "completed"
    foreground = await whole(app, store=True)
    assert (await call(app, f"{RESPONSES}/{foreground['id']}/cancel", b"")).status == 400


async def test_deleting_what_runs_in_the_background_ends_it(store: ResponseStore) -> None:
    """And nothing of it comes back."""
    generator = ScriptedGenerator(is_queued_only)
    app = ResponsesApp(generator, store)
    made = await in_background(app)
    await until(lambda: len(generator.replies) == 1)
    assert (await call(app, f"{RESPONSES}/{made['id']}", b"", method="DELETE")).status == 200
    assert len(generator.cancelled) == 1
    assert (await get(app, made["id"])).status == 404


async def test_a_background_response_can_fail(store: ResponseStore) -> None:
    """Before or after its first word: then that is what is stored, with a code."""
    failure = Failure(kind=FailureKind.CONTEXT_LENGTH_EXCEEDED, message="6000 of 4096")
    app = ResponsesApp(ScriptedGenerator(fails(failure)), store)
    done = await ended(app, (await in_background(app))["id"])
    assert (done["status"], done["error"]["code"]) == ("failed", "context_length_exceeded")
    app = ResponsesApp(RaisingGenerator(), store)
    with structlog.testing.capture_logs():
        done = await ended(app, (await in_background(app))["id"])
    assert (done["status"], done["error"]["code"]) == ("failed", "server_error")


@pytest.mark.parametrize("fields", [{"store": False}, {"store": True, "stream": True}])
async def test_a_background_needs_a_store_and_no_stream(store: ResponseStore, fields: dict[str, Any]) -> None:
    """400, and nothing is begun."""
    generator = ScriptedGenerator(says("x"))
    answer = await call(ResponsesApp(generator, store), RESPONSES, asking(background=True, **fields))
    assert (answer.status, generator.asked) == (400, [])


async def test_too_long_a_body(store: ResponseStore) -> None:
    """413, as everywhere."""
    app = ResponsesApp(ScriptedGenerator(says("x")), store)
    assert (await call(app, RESPONSES, asking("x" * MAX_BODY_BYTES))).status == 413


async def test_an_aborted_worker_does_not_leave_a_place_taken(store: ResponseStore) -> None:
    """Every open request ends exactly once, in the background, too."""
    desk = make_desk()
    generator = ScriptedGenerator(is_queued_only)
    app = ResponsesApp(generator, store, desk=desk)
    made = await in_background(app)
    await until(lambda: len(generator.replies) == 1)
    assert len(desk.views()) == 1
    (reply,) = generator.replies
    reply.put(Failed(request_id=reply.request_id, failure=Failure(kind=FailureKind.SHUTTING_DOWN, message="bye")))
    assert (await ended(app, made["id"]))["status"] == "failed"
    assert desk.views() == ()
