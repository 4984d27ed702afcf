"""A typed request of OpenAI's API → the Generate command of a worker, or the Failure that names the field. Pure."""

import hashlib
import re
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.openai.schema import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    EarlierToolCall,
    GenerationOptions,
    Message,
)
from gateway.volatile_heads import without_volatile_head
from protocol.failures import Failure, FailureKind
from protocol.generation import CacheUse, ChatMessage, ChatPrompt, Generate, Prompt, TextPrompt, TokenPrompt, ToolCall
from protocol.ids import RequestId
from protocol.sampling import Sampling
from protocol.scopes import owner_id

COMPLETION_MAX_TOKENS = 16
"""Of /v1/completions, when the client names none: OpenAI's contract."""

_INT_MAX = 2**31 - 1
_STOPS_MAX = 4
_DEPTH_MAX = 64
_CHOICES_MAX = 32
_DECIMAL = re.compile(r"[0-9]{1,10}")


class _Refusal(Exception):
    """Carries a Failure out of a nested translation; never leaves this module."""

    def __init__(self, kind: FailureKind, param: str, message: str) -> None:
        super().__init__()
        self.failure = Failure(kind=kind, message=f"`{param}`: {message}", param=param)


def chat_to_generate(
    request: ChatRequest, *, request_id: RequestId, cache_scope: bytes, disk_ttl_seconds: float | None = None
) -> tuple[Generate, ...] | Failure:
    """What a chat request asks of a worker. `cache_scope` and `disk_ttl_seconds` are the caller's own."""
    try:
        _refuse_unsupported(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise _invalid("top_logprobs", "needs `logprobs: true`. Add that, or leave `top_logprobs` out.")
        prompt = ChatPrompt(
            messages=tuple(_message(message, f"messages[{at}]") for at, message in enumerate(request.messages)),
            template_arguments=_plain(request.chat_template_kwargs or {}, "chat_template_kwargs"),
        )
        return _choices(
            request,
            prompt,
            request_id=request_id,
            cache=_cache_use(request, cache_scope, disk_ttl_seconds),
            max_tokens=_max_tokens(request),
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
    except _Refusal as refusal:
        return refusal.failure


def completion_to_generate(
    request: CompletionRequest, *, request_id: RequestId, cache_scope: bytes, disk_ttl_seconds: float | None = None
) -> tuple[Generate, ...] | Failure:
    """What a completion request asks of a worker. The cache's arguments as in `chat_to_generate`."""
    try:
        _refuse_unsupported(request)
        return _choices(
            request,
            _completion_prompt(request.prompt),
            request_id=request_id,
            cache=_cache_use(request, cache_scope, disk_ttl_seconds),
            max_tokens=_max_tokens(request) or COMPLETION_MAX_TOKENS,
            top_logprobs=request.logprobs,
        )
    except _Refusal as refusal:
        return refusal.failure


def _invalid(param: str, message: str) -> _Refusal:
    return _Refusal(FailureKind.INVALID_REQUEST, param, message)


def _unsupported(param: str, message: str) -> _Refusal:
    return _Refusal(FailureKind.UNSUPPORTED, param, message)


# --- options ---------------------------------------------------------------------------------------------------------


def _refuse_unsupported(request: GenerationOptions) -> None:
    """Refuse what would change the answer and cannot be honoured. The same for both routes."""
    unsupported = {
        "best_of": (request.best_of or 1) > (request.n or 1),
        "echo": bool(request.echo),
        "suffix": bool(request.suffix),
        "ignore_eos": bool(request.ignore_eos),
        "tools": bool(request.tools),
        "tool_choice": request.tool_choice not in (None, "none", "auto"),
        "functions": bool(request.functions),
        "function_call": request.function_call not in (None, "none", "auto"),
        "response_format": request.response_format is not None and request.response_format.type != "text",
        "modalities": any(modality != "text" for modality in request.modalities or ()),
    }
    for name, is_wanted in unsupported.items():
        if is_wanted:
            raise _unsupported(name, "this value is not supported by this server. Leave the field out.")
    if (request.n or 1) > _CHOICES_MAX:
        raise _invalid("n", f"at most {_CHOICES_MAX} choices. Ask for fewer, or send several requests.")
    if request.stream_options is not None and not request.stream:
        raise _invalid("stream_options", "is for streams only. Add `stream: true`, or leave it out.")


def _choices(
    request: GenerationOptions,
    prompt: Prompt,
    *,
    request_id: RequestId,
    cache: CacheUse,
    max_tokens: int | None,
    top_logprobs: int | None,
) -> tuple[Generate, ...]:
    """One command for each choice: they share their prompt's prefix in the worker, and differ in their seed."""
    first = Generate(
        request_id=request_id,
        prompt=prompt,
        sampling=_sampling(request),
        max_tokens=max_tokens,
        stop=_stop(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        top_logprobs=top_logprobs,
        cache=cache,
    )
    return (first, *(_another(first, choice) for choice in range(1, request.n or 1)))


def _another(first: Generate, choice: int) -> Generate:
    seed = first.sampling.seed
    return replace(
        first,
        request_id=RequestId(f"{first.request_id}-{choice}"),
        sampling=replace(first.sampling, seed=None if seed is None else (seed + choice) % 2**64),
    )


def _cache_use(request: GenerationOptions, cache_scope: bytes, disk_ttl_seconds: float | None) -> CacheUse:
    """Blocks are the caller's even where it narrowed its scope: it may have them all forgotten."""
    return CacheUse(
        scope=_narrowed(cache_scope, request.cache_salt),
        owner=owner_id(cache_scope),
        retention="in_memory" if request.prompt_cache_retention in ("in_memory", "in-memory") else "disk",
        disk_ttl_seconds=disk_ttl_seconds,
    )


def _max_tokens(request: GenerationOptions) -> int | None:
    """The newer name wins. A huge number is no mistake: the worker stops at the context's end."""
    wanted = request.max_completion_tokens or request.max_tokens
    return None if wanted is None else min(wanted, _INT_MAX)


def _sampling(request: GenerationOptions) -> Sampling:
    default = Sampling()
    return Sampling(
        temperature=_or(request.temperature, default.temperature),
        top_p=_or(request.top_p, default.top_p),
        top_k=min(max(request.top_k or 0, 0), _INT_MAX),
        min_p=_or(request.min_p, default.min_p),
        repetition_penalty=_or(request.repetition_penalty, default.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, default.presence_penalty),
        frequency_penalty=_or(request.frequency_penalty, default.frequency_penalty),
        logit_bias=_logit_bias(request.logit_bias or {}),
        seed=_seed(request.seed),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for token in biases:
        if not _DECIMAL.fullmatch(token) or int(token) > _INT_MAX:
            raise _invalid("logit_bias", "its keys must be token ids written in decimal digits. Correct them.")
    return {int(token): bias for token, bias in biases.items()}


def _seed(seed: int | None) -> int | None:
    """Any 64-bit number, signed or not; a negative one stands for its two's complement."""
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**64:
        raise _invalid("seed", "must fit into 64 bits. Send a smaller number.")
    return seed % 2**64


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > _STOPS_MAX:
        raise _invalid("stop", f"at most {_STOPS_MAX} strings. Send fewer.")
    if not all(strings):
        raise _invalid("stop", "a stop string must not be empty. Leave it out.")
    return tuple(strings)


def _narrowed(cache_scope: bytes, salt: str | None) -> bytes:
    """A client's salt divides its own scope further; it never reaches another caller's."""
    if salt is None:
        return cache_scope
    key = hashlib.blake2b(cache_scope).digest()
    return hashlib.blake2b(salt.encode(), key=key, digest_size=32).digest()


# --- prompts ---------------------------------------------------------------------------------------------------------


def _completion_prompt(prompt: str | list[str | int | list[int]]) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(text=prompt)
    if prompt and all(isinstance(item, int) for item in prompt):
        return TokenPrompt(token_ids=tuple(item for item in prompt if isinstance(item, int)))
    match prompt:
        case []:
            raise _invalid("prompt", "must not be empty. Send a string or a list of token ids.")
        case [str() as text]:
            return TextPrompt(text=text)
        case [list() as token_ids]:
            if not token_ids:
                raise _invalid("prompt[0]", "must not be empty. Send at least one token id.")
            return TokenPrompt(token_ids=tuple(token_ids))
        case _:
            raise _unsupported("prompt", "one prompt per request only. Send several requests.")


def _message(message: Message, at: str) -> ChatMessage:
    if message.function_call is not None:
        raise _unsupported(f"{at}.function_call", "is not supported. Use `tool_calls`.")
    if message.audio is not None:
        raise _unsupported(f"{at}.audio", "this is a text-only model. Send text.")
    match message.role:
        case "system" | "developer":
            content = _required_content(_without_volatile_heads(message), at)
            return ChatMessage(role=message.role, content=content, name=message.name)
        case "user":
            return ChatMessage(role="user", content=_required_content(message, at), name=message.name)
        case "tool":
            if message.tool_call_id is None:
                raise _invalid(f"{at}.tool_call_id", "is required. Name the call that this message answers.")
            return ChatMessage(
                role="tool",
                content=_required_content(message, at),
                name=message.name,
                tool_call_id=message.tool_call_id,
            )
        case "assistant":
            reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
            return ChatMessage(
                role="assistant",
                content=_text(message.content or [], at) or message.refusal or "",
                name=message.name,
                reasoning_content=reasoning,
                tool_calls=tuple(
                    _tool_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())
                ),
            )
        case "function":
            raise _unsupported(f"{at}.role", "the role `function` is not supported. Use `tool` with `tool_call_id`.")
        case _:
            raise _invalid(f"{at}.role", "unknown role. Use system, developer, user, assistant or tool.")


def _without_volatile_heads(message: Message) -> Message:
    """Before parts are joined: a client may send such a head as a part of its own, without a line's end."""
    if isinstance(message.content, str):
        return replace(message, content=without_volatile_head(message.content))
    parts = [
        part if part.text is None else replace(part, text=without_volatile_head(part.text))
        for part in message.content or ()
    ]
    return message if message.content is None else replace(message, content=parts)


def _required_content(message: Message, at: str) -> str:
    if message.content is None:
        raise _invalid(f"{at}.content", "is required for this role. Send a string or a list of text parts.")
    if message.content == [] and message.role == "user":
        raise _invalid(f"{at}.content", "must not be an empty list. Send a string or a list of text parts.")
    return _text(message.content, at)


def _text(content: str | list[ContentPart], at: str) -> str:
    """Text parts joined in order, with nothing between them."""
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{at}.content[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, at: str) -> str:
    match part.type:
        case "text":
            if part.text is None:
                raise _invalid(f"{at}.text", "must be a string. Send the text.")
            return part.text
        case "refusal":
            if part.refusal is None:
                raise _invalid(f"{at}.refusal", "must be a string. Send the text.")
            return part.refusal
        case "image_url" | "input_audio" | "file" | "image" | "video_url" | "audio_url":
            raise _unsupported(at, "this is a text-only model. Send parts of type `text` only.")
        case _:
            raise _invalid(f"{at}.type", "unknown type of part. Use `text`.")


def _tool_call(call: EarlierToolCall, at: str) -> ToolCall:
    if call.type != "function":
        raise _unsupported(f"{at}.type", "only calls of type `function` are supported. Leave this one out.")
    if call.function is None:
        raise _invalid(f"{at}.function", "is required. Send its name and arguments.")
    return ToolCall(
        id=call.id,
        name=call.function.name,
        arguments=_arguments(call.function.arguments, f"{at}.function.arguments"),
    )


def _arguments(arguments: str | dict[str, Any] | None, at: str) -> dict[str, Any]:
    """Templates want a mapping, the API has JSON in a string, and models write an empty one for no arguments."""
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return _plain(arguments, at)
    try:
        decoded = msgspec.json.decode(arguments.encode(), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        raise _invalid(at, "must be a JSON object in a string. Correct it, or send an empty string.") from None
    return _plain(decoded, at)


def _plain(value: dict[str, Any], at: str) -> dict[str, Any]:
    """The same object, if it can travel to a worker: integers of 64 bits, and no deep nesting."""
    level: list[Any] = [value]
    for _ in range(_DEPTH_MAX):
        level = [child for item in level for child in _children(item, at)]
        if not level:
            return value
    raise _invalid(at, f"is nested deeper than {_DEPTH_MAX} levels. Send a flatter object.")


def _children(value: Any, at: str) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return value  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise _invalid(at, "holds an integer of more than 64 bits. Send it as a string.")
    return []
