"""A typed request of OpenAI's API → the Generate commands of a worker, or the Failure that names the field. Pure."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gateway.openai.constraints import asked_constraint
from gateway.openai.json_values import plain
from gateway.openai.messages import chat_messages
from gateway.openai.refusals import Refusal, invalid, unsupported
from gateway.openai.schema import ChatRequest, CompletionRequest, GenerationOptions
from gateway.openai.thinking import asked_budget
from gateway.openai.tools import asked_tools
from protocol.failures import Failure
from protocol.generation import CacheUse, ChatMessage, ChatPrompt, Generate, Prompt, TextPrompt, TokenPrompt
from protocol.ids import RequestId
from protocol.sampling import Sampling
from protocol.scopes import owner_id

COMPLETION_MAX_TOKENS = 16
"""Of /v1/completions, when the client names none: OpenAI's contract."""

_INT_MAX = 2**31 - 1
_STOPS_MAX = 4
_CHOICES_MAX = 32
_ANSWERS_MAX = 64
"""Of one request. No more may wait for a model by default, so that more could never run."""
_DECIMAL = re.compile(r"[0-9]{1,10}")


def chat_to_generate(
    request: ChatRequest, *, request_id: RequestId, cache_scope: bytes, disk_ttl_seconds: float | None = None
) -> tuple[Generate, ...] | Failure:
    """What a chat request asks of a worker. `cache_scope` and `disk_ttl_seconds` are the caller's own."""
    try:
        _refuse_unsupported(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs", "needs `logprobs: true`. Add that, or leave `top_logprobs` out.")
        asked = asked_tools(request)
        constraint = asked_constraint(request)
        if constraint is not None and asked.use is not None and asked.use.choice == "required":
            raise invalid("tool_choice", "forces a call, and another field says what the text must be. Send only one.")
        messages = chat_messages(request.messages)
        first = Generate(
            request_id=request_id,
            prompt=ChatPrompt(
                messages=messages,
                tools=asked.tools,
                template_arguments=_template_arguments(request),
                ending="continue" if _goes_on(request, messages) else "new_message",
            ),
            sampling=_sampling(request),
            max_tokens=_max_tokens(request),
            stop=_stop(request.stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            cache=_cache_use(request, cache_scope, disk_ttl_seconds),
            tool_use=asked.use,
            constraint=constraint,
            reasoning="split",
            reasoning_budget_tokens=asked_budget(request),
            ignore_end="yes" if request.ignore_eos else "no",
        )
        return _answers(first, [first.prompt], request.n or 1)
    except Refusal as refusal:
        return refusal.failure


def completion_to_generate(
    request: CompletionRequest, *, request_id: RequestId, cache_scope: bytes, disk_ttl_seconds: float | None = None
) -> tuple[Generate, ...] | Failure:
    """What a completion request asks of a worker: `n` answers to each prompt, prompt by prompt. The cache's arguments
    as in `chat_to_generate`."""
    try:
        _refuse_unsupported(request)
        prompts = _completion_prompts(request)
        if request.echo and request.logprobs is not None:
            raise unsupported("echo", "gives no logprobs of the prompt here. Leave `logprobs` or `echo` out.")
        first = Generate(
            request_id=request_id,
            prompt=prompts[0],
            sampling=_sampling(request),
            max_tokens=_max_tokens(request) or COMPLETION_MAX_TOKENS,
            stop=_stop(request.stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            top_logprobs=request.logprobs,
            cache=_cache_use(request, cache_scope, disk_ttl_seconds),
            constraint=asked_constraint(request),
            ignore_end="yes" if request.ignore_eos else "no",
        )
        return _answers(first, prompts, request.n or 1)
    except Refusal as refusal:
        return refusal.failure


# --- choices ---------------------------------------------------------------------------------------------------------


def _answers(first: Generate, prompts: Sequence[Prompt], count: int) -> tuple[Generate, ...]:
    """One command for each choice. Those of one prompt share its prefix in the worker, and differ in their seed."""
    if count * len(prompts) > _ANSWERS_MAX:
        raise invalid("prompt", f"would have {count * len(prompts)} answers of at most {_ANSWERS_MAX}. Send fewer.")
    return tuple(
        _another(first, prompt, place * count + choice, choice)
        for place, prompt in enumerate(prompts)
        for choice in range(count)
    )


def _another(first: Generate, prompt: Prompt, index: int, choice: int) -> Generate:
    seed = first.sampling.seed
    return replace(
        first,
        request_id=first.request_id if index == 0 else RequestId(f"{first.request_id}-{index}"),
        prompt=prompt,
        sampling=replace(first.sampling, seed=None if seed is None else (seed + choice) % 2**64),
    )


# --- options ---------------------------------------------------------------------------------------------------------


def _refuse_unsupported(request: GenerationOptions) -> None:
    """Refuse what would change the answer and cannot be honoured. The same for both routes."""
    if (request.best_of or 1) > (request.n or 1):
        raise unsupported("best_of", "must not be more than `n` on this server. Leave it out.")
    if any(modality != "text" for modality in request.modalities or ()):
        raise unsupported("modalities", "this is a text-only model. Ask for `text`, or leave it out.")
    if (request.n or 1) > _CHOICES_MAX:
        raise invalid("n", f"at most {_CHOICES_MAX} choices. Ask for fewer, or send several requests.")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "is for streams only. Add `stream: true`, or leave it out.")


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
            raise invalid("logit_bias", "its keys must be token ids written in decimal digits. Correct them.")
    return {int(token): bias for token, bias in biases.items()}


def _seed(seed: int | None) -> int | None:
    """Any 64-bit number, signed or not; a negative one stands for its two's complement."""
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**64:
        raise invalid("seed", "must fit into 64 bits. Send a smaller number.")
    return seed % 2**64


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > _STOPS_MAX:
        raise invalid("stop", f"at most {_STOPS_MAX} strings. Send fewer.")
    if not all(strings):
        raise invalid("stop", "a stop string must not be empty. Leave it out.")
    return tuple(strings)


def _narrowed(cache_scope: bytes, salt: str | None) -> bytes:
    """A client's salt divides its own scope further; it never reaches another caller's."""
    if salt is None:
        return cache_scope
    key = hashlib.blake2b(cache_scope).digest()
    return hashlib.blake2b(salt.encode(), key=key, digest_size=32).digest()


# --- prompts ---------------------------------------------------------------------------------------------------------


def _template_arguments(request: ChatRequest) -> dict[str, Any]:
    """What the client says to the template itself goes before what its `reasoning_effort` and its budget imply."""
    implied: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        implied["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            implied["enable_thinking"] = False
    if asked_budget(request) == 0:
        implied["enable_thinking"] = False
    return {**implied, **plain(request.chat_template_kwargs or {}, "chat_template_kwargs")}


def _goes_on(request: ChatRequest, messages: Sequence[ChatMessage]) -> bool:
    """Whether the answer goes on from the last message. OpenAI's own API always begins a new one, so only a flag says
    so, vLLM's."""
    if not request.continue_final_message:
        if request.add_generation_prompt is False:
            raise unsupported("add_generation_prompt", "false is for `continue_final_message` only. Leave it out.")
        return False
    if request.add_generation_prompt:
        raise invalid("add_generation_prompt", "must be false with `continue_final_message`. Leave one of them out.")
    last = messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        raise invalid("continue_final_message", "needs a last message of the assistant, with text and without calls.")
    return True


def _completion_prompts(request: CompletionRequest) -> list[Prompt]:
    prompts = _prompts(request.prompt)
    if request.echo and not all(isinstance(prompt, TextPrompt) for prompt in prompts):
        raise unsupported("echo", "is for prompts of text only. Send text, or leave `echo` out.")
    if not request.suffix:
        return prompts
    if not all(isinstance(prompt, TextPrompt) for prompt in prompts):
        raise unsupported("suffix", "is for prompts of text only. Send text, or leave `suffix` out.")
    return [TextPrompt(text=prompt.text, suffix=request.suffix) for prompt in prompts if isinstance(prompt, TextPrompt)]


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """One text, one list of token ids, or several of these."""
    if isinstance(prompt, str):
        return [TextPrompt(text=prompt)]
    if not prompt:
        raise invalid("prompt", "must not be empty. Send a string or a list of token ids.")
    if all(isinstance(item, int) for item in prompt):
        return [TokenPrompt(token_ids=tuple(item for item in prompt if isinstance(item, int)))]
    return [_prompt(item, f"prompt[{index}]") for index, item in enumerate(prompt)]


def _prompt(item: str | int | list[int], at: str) -> Prompt:
    match item:
        case str():
            return TextPrompt(text=item)
        case list():
            if not item:
                raise invalid(at, "must not be empty. Send at least one token id.")
            return TokenPrompt(token_ids=tuple(item))
        case _:
            raise invalid(at, "must be a text or a list of token ids, as the others are. Correct it.")
