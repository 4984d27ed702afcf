"""Admission and honest waiting over both routes: what is refused before any byte, and what a waiting client hears."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from gateway.admission import ClassBounds, ClassLimits, DayTokens, KeyLimits, Load
from gateway.caller import Caller
from gateway.front_desk import FrontDesk, Place
from gateway.latency_class import ClassRights, WorkClass
from gateway.replies import Reply
from gateway.status import ModelStatus, ServiceStatus
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    Checked,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Loading,
    Prefilling,
    Queued,
    RequestEvent,
    Usage,
    Waiting,
    Work,
)
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass
from tests.fakes.openai_app import ALICE, CREATED, MODEL, SCOPE, Answer, call, make_desk, openai_app, served, until
from tests.fakes.scripted_generator import TIMINGS, ScriptedGenerator, fails, is_queued_only, is_silent, says

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON_HEADERS = {"content-type": "application/json"}
MODES = pytest.mark.parametrize("stream", [False, True])


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def caller(limits: KeyLimits | None = None, classes: ClassRights | None = None) -> Caller:
    return Caller(key_name="alice", cache_scope=SCOPE, limits=limits or KeyLimits(), classes=classes or ClassRights())


def finish(reply: Reply) -> None:
    reply.put(Delta(request_id=reply.request_id, text="x", tokens=1))
    usage = Usage(prompt_tokens=7, completion_tokens=1, cached_tokens=0)
    reply.put(Finished(request_id=reply.request_id, reason=FinishReason.STOP, usage=usage, timings=TIMINGS))


# --- class -----------------------------------------------------------------------------------------------------------


@MODES
async def test_the_class_granted_reaches_the_worker_and_the_client(*, stream: bool) -> None:
    """Header, body and every chunk say what was granted, clamped by the key; the worker gets it with the key's name."""
    generator = ScriptedGenerator(says("a", "b"), pace="one_by_one")
    app = openai_app(generator, caller=caller(classes=ClassRights(highest=LatencyClass.STANDARD)))
    for asked, granted, tier in (("priority", "standard", "default"), ("flex", "batch", "flex")):
        answer = await call(app, CHAT, chat_body(stream=stream, service_tier=asked))
        assert answer.headers["x-mlxd-class"] == granted
        assert "x-mlxd-ignored-params" not in answer.headers
        documents = [json.loads(event) for event in answer.events[:-1]] if stream else [answer.json]
        assert {document["service_tier"] for document in documents} == {tier}
        _, generate = generator.asked[-1]
        assert (generate.latency_class, generate.tenant) == (granted, "alice")


async def test_unknown_classes_fall_to_the_default() -> None:
    """Never an error: a wrong word costs time, not the answer."""
    generator = ScriptedGenerator(says("a"))
    app = openai_app(generator, caller=caller(classes=ClassRights(default=LatencyClass.BATCH)))
    answer = await call(
        app, CHAT, chat_body(service_tier="platinum", priority=0), headers={**JSON_HEADERS, "x-mlxd-class": "now!"}
    )
    assert (answer.status, answer.headers["x-mlxd-class"]) == (200, "batch")
    assert answer.headers["x-mlxd-ignored-params"] == "x-mlxd-class, service_tier"
    for priority in ("high", 1.5):
        answer = await call(app, CHAT, chat_body(priority=priority))
        assert (answer.status, answer.headers["x-mlxd-class"]) == (200, "batch")
        assert answer.headers["x-mlxd-ignored-params"] == "priority"
    assert "x-mlxd-ignored-params" not in (await call(app, CHAT, chat_body(priority=-1.0))).headers


# --- admission -------------------------------------------------------------------------------------------------------


