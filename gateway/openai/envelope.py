"""What all answers of OpenAI's two generation routes have in common: envelope, bill, details. Decides only."""

from collections.abc import Sequence
from typing import Literal, assert_never

from msgspec import UNSET, Struct, UnsetType

from gateway.answer_details import DetailsObject
from gateway.latency_class import ServiceTier
from gateway.openai.answers import (
    CompletionTokensDetails,
    EndReason,
    PromptTokensDetails,
    UsageObject,
)
from protocol.generation import Finished, FinishReason, OutputWarning
from protocol.ids import RequestId


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


class AnswerStyle(Struct, frozen=True, kw_only=True):
    """How a request wants to be answered. `top_logprobs` is None when it wants no logprobs.

    There are `choices` answers, `choices_per_prompt` to each prompt. `calls` is how calls are told (the legacy way
    knows only one), `reasoning` whether the model's thoughts are. `echo` is what each prompt's answers begin with.
    """

    choices: int = 1
    choices_per_prompt: int = 1
    usage: Literal["asked", "unasked"] = "unasked"
    progress: Literal["asked", "unasked"] = "unasked"
    top_logprobs: int | None = None
    calls: Literal["tool_calls", "function_call"] = "tool_calls"
    reasoning: Literal["shown", "hidden"] = "shown"
    echo: tuple[str, ...] = ()

    def echo_of(self, choice: int) -> str:
        return self.echo[choice // self.choices_per_prompt] if self.echo else ""


def details(envelope: Envelope, ends: Sequence[Finished]) -> DetailsObject | UnsetType:
    """For who asked, the first choice's, and the timings of each if there are several; the warnings of all, for
    everybody."""
    every: list[OutputWarning] = [warning for end in ends for warning in end.warnings]
    warnings = tuple(dict.fromkeys(every)) or UNSET
    if envelope.details_of is None:
        return UNSET if warnings is UNSET else DetailsObject(warnings=warnings)
    return DetailsObject(
        request_id=envelope.details_of,
        timings=ends[0].timings,
        choices=tuple(end.timings for end in ends) if len(ends) > 1 else UNSET,
        cache=ends[0].cache,
        warnings=warnings,
    )


def end_reason(reason: FinishReason, calls: Literal["tool_calls", "function_call"] = "tool_calls") -> EndReason:
    """In OpenAI's words."""
    match reason:
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.TOOL_CALLS:
            return calls
        case _:
            assert_never(reason)


def usage_of(ends: Sequence[Finished], choices_per_prompt: int) -> UsageObject:
    """The bill: choices of one prompt share it, and each has its own answer."""
    prompts = [end.usage for end in ends[::choices_per_prompt]]
    prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
    completion_tokens = sum(end.usage.completion_tokens for end in ends)
    return UsageObject(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(prompt.cached_tokens for prompt in prompts)),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(end.usage.reasoning_tokens for end in ends)
        ),
    )
