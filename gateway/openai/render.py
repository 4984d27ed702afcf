"""A worker's events → the bytes of OpenAI's API. Pure: the same events give the same bytes.

A stream's hot path is one JSON string between two halves of a chunk that were encoded once. The halves come from
the chunk struct itself, so they cannot drift from what the slow path sends.
"""

from collections.abc import Sequence
from typing import Literal, assert_never

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from gateway import sse
from gateway.http_errors import openai_error_body
from gateway.latency_class import ServiceTier
from gateway.openai.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    DetailsObject,
    EndReason,
    LegacyLogprobsObject,
    PromptTokensDetails,
    TextChoice,
    TextCompletion,
    TokenObject,
    TopToken,
    UsageObject,
)
from gateway.openai.waiting import PromptProgressObject
from protocol.generation import (
    ChosenLogprob,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Prefilling,
    Queued,
    RequestEvent,
    Usage,
    Waiting,
    Warmed,
)
from protocol.ids import RequestId

UsageChunk = Literal["asked", "unasked"]

_MARK = "\0text\0"
_LOWEST_LOGPROB = -9999.0
_encode = msgspec.json.Encoder().encode


class Envelope(Struct, frozen=True, kw_only=True):
    """What is the same in every chunk of an answer. `details_of` is the request whose details go into the last one.

    The legacy route has no `service_tier`.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    details_of: RequestId | None = None
    service_tier: ServiceTier | UnsetType = UNSET


class ChatStream:
    """One chat stream, event by event. Ends with `[DONE]`, or with an error and without it."""

    def __init__(self, envelope: Envelope, *, usage: UsageChunk) -> None:
        self._envelope = envelope
        self._usage: UsageChunk = usage
        self._no_usage: UnsetType | None = None if usage == "asked" else UNSET
        self._head, self._tail = _halves(self._chunk(delta=ChatDelta(content=_MARK)))
        self._is_open = False

    def encode(self, event: RequestEvent) -> bytes:
        """The bytes that this event adds to the stream, perhaps none."""
        match event:
            case Delta(text=text, logprobs=()):
                return self.opening() + self._head + _encode(text) + self._tail if text else b""
            case Delta():
                content = [_token(token) for token in event.logprobs]
                chunk = self._chunk(delta=ChatDelta(content=event.text), logprobs=ChatLogprobs(content=content))
                return self.opening() + _event(chunk)
            case Queued() | Waiting() | Prefilling() | Warmed():
                return self.opening()
            case Finished():
                last = self._chunk(delta=ChatDelta(), finish_reason=_end_reason(event.reason))
                return self.opening() + _ending(last, self._envelope, event, usage=self._usage) + sse.DONE
            case Failed():
                return sse.data_event(openai_error_body(event.failure))
            case _:  # what only other requests have
                return b""

    def opening(self) -> bytes:
        """The first chunk, once: it may go out before anything is known."""
        if self._is_open:
            return b""
        self._is_open = True
        return _event(self._chunk(delta=ChatDelta(role="assistant", content="")))

    def progress(self, progress: PromptProgressObject) -> bytes:
        """A chunk that says only how far the prompt is."""
        return self.opening() + _event(replace(self._chunk(delta=ChatDelta()), prompt_progress=progress))

    def _chunk(
        self, *, delta: ChatDelta, logprobs: ChatLogprobs | None = None, finish_reason: EndReason | None = None
    ) -> ChatChunk:
        return ChatChunk(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            service_tier=self._envelope.service_tier,
            system_fingerprint=self._envelope.system_fingerprint,
            choices=[ChatChunkChoice(delta=delta, logprobs=logprobs, finish_reason=finish_reason)],
            usage=self._no_usage,
        )


class TextStream:
    """One stream of the legacy route, event by event. Ends as ChatStream does."""

    def __init__(self, envelope: Envelope, *, usage: UsageChunk, top_logprobs: int | None) -> None:
        self._envelope = envelope
        self._usage: UsageChunk = usage
        self._no_usage: UnsetType | None = None if usage == "asked" else UNSET
        self._head, self._tail = _halves(self._chunk(TextChoice(text=_MARK)))
        self._top_logprobs = top_logprobs
        self._offsets = _Offsets()

    def encode(self, event: RequestEvent) -> bytes:
        """The bytes that this event adds to the stream, perhaps none."""
        match event:
            case Delta(text=text, logprobs=()):
                return self._head + _encode(text) + self._tail if text else b""
            case Delta():
                logprobs = _legacy_logprobs(event.logprobs, self._offsets, self._top_logprobs)
                return _event(self._chunk(TextChoice(text=event.text, logprobs=logprobs)))
            case Queued() | Waiting() | Prefilling() | Warmed():
                return b""
            case Finished():
                last = self._chunk(TextChoice(text="", finish_reason=_end_reason(event.reason)))
                return _ending(last, self._envelope, event, usage=self._usage) + sse.DONE
            case Failed():
                return sse.data_event(openai_error_body(event.failure))
            case _:  # what only other requests have
                return b""

    def opening(self) -> bytes:
        """Nothing: this route's stream begins with its text."""
        return b""

    def progress(self, progress: PromptProgressObject) -> bytes:
        """A chunk that says only how far the prompt is."""
        return _event(replace(self._chunk(TextChoice(text="")), prompt_progress=progress))

    def _chunk(self, choice: TextChoice) -> TextCompletion:
        return _text_completion(self._envelope, choice, self._no_usage)