@MODES
async def test_a_full_key_is_refused_before_any_byte(*, stream: bool) -> None:
    """429 that names the limit, and says when to come back and whether; nothing reaches a worker."""
    generator = ScriptedGenerator(is_queued_only)
    desk = make_desk()
    limited = openai_app(generator, desk=desk, caller=caller(KeyLimits(max_running=1, max_queued=0)))
    first = asyncio.create_task(call(limited, CHAT, chat_body()))
    await until(lambda: bool(generator.replies))
    answer = await call(limited, CHAT, chat_body(stream=stream))
    assert (answer.status, answer.error["code"], answer.error["type"]) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    assert "max_running 1" in answer.error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.headers["x-should-retry"] == "true"
    assert answer.headers["x-ratelimit-limit-requests"] == "1"
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert answer.headers["x-mlxd-class"] == "standard"
    assert len(generator.asked) == 1
    finish(generator.replies[0])
    assert (await first).headers["x-ratelimit-remaining-requests"] == "0"
    second = asyncio.create_task(call(limited, CHAT, chat_body()))
    await until(lambda: len(generator.replies) == 2)
    finish(generator.replies[1])
    assert (await second).status == 200


async def test_a_full_class_leaves_the_others_alone() -> None:
    """An overnight batch that fills its queue keeps nobody else out."""
    generator = ScriptedGenerator(is_queued_only)
    app = openai_app(generator, desk=make_desk(class_limits=ClassLimits(batch=ClassBounds(max_queued=1))))
    waiting = asyncio.create_task(call(app, CHAT, chat_body(service_tier="flex")))
    await until(lambda: bool(generator.replies))
    refused = await call(app, CHAT, chat_body(service_tier="flex"))
    assert refused.status == 429
    assert "max_queued_batch 1" in refused.error["message"]
    other = asyncio.create_task(call(app, CHAT, chat_body()))
    await until(lambda: len(generator.replies) == 2)
    for reply in generator.replies:
        finish(reply)
    assert {(await waiting).status, (await other).status} == {200}


async def test_a_days_tokens_run_out() -> None:
    """What was used is counted as `usage` counts it; then 429 until midnight UTC, which no SDK should sit out."""
    tokens = DayTokens()
    app = openai_app(
        ScriptedGenerator(says("a", "b")),
        desk=make_desk(tokens=tokens),
        caller=caller(KeyLimits(tokens_per_day=10)),
    )
    first = await call(app, CHAT, chat_body())
    assert first.headers["x-ratelimit-limit-tokens"] == "10"
    assert first.headers["x-ratelimit-remaining-tokens"] == "10"
    assert tokens.used("alice", unix_now=CREATED) == first.json["usage"]["total_tokens"] == 9
    assert (await call(app, CHAT, chat_body())).headers["x-ratelimit-remaining-tokens"] == "1"
    refused = await call(app, CHAT, chat_body())
    assert refused.status == 429
    assert "tokens_per_day" in refused.error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert int(refused.headers["retry-after"]) > 120
    assert refused.headers["x-ratelimit-reset-tokens"].endswith("s")


async def test_an_unlimited_key_hears_of_no_limits() -> None:
    """No header speaks of a limit that is not there."""
    answer = await call(openai_app(ScriptedGenerator(says("a"))), CHAT, chat_body())
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_what_failed_is_not_billed() -> None:
    """A request that a worker refused, or that nobody ever worked on, costs no tokens."""
    tokens = DayTokens()
    failure = Failure(kind=FailureKind.WORKER_DIED, message="It restarts. Try again.")
    await call(openai_app(ScriptedGenerator(fails(failure)), desk=make_desk(tokens=tokens)), CHAT, chat_body())
    assert tokens.used("alice", unix_now=CREATED) == 0
    await call(
        openai_app(ScriptedGenerator(fails(failure, after=["a"])), desk=make_desk(tokens=tokens)), CHAT, chat_body()
    )
    assert tokens.used("alice", unix_now=CREATED) == 8


async def test_over_max_running_waits_for_its_own() -> None:
    """Held back in the gateway, first come first served; it reaches the model when the one before it has ended."""
    generator = ScriptedGenerator(is_queued_only)
    desk = make_desk()
    app = openai_app(generator, desk=desk, caller=caller(KeyLimits(max_running=1, max_queued=2)))
    exchanges = [asyncio.create_task(call(app, CHAT, chat_body(user=str(number)))) for number in range(3)]
    await until(lambda: len(desk.views()) == 3)
    for number in range(3):
        await until(lambda number=number: len(generator.replies) == number + 1)
        assert [view.held_by for view in desk.views()] == [""] + ["key_limit"] * (2 - number)
        finish(generator.replies[number])
    assert [answer.status for answer in await asyncio.gather(*exchanges)] == [200, 200, 200]
    assert desk.views() == ()


