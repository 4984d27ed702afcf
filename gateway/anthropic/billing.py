"""Which of a prompt's tokens were read from the cache, put there because the client marked them, or neither. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from gateway.anthropic.answers import CacheCreation, OutputTokensDetails, ServiceTier, UsageObject
from gateway.anthropic.conversation import CacheMark


class OutputBill(Struct, frozen=True, kw_only=True):
    """What was generated; `thinking_tokens` is a part of `tokens`."""

    tokens: int = 0
    thinking_tokens: int = 0


_NOTHING_YET = OutputBill()


def bill(
    *,
    prompt_tokens: int,
    cached_tokens: int,
    marks: Sequence[CacheMark],
    message_starts: Sequence[int],
    output: OutputBill = _NOTHING_YET,
    service_tier: ServiceTier = "standard",
) -> UsageObject:
    """The three input numbers are disjoint and sum to the prompt.

    `cached_tokens` were skipped. Of those computed, the ones before the last marker count as created, by the longest
    of the markers that cover them. A marker ends where the next message's text begins, as `message_starts` has it;
    without that knowledge it covers the prompt.
    """
    read = min(cached_tokens, prompt_tokens)
    hour = max((_end(mark, prompt_tokens, message_starts) for mark in marks if mark.ttl == "1h"), default=0)
    last = max((_end(mark, prompt_tokens, message_starts) for mark in marks), default=0)
    created_hour = max(0, hour - read)
    created = max(0, last - read)
    return UsageObject(
        input_tokens=prompt_tokens - read - created,
        cache_creation_input_tokens=created,
        cache_read_input_tokens=read,
        cache_creation=CacheCreation(
            ephemeral_5m_input_tokens=created - created_hour, ephemeral_1h_input_tokens=created_hour
        ),
        output_tokens=output.tokens,
        output_tokens_details=OutputTokensDetails(thinking_tokens=output.thinking_tokens),
        service_tier=service_tier,
    )


def _end(mark: CacheMark, prompt_tokens: int, message_starts: Sequence[int]) -> int:
    if mark.messages < len(message_starts):
        return min(prompt_tokens, max(0, message_starts[mark.messages]))
    return prompt_tokens
