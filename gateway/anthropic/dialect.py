"""POST /v1/messages as a dialect of `gateway.answering`. Decides only."""

from typing import Protocol, assert_never

from msgspec import Struct

from gateway.admission import KeyLimits, Load
from gateway.anthropic.answers import CacheMiss, DiagnosticsObject, ServiceTier
from gateway.anthropic.conversation import CacheMark
from gateway.anthropic.decode import decode
from gateway.anthropic.rate_limits import rate_headers
from gateway.anthropic.rendering import Diagnose, Envelope, MessagesRendering
from gateway.anthropic.schema import MessagesRequest
from gateway.anthropic.translate import messages_to_work
from gateway.anthropic_errors import anthropic_error
from gateway.dialects import Accepted, Asked, Header
from gateway.error_answers import ErrorAnswer
from gateway.prompt_comparison import PromptComparison
from gateway.request_tallies import Dialect as DialectName
from protocol.failures import Failure
from protocol.generation import ChatPrompt, Generate, Queued, Warm
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass


class Comparing(Protocol):
    """Whoever remembers earlier prompts. None: nothing is remembered here at all."""

    def compare(
        self, earlier_id: str, work: Generate | Warm, queued: Queued | None, *, model: ModelName
    ) -> PromptComparison | None: ...


class Understood(Struct, frozen=True, kw_only=True):
    """A request with its prompt's cache markers."""

    request: MessagesRequest
    marks: tuple[CacheMark, ...]


class MessagesDialect:
    """The route's. `secret` is the key of thinking blocks' signatures."""

    prompt_field = "messages"
    name: DialectName = "messages"

    def __init__(self, *, secret: bytes, earlier: Comparing | None) -> None:
        self._secret = secret
        self._earlier = earlier

    def accept(self, body: bytes, asked: Asked) -> Accepted[Understood] | Failure:
        """See `Dialect`."""
        decoded = decode(body, MessagesRequest)
        if isinstance(decoded, Failure):
            return decoded
        request = decoded.request
        translated = messages_to_work(
            request,
            request_id=asked.request_id,
            cache_scope=asked.caller.cache_scope,
            disk_ttl_seconds=asked.caller.cache_ttl_seconds,
        )
        if isinstance(translated, Failure):
            return translated
        marks = translated.marks
        if isinstance(translated.work, Warm) and not marks:  # all that it computes, it computes to be kept
            marks = (CacheMark(messages=len(_messages(translated.work)), ttl="5m"),)
        return Accepted(
            request=Understood(request=request, marks=marks),
            model=ModelName(request.model),
            work=(translated.work,),
            answer="stream" if request.stream else "whole",
            priority=request.priority,
            ignored=decoded.ignored + translated.ignored,
        )

    def rendering(self, accepted: Accepted[Understood], asked: Asked) -> MessagesRendering:
        """See `Dialect`."""
        request = accepted.request.request
        envelope = Envelope(
            request_id=asked.request_id,
            model=request.model,
            max_tokens=request.max_tokens,
            marks=accepted.request.marks,
            service_tier=_tier(accepted.latency_class),
            details=asked.details,
        )
        return MessagesRendering(envelope, secret=self._secret, diagnose=self._diagnosis(accepted))

    def error(self, failure: Failure, request_id: RequestId) -> ErrorAnswer:
        """See `Dialect`."""
        return anthropic_error(failure, request_id)

    def rate_headers(self, load: Load, limits: KeyLimits) -> tuple[Header, ...]:
        """See `Dialect`."""
        return rate_headers(load, limits)

    def _diagnosis(self, accepted: Accepted[Understood]) -> Diagnose | None:
        options = accepted.request.request.diagnostics
        if options is None:
            return None
        earlier_id, (work,) = options.previous_message_id, accepted.work

        def diagnose(queued: Queued | None) -> DiagnosticsObject:
            if earlier_id is None:  # a first turn
                return DiagnosticsObject(cache_miss_reason=None)
            if self._earlier is None:
                return DiagnosticsObject(cache_miss_reason=CacheMiss(type="unavailable"))
            compared = self._earlier.compare(earlier_id, work, queued, model=accepted.model)
            return DiagnosticsObject(cache_miss_reason=cache_miss(compared))

        return diagnose


def cache_miss(compared: PromptComparison | None) -> CacheMiss | None:
    """In this API's words. It has none for a prompt that is rendered in another way."""
    if compared is None:
        return CacheMiss(type="unavailable")
    match compared.difference:
        case "none":
            return None
        case "unknown":
            return CacheMiss(type="previous_message_not_found")
        case "rendering":
            return CacheMiss(type="unavailable")
        case "model":
            return CacheMiss(type="model_changed", cache_missed_input_tokens=compared.missed_tokens)
        case "system":
            return CacheMiss(type="system_changed", cache_missed_input_tokens=compared.missed_tokens)
        case "tools":
            return CacheMiss(type="tools_changed", cache_missed_input_tokens=compared.missed_tokens)
        case "messages":
            return CacheMiss(type="messages_changed", cache_missed_input_tokens=compared.missed_tokens)
        case _:
            assert_never(compared.difference)


def _messages(work: Warm) -> tuple[object, ...]:
    return work.prompt.messages if isinstance(work.prompt, ChatPrompt) else ()


def _tier(latency_class: LatencyClass) -> ServiceTier:
    """The class that was granted."""
    match latency_class:
        case LatencyClass.INTERACTIVE:
            return "priority"
        case LatencyClass.STANDARD:
            return "standard"
        case LatencyClass.BATCH:
            return "batch"
        case _:
            assert_never(latency_class)