# --- headers ---------------------------------------------------------------------------------------------------------


class Loads:
    """A service whose model is being read."""

    def status(self) -> ServiceStatus:
        loading = Loading(done_bytes=40, total_bytes=100)
        return ServiceStatus(
            models=(
                ModelStatus(
                    name=ModelName(MODEL), state="starting", since_unix=0.0, loading=loading, loaded_in_seconds=8.4
                ),
            )
        )


@asynccontextmanager
async def waiting_stream(
    generator: ScriptedGenerator, path: str = CHAT, desk: Any = None, **fields: Any
) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of one stream that is not silent for long."""
    app = openai_app(generator, keepalive_seconds=0.02, headers_seconds=0.05, desk=desk)
    body = (
        chat_body(stream=True, **fields) if path == CHAT else {"model": MODEL, "prompt": "hi", "stream": True, **fields}
    )
    async with (
        served(app) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", path, json=body) as answer,
    ):
        assert answer.status_code == 200
        yield answer.aiter_lines()


async def next_line(lines: AsyncIterator[str], words: str) -> str:
    async with asyncio.timeout(10):
        async for line in lines:
            if words in line:
                return line
    raise AssertionError(f"the stream ended without {words!r}")


class HasNoRoom:
    """A service whose model waits for others to leave."""

    def status(self) -> ServiceStatus:
        return ServiceStatus(models=(ModelStatus(name=ModelName(MODEL), state="waiting_for_memory", since_unix=0.0),))


async def test_who_waits_until_other_models_have_left_is_told_so() -> None:
    """Nobody can say for how long."""
    generator = ScriptedGenerator(is_silent)
    async with waiting_stream(generator, desk=make_desk(status_source=HasNoRoom())) as lines:
        assert await next_line(lines, ": mlxd held_by=memory")
        (reply,) = generator.replies
        finish(reply)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_model_that_takes_long_does_not_hold_back_the_headers(path: str) -> None:
    """B06: after the patience a stream begins, says how far the load is, and goes on as any other."""
    generator = ScriptedGenerator(is_silent)
    async with waiting_stream(generator, path, make_desk(status_source=Loads())) as lines:
        assert await next_line(lines, ": mlxd loading=40% eta=9s")
        (reply,) = generator.replies
        reply.put(Queued(request_id=reply.request_id, prompt_tokens=7))
        finish(reply)
        assert "[DONE]" in await next_line(lines, "[DONE]")


async def test_a_stream_that_begins_before_its_model_speaks_says_at_once_what_it_waits_for() -> None:
    """The first comment does not wait for the keepalive's timer."""
    desk = make_desk()
    app = openai_app(
        ScriptedGenerator(is_silent), desk=desk, caller=caller(KeyLimits(max_running=1)), headers_seconds=0.01
    )
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        first = asyncio.create_task(client.post(CHAT, json=chat_body()))
        await until(lambda: bool(desk.views()))
        async with client.stream("POST", CHAT, json=chat_body(stream=True)) as answer:
            assert await next_line(answer.aiter_lines(), ": mlxd") == ": mlxd queue=0 held_by=key_limit"
        first.cancel()


