"""What clients of OpenAI's Responses API send, field by field, with its ranges.

`null` means absent wherever a field is optional. Items of the input and tools are read one by one, so that an error
names the one at fault: see `history` and `tools`. What a struct does not name is ignored, and named to the client in a
response header.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from gateway.openai.schema import (
    MinP,
    ModelId,
    Penalty,
    PositiveInt,
    RepetitionPenalty,
    ShortText,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
)
from gateway.request_body import Decoded, decode_plain
from protocol.failures import Failure, FailureKind

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Plain = TypeVar("Plain")
Asking = TypeVar("Asking")

_IGNORED = frozenset(
    {
        "background_options",
        "max_tool_calls",
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "user",
    }
)
"""Typed fields that nothing is done with but to give them back, since the answer is right without them."""

_ELSEWHERE = {
    "best_of": "Send several requests.",
    "function_call": "Use `tool_choice`.",
    "functions": "Use `tools`.",
    "logit_bias": "Use /v1/chat/completions for it.",
    "logprobs": 'Use `include: ["message.output_text.logprobs"]` and `top_logprobs`.',
    "max_completion_tokens": "Use `max_output_tokens`.",
    "max_tokens": "Use `max_output_tokens`.",
    "messages": "Use `input`.",
    "n": "Send several requests.",
    "reasoning_effort": "Use `reasoning.effort`.",
    "response_format": "Use `text.format`.",
    "stop": "Use /v1/chat/completions for it.",
}
"""Fields of the neighbouring API that change the answer, so that ignoring them would be a lie, and what to do."""


class StreamOptions(Struct, frozen=True, kw_only=True):
    """Obfuscation pads events against somebody who only sees their sizes. It is not done."""

    include_obfuscation: bool | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True):
    """How much to think. Summaries are not made: the reasoning itself is in the answer."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Struct, frozen=True, kw_only=True):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, kw_only=True):
    """The format is held; a verbosity is only given back."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class CacheOptions(Struct, frozen=True, kw_only=True):
    """`prewarm`: fill the cache, generate nothing. `comparison_response_id`: say why not more of it was reused."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: ShortText | None = None
    prewarm: bool | None = None
    comparison_response_id: ShortText | None = None


class AllowedTool(Struct, frozen=True, kw_only=True):
    """One entry of an `allowed_tools` choice. Kinds other than function and custom have other names, or none."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ChosenTool(Struct, frozen=True, kw_only=True):
    """A `tool_choice` that is more than a word; `type` says which of the others it has."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class PromptFields(Struct, frozen=True, kw_only=True):
    """What makes a prompt, on every route that takes one."""

    model: ModelId
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    previous_response_id: ShortText | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: Any = None
    prompt: Any = None


class CreateRequest(PromptFields, frozen=True, kw_only=True):
    """The body of POST /v1/responses."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    background_options: dict[str, Any] | None = None
    store: bool | None = None
    include: list[ShortText] | None = None
    max_output_tokens: PositiveInt | None = None
    max_tool_calls: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: TopLogprobs | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    metadata: dict[Annotated[str, Meta(max_length=64)], ShortText] | None = None
    service_tier: ShortText | None = None
    priority: int | float | str | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    user: ShortText | None = None


class CountRequest(PromptFields, frozen=True, kw_only=True):
    """The body of POST /v1/responses/input_tokens."""


# --- items of the input ----------------------------------------------------------------------------------------------


class ItemKind(Struct, frozen=True, kw_only=True):
    """What is looked at first. An item without a type is a message."""

    type: str | None = None


class ContentPart(Struct, frozen=True, kw_only=True):
    """One part of a content; `type` says which of the others it has."""

    type: str
    text: str | None = None
    refusal: str | None = None


class MessageItem(Struct, frozen=True, kw_only=True):
    """A message, any role."""

    role: str
    content: str | list[ContentPart]


class FunctionCallItem(Struct, frozen=True, kw_only=True):
    """A call that the model made. `arguments` is JSON in a string; some clients send the object itself."""

    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None


class CustomCallItem(Struct, frozen=True, kw_only=True):
    """A call of a custom tool: its input is text of any kind."""

    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutputItem(Struct, frozen=True, kw_only=True):
    """What a call of either kind gave."""

    call_id: str
    output: str | list[ContentPart]


class ReasoningItem(Struct, frozen=True, kw_only=True):
    """What the model thought: as text, sealed, or as a summary of it."""

    content: list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


class AdditionalToolsItem(Struct, frozen=True, kw_only=True):
    """Tools that a client adds in the middle of a conversation."""

    tools: list[msgspec.Raw]


class ReferenceItem(Struct, frozen=True, kw_only=True):
    """An item of a stored answer, by its id."""

    id: ShortText


# --- tools -----------------------------------------------------------------------------------------------------------


class GrammarFormat(Struct, frozen=True, kw_only=True):
    """What a custom tool's input looks like."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class FunctionTool(Struct, frozen=True, kw_only=True):
    """A function with JSON arguments. Its schema is what the model is shown; `strict` says nothing new here."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Struct, frozen=True, kw_only=True):
    """A function with one text as its input."""

    name: str
    description: str | None = None
    format: GrammarFormat | None = None


class NamespaceTool(Struct, frozen=True, kw_only=True):
    """Tools under a common name."""

    name: str
    tools: list[msgspec.Raw]


# --- reading ---------------------------------------------------------------------------------------------------------


def decode_request(body: bytes, request_type: type[Asking]) -> Decoded[Asking] | Failure:
    """Read a body. Every malformed one, whatever its bytes, is a Failure."""
    request = decode_plain(body, request_type)
    if isinstance(request, Failure):
        return request
    values = decode_plain(body, dict[str, msgspec.Raw])
    if isinstance(values, Failure):
        return values
    for name, value in values.items():
        if name in _ELSEWHERE and bytes(value) != b"null":
            return Failure(
                kind=FailureKind.UNSUPPORTED,
                message=f"`{name}`: is no field of the Responses API. {_ELSEWHERE[name]}",
                param=name,
            )
    honoured = {field.encode_name for field in msgspec.structs.fields(request_type)} - _IGNORED  # pyright: ignore[reportArgumentType]
    ignored = tuple(name for name, value in values.items() if bytes(value) != b"null" and name not in honoured)
    return Decoded(request=request, ignored=ignored)


def decode_part(raw: msgspec.Raw, part_type: type[Plain], at: str) -> Plain | Failure:
    """Read one item or tool that stands at `at` in the body: errors name the field with its whole path."""
    part = decode_plain(bytes(raw), part_type)
    if not isinstance(part, Failure):
        return part
    if part.param is None:
        return replace(part, message=f"`{at}`: must be an object. Correct it and send the request again.", param=at)
    path = f"{at}.{part.param}" if not part.param.startswith("[") else f"{at}{part.param}"
    return replace(part, message=part.message.replace(f"`{part.param}`", f"`{path}`", 1), param=path)
