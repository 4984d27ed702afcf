"""What clients of Anthropic's API get: the message, its blocks, and the events of a stream."""

from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.answer_details import DetailsObject

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
ServiceTier = Literal["standard", "priority", "batch"]


# --- usage -----------------------------------------------------------------------------------------------------------


class CacheCreation(Struct, frozen=True, kw_only=True):
    """`cache_creation_input_tokens` by how long the client wants them kept."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True, kw_only=True):
    """`thinking_tokens` is a part of `output_tokens`."""

    thinking_tokens: int = 0


class UsageObject(Struct, frozen=True, kw_only=True):
    """The bill. The prompt is the sum of the three input numbers; they do not overlap."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    service_tier: ServiceTier = "standard"


# --- cache diagnostics -----------------------------------------------------------------------------------------------


class CacheMiss(Struct, frozen=True, kw_only=True):
    """Why the earlier request's prefix could not be used, and how much of it was lost."""

    type: Literal[
        "model_changed",
        "system_changed",
        "tools_changed",
        "messages_changed",
        "previous_message_not_found",
        "unavailable",
    ]
    cache_missed_input_tokens: int | UnsetType = UNSET


class DiagnosticsObject(Struct, frozen=True, kw_only=True):
    """None: the earlier request's prefix is the beginning of this one's prompt, or there is none to compare with."""

    cache_miss_reason: CacheMiss | None


# --- blocks ----------------------------------------------------------------------------------------------------------


class TextBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """What the client shows."""

    text: str


class ThinkingBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought. Clients send it back with its signature, which nobody needs to check here."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: Raw | dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageObject(Struct, frozen=True, kw_only=True):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: UsageObject
    diagnostics: DiagnosticsObject | UnsetType = UNSET
    mlxd: DetailsObject | UnsetType = UNSET


# --- events ----------------------------------------------------------------------------------------------------------


class MessageStart(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_start"):
    """The first event."""

    message: MessageObject


class BlockStart(Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: ContentBlock


class TextDelta(Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, kw_only=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"):
    """More of the open block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"):
    """The block has ended."""

    index: int


class EndDelta(Struct, frozen=True, kw_only=True):
    """How the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    """How the message ended, and the whole bill."""

    delta: EndDelta
    usage: UsageObject
    diagnostics: DiagnosticsObject | UnsetType = UNSET
    mlxd: DetailsObject | UnsetType = UNSET


class MessageStop(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_stop"):
    """The last event."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
