"""What a prompt changed against an earlier request's, as the standard cache diagnostics of two APIs want it. Decides
only.

It is about what was asked, not about what the cache did: `gateway.explain` tells that.
"""

from typing import Literal

from msgspec import Struct

from gateway.request_ring import MessageMark, PromptMarks, RequestRecord, common_messages, common_tokens

Difference = Literal["none", "unknown", "model", "system", "tools", "messages", "rendering"]
"""The first of these that is not the same. `none`: the earlier prompt is this one's beginning. `unknown`: there is no
such earlier request of this owner's. `rendering`: what else the chat template was given."""


class PromptComparison(Struct, frozen=True, kw_only=True):
    """`missed_tokens` of the earlier prompt could not be used again, `reusable_tokens` could, to the grain."""

    difference: Difference
    missed_tokens: int = 0
    reusable_tokens: int = 0


def compare_prompts(mine: PromptMarks, earlier: RequestRecord | None) -> PromptComparison:
    """This prompt with the earlier one, which must be the same owner's."""
    if earlier is None:
        return PromptComparison(difference="unknown")
    difference = _difference(mine, earlier)
    if difference == "none":
        return PromptComparison(difference="none", reusable_tokens=earlier.prompt_tokens)
    is_usable = mine.model == earlier.model and mine.scope == earlier.scope
    common = min(common_tokens(mine, earlier), earlier.prompt_tokens) if is_usable else 0
    return PromptComparison(difference=difference, missed_tokens=earlier.prompt_tokens - common, reusable_tokens=common)


def _difference(mine: PromptMarks, earlier: RequestRecord) -> Difference:
    if mine.model != earlier.model:
        return "model"
    if _system(mine.messages) != _system(earlier.messages):
        return "system"
    if mine.tools != earlier.tools:
        return "tools"
    if common_messages(mine, earlier) < len(earlier.messages):
        return "messages"
    if mine.rendering != earlier.rendering or mine.scope != earlier.scope:
        return "rendering"
    return "none"


def _system(messages: tuple[MessageMark, ...]) -> list[bytes]:
    """The system's messages at the start; what stands later is a part of the conversation."""
    marks: list[bytes] = []
    for message in messages:
        if message.role not in ("system", "developer"):
            break
        marks.append(message.digest)
    return marks
