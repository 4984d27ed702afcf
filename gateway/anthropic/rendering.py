"""A worker's events → the bytes of a message. Decides only: the same events give the same bytes.

Blocks are numbered from 0, one ends before the next begins, and none is empty: a block opens with its first text.
"""

from collections.abc import Callable, Sequence
from typing import Literal, assert_never

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.answer_details import DetailsObject
from gateway.answer_parts import CallPart, Collected, Part, ReasoningPart, TextPart
from gateway.anthropic.answers import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    DiagnosticsObject,
    EndDelta,
    Event,
    InputJsonDelta,
    MessageDelta,
    MessageObject,
    MessageStart,
    MessageStop,
    ServiceTier,
    SignatureDelta,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    UsageObject,
)
from gateway.anthropic.billing import OutputBill, bill
from gateway.anthropic.conversation import CacheMark
from gateway.anthropic.seal import Seal, signature_of
from gateway.anthropic_errors import anthropic_error_body
from gateway.event_bytes import KEEPALIVE, named_event
from gateway.in_flight import RequestView
from gateway.waiting_comment import waiting_comment
from protocol.failures import Failure
from protocol.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    Delta,
    Finished,
    FinishReason,
    Prefilling,
    Queued,
    Reasoning,
    RequestEvent,
    Warmed,
)
from protocol.ids import RequestId

PING = named_event(b"ping", b'{"type":"ping"}')

INVALID_JSON = "INVALID_JSON"
"""The key under which clients of this API send arguments that are no JSON back to the model."""

Diagnose = Callable[[Queued | None], DiagnosticsObject]
OpenBlock = Literal["text", "thinking", "tool_use"]

_encode = msgspec.json.Encoder().encode


class Envelope(Struct, frozen=True, kw_only=True):
    """What an answer says of itself. `details` is whether its client wants to know more than the API tells.

    `max_tokens` is what was asked for, 0 for a warm. `marks` are the prompt's cache markers.
    """

    request_id: RequestId
    model: str
    max_tokens: int
    marks: tuple[CacheMark, ...]
    service_tier: ServiceTier
    details: Literal["asked", "unasked"]

    @property
    def message_id(self) -> str:
        return "msg_" + self.request_id.removeprefix("req_")


