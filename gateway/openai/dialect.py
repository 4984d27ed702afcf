"""OpenAI's two generation routes as dialects of `gateway.answering`. Decides only."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from gateway.admission import KeyLimits, Load, rate_headers
from gateway.dialects import CONSTRAINT_FIELD, Accepted, Asked, Header
from gateway.error_answers import ErrorAnswer, openai_error
from gateway.latency_class import service_tier_of
from gateway.openai.chat_rendering import ChatRendering
from gateway.openai.constraints import constraint_field
from gateway.openai.decode import decode
from gateway.openai.envelope import AnswerStyle, Envelope
from gateway.openai.schema import ChatRequest, CompletionRequest, GenerationOptions
from gateway.openai.text_rendering import TextRendering
from gateway.openai.translate import chat_to_generate, completion_to_generate
from gateway.request_tallies import Dialect as DialectName
from protocol.failures import Failure
from protocol.generation import Generate
from protocol.ids import ModelName, RequestId

Body = TypeVar("Body", bound=GenerationOptions)
Asking = TypeVar("Asking", bound=GenerationOptions, contravariant=True)


class _Translate(Protocol[Asking]):
    def __call__(
        self, request: Asking, *, request_id: RequestId, cache_scope: bytes, disk_ttl_seconds: float | None = None
    ) -> tuple[Generate, ...] | Failure: ...


class OpenAIDialect(Generic[Body]):
    """One of the two routes: they differ in schema, translation and rendering."""

    def __init__(
        self,
        *,
        request_type: type[Body],
        translate: _Translate[Body],
        id_prefix: str,
        prompt_field: str,
        name: DialectName,
        rendering: Callable[[Envelope, AnswerStyle], ChatRendering | TextRendering],
        style: Callable[[Body], AnswerStyle],
        tells_service_tier: bool,
    ) -> None:
        self.prompt_field = prompt_field
        self.name: DialectName = name
        self._request_type = request_type
        self._translate = translate
        self._id_prefix = id_prefix
        self._rendering = rendering
        self._style = style
        self._tells_service_tier = tells_service_tier

    def accept(self, body: bytes, asked: Asked) -> Accepted[Body] | Failure:
        """See `Dialect`."""
        decoded = decode(body, self._request_type)
        if isinstance(decoded, Failure):
            return decoded
        request = decoded.request
        work = self._translate(
            request,
            request_id=asked.request_id,
            cache_scope=asked.caller.cache_scope,
            disk_ttl_seconds=asked.caller.cache_ttl_seconds,
        )
        if isinstance(work, Failure):
            return work
        return Accepted(
            request=request,
            model=ModelName(request.model),
            work=work,
            answer="stream" if request.stream else "whole",
            service_tier=request.service_tier,
            priority=request.priority,
            constraint_field=constraint_field(request) or CONSTRAINT_FIELD,
            ignored=decoded.ignored,
        )

    def rendering(self, accepted: Accepted[Body], asked: Asked) -> ChatRendering | TextRendering:
        """See `Dialect`."""
        request = accepted.request
        envelope = Envelope(
            id=self._id_prefix + asked.request_id.removeprefix("req_"),
            created=asked.created_unix,
            model=request.model,
            system_fingerprint=asked.system_fingerprint,
            details_of=asked.request_id if asked.details == "asked" else None,
            service_tier=service_tier_of(accepted.latency_class) if self._tells_service_tier else UNSET,
        )
        options = request.stream_options
        choices_per_prompt = request.n or 1
        style = replace(
            self._style(request),
            choices=len(accepted.work),
            choices_per_prompt=choices_per_prompt,
            usage="asked" if options is not None and options.include_usage else "unasked",
            progress="asked" if request.return_progress else "unasked",
        )
        return self._rendering(envelope, style)

    def error(self, failure: Failure, request_id: RequestId) -> ErrorAnswer:
        """See `Dialect`."""
        del request_id  # is in a header already
        return openai_error(failure)

    def rate_headers(self, load: Load, limits: KeyLimits) -> tuple[Header, ...]:
        """See `Dialect`."""
        return rate_headers(load, limits)


def _chat_style(request: ChatRequest) -> AnswerStyle:
    return AnswerStyle(
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        calls="function_call" if request.functions else "tool_calls",
        reasoning="hidden" if request.include_reasoning is False else "shown",
    )


def _completion_style(request: CompletionRequest) -> AnswerStyle:
    prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    echo = tuple(prompt for prompt in prompts if isinstance(prompt, str)) if request.echo else ()
    return AnswerStyle(top_logprobs=request.logprobs, echo=echo)


CHAT = OpenAIDialect(
    request_type=ChatRequest,
    translate=chat_to_generate,
    id_prefix="chatcmpl-",
    prompt_field="messages",
    name="chat",
    rendering=ChatRendering,
    style=_chat_style,
    tells_service_tier=True,
)
COMPLETIONS = OpenAIDialect(
    request_type=CompletionRequest,
    translate=completion_to_generate,
    id_prefix="cmpl-",
    prompt_field="prompt",
    name="completions",
    rendering=TextRendering,
    style=_completion_style,
    tells_service_tier=False,
)
