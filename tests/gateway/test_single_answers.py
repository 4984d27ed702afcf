"""Requests that end with one event: their class, their bill, a client that leaves, a model that fails. In process."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.admission import DayTokens, KeyLimits
from gateway.caller import Caller
from gateway.front_desk import FrontDesk
from gateway.latency_class import ClassRights
from gateway.replies import Reply
from gateway.single_answers import SingleAnswers
from gateway.tokens.routes import tokens_router
from gateway.vectors.embeddings import inputs_of
from gateway.vectors.routes import vectors_router
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    Embed,
    Embedded,
    Failed,
    Prefilling,
    Queued,
    RequestEvent,
    Rerank,
    Reranked,
    TextPrompt,
    Timings,
    Tokenize,
    Tokenized,
    TokenPrompt,
    Work,
)
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass
from tests.fakes.gated_app import GatedApp
from tests.fakes.openai_app import CREATED, MAX_BODY_BYTES, MODEL, SCOPE, call, make_desk
from tests.fakes.scripted_generator import FewModels, KnownModel

EMBEDDINGS, RERANK, TOKENIZE = "/v1/embeddings", "/v1/rerank", "/tokenize"
HELLO = {"model": MODEL, "input": "hello"}


class Answerer:
    """Stands in for dispatch: each request is answered with these events at once."""

    def __init__(self, answer: Callable[[Work], Sequence[RequestEvent]]) -> None:
        self._answer = answer
        self.asked: list[tuple[ModelName, Any]] = []
        self.replies: list[Reply] = []
        self.cancelled: list[RequestId] = []

    def submit(self, model: ModelName, work: Work) -> Reply:
        reply = Reply(work.request_id, self.cancelled.append)
        self.asked.append((model, work))
        self.replies.append(reply)
        for event in self._answer(work):
            reply.put(event)
        return reply


def counts(work: Work) -> Sequence[RequestEvent]:
    """As an embedding worker would: seven tokens, whatever is asked."""
    request_id = work.request_id
    match work:
        case Embed():
            end: RequestEvent = Embedded(
                request_id=request_id, dimensions=1, vectors=b"\0\0\x80?" * len(work.inputs), prompt_tokens=7
            )
        case Rerank():
            end = Reranked(request_id=request_id, scores=(0.5,) * len(work.documents), prompt_tokens=7)
        case _:
            end = Tokenized(request_id=request_id, token_ids=(1,), tokens=("a",), context_tokens=9)
            return [end]
    return [Queued(request_id=request_id, prompt_tokens=7), end]


def app_of(generator: Answerer, *, desk: FrontDesk | None = None, caller: Caller | None = None) -> GatedApp:
    """The routes behind a stand-in for the gate."""
    answers = SingleAnswers(generator, FewModels(KnownModel(MODEL)), desk or make_desk(), max_body_bytes=MAX_BODY_BYTES)
    asking = caller or Caller(key_name="alice", cache_scope=SCOPE)
    return GatedApp([vectors_router(answers), tokens_router(answers)], asking)


def limited(**limits: int) -> Caller:
    return Caller(key_name="alice", cache_scope=SCOPE, limits=KeyLimits(**limits))


async def test_class_and_tenant_reach_the_worker() -> None:
    """Asked for by header or body, never above what the key may, and told in the answer."""
    generator = Answerer(counts)
    app = app_of(generator)
    answer = await call(app, EMBEDDINGS, {**HELLO, "service_tier": "flex"})
    assert answer.headers["x-mlxd-class"] == "batch"
    headers = {"content-type": "application/json", "x-mlxd-class": "interactive"}
    await call(app, RERANK, {"model": MODEL, "query": "q", "documents": ["d"]}, headers=headers)
    assert [(work.latency_class, work.tenant) for _, work in generator.asked] == [
        (LatencyClass.BATCH, "alice"),
        (LatencyClass.INTERACTIVE, "alice"),
    ]
    modest = Caller(key_name="alice", cache_scope=SCOPE, classes=ClassRights(highest=LatencyClass.STANDARD))
    answer = await call(app_of(generator, caller=modest), EMBEDDINGS, HELLO, headers=headers)
    assert answer.headers["x-mlxd-class"] == "standard"


async def test_a_days_tokens_are_charged_and_run_out() -> None:
    """Embeddings and rerank as `usage` counts them; a question of tokens costs nothing and is answered all the same."""
    tokens = DayTokens()
    app = app_of(Answerer(counts), desk=make_desk(tokens=tokens), caller=limited(tokens_per_day=14))
    first = await call(app, EMBEDDINGS, HELLO)
    assert first.json["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert tokens.used("alice", unix_now=CREATED) == 7
    await call(app, TOKENIZE, {"model": MODEL, "prompt": "a"})
    assert tokens.used("alice", unix_now=CREATED) == 7
    await call(app, RERANK, {"model": MODEL, "query": "q", "documents": ["d"]})
    assert tokens.used("alice", unix_now=CREATED) == 14
    refused = await call(app, EMBEDDINGS, HELLO)
    assert (refused.status, refused.headers["x-should-retry"]) == (429, "false")
    assert (await call(app, TOKENIZE, {"model": MODEL, "prompt": "a"})).status == 200


async def test_who_asks_for_details_gets_timings_and_nobody_else_does() -> None:
    """The object `mlxd` as in other dialects: the worker's timings with what was waited for here. Tokens have none."""
    timings = Timings(queue_seconds=1.0, prefill_seconds=2.0, decode_seconds=0.0, prefill_slices=3)

    def timed(work: Work) -> Sequence[RequestEvent]:
        *before, end = counts(work)
        return [*before, replace(end, timings=timings) if isinstance(end, Embedded | Reranked) else end]

    app = app_of(Answerer(timed))
    ranking = {"model": MODEL, "query": "q", "documents": ["d"]}
    asking = {"content-type": "application/json", "x-mlxd-details": "1"}
    for path, body in ((EMBEDDINGS, HELLO), (EMBEDDINGS, {**HELLO, "encoding_format": "base64"}), (RERANK, ranking)):
        assert "mlxd" not in (await call(app, path, body)).json
        answer = await call(app, path, body, headers=asking)
        told = answer.json["mlxd"]
        assert told["request_id"].startswith("req_")
        assert told.keys() == {"request_id", "timings"}
        assert told["timings"]["prefill_seconds"] == 2.0
        assert told["timings"]["prefill_slices"] == 3
        assert told["timings"]["queue"]["worker_seconds"] == 1.0
        assert told["timings"]["queue_seconds"] >= 1.0
    assert "mlxd" not in (await call(app, TOKENIZE, {"model": MODEL, "prompt": "a"}, headers=asking)).json


