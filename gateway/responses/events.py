"""The events of a response's stream. Each is numbered, and named by its type. Types, and how their bytes are made."""

from typing import Any

import msgspec
from msgspec import UNSET, Struct

from gateway.event_bytes import named_event
from gateway.openai.answers import TokenObject
from gateway.responses.answers import OutputItem, OutputText, ReasoningText, ResponseObject

_encode = msgspec.json.Encoder().encode


class _Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class _OfResponse(_Event, frozen=True, kw_only=True):
    """`mlxd` says, while the response waits, what for."""

    response: ResponseObject
    mlxd: Any = UNSET
    """A RequestView or a PromptProgressObject: a union that msgspec could not read, and so would not describe."""


class Created(_OfResponse, frozen=True, kw_only=True, tag="response.created"):
    """The first."""


class Queued(_OfResponse, frozen=True, kw_only=True, tag="response.queued"):
    """It waits for its model, or for its turn."""


class InProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    """It is worked on."""


class Completed(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    """The good end."""


class Incomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    """The end at a limit."""


class Failed(_OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    """The bad end."""


class _OfItem(_Event, frozen=True, kw_only=True):
    output_index: int


class ItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    item: OutputItem


class ItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    """It is whole."""

    item: OutputItem


class _OfContent(_OfItem, frozen=True, kw_only=True):
    item_id: str
    content_index: int = 0


class PartAdded(_OfContent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """An item's text begins."""

    part: OutputText | ReasoningText


class PartDone(_OfContent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """It is whole."""

    part: OutputText | ReasoningText


class TextDelta(_OfContent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More of a message's text."""

    delta: str
    logprobs: tuple[TokenObject, ...] = ()


class TextDone(_OfContent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All of it."""

    text: str
    logprobs: tuple[TokenObject, ...] = ()


class ReasoningDelta(_OfContent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More of what the model thinks."""

    delta: str


class ReasoningDone(_OfContent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """All of it."""

    text: str


class _OfCall(_OfItem, frozen=True, kw_only=True):
    item_id: str


class ArgumentsDelta(_OfCall, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_OfCall, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """All of them."""

    name: str
    arguments: str


class InputDelta(_OfCall, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More of a custom tool's input."""

    delta: str


class InputDone(_OfCall, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    """All of it."""

    input: str


Event = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
)


def event_bytes(event: Event) -> bytes:
    """With its type in both places: SDKs look into the data, older parsers at the event's line."""
    return named_event(str(event.__struct_config__.tag).encode(), _encode(event))
