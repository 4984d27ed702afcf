"""What clients of OpenAI's API get: the objects of both routes, whole and in chunks.

Field order matters in one way: `choices` comes after `model`, see `render`.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.latency_class import ServiceTier
from gateway.openai.waiting import PromptProgressObject
from protocol.generation import CacheReport, Timings
from protocol.ids import RequestId

EndReason = Literal["stop", "length"]


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """`cached_tokens` is a part of `prompt_tokens`."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True, kw_only=True):
    """Reasoning is not told apart yet."""

    reasoning_tokens: int = 0


class UsageObject(Struct, frozen=True, kw_only=True):
    """The bill."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class DetailsObject(Struct, frozen=True, kw_only=True):
    """What mlxd knows beyond OpenAI's object, for who asks with the header `x-mlxd-details: 1`."""

    request_id: RequestId
    timings: Timings
    cache: CacheReport


# --- chat ------------------------------------------------------------------------------------------------------------


class TopToken(Struct, frozen=True, kw_only=True):
    """An alternative. `bytes` may be part of a character, `token` then holds a replacement character."""

    token: str
    bytes: list[int]
    logprob: float


class TokenObject(Struct, frozen=True, kw_only=True):
    """A drawn token with its alternatives."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopToken]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """The logprobs of a choice, or of a chunk's part of it."""

    content: list[TokenObject]
    refusal: None = None


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """The answer itself."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    """The only choice."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    service_tier: ServiceTier | UnsetType = UNSET
    system_fingerprint: str | None
    mlxd: DetailsObject | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, kw_only=True):
    """What a chunk adds; empty in the last one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """The only choice's part in a chunk."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: EndReason | None = None


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a chat stream. `usage` is there only when the client asked for it, null until the last chunk."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    service_tier: ServiceTier | UnsetType = UNSET
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: UsageObject | UnsetType | None = UNSET
    prompt_progress: PromptProgressObject | UnsetType = UNSET
    mlxd: DetailsObject | UnsetType = UNSET


# --- completions -----------------------------------------------------------------------------------------------------


class LegacyLogprobsObject(Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry per token. `text_offset` counts characters of the returned text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(Struct, frozen=True, kw_only=True):
    """The only choice, or its part in a chunk."""

    index: int = 0
    text: str
    logprobs: LegacyLogprobsObject | None = None
    finish_reason: EndReason | None = None


class TextCompletion(Struct, frozen=True, kw_only=True):
    """A whole answer, and one event of a stream. `usage` in a stream as in ChatChunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[TextChoice]
    usage: UsageObject | UnsetType | None = UNSET
    prompt_progress: PromptProgressObject | UnsetType = UNSET
    mlxd: DetailsObject | UnsetType = UNSET