async def test_what_was_refused_costs_nothing_and_what_ran_is_paid() -> None:
    """A refusal before any work is free; one that comes in the midst of it is not."""

    def refuses(work: Work) -> Sequence[RequestEvent]:
        failure = Failure(kind=FailureKind.CONTEXT_LENGTH_EXCEEDED, message="input[0] has 9 tokens", param="input[0]")
        return [Failed(request_id=work.request_id, failure=failure)]

    def dies(work: Work) -> Sequence[RequestEvent]:
        failure = Failure(kind=FailureKind.WORKER_DIED, message="its process ended", retry_after_seconds=1.0)
        return [
            Queued(request_id=work.request_id, prompt_tokens=7),
            Prefilling(request_id=work.request_id, done_tokens=3, total_tokens=7, cached_tokens=0),
            Failed(request_id=work.request_id, failure=failure),
        ]

    tokens = DayTokens()
    refused = await call(app_of(Answerer(refuses), desk=make_desk(tokens=tokens)), EMBEDDINGS, HELLO)
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert refused.error["message"] == "input has 9 tokens"
    assert tokens.used("alice", unix_now=CREATED) == 0
    died = await call(app_of(Answerer(dies), desk=make_desk(tokens=tokens)), EMBEDDINGS, HELLO)
    assert (died.status, died.error["code"], died.headers["retry-after"]) == (503, "worker_died", "1")
    assert tokens.used("alice", unix_now=CREATED) == 7