@pytest.mark.parametrize("fits", [True, False])
async def test_who_is_held_by_its_key_is_checked_before_its_headers(*, fits: bool) -> None:
    """What fits begins at once, long before the patience ends; what does not is refused with its real status."""
    generator, desk = ScriptedGenerator(is_silent), make_desk()
    app = openai_app(generator, desk=desk, caller=caller(KeyLimits(max_running=1)), headers_seconds=60.0)
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        first = asyncio.create_task(client.post(CHAT, json=chat_body()))
        await until(lambda: bool(desk.views()))
        second = asyncio.create_task(_status(client, chat_body(stream=True)))
        await until(lambda: bool(generator.checks))
        (check,) = generator.checks
        failure = Failure(kind=FailureKind.CONTEXT_LENGTH_EXCEEDED, message="9000 tokens, at most 4096. Shorten it.")
        check.put(
            Checked(request_id=check.request_id, prompt_tokens=7)
            if fits
            else Failed(request_id=check.request_id, failure=failure)
        )
        assert await asyncio.wait_for(second, 10) == ((200, "") if fits else (400, "context_length_exceeded"))
        if not fits:
            await until(lambda: len(desk.views()) == 1)
            assert [outcome for _, _, outcome in desk.tallies.ended] == ["context_length_exceeded"]
        first.cancel()
    assert len(generator.asked) == 1


def test_who_never_ran_says_nothing_of_when_to_come_back() -> None:
    """Ends of which no model worked on, and a key's warms, which take no turn of its, shorten no Retry-After."""
    now = 0.0
    desk = FrontDesk(
        class_limits=ClassLimits(),
        tokens=DayTokens(),
        status_source=Loads(),
        clock=lambda: now,
        unix_clock=lambda: CREATED,
    )
    ada = caller()
    refused = Failure(kind=FailureKind.CONTEXT_LENGTH_EXCEEDED, message="Too long. Shorten it.")
    request_id = RequestId("r")
    runs = Prefilling(request_id=request_id, done_tokens=1, total_tokens=9, cached_tokens=0)
    lives: list[tuple[WorkClass, float, RequestEvent | None]] = [
        ("standard", 40.0, runs),
        ("standard", 0.5, Failed(request_id=request_id, failure=refused)),
        ("standard", 0.5, None),
        ("warm", 2.0, runs),
    ]
    for work_class, seconds, event in lives:
        place = desk.enter(ada, request_id=request_id, model=ModelName(MODEL), work_class=work_class)
        assert isinstance(place, Place)
        if event is not None:
            place.advance(event)
        now += seconds
        place.leave()
    loads: list[Load] = []

    def note(load: Load, limits: KeyLimits) -> tuple[tuple[bytes, bytes], ...]:
        loads.append(load)
        return ()

    for work_class in ("standard", "warm"):
        desk.headers(ada, work_class, note)
    assert [load.key_next_seconds for load in loads] == [40.0, 40.0]
    assert [load.class_next_seconds for load in loads] == [40.0, 2.0]


async def test_an_overload_at_the_check_is_no_refusal() -> None:
    """What may be over when the request's turn has come is not said before."""
    generator, desk = ScriptedGenerator(is_silent), make_desk()
    app = openai_app(generator, desk=desk, caller=caller(KeyLimits(max_running=1)), headers_seconds=0.2)
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        first = asyncio.create_task(client.post(CHAT, json=chat_body()))
        await until(lambda: bool(desk.views()))
        second = asyncio.create_task(_status(client, chat_body(stream=True)))
        await until(lambda: bool(generator.checks))
        (check,) = generator.checks
        failure = Failure(kind=FailureKind.SHUTTING_DOWN, message="It stops.")
        check.put(Failed(request_id=check.request_id, failure=failure))
        assert await asyncio.wait_for(second, 10) == (200, "")
        first.cancel()


async def test_a_model_that_loads_checks_with_its_tokenizer() -> None:
    """B08: the weights are not there, and what is too long is a 400 all the same."""
    generator = ScriptedGenerator(is_silent)
    app = openai_app(generator, desk=make_desk(status_source=Loads()), headers_seconds=60.0)
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        asked = asyncio.create_task(_status(client, chat_body(stream=True)))
        await until(lambda: bool(generator.checks))
        (check,) = generator.checks
        failure = Failure(kind=FailureKind.CONTEXT_LENGTH_EXCEEDED, message="9000 tokens, at most 4096. Shorten it.")
        check.put(Failed(request_id=check.request_id, failure=failure))
        assert await asyncio.wait_for(asked, 10) == (400, "context_length_exceeded")
    await until(lambda: len(generator.cancelled) == 1)


