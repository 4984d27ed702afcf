"""A stand-in for dispatch: answers each request with events of the test's choosing, and remembers what it was asked."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from gateway.replies import Reply
from protocol.failures import Failure
from protocol.generation import (
    Check,
    ChosenLogprob,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Queued,
    RequestEvent,
    Timings,
    Usage,
    Work,
)
from protocol.ids import ModelName, RequestId

Script = Callable[[Generate], Sequence[RequestEvent]]
Pace = Literal["at_once", "one_by_one"]

TIMINGS = Timings(queue_seconds=0.0, prefill_seconds=0.1, decode_seconds=0.2, prefill_slices=1)


class KnownModel:
    """A model of the catalog."""

    def __init__(self, name: str, problem: str | None = None) -> None:
        self.name = ModelName(name)
        self.problem = problem


class FewModels:
    """A catalog of these models."""

    def __init__(self, *models: KnownModel) -> None:
        self._models = {str(model.name): model for model in models}

    def find(self, name: str) -> KnownModel | None:
        return self._models.get(name)


class ScriptedGenerator:
    """Events come all at once (unread deltas merge) or one by one; the test may put more into `replies`.

    `checks` are those of the questions whether a request would be accepted, which nobody answers but the test.
    """

    def __init__(self, script: Script, *, pace: Pace = "at_once") -> None:
        self._script = script
        self._pace: Pace = pace
        self._tasks: list[asyncio.Task[None]] = []
        self.asked: list[tuple[ModelName, Generate]] = []
        self.replies: list[Reply] = []
        self.checks: list[Reply] = []
        self.cancelled: list[RequestId] = []

    def submit(self, model: ModelName, work: Work) -> Reply:
        if isinstance(work, Check):
            reply = Reply(work.request_id, lambda _: None)
            self.checks.append(reply)
            return reply
        assert isinstance(work, Generate)
        generate = work
        reply = Reply(generate.request_id, self._cancel)
        self.asked.append((model, generate))
        self.replies.append(reply)
        events = self._script(generate)
        match self._pace:
            case "at_once":
                for event in events:
                    reply.put(event)
            case "one_by_one":
                self._tasks.append(asyncio.create_task(_put_slowly(reply, events)))
        return reply

    def _cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)


async def _put_slowly(reply: Reply, events: Iterable[RequestEvent]) -> None:
    for event in events:
        reply.put(event)
        for _ in range(5):  # let the reader take it, so that it does not merge with the next
            await asyncio.sleep(0)


def says(
    *texts: str,
    reason: FinishReason = FinishReason.STOP,
    logprobs: Sequence[tuple[ChosenLogprob, ...]] = (),
    cached_tokens: int = 0,
) -> Script:
    """A script: queued, these texts as deltas, finished."""

    def script(generate: Generate) -> Sequence[RequestEvent]:
        request_id = generate.request_id
        deltas = [
            Delta(request_id=request_id, text=text, tokens=1, logprobs=logprobs[at] if logprobs else ())
            for at, text in enumerate(texts)
        ]
        usage = Usage(prompt_tokens=7, completion_tokens=len(texts), cached_tokens=cached_tokens)
        return [
            Queued(request_id=request_id, prompt_tokens=7),
            *deltas,
            Finished(request_id=request_id, reason=reason, usage=usage, timings=TIMINGS),
        ]

    return script


def fails(failure: Failure, *, after: Sequence[str] | None = None) -> Script:
    """A script: fails before it is queued, or after these texts."""

    def script(generate: Generate) -> Sequence[RequestEvent]:
        request_id = generate.request_id
        failed = Failed(request_id=request_id, failure=failure)
        if after is None:
            return [failed]
        texts = [Delta(request_id=request_id, text=text, tokens=1) for text in after]
        return [Queued(request_id=request_id, prompt_tokens=7), *texts, failed]

    return script


def is_queued_only(generate: Generate) -> Sequence[RequestEvent]:
    """A script: accepted, and then nothing until the test puts more."""
    return [Queued(request_id=generate.request_id, prompt_tokens=7)]


def is_silent(_: Generate) -> Sequence[RequestEvent]:
    """A script: nothing at all until the test puts something."""
    return []
