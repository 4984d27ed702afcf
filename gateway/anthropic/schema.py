"""What clients of Anthropic's API send, field by field, with its ranges.

`null` means absent wherever a field is optional. What a struct does not name is ignored, and named to the client in a
response header.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

ModelId = Annotated[str, Meta(max_length=1024)]
ToolName = Annotated[str, Meta(min_length=1, max_length=256)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Ttl = Literal["5m", "1h"]
Effort = Literal["low", "medium", "high", "xhigh", "max"]

THINKING_BUDGET_MIN = 1024


class CacheControl(Struct, frozen=True, kw_only=True):
    """A marker: what stands before it is worth keeping."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Ttl | None = None


class Source(Struct, frozen=True, kw_only=True):
    """Where a document's or an image's content is; `type` says which of the others it has."""

    type: str
    data: str | None = None
    content: "str | list[Block] | None" = None


class Block(Struct, frozen=True, kw_only=True):
    """One block of a message's content, of any type; `type` says which of the others it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | dict[str, Any] | None" = None
    is_error: bool | None = None
    source: str | Source | None = None
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class Message(Struct, frozen=True, kw_only=True):
    """One message of the conversation, any role."""

    role: str
    content: str | list[Block]


class ToolDefinition(Struct, frozen=True, kw_only=True):
    """A tool. Only those without a type, or of type `custom`, are the client's own functions."""

    name: ToolName | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Struct, frozen=True, kw_only=True):
    """How the tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, frozen=True, kw_only=True):
    """The shape that the answer must have."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, kw_only=True):
    """How hard the model tries, and what its answer must look like."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(Struct, frozen=True, kw_only=True):
    """Who the client's own user is."""

    user_id: Annotated[str, Meta(max_length=256)] | None = None


class DiagnosticsOptions(Struct, frozen=True, kw_only=True):
    """Ask why the prompt's prefix was not the earlier request's."""

    previous_message_id: Annotated[str, Meta(max_length=128)] | None = None


class PromptRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens: all that the prompt is made of."""

    model: ModelId
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(PromptRequest, frozen=True, kw_only=True):
    """The body of POST /v1/messages. `max_tokens` 0 only fills the cache."""

    max_tokens: NotNegative
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=64)] | None = None
    temperature: Fraction | None = None
    top_p: TopP | None = None
    top_k: NotNegative | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[str, Meta(max_length=256)] | None = None
    priority: int | float | str | None = None
    diagnostics: DiagnosticsOptions | None = None
