"""A typed request of the Responses API → the command for a worker, or the Failure that names the field. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from gateway.openai.json_values import plain
from gateway.openai.refusals import Refusal, invalid, unsupported
from gateway.openai.thinking import budget_in_template
from gateway.responses.history import history_of
from gateway.responses.schema import CreateRequest, PromptFields, TextFormat
from gateway.responses.tools import AskedTools, asked_tools
from protocol.failures import Failure
from protocol.generation import CacheUse, ChatPrompt, Generate, Warm
from protocol.ids import RequestId
from protocol.sampling import Sampling
from protocol.tools import Constraint, JsonObject, JsonSchema

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"

_INCLUDED = frozenset({LOGPROBS, SEALED_REASONING})
_SCHEMA_MAX_BYTES = 64 * 1024
_INT_MAX = 2**31 - 1


class Understood(Struct, frozen=True, kw_only=True):
    """What a request means: its prompt, its tools as the client knows them, what the answer's text must be."""

    prompt: ChatPrompt
    tools: AskedTools
    constraint: Constraint | None
    ignored: tuple[str, ...]
    thinking_budget: int | None = None


def understand(
    request: PromptFields, items: Sequence[tuple[str, msgspec.Raw]], *, cache_scope: bytes
) -> Understood | Failure:
    """`items` are those of earlier answers and of the input, with where they stand."""
    try:
        if request.conversation is not None:
            raise unsupported("conversation", "is not offered here. Use `previous_response_id`, or send all items.")
        if request.prompt is not None:
            raise unsupported("prompt", "no prompts are kept here. Send `instructions` and `input`.")
        if not items and not request.instructions:
            raise invalid("input", "is required, and must not be an empty list. Send a string or items.")
        history = history_of(items, instructions=request.instructions, cache_scope=cache_scope)
        if not history.messages:
            raise invalid("input", "holds no message. Send one.")
        tools = asked_tools(request, history.tools)
        constraint = _constraint(request.text.format if request.text is not None else None)
        if constraint is not None and tools.use is not None and tools.use.choice == "required":
            raise invalid("text.format", "cannot be held by an answer that must be a tool call. Send only one of them.")
        return Understood(
            prompt=ChatPrompt(
                messages=history.messages, tools=tools.tools, template_arguments=_template_arguments(request)
            ),
            tools=tools,
            constraint=constraint,
            thinking_budget=budget_in_template(request.chat_template_kwargs),
            ignored=(*history.ignored, *tools.ignored, *_ignored(request)),
        )
    except Refusal as refusal:
        return refusal.failure


def input_items(request: PromptFields) -> list[tuple[str, msgspec.Raw]]:
    """The input's items with where they stand; a string is one message of the user."""
    match request.input:
        case None:
            return []
        case str() as text:
            content = [{"type": "input_text", "text": text}]
            return [("input", msgspec.Raw(msgspec.json.encode({"role": "user", "content": content})))]
        case items:
            return [(f"input[{index}]", item) for index, item in enumerate(items)]


def command_of(
    request: CreateRequest, understood: Understood, *, request_id: RequestId, cache: CacheUse
) -> Generate | Warm:
    """What a worker is to do. `cache` is the caller's."""
    if request.prompt_cache_retention in ("in_memory", "in-memory"):
        cache = msgspec.structs.replace(cache, retention="in_memory")
    if request.prompt_cache_options is not None and request.prompt_cache_options.prewarm:
        return Warm(request_id=request_id, prompt=understood.prompt, cache=cache)
    return Generate(
        request_id=request_id,
        prompt=understood.prompt,
        sampling=sampling_of(request),
        max_tokens=None if request.max_output_tokens is None else min(request.max_output_tokens, _INT_MAX),
        top_logprobs=asked_logprobs(request),
        cache=cache,
        tool_use=understood.tools.use,
        constraint=understood.constraint,
        reasoning="split",
        reasoning_budget_tokens=understood.thinking_budget,
    )


def asked_logprobs(request: CreateRequest) -> int | None:
    """How many alternatives of each token, None when no log probabilities are wanted."""
    is_wanted = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    return (request.top_logprobs or 0) if is_wanted else None


def sampling_of(request: CreateRequest) -> Sampling:
    """As asked, the rest as it is for everybody."""
    asked = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": None if request.top_k is None else min(max(request.top_k, 0), _INT_MAX),
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "seed": None if request.seed is None else request.seed % 2**64,
    }
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    return msgspec.structs.replace(Sampling(), **given)


def _template_arguments(request: PromptFields) -> dict[str, Any]:
    """Templates call the switch `enable_thinking`, and those with degrees `reasoning_effort`."""
    arguments: dict[str, Any] = {}
    effort = request.reasoning.effort if request.reasoning is not None else None
    if effort is not None:
        arguments["reasoning_effort"] = effort
        if effort in ("none", "minimal"):
            arguments["enable_thinking"] = False
    if budget_in_template(request.chat_template_kwargs) == 0:
        arguments["enable_thinking"] = False
    return arguments | plain(request.chat_template_kwargs or {}, "chat_template_kwargs")


def _constraint(asked: TextFormat | None) -> Constraint | None:
    match asked:
        case None | TextFormat(type="text"):
            return None
        case TextFormat(type="json_object"):
            return JsonObject()
        case TextFormat(schema=dict() as schema):
            text = msgspec.json.encode(plain(schema, "text.format.schema")).decode()
            if len(text.encode()) > _SCHEMA_MAX_BYTES:
                raise invalid("text.format.schema", f"is over {_SCHEMA_MAX_BYTES} bytes. Send a smaller one.")
            return JsonSchema(text=text)
        case TextFormat():
            raise invalid("text.format.schema", "is required for this type. Send the JSON schema of the answer.")


def _ignored(request: PromptFields) -> list[str]:
    """Values that nothing is done with, of fields that are honoured otherwise."""
    ignored = {
        "truncation": request.truncation == "auto",
        "text.verbosity": request.text is not None and request.text.verbosity is not None,
        "reasoning.summary": request.reasoning is not None and request.reasoning.summary is not None,
    }
    if isinstance(request, CreateRequest):
        options = request.stream_options
        ignored["include"] = any(name not in _INCLUDED for name in request.include or ())
        ignored["stream_options"] = options is not None and bool(options.include_obfuscation)
    return [name for name, is_ignored in ignored.items() if is_ignored]
