"""A worker's events → the bytes of Chat Completions. Decides only: the same events give the same bytes.

A stream's hot path is one JSON string between two halves of a chunk that were encoded once. The halves come from
the chunk struct itself, so they cannot drift from what the slow path sends.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from gateway.answer_parts import Collected, ReasoningPart
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
from gateway.openai.envelope import AnswerStyle, Envelope, details, end_reason, usage_of
from gateway.openai.logprobs import token_object
from gateway.openai.prompt_progress import prompt_progress
from gateway.waiting_comment import waiting_comment
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

_MARK = "\0text\0"
_encode = msgspec.json.Encoder().encode


class ChatRendering:
    """One chat answer. A stream of it ends with `[DONE]`, or with an error and without it."""

    def __init__(self, envelope: Envelope, style: AnswerStyle) -> None:
        self._envelope = envelope
        self._style = style
        self._no_usage: UnsetType | None = None if style.usage == "asked" else UNSET
        self._halves = [_halves(self._chunk(ChatDelta(content=_MARK), choice)) for choice in range(style.choices)]
        self._ends: dict[int, Finished] = {}
        self._opened = False

    def opening(self) -> bytes:
        """The first chunk of each choice, once: they may go out before anything is known."""
        if self._opened:
            return b""
        self._opened = True
        first = ChatDelta(role="assistant", content="")
        return b"".join(_event(self._chunk(first, choice)) for choice in range(self._style.choices))

    def encode(self, event: RequestEvent, choice: int) -> bytes:
        """The bytes that this event adds to the stream, perhaps none."""
        match event:
            case Delta(text=text, logprobs=()):
                head, tail = self._halves[choice]
                return head + _encode(text) + tail if text else b""
            case Delta():
                return _event(self._chunk(ChatDelta(content=event.text), choice, event.logprobs))
            case Reasoning():
                if self._style.reasoning == "hidden":
                    return b""
                return _event(self._chunk(ChatDelta(reasoning_content=event.text), choice, event.logprobs))
            case CallStarted() | CallArguments():
                return _event(self._chunk(self._call_delta(event), choice, _logprobs_of(event)))
            case Finished():
                self._ends[choice] = event
                last = self._chunk(ChatDelta(), choice, finish_reason=end_reason(event.reason, self._style.calls))
                is_the_end = len(self._ends) == self._style.choices and self._style.usage == "unasked"
                return _event(replace(last, mlxd=details(self._envelope, self._in_order())) if is_the_end else last)
            case _:  # nothing that this API has a word for
                return b""

    def progress(self, event: Prefilling, prefill_seconds: float) -> bytes:
        """A chunk that says only how far the prompt is, for who asked for it."""
        if self._style.progress == "unasked":
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
        if self._style.usage == "unasked":
            return DONE
        ends = self._in_order()
        bill = replace(self._chunk(ChatDelta(), 0), choices=[], usage=usage_of(ends, self._style.choices_per_prompt))
        return _event(replace(bill, mlxd=details(self._envelope, ends))) + DONE

    def whole(self, answers: Sequence[Collected]) -> bytes:
        """The whole answer."""
        ends = [answer.end for answer in answers if isinstance(answer.end, Finished)]
        if self._style.reasoning == "hidden":
            answers = [_without_reasoning(answer) for answer in answers]
        return _encode(
            ChatCompletion(
                id=self._envelope.id,
                created=self._envelope.created,
                model=self._envelope.model,
                choices=[
                    ChatChoice(
                        index=index,
                        message=_message(answer, self._style.calls),
                        logprobs=None if self._style.top_logprobs is None else _logprobs(answer.logprobs),
                        finish_reason=end_reason(end.reason, self._style.calls),
                    )
                    for index, (answer, end) in enumerate(zip(answers, ends, strict=True))
                ],
                usage=usage_of(ends, self._style.choices_per_prompt),
                service_tier=self._envelope.service_tier,
                system_fingerprint=self._envelope.system_fingerprint,
                mlxd=details(self._envelope, ends),
            )
        )

    def _call_delta(self, event: CallStarted | CallArguments) -> ChatDelta:
        """The name comes once, with empty arguments; the arguments after it, piece by piece."""
        if isinstance(event, CallStarted):
            function = FunctionDelta(name=event.name, arguments="")
            call = ToolCallDelta(index=event.index, id=event.call_id, type="function", function=function)
        else:
            function = FunctionDelta(arguments=event.text)
            call = ToolCallDelta(index=event.index, function=function)
        match self._style.calls:
            case "tool_calls":
                return ChatDelta(tool_calls=[call])
            case "function_call":
                return ChatDelta(function_call=function)

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


def _message(answer: Collected, told: Literal["tool_calls", "function_call"]) -> AssistantMessage:
    functions = [FunctionObject(name=call.name, arguments=call.arguments) for call in answer.calls]
    message = AssistantMessage(
        content=answer.text or (None if functions else ""), reasoning_content=answer.reasoning or UNSET
    )
    if not functions:
        return message
    match told:
        case "function_call":
            return replace(message, function_call=functions[0])
        case "tool_calls":
            calls = zip(answer.calls, functions, strict=True)
            return replace(message, tool_calls=[ToolCallObject(id=call.call_id, function=f) for call, f in calls])


def _without_reasoning(answer: Collected) -> Collected:
    return replace(answer, parts=tuple(part for part in answer.parts if not isinstance(part, ReasoningPart)))


def _logprobs_of(event: CallStarted | CallArguments) -> Sequence[ChosenLogprob]:
    return () if isinstance(event, CallStarted) else event.logprobs


def _logprobs(logprobs: Sequence[ChosenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(content=[token_object(token) for token in logprobs])


def _halves(chunk: ChatChunk) -> tuple[bytes, bytes]:
    """The event's bytes before and after its text. The last mark is the text's: `choices` comes after `model`."""
    head, _, tail = _event(chunk).rpartition(_encode(_MARK))
    return head, tail


def _event(chunk: ChatChunk) -> bytes:
    return data_event(_encode(chunk))
