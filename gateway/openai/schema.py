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


class NamedSchema(Struct, frozen=True, kw_only=True):
    """A JSON schema with its name. `strict` changes nothing: every schema is enforced."""

    name: ShortText | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """What the answer must be. `schema` beside `json_object` is llama-server's."""

    type: str
    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(Struct, frozen=True, kw_only=True):
    """vLLM's way to say it: exactly one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


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
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    modalities: list[str] | None = None

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
    priority: int | float | str | None = None
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
    function_call: CalledFunction | None = None
    audio: dict[str, Any] | None = None


class FunctionDefinition(Struct, frozen=True, kw_only=True):
    """A function that may be called. `strict` changes nothing: arguments follow `parameters` wherever they can."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct, frozen=True, kw_only=True):
    """One of `tools`."""

    type: str
    function: FunctionDefinition | None = None


class FunctionName(Struct, frozen=True, kw_only=True):
    """Which function is meant."""

    name: str


class AllowedTool(Struct, frozen=True, kw_only=True):
    """One of the tools that may be called now. Some clients leave out the inner object."""

    type: str = "function"
    function: FunctionName | None = None
    name: str | None = None


class AllowedTools(Struct, frozen=True, kw_only=True):
    """Narrows which of `tools` may be called without a change to the prompt."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedTool] = []


class ToolChoice(Struct, frozen=True, kw_only=True):
    """The object form of `tool_choice`. `name` beside `type` is how the Responses API has it."""

    type: str
    function: FunctionName | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None


class ChatRequest(GenerationOptions, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: str | FunctionName | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(GenerationOptions, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: LegacyLogprobs | None = None
