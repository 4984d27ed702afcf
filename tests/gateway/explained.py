"""Requests that finished, for the tests of the ring and of explanations: a fake tokenizer makes one token a letter."""

import hashlib
import itertools
from collections.abc import Sequence

from gateway.request_ring import RequestMarks, RequestRecord
from protocol.generation import (
    CacheReport,
    CacheUse,
    ChatMessage,
    ChatPrompt,
    Finished,
    FinishReason,
    Generate,
    Prompt,
    Queued,
    TextPrompt,
    TokenPrompt,
    Usage,
)
from protocol.ids import GRAIN_TOKENS, Grain, Incarnation, ModelName, RequestId
from protocol.sampling import Sampling
from tests.fakes.scripted_generator import TIMINGS

MARKS = RequestMarks(b"secret of the tests")
_numbers = itertools.count(1)


def chat(*contents: str) -> ChatPrompt:
    """The first is the system's, then user and assistant take turns."""
    roles = itertools.chain(["system"], itertools.cycle(["user", "assistant"]))
    messages = [ChatMessage(role=role, content=text) for role, text in zip(roles, contents, strict=False)]  # pyright: ignore[reportArgumentType]
    return ChatPrompt(messages=tuple(messages))


def rendered(prompt: Prompt) -> str:
    match prompt:
        case ChatPrompt(messages=messages, template_arguments=arguments, tools=tools):
            head = ("" if not arguments else repr(arguments)) + "".join(f"<t>{tool.name}" for tool in tools)
            return head + "".join(f"<{message.role[0]}>{message.content}" for message in messages)
        case TextPrompt(text=text):
            return text
        case TokenPrompt(token_ids=ids):
            return "".join(map(chr, ids))


def grains(scope: bytes, text: str) -> tuple[Grain, ...]:
    """The chain of whole grains."""
    ends = range(GRAIN_TOKENS, len(text) + 1, GRAIN_TOKENS)
    return tuple(Grain(hashlib.blake2b(text[:end].encode(), key=scope, digest_size=16).digest()) for end in ends)


def finished(
    prompt: Prompt | str,
    *,
    cache: CacheReport | None = None,
    scope: bytes = b"scope",
    owner: str = "alice",
    model: str = "m",
    incarnation: int = 1,
    at: float = 0.0,
    chain: Sequence[Grain] | None = None,
) -> RequestRecord:
    prompt = TextPrompt(text=prompt) if isinstance(prompt, str) else prompt
    request_id = RequestId(f"req_{next(_numbers)}")
    text = rendered(prompt)
    generate = Generate(
        request_id=request_id, prompt=prompt, sampling=Sampling(), cache=CacheUse(scope=scope, owner=owner)
    )
    queued = Queued(
        request_id=request_id,
        prompt_tokens=len(text),
        grains=grains(scope, text) if chain is None else tuple(chain),
    )
    end = Finished(
        request_id=request_id,
        reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=len(text), completion_tokens=1, cached_tokens=0),
        timings=TIMINGS,
        cache=cache or CacheReport(),
    )
    return MARKS.record(
        generate,
        queued,
        end,
        model=ModelName(model),
        incarnation=Incarnation(incarnation),
        now=at,
        unix_now=1e9 + at,
    )


def ram(tokens: int, reason: str = "") -> CacheReport:
    return CacheReport(ram_tokens=tokens, miss_reason=reason)