async def test_over_the_keys_limit_it_waits_and_tokens_do_not() -> None:
    """`max_running` holds a second batch of texts back until the first is done."""
    generator = Answerer(lambda work: [] if isinstance(work, Embed) else counts(work))
    app = app_of(generator, caller=limited(max_running=1))
    first, second = (asyncio.create_task(call(app, EMBEDDINGS, HELLO)) for _ in range(2))
    async with asyncio.timeout(10):
        while not generator.replies:  # noqa: ASYNC110  (there is no event to wait for)
            await asyncio.sleep(0)
        assert (await call(app, TOKENIZE, {"model": MODEL, "prompt": "a"})).status == 200
        embeds = [work for _, work in generator.asked if isinstance(work, Embed)]
        assert len(embeds) == 1
        for event in counts(embeds[0]):
            generator.replies[0].put(event)
        assert (await first).status == 200
        while len(generator.asked) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for event in counts(generator.asked[2][1]):
            generator.replies[2].put(event)
        assert (await second).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, HELLO),
        (RERANK, {"model": MODEL, "query": "q", "documents": ["d"]}),
        (TOKENIZE, {"model": MODEL, "prompt": "a"}),
    ],
)
async def test_a_client_that_leaves_cancels_its_work(path: str, body: dict[str, Any]) -> None:
    """H: nothing computes for nobody, and nothing is answered to nobody."""
    generator = Answerer(lambda _: [])
    desk = make_desk()
    left = asyncio.Event()
    sent: list[Any] = []
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    running = asyncio.create_task(app_of(generator, desk=desk)(scope, receive, send))
    async with asyncio.timeout(10):
        while not generator.replies:  # noqa: ASYNC110  (there is no event to wait for)
            await asyncio.sleep(0)
        left.set()
        await running
    assert set(generator.cancelled) == {generator.replies[0].request_id}
    assert sent == []
    assert desk.views() == ()


async def test_the_log_says_what_it_was() -> None:
    """Class, tokens and end; nothing that a client wrote."""
    app = app_of(Answerer(counts))
    await call(app, EMBEDDINGS, HELLO)
    fields = app.log_fields[-1]
    assert (fields["class"], fields["ended"], fields["phase"]) == ("standard", "finished", "finished")
    assert fields["prompt_tokens"] == 7
    assert {type(value) for name, value in fields.items() if name.endswith("_seconds")} == {float}


@pytest.mark.parametrize(
    ("sent", "inputs"),
    [
        ("a", (TextPrompt(text="a"),)),
        (["a", "b"], (TextPrompt(text="a"), TextPrompt(text="b"))),
        ([1, 2], (TokenPrompt(token_ids=(1, 2)),)),
        ([[1], [2, 3]], (TokenPrompt(token_ids=(1,)), TokenPrompt(token_ids=(2, 3)))),
    ],
)
def test_every_form_of_input(sent: Any, inputs: Any) -> None:
    """OpenAI's four."""
    assert inputs_of(sent) == inputs


async def test_a_chat_is_counted_with_the_prompt_that_an_answer_would_have() -> None:
    """G02: tokens are asked of the very prompt; how to draw is not looked at."""
    generator = Answerer(counts)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0.3, "max_tokens": 5}
    answer = await call(app_of(generator), TOKENIZE, body)
    assert answer.json == {"count": 1, "max_model_len": 9, "tokens": [1], "token_strs": None}
    (_, asked), *_ = generator.asked
    assert isinstance(asked, Tokenize)
    assert asked.special_tokens == "add"
    assert [(message.role, message.content) for message in asked.prompt.messages] == [("user", "hi")]  # pyright: ignore