async def _status(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str]:
    """A stream's status, as soon as it is there, with the error's code."""
    async with client.stream("POST", CHAT, json=body) as answer:
        if answer.status_code == 200:
            return 200, ""
        return answer.status_code, json.loads(await answer.aread())["error"]["code"]


async def test_a_late_refusal_is_an_error_event_that_names_the_field() -> None:
    """B08: what could not be known before the status line has the same body after it, and no [DONE]."""
    generator = ScriptedGenerator(is_silent)
    async with waiting_stream(generator) as lines:
        await next_line(lines, "keepalive")
        (reply,) = generator.replies
        failure = Failure(kind=FailureKind.CONTEXT_LENGTH_EXCEEDED, message="9000 tokens, at most 4096. Shorten it.")
        reply.put(Failed(request_id=reply.request_id, failure=failure))
        error = json.loads((await next_line(lines, '"error"')).removeprefix("data: "))["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert not [line async for line in lines if "DONE" in line]


async def test_progress_before_acceptance_is_no_acceptance() -> None:
    """B08: a worker that first says that the request waits, and then refuses it, gets a real status."""

    def script(generate: Generate) -> Sequence[RequestEvent]:
        failure = Failure(kind=FailureKind.INVALID_REQUEST, message="The template refuses this. Mend the roles.")
        return [
            Waiting(request_id=generate.request_id, ahead=1),
            Failed(request_id=generate.request_id, failure=failure),
        ]

    answer = await call(openai_app(ScriptedGenerator(script, pace="one_by_one")), CHAT, chat_body(stream=True))
    assert answer.status == 400


async def test_a_whole_answer_waits_for_its_real_status() -> None:
    """Without stream there is nothing to begin: the patience is for streams only."""
    generator = ScriptedGenerator(is_silent)
    exchange = asyncio.create_task(call(openai_app(generator, headers_seconds=0.01), CHAT, chat_body()))
    await until(lambda: bool(generator.replies))
    await asyncio.sleep(0.05)  # nothing must happen in it
    assert not exchange.done()
    (reply,) = generator.replies
    reply.put(Failed(request_id=reply.request_id, failure=Failure(kind=FailureKind.OVERLOADED, message="Later.")))
    assert (await exchange).status == 429


# --- what a waiting client hears -------------------------------------------------------------------------------------


async def test_comments_say_position_and_progress() -> None:
    """B05: queue, prefill, then silence filled with plain comments; never an `id:` line."""
    generator = ScriptedGenerator(is_queued_only)
    seen: list[str] = []
    async with waiting_stream(generator) as lines:
        await until(lambda: bool(generator.replies))
        (reply,) = generator.replies
        request_id = reply.request_id
        reply.put(Waiting(request_id=request_id, ahead=2, eta_seconds=13.5))
        seen.append(await next_line(lines, ": mlxd queue=2 eta=14s"))
        reply.put(
            Prefilling(request_id=request_id, done_tokens=8192, total_tokens=32768, cached_tokens=24, eta_seconds=9)
        )
        seen.append(await next_line(lines, ": mlxd prefill=8192/32768 cached=24 eta=9s"))
        reply.put(Delta(request_id=request_id, text="x", tokens=1))
        await next_line(lines, ": keepalive")
        finish(reply)
        seen += [line async for line in lines]
    assert not any(line.startswith(("id:", "retry:", "event:")) for line in seen)
    assert seen[-2] == "data: [DONE]"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prompt_progress_comes_to_who_asks(path: str) -> None:
    """llama-server's shape, in chunks with choices, so that no client stumbles; nothing of it otherwise."""

    def script(generate: Generate) -> Sequence[RequestEvent]:
        queued, *rest = says("a")(generate)
        progress = Prefilling(request_id=generate.request_id, done_tokens=5, total_tokens=7, cached_tokens=2)
        return [queued, progress, *rest]

    app = openai_app(ScriptedGenerator(script, pace="one_by_one"))
    body = chat_body(stream=True) if path == CHAT else {"model": MODEL, "prompt": "hi", "stream": True}
    asked = await call(app, path, {**body, "return_progress": True})
    chunks = [json.loads(event) for event in asked.events[:-1]]
    (progress,) = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert (progress["total"], progress["cache"], progress["processed"]) == (7, 2, 5)
    assert progress["time_ms"] >= 0
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert "x-mlxd-ignored-params" not in asked.headers
    assert b"prompt_progress" not in (await call(app, path, body)).body


# --- a long wait -----------------------------------------------------------------------------------------------------


async def test_the_sdk_survives_a_twenty_minute_wait() -> None:
    """Scaled: 120 keepalives of 10 s are 120 of 10 ms, and the SDK's read timeout is 25 of them, although the model
    says nothing at all for the first half. The answer then arrives whole."""
    generator = ScriptedGenerator(is_silent)
    app = openai_app(generator, keepalive_seconds=0.01, headers_seconds=0.03)
    comments = 0

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        async def count(message: Any) -> None:
            nonlocal comments
            comments += message.get("body", b"").startswith(b":")
            await send(message)

        await app(scope, receive, count)

    timeout = httpx.Timeout(10.0, read=0.25)
    async with (
        served(counted) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=timeout) as client,
    ):
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        reading = asyncio.create_task(_text_of(stream))
        await until(lambda: comments >= 60)
        (reply,) = generator.replies
        reply.put(Queued(request_id=reply.request_id, prompt_tokens=7))
        await until(lambda: comments >= 120)
        finish(reply)
        assert await reading == "x"
    assert generator.cancelled == []


