"""A typed request of Anthropic's API → a worker's command, or the Failure that names the field. Pure."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, assert_never

import msgspec
from msgspec import Struct

from gateway.anthropic.conversation import CacheMark, Conversation, conversation
from gateway.anthropic.schema import (
    THINKING_BUDGET_MIN,
    MessagesRequest,
    OutputFormat,
    PromptRequest,
    ToolDefinition,
)
from gateway.openai.json_values import plain
from gateway.openai.refusals import Refusal, invalid
from protocol.failures import Failure
from protocol.generation import CacheUse, ChatPrompt, Generate, Pin, Warm
from protocol.ids import RequestId
from protocol.sampling import Sampling
from protocol.scopes import owner_id
from protocol.tools import JsonSchema, Tool, ToolUse

TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}

_INT_MAX = 2**31 - 1
_SENT_EFFORT = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Templates know three."""


class Translated(Struct, frozen=True, kw_only=True):
    """The command, the prompt's cache markers, and what of the request nothing is done with."""

    work: Generate | Warm
    marks: tuple[CacheMark, ...]
    ignored: tuple[str, ...]


def messages_to_work(
    request: MessagesRequest, *, request_id: RequestId, cache_scope: bytes, disk_ttl_seconds: float | None = None
) -> Translated | Failure:
    """What POST /v1/messages asks of a worker. `cache_scope` and `disk_ttl_seconds` are the caller's own."""
    try:
        tools = _client_tools(request)
        spoken = conversation(request)
        prompt = _prompt(request, spoken, tools)
        cache = CacheUse(scope=cache_scope, owner=owner_id(cache_scope), disk_ttl_seconds=disk_ttl_seconds)
        _check_thinking(request)
        stop = _stop(request.stop_sequences or ())
        tool_use = _tool_use(request, tools)
        output_format = _output_format(request)
        if request.max_tokens == 0:
            _check_warm(request)
            pin = _pin(request.model, prompt, cache, spoken.marks)
            work: Generate | Warm = Warm(request_id=request_id, prompt=prompt, cache=cache, pin=pin)
        else:
            if output_format is not None and tool_use is not None and tool_use.choice == "required":
                raise invalid("tool_choice", "forces a call, and the format says what the text must be. Send only one.")
            default = Sampling()
            work = Generate(
                request_id=request_id,
                prompt=prompt,
                sampling=Sampling(
                    temperature=default.temperature if request.temperature is None else request.temperature,
                    top_p=default.top_p if request.top_p is None else request.top_p,
                    top_k=min(request.top_k or 0, _INT_MAX),
                ),
                max_tokens=min(request.max_tokens, _INT_MAX),
                stop=stop,
                cache=cache,
                tool_use=tool_use,
                constraint=None if output_format is None else _constraint(output_format),
                reasoning="split",
                reasoning_budget_tokens=_thinking_budget(request),
            )
    except Refusal as refusal:
        return refusal.failure
    return Translated(work=work, marks=spoken.marks, ignored=_ignored(request))


def prompt_of(request: PromptRequest) -> ChatPrompt | Failure:
    """The prompt that this request's answer would be billed for."""
    try:
        tools = _client_tools(request)
        prompt = _prompt(request, conversation(request), tools)
        _tool_use(request, tools)
        _output_format(request)
    except Refusal as refusal:
        return refusal.failure
    return prompt


def _prompt(request: PromptRequest, spoken: Conversation, tools: tuple[Tool, ...]) -> ChatPrompt:
    is_none = request.tool_choice is not None and request.tool_choice.type == "none"
    return ChatPrompt(
        messages=spoken.messages,
        tools=() if is_none else tools,
        template_arguments=_template_arguments(request),
        ending=spoken.ending,
    )


def _template_arguments(request: PromptRequest) -> dict[str, Any]:
    """A request that does not ask for thinking gets none, as this API has it: its client expects text first."""
    thinks = request.thinking is not None and request.thinking.type in ("enabled", "adaptive")
    arguments: dict[str, Any] = {"enable_thinking": thinks}
    if request.output_config is not None and request.output_config.effort is not None:
        arguments["reasoning_effort"] = _SENT_EFFORT[request.output_config.effort]
    return arguments


# --- tools -----------------------------------------------------------------------------------------------------------


def _is_client_tool(tool: ToolDefinition) -> bool:
    return tool.type in (None, "custom")


