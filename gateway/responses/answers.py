"""What clients of OpenAI's Responses API get: the response object and the items of its output."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.answer_details import DetailsObject
from gateway.latency_class import ServiceTier
from gateway.openai.answers import TokenObject

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

ENDED: tuple[Status, ...] = ("completed", "incomplete", "failed", "cancelled")

# --- items -----------------------------------------------------------------------------------------------------------


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text that the client sees. Nothing here makes annotations."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[TokenObject, ...] = ()


class ReasoningText(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class MessageOutput(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...]


class ReasoningOutput(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What it thought before. No summaries are made; `encrypted_content` is there when it was asked for."""

    id: str
    status: ItemStatus
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...]
    encrypted_content: str | UnsetType = UNSET


class FunctionCallOutput(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call. `arguments` is JSON in a string, as the model wrote it: it may be invalid."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomCallOutput(Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. `mlxd_arguments` is all that the model wrote, if that is more than the input."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str
    mlxd_arguments: str | UnsetType = UNSET


OutputItem = MessageOutput | ReasoningOutput | FunctionCallOutput | CustomCallOutput

# --- the response ----------------------------------------------------------------------------------------------------


class InputTokensDetails(Struct, frozen=True, kw_only=True):
    """`cached_tokens` is a part of `input_tokens`. What is kept of the rest is nobody's bill here: 0."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True, kw_only=True):
    """`reasoning_tokens` is a part of `output_tokens`."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """The bill."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True, kw_only=True):
    """Why it failed."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True, kw_only=True):
    """Why it stopped before its end."""

    reason: Literal["max_output_tokens"]


class CacheDiagnostics(Struct, frozen=True, kw_only=True):
    """Why not more of an earlier response's prompt was reused. See `diagnostics`.

    `mlxd_reason` and its text say what OpenAI's list of reasons has no word for.
    """

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: str | UnsetType = UNSET
    cache_missed_tokens: int | UnsetType = UNSET
    comparison_reusable_tokens: int | UnsetType = UNSET
    mlxd_reason: str | UnsetType = UNSET
    mlxd_reason_text: str | UnsetType = UNSET


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response, at any moment of its life. It gives the request's settings back, as they were understood."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_options: Any
    prompt_cache_retention: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: ServiceTier
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: tuple[msgspec.Raw, ...]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    prompt_cache_diagnostics: CacheDiagnostics | UnsetType = UNSET
    mlxd: DetailsObject | UnsetType = UNSET


class InputTokens(Struct, frozen=True, kw_only=True):
    """The answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDeleted(Struct, frozen=True, kw_only=True):
    """The answer to DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Struct, frozen=True, kw_only=True):
    """A page of a stored response's input."""

    object: Literal["list"] = "list"
    data: tuple[msgspec.Raw, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
