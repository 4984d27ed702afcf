"""A worker's events → the bytes of Chat Completions. Decides only: the same events give the same bytes.

A stream's hot path is one JSON string between two halves of a chunk that were encoded once. The halves come from
the chunk struct itself, so they cannot drift from what the slow path sends.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from gateway.answer_parts import Collected
from gateway.error_answers import openai_error_body
from gateway.event_bytes import DONE, data_event
from gateway.in_flight import RequestView
from gateway.openai.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    EndReason,
    FunctionDelta,
    FunctionObject,
    ToolCallDelta,
    ToolCallObject,
)
from gateway.openai.envelope import Envelope, details, end_reason, usage_of
from gateway.openai.logprobs import token_object
from gateway.openai.waiting import prompt_progress, waiting_comment
from protocol.failures import Failure
from protocol.generation import (
    CallArguments,
    CallStarted,
    ChosenLogprob,
    Delta,
    Finished,
    Prefilling,
    Reasoning,
    RequestEvent,
)

UsageChunk = Literal["asked", "unasked"]
Progress = Literal["asked", "unasked"]

_MARK = "\0text\0"
_encode = msgspec.json.Encoder().encode


class ChatRendering:
    """One chat answer. A stream of it ends with `[DONE]`, or with an error and without it."""

    def __init__(
        self, envelope: Envelope, *, choices: int, usage: UsageChunk, progress: Progress, top_logprobs: int | None
    ) -> None:
        """`top_logprobs` is None when the client wants no logprobs."""
        self._envelope = envelope
        self._choices = choices
        self._usage: UsageChunk = usage
        self._progress: Progress = progress
        self._top_logprobs = top_logprobs
        self._no_usage: UnsetType | None = None if usage == "asked" else UNSET
        self._halves = [_halves(self._chunk(ChatDelta(content=_MARK), choice)) for choice in range(choices)]
        self._ends: dict[int, Finished] = {}
        self._opened = False

    def opening(self) -> bytes:
        """The first chunk of each choice, once: they may go out before anything is known."""
        if self._opened:
            return b""
        self._opened = True
        first = ChatDelta(role="assistant", content="")
        return b"".join(_event(self._chunk(first, choice)) for choice in range(self._choices))

    def encode(self, event: RequestEvent, choice: int) -> bytes:
        """The bytes that this event adds to the stream, perhaps none."""
        match event:
            case Delta(text=text, logprobs=()):
                head, tail = self._halves[choice]
                return head + _encode(text) + tail if text else b""
            case Delta():
                return _event(self._chunk(ChatDelta(content=event.text), choice, event.logprobs))
            case Reasoning():
                return _event(self._chunk(ChatDelta(reasoning_content=event.text), choice, event.logprobs))
            case CallStarted():
                function = FunctionDelta(name=event.name, arguments="")
                call = ToolCallDelta(index=event.index, id=event.call_id, type="function", function=function)
                return _event(self._chunk(ChatDelta(tool_calls=[call]), choice))
            case CallArguments():
                call = ToolCallDelta(index=event.index, function=FunctionDelta(arguments=event.text))
                return _event(self._chunk(ChatDelta(tool_calls=[call]), choice, event.logprobs))
            case Finished():
                self._ends[choice] = event
                last = self._chunk(ChatDelta(), choice, finish_reason=end_reason(event.reason))
                is_the_end = len(self._ends) == self._choices and self._usage == "unasked"
                return _event(replace(last, mlxd=details(self._envelope, self._in_order())) if is_the_end else last)
            case _:  # nothing that this API has a word for
                return b""

    def progress(self, event: Prefilling, prefill_seconds: float) -> bytes:
        """A chunk that says only how far the prompt is, for who asked for it."""
        if self._progress == "unasked":
            return b""
        done = prompt_progress(event, prefill_seconds=prefill_seconds)
        return _event(replace(self._chunk(ChatDelta(), 0), prompt_progress=done))

    def keepalive(self, view: RequestView) -> bytes:
        """A comment line."""
        return waiting_comment(view)

    def failed(self, failure: Failure) -> bytes:
        """The error event that SDKs raise on."""
        return data_event(openai_error_body(failure))

    def closing(self) -> bytes:
        """The bill, if it was asked for, and the mark of a whole stream."""
        if self._usage == "unasked":
            return DONE
        ends = self._in_order()
        bill = replace(self._chunk(ChatDelta(), 0), choices=[], usage=usage_of(ends))
        return _event(replace(bill, mlxd=details(self._envelope, ends))) + DONE

    def whole(self, answers: Sequence[Collected]) -> bytes:
        """The whole answer."""
        ends = [answer.end for answer in answers if isinstance(answer.end, Finished)]
        return _encode(
            ChatCompletion(
                id=self._envelope.id,
                created=self._envelope.created,
                model=self._envelope.model,
                choices=[
                    ChatChoice(
                        index=index,
                        message=_message(answer),
                        logprobs=None if self._top_logprobs is None else _logprobs(answer.logprobs),
                        finish_reason=end_reason(end.reason),
                    )
                    for index, (answer, end) in enumerate(zip(answers, ends, strict=True))
                ],
                usage=usage_of(ends),
                service_tier=self._envelope.service_tier,
                system_fingerprint=self._envelope.system_fingerprint,
                mlxd=details(self._envelope, ends),
            )
        )

    def _in_order(self) -> list[Finished]:
        return [end for _, end in sorted(self._ends.items())]

    def _chunk(
        self,
        delta: ChatDelta,
        choice: int,
        logprobs: Sequence[ChosenLogprob] = (),
        *,
        finish_reason: EndReason | None = None,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            service_tier=self._envelope.service_tier,
            system_fingerprint=self._envelope.system_fingerprint,
            choices=[
                ChatChunkChoice(
                    index=choice,
                    delta=delta,
                    logprobs=_logprobs(logprobs) if logprobs else None,
                    finish_reason=finish_reason,
                )
            ],
            usage=self._no_usage,
        )


def _message(answer: Collected) -> AssistantMessage:
    calls = [
        ToolCallObject(id=call.call_id, function=FunctionObject(name=call.name, arguments=call.arguments))
        for call in answer.calls
    ]
    return AssistantMessage(
        content=answer.text or (None if calls else ""),
        reasoning_content=answer.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _logprobs(logprobs: Sequence[ChosenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(content=[token_object(token) for token in logprobs])


def _halves(chunk: ChatChunk) -> tuple[bytes, bytes]:
    """The event's bytes before and after its text. The last mark is the text's: `choices` comes after `model`."""
    head, _, tail = _event(chunk).rpartition(_encode(_MARK))
    return head, tail


def _event(chunk: ChatChunk) -> bytes:
    return data_event(_encode(chunk))
