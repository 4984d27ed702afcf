"""What clients of OpenAI's API send, field by field, with its ranges.

`null` means absent wherever a field is optional: the SDKs' types allow it and clients send it. What a struct does
not name is ignored, and named to the client in a response header.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
PositiveInt = Annotated[int, Meta(ge=1)]
TopK = Annotated[int, Meta(ge=-1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
LegacyLogprobs = Annotated[int, Meta(ge=0, le=5)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ShortText = Annotated[str, Meta(max_length=512)]
ModelId = Annotated[str, Meta(max_length=1024)]


class StreamOptions(Struct, frozen=True, kw_only=True):
    """How a stream is dressed."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """Only `text` can be honoured today; the schema of the others is not looked at."""

    type: str


class CacheOptions(Struct, frozen=True, kw_only=True):
    """OpenAI's cache hints. Nothing to do: every prefix is cached anyway."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class GenerationOptions(Struct, frozen=True, kw_only=True):
    """What both routes take. Some are honoured, some ignored, some refused; `decode` and `translate` say which."""

    model: ModelId
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None

    n: PositiveInt | None = None
    best_of: PositiveInt | None = None
    echo: bool | None = None
    suffix: str | None = None
    ignore_eos: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None

    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    service_tier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: Annotated[str, Meta(max_length=64)] | None = None
    user: ShortText | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    prediction: dict[str, Any] | None = None
    priority: int | None = None
    return_progress: bool | None = None
    ttl: float | None = None


class ContentPart(Struct, frozen=True, kw_only=True):
    """One part of a message's content; `type` says which of the others it has."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Struct, frozen=True, kw_only=True):
    """The function of an earlier call. `arguments` is JSON in a string; some clients send the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class EarlierToolCall(Struct, frozen=True, kw_only=True):
    """A call that an assistant's message of the history holds."""

    id: str
    type: str = "function"
    function: CalledFunction | None = None


class Message(Struct, frozen=True, kw_only=True):
    """One message of the conversation, any role."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[EarlierToolCall] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class ChatRequest(GenerationOptions, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationOptions, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: LegacyLogprobs | None = None