def _client_tools(request: PromptRequest) -> tuple[Tool, ...]:
    """Those that the client runs by a schema it gives; the API's own kinds are left out, and named as ignored."""
    tools: list[Tool] = []
    for at, tool in enumerate(request.tools or ()):
        if not _is_client_tool(tool):
            continue
        where = f"tools[{at}]"
        if tool.name is None:
            raise invalid(f"{where}.name", "is required. Name the tool.")
        if tool.input_schema is None:
            raise invalid(f"{where}.input_schema", "is required. Send the tool's JSON schema.")
        parameters = plain(tool.input_schema, f"{where}.input_schema")
        if parameters.get("type", "object") != "object":
            raise invalid(f"{where}.input_schema", "must be the JSON schema of an object. Set its `type` to `object`.")
        if any(tool.name == other.name for other in tools):
            raise invalid(f"{where}.name", "is another tool's name, too. Give each tool its own.")
        tools.append(Tool(name=tool.name, description=tool.description or "", parameters=parameters))
    return tuple(tools)


def _tool_use(request: PromptRequest, tools: tuple[Tool, ...]) -> ToolUse | None:
    choice = request.tool_choice
    if choice is None:
        return ToolUse() if tools else None
    calls: Literal["many", "one"] = "one" if choice.disable_parallel_tool_use else "many"
    match choice.type:
        case "none":
            return None
        case "auto":
            return ToolUse(calls=calls) if tools else None
        case "any":
            if not tools:
                raise invalid("tool_choice", "asks for a call and there is no tool to call. Send tools with a schema.")
            return ToolUse(choice="required", calls=calls)
        case "tool":
            if choice.name is None:
                raise invalid("tool_choice.name", "is required with this type. Name one of the tools.")
            if all(tool.name != choice.name for tool in tools):
                raise invalid("tool_choice.name", "is not the name of a tool in `tools`. Name one of those.")
            return ToolUse(choice="required", allowed=(choice.name,), calls=calls)
        case _:
            assert_never(choice.type)


# --- options ---------------------------------------------------------------------------------------------------------


def _check_thinking(request: MessagesRequest) -> None:
    thinking = request.thinking
    if thinking is None or thinking.type != "enabled":
        return
    budget = thinking.budget_tokens
    if budget is None:
        raise invalid("thinking.budget_tokens", "is required with `enabled`. Send it, or ask for `adaptive`.")
    if budget < THINKING_BUDGET_MIN:
        raise invalid("thinking.budget_tokens", f"must be {THINKING_BUDGET_MIN} or more. Raise it.")
    if 0 < request.max_tokens <= budget:
        raise invalid("thinking.budget_tokens", "must be less than `max_tokens`. Lower it, or raise `max_tokens`.")


def _thinking_budget(request: MessagesRequest) -> int | None:
    """Of `enabled` thinking, which `_check_thinking` looked at. `adaptive` leaves it to the model."""
    thinking = request.thinking
    return None if thinking is None or thinking.type != "enabled" else thinking.budget_tokens


def _check_warm(request: MessagesRequest) -> None:
    """What makes no sense where nothing is generated."""
    thinking, choice = request.thinking, request.tool_choice
    refused = {
        "stream": bool(request.stream),
        "thinking": thinking is not None and thinking.type in ("enabled", "adaptive"),
        "tool_choice": choice is not None and choice.type in ("any", "tool"),
        "output_config.format": _output_format(request) is not None,
    }
    for field, is_asked in refused.items():
        if is_asked:
            raise invalid(field, "cannot be had with `max_tokens: 0`, which generates nothing. Leave one of them out.")


def _pin(model: str, prompt: ChatPrompt, cache: CacheUse, marks: Sequence[CacheMark]) -> Pin | None:
    """Who marks what it warms wants it kept: as long as the longest marker says. The same prompt has the same pin,
    whose name tells nothing of it."""
    if not marks:
        return None
    key = hashlib.blake2b(cache.scope).digest()
    digest = hashlib.blake2b(msgspec.msgpack.encode((model, prompt)), key=key, digest_size=8).hexdigest()
    return Pin(name=f"messages-{digest}", ttl_seconds=max(TTL_SECONDS[mark.ttl] for mark in marks))


def _stop(sequences: Sequence[str]) -> tuple[str, ...]:
    for at, sequence in enumerate(sequences):
        if not sequence.strip():
            raise invalid(f"stop_sequences[{at}]", "must hold more than whitespace. Leave it out.")
    return tuple(sequences)


def _output_format(request: PromptRequest) -> OutputFormat | None:
    """By its name, or by the one it had while it was new."""
    config = request.output_config
    found = request.output_format if config is None or config.format is None else config.format
    if found is not None:
        plain(found.schema, "output_config.format.schema")
    return found


def _constraint(output_format: OutputFormat) -> JsonSchema:
    return JsonSchema(text=msgspec.json.encode(output_format.schema).decode())


def _ignored(request: MessagesRequest) -> tuple[str, ...]:
    thinking = request.thinking
    names = [f"tools.{tool.type}" for tool in request.tools or () if not _is_client_tool(tool)]
    if thinking is not None and thinking.display == "omitted":
        names.append("thinking.display")
    return tuple(names)