async def _text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


# --- clients that leave ----------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("phase", ["held", "waiting_for_model", "queued", "prefilling", "decoding"])
async def test_who_leaves_frees_everything(phase: str, *, stream: bool) -> None:
    """B07: in every phase the worker is told, the place is free for the key's next one, and no task stays behind."""
    generator = ScriptedGenerator(is_silent)
    desk = make_desk()
    limits = KeyLimits(max_running=1, max_queued=1)
    app = openai_app(generator, desk=desk, caller=caller(limits), headers_seconds=0.01)
    blocker = asyncio.create_task(call(app, CHAT, chat_body())) if phase == "held" else None
    if blocker is not None:
        await until(lambda: len(generator.replies) == 1)
    async with served(app) as url:
        before = len(asyncio.all_tasks())
        async with httpx.AsyncClient(base_url=url) as client:
            exchange = asyncio.create_task(client.post(CHAT, json=chat_body(stream=stream)))
            await until(lambda: len(desk.views()) == (1 if blocker is None else 2))
            if blocker is None:
                await until(lambda: bool(generator.replies))
                _bring_to(phase, generator.replies[0])
            await until(lambda: desk.views()[-1].phase == ("queued" if phase == "held" else phase))
            exchange.cancel()
        await until(lambda: len(desk.views()) == (0 if blocker is None else 1))
        assert len(generator.cancelled) == (1 if blocker is None else 0)
        await until(lambda: len(asyncio.all_tasks()) <= before)
    if blocker is not None:
        finish(generator.replies[0])
        assert (await blocker).status == 200
    assert desk.views() == ()


def _bring_to(phase: str, reply: Reply) -> None:
    request_id = reply.request_id
    events: dict[str, list[RequestEvent]] = {
        "waiting_for_model": [],
        "queued": [Queued(request_id=request_id, prompt_tokens=7)],
        "prefilling": [
            Queued(request_id=request_id, prompt_tokens=7),
            Prefilling(request_id=request_id, done_tokens=1, total_tokens=7, cached_tokens=0),
        ],
        "decoding": [
            Queued(request_id=request_id, prompt_tokens=7),
            Delta(request_id=request_id, text="x", tokens=1),
        ],
    }
    for event in events[phase]:
        reply.put(event)


async def test_a_fault_leaves_no_place_behind() -> None:
    """A generator that raises is a 500, and its request is not in the book any more."""

    class Raising:
        def submit(self, model: ModelName, work: Work) -> Reply:
            raise RuntimeError("a fault")

    desk = make_desk()
    answer: Answer = await call(openai_app(Raising(), desk=desk), CHAT, chat_body())
    assert (answer.status, desk.views()) == (500, ())
    assert ALICE.limits == KeyLimits()