class MessagesRendering:
    """One answer. A stream of it ends with `message_stop`, or with an error and without it."""

    def __init__(self, envelope: Envelope, *, secret: bytes, diagnose: Diagnose | None) -> None:
        """`secret` is the key of signatures. `diagnose` is None when the client did not ask."""
        self._envelope = envelope
        self._secret = secret
        self._diagnose = diagnose
        self._queued: Queued | None = None
        self._cached_tokens = 0
        self._has_started = False
        self._has_diagnosed = False
        self._index = -1
        self._open: OpenBlock | None = None
        self._head = b""
        self._seal = Seal(secret)

    # --- a stream ----------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """Nothing: the first event has the prompt's numbers, which are not known yet."""
        return b""

    def encode(self, event: RequestEvent, choice: int) -> bytes:
        """See `Rendering`. There is one choice only."""
        del choice
        match event:
            case Queued():
                self._queued = event
                return b""
            case Delta():
                return self._piece("text", event.text)
            case Reasoning():
                return self._piece("thinking", event.text)
            case CallStarted():
                block = ToolUseBlock(id=event.call_id, name=event.name, input={})
                return self._start() + self._begin("tool_use", block)
            case CallArguments():
                return self._arguments(event.text)
            case CallEnded():
                return self._end_block()
            case Finished():
                return self._start() + self._end_block() + self._end(event)
            case _:  # nothing that this API has a word for
                return b""

    def progress(self, event: Prefilling, prefill_seconds: float) -> bytes:
        """The first that is known of the prompt's work lets the message begin."""
        del prefill_seconds
        self._cached_tokens = event.cached_tokens
        return self._start()

    def keepalive(self, view: RequestView) -> bytes:
        """A ping; or the message's beginning, with what is known, so that a ping may follow it the next time. What the
        client waits for stands before it in a comment: SDKs drop that, people with a log of the wire read it."""
        comment = waiting_comment(view)
        if comment == KEEPALIVE:  # nothing that the ping does not say
            comment = b""
        if self._has_started:
            return comment + PING
        if view.progress is not None:
            self._cached_tokens = view.progress.cached_tokens
        return comment + self._start()

    def failed(self, failure: Failure) -> bytes:
        """The error event that SDKs raise on."""
        return named_event(b"error", anthropic_error_body(failure, self._envelope.request_id))

    def closing(self) -> bytes:
        """The mark of a whole stream."""
        return _event(b"message_stop", MessageStop())

    def _start(self) -> bytes:
        if self._has_started:
            return b""
        self._has_started = True
        queued = self._queued
        usage = self._usage(queued.prompt_tokens if queued else 0, self._cached_tokens, queued, OutputBill())
        message = self._message([], usage=usage, queued=queued)
        self._has_diagnosed = queued is not None
        return _event(b"message_start", MessageStart(message=message))

    def _piece(self, kind: Literal["text", "thinking"], text: str) -> bytes:
        if not text:
            return b""
        before = b""
        if self._open != kind:
            block = TextBlock(text="") if kind == "text" else ThinkingBlock(thinking="", signature="")
            before = self._start() + self._begin(kind, block)
        if kind == "thinking":
            self._seal.add(text)
        return before + self._head + _encode(text) + b"}}\n\n"

    def _arguments(self, text: str) -> bytes:
        if not text or self._open != "tool_use":
            return b""
        return self._delta(InputJsonDelta(partial_json=text))

    def _begin(self, kind: OpenBlock, block: ContentBlock) -> bytes:
        before = self._end_block()
        self._open = kind
        self._index += 1
        if kind != "tool_use":
            # A stream's hot path is one JSON string behind this.
            self._head = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                b'"delta":{"type":"%b_delta","%b":' % (self._index, kind.encode(), kind.encode())
            )
        if kind == "thinking":
            self._seal = Seal(self._secret)
        return before + _event(b"content_block_start", BlockStart(index=self._index, content_block=block))

    def _end_block(self) -> bytes:
        """A call that was cut ends, too, as the API has it: that it is not whole is for the stop reason to say."""
        if self._open is None:
            return b""
        sealed = self._delta(SignatureDelta(signature=self._seal.signature())) if self._open == "thinking" else b""
        self._open = None
        return sealed + _event(b"content_block_stop", BlockStop(index=self._index))

    def _delta(self, delta: InputJsonDelta | SignatureDelta) -> bytes:
        return _event(b"content_block_delta", BlockDelta(index=self._index, delta=delta))

    def _end(self, end: Finished) -> bytes:
        stop_reason, stop_sequence = self._stop(end)
        is_late = self._diagnose is not None and not self._has_diagnosed
        return _event(
            b"message_delta",
            MessageDelta(
                delta=EndDelta(stop_reason=stop_reason, stop_sequence=stop_sequence),
                usage=self._usage_of(end, self._queued),
                diagnostics=self._diagnostics(self._queued) if is_late else UNSET,
                mlxd=self._details(end),
            ),
        )

    # --- a whole answer ----------------------------------------------------------------------------------------------

    def whole(self, answers: Sequence[Collected]) -> bytes:
        """The whole answer."""
        (answer,) = answers
        end, queued = answer.end, answer.queued
        stop_reason, stop_sequence = self._stop(end)
        return _encode(
            self._message(
                [self._block(part) for part in _joined(answer.parts)],
                usage=self._usage_of(end, queued),
                queued=queued,
                stop_reason=stop_reason,
                stop_sequence=stop_sequence,
                mlxd=self._details(end),
            )
        )

    def _block(self, part: Part) -> ContentBlock:
        match part:
            case TextPart():
                return TextBlock(text=part.text)
            case ReasoningPart():
                return ThinkingBlock(thinking=part.text, signature=signature_of(part.text, self._secret))
            case CallPart():
                return ToolUseBlock(id=part.call_id, name=part.name, input=call_input(part.arguments))
            case _:
                assert_never(part)

    # --- both --------------------------------------------------------------------------------------------------------

    def _message(
        self,
        content: list[ContentBlock],
        *,
        usage: UsageObject,
        queued: Queued | None,
        stop_reason: StopReason | None = None,
        stop_sequence: str | None = None,
        mlxd: DetailsObject | UnsetType = UNSET,
    ) -> MessageObject:
        return MessageObject(
            id=self._envelope.message_id,
            model=self._envelope.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
            diagnostics=self._diagnostics(queued),
            mlxd=mlxd,
        )

    def _diagnostics(self, queued: Queued | None) -> DiagnosticsObject | UnsetType:
        if self._diagnose is None:
            return UNSET
        # Without the prompt's tokens nothing can be compared yet, for which the API has this word.
        return DiagnosticsObject(cache_miss_reason=None) if queued is None else self._diagnose(queued)

    def _stop(self, end: Finished | Warmed) -> tuple[StopReason, str | None]:
        if isinstance(end, Warmed):
            return "max_tokens", None
        match end.reason:
            case FinishReason.TOOL_CALLS:
                return "tool_use", None
            case FinishReason.STOP:
                return ("end_turn", None) if end.matched_stop is None else ("stop_sequence", end.matched_stop)
            case FinishReason.LENGTH:
                is_asked = end.usage.completion_tokens >= self._envelope.max_tokens
                return ("max_tokens" if is_asked else "model_context_window_exceeded"), None
            case _:
                assert_never(end.reason)

    def _usage_of(self, end: Finished | Warmed, queued: Queued | None) -> UsageObject:
        match end:
            case Finished(usage=usage):
                output = OutputBill(tokens=usage.completion_tokens, thinking_tokens=usage.reasoning_tokens)
                return self._usage(usage.prompt_tokens, usage.cached_tokens, queued, output)
            case Warmed():
                return self._usage(end.prompt_tokens, end.cached_tokens, queued, OutputBill())
            case _:
                assert_never(end)

    def _usage(self, prompt_tokens: int, cached_tokens: int, queued: Queued | None, output: OutputBill) -> UsageObject:
        return bill(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            marks=self._envelope.marks,
            message_starts=queued.message_starts if queued else (),
            output=output,
            service_tier=self._envelope.service_tier,
        )

    def _details(self, end: Finished | Warmed) -> DetailsObject | UnsetType:
        warnings = (tuple(dict.fromkeys(end.warnings)) if isinstance(end, Finished) else ()) or UNSET
        if self._envelope.details == "unasked":
            return UNSET if warnings is UNSET else DetailsObject(warnings=warnings)
        return DetailsObject(
            request_id=self._envelope.request_id, timings=end.timings, cache=end.cache, warnings=warnings
        )


def call_input(arguments: str) -> Raw | dict[str, str]:
    """A call's arguments as this API has them, an object: the model's own JSON, or a text that is none by a key that
    says so."""
    if not arguments.strip():
        return {}
    try:
        msgspec.json.decode(arguments.encode(), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return {INVALID_JSON: arguments}
    return Raw(arguments.encode())


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Without empty texts, and neighbours of one kind as one, as a stream has them."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        match last, part:
            case _, TextPart(text="") | ReasoningPart(text=""):
                continue
            case TextPart(), TextPart():
                joined[-1] = TextPart(text=last.text + part.text, logprobs=[])
            case ReasoningPart(), ReasoningPart():
                joined[-1] = ReasoningPart(text=last.text + part.text, logprobs=[])
            case _:
                joined.append(part)
    return joined


def _event(name: bytes, event: Event) -> bytes:
    return named_event(name, _encode(event))