def chat_completion(
    envelope: Envelope, deltas: Sequence[Delta], finished: Finished, *, top_logprobs: int | None
) -> bytes:
    """The whole answer of the chat route. `top_logprobs` is None when the client wants no logprobs."""
    content = [_token(token) for delta in deltas for token in delta.logprobs]
    return _encode(
        ChatCompletion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=[
                ChatChoice(
                    message=AssistantMessage(content=_joined(deltas)),
                    logprobs=None if top_logprobs is None else ChatLogprobs(content=content),
                    finish_reason=_end_reason(finished.reason),
                )
            ],
            usage=_usage(finished.usage),
            service_tier=envelope.service_tier,
            system_fingerprint=envelope.system_fingerprint,
            mlxd=_details(envelope, finished),
        )
    )


def text_completion(
    envelope: Envelope, deltas: Sequence[Delta], finished: Finished, *, top_logprobs: int | None
) -> bytes:
    """The whole answer of the legacy route. `top_logprobs` is None when the client wants no logprobs."""
    tokens = [token for delta in deltas for token in delta.logprobs]
    logprobs = None if top_logprobs is None else _legacy_logprobs(tokens, _Offsets(), top_logprobs)
    choice = TextChoice(text=_joined(deltas), logprobs=logprobs, finish_reason=_end_reason(finished.reason))
    completion = _text_completion(envelope, choice, _usage(finished.usage))
    return _encode(replace(completion, mlxd=_details(envelope, finished)))


def _text_completion(envelope: Envelope, choice: TextChoice, usage: UsageObject | UnsetType | None) -> TextCompletion:
    return TextCompletion(
        id=envelope.id,
        created=envelope.created,
        model=envelope.model,
        system_fingerprint=envelope.system_fingerprint,
        choices=[choice],
        usage=usage,
    )


def _halves(chunk: ChatChunk | TextCompletion) -> tuple[bytes, bytes]:
    """The event's bytes before and after its text. The last mark is the text's: `choices` comes after `model`."""
    head, _, tail = _event(chunk).rpartition(_encode(_MARK))
    return head, tail


def _event(chunk: ChatChunk | TextCompletion) -> bytes:
    return sse.data_event(_encode(chunk))


def _ending(last: ChatChunk | TextCompletion, envelope: Envelope, finished: Finished, *, usage: UsageChunk) -> bytes:
    """The chunk with the finish reason, and the one with the usage if it was asked for. Details go into the last."""
    details = _details(envelope, finished)
    match usage:
        case "unasked":
            return _event(replace(last, mlxd=details))
        case "asked":
            return _event(last) + _event(replace(last, choices=[], usage=_usage(finished.usage), mlxd=details))
        case _:
            assert_never(usage)


def _details(envelope: Envelope, finished: Finished) -> DetailsObject | UnsetType:
    if envelope.details_of is None:
        return UNSET
    return DetailsObject(request_id=envelope.details_of, timings=finished.timings, cache=finished.cache)


def _joined(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _end_reason(reason: FinishReason) -> EndReason:
    match reason:
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.TOOL_CALLS:
            raise NotImplementedError
        case _:
            assert_never(reason)


def _usage(usage: Usage) -> UsageObject:
    return UsageObject(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


# --- logprobs --------------------------------------------------------------------------------------------------------


def _finite(logprob: float) -> float:
    """JSON has no infinity, and clients' types no null here. OpenAI has this number in its place."""
    return max(_LOWEST_LOGPROB, logprob)


def _token(token: ChosenLogprob) -> TokenObject:
    return TokenObject(
        token=token.chosen.token,
        bytes=list(token.chosen.token_bytes),
        logprob=_finite(token.chosen.logprob),
        top_logprobs=[
            TopToken(token=other.token, bytes=list(other.token_bytes), logprob=_finite(other.logprob))
            for other in token.top
        ],
    )


class _Offsets:
    """Where tokens begin in the text, in characters. A token that begins inside a character counts as at that one."""

    def __init__(self) -> None:
        self._characters = 0

    def next(self, token_bytes: bytes) -> int:
        begins_inside = bool(token_bytes) and _is_continuation(token_bytes[0])
        offset = max(0, self._characters - 1) if begins_inside else self._characters
        self._characters += sum(not _is_continuation(byte) for byte in token_bytes)
        return offset


def _is_continuation(byte: int) -> bool:
    """Of UTF-8: a byte that begins no character."""
    return byte & 0b1100_0000 == 0b1000_0000


def _legacy_logprobs(
    tokens: Sequence[ChosenLogprob], offsets: _Offsets, top_logprobs: int | None
) -> LegacyLogprobsObject:
    return LegacyLogprobsObject(
        tokens=[token.chosen.token for token in tokens],
        token_logprobs=[_finite(token.chosen.logprob) for token in tokens],
        top_logprobs=[_legacy_top(token) for token in tokens] if top_logprobs else None,
        text_offset=[offsets.next(token.chosen.token_bytes) for token in tokens],
    )


def _legacy_top(token: ChosenLogprob) -> dict[str, float]:
    """The alternatives and, as OpenAI has it, always the drawn token too."""
    return {other.token: _finite(other.logprob) for other in (*token.top, token.chosen)}
