"""What clients of OpenAI's API get: the objects of both routes, whole and in chunks.

Field order matters in one way: `choices` comes after `model`, see `render`.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.answer_details import DetailsObject
from gateway.latency_class import ServiceTier
from gateway.openai.prompt_progress import PromptProgressObject

EndReason = Literal["stop", "length", "tool_calls", "function_call"]


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """`cached_tokens` is a part of `prompt_tokens`. Nobody is billed for what a prompt leaves in the cache."""

    cached_tokens: int
    cache_write_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True, kw_only=True):
    """`reasoning_tokens` is a part of `completion_tokens`. Predictions are ignored: none is accepted or rejected."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class UsageObject(Struct, frozen=True, kw_only=True):
    """The bill."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


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


class FunctionObject(Struct, frozen=True, kw_only=True):
    """A called function. `arguments` is JSON in a string, as the model wrote it: it may be invalid."""

    name: str
    arguments: str


class ToolCallObject(Struct, frozen=True, kw_only=True):
    """A call in a whole answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionObject


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """The answer itself. `content` is null when there are only calls. `function_call` answers legacy `functions`."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallObject] | UnsetType = UNSET
    function_call: FunctionObject | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One of the answers."""

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


class FunctionDelta(Struct, frozen=True, kw_only=True):
    """A piece of a called function: the name in its first piece only."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """A piece of a call: `id` and `type` in its first piece only."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Struct, frozen=True, kw_only=True):
    """What a chunk adds; empty in the last one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """One choice's part in a chunk."""

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
    """One choice, or its part in a chunk."""

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
