"""What all answers of OpenAI's two generation routes have in common: envelope, bill, details. Decides only."""

from collections.abc import Sequence
from typing import assert_never

from msgspec import UNSET, Struct, UnsetType

from gateway.latency_class import ServiceTier
from gateway.openai.answers import (
    CompletionTokensDetails,
    DetailsObject,
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


def details(envelope: Envelope, ends: Sequence[Finished]) -> DetailsObject | UnsetType:
    """Of the first choice, for who asked; the warnings of all, for everybody."""
    every: list[OutputWarning] = [warning for end in ends for warning in end.warnings]
    warnings = tuple(dict.fromkeys(every)) or UNSET
    if envelope.details_of is None:
        return UNSET if warnings is UNSET else DetailsObject(warnings=warnings)
    return DetailsObject(
        request_id=envelope.details_of, timings=ends[0].timings, cache=ends[0].cache, warnings=warnings
    )


def end_reason(reason: FinishReason) -> EndReason:
    """In OpenAI's words."""
    match reason:
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.TOOL_CALLS:
            return "tool_calls"
        case _:
            assert_never(reason)


def usage_of(ends: Sequence[Finished]) -> UsageObject:
    """The bill: the choices have one prompt, and each its own answer."""
    prompt = ends[0].usage
    completion_tokens = sum(end.usage.completion_tokens for end in ends)
    return UsageObject(
        prompt_tokens=prompt.prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt.prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=prompt.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(end.usage.reasoning_tokens for end in ends)
        ),
    )
