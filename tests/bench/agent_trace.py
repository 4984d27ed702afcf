"""A made-up day of coding agents, the same each time: which prompts two keys ask, in which order. Pure.

Each key has a long system prompt with its tools, which all its conversations share, and works through its conversations
a few at a time, in bursts. A conversation has thirty turns; each adds an answer and a tool's result, so its context
grows from three to some twenty thousand tokens. Beside that, as agents do: a title is asked for at the beginning of a
conversation, every third conversation sends one request twice, every second one has its history rewritten from some
point on (an edit, a compaction), and one conversation of each key rests in the middle until the end of the day.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TURNS = 30
Kind = Literal["turn", "title", "again", "edit"]


class Asked(NamedTuple):
    """One request: what the client sends and what the model will say to it."""

    kind: Kind
    scope: bytes
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """How much happens. Token counts are averages."""

    keys: int = 2
    conversations_per_key: int = 8
    at_a_time: int = 4
    system_tokens: int = 3000
    title_system_tokens: int = 180
    question_tokens: int = 200
    answer_tokens: int = 120
    result_tokens: int = 450
    conversations_per_again: int = 3
    conversations_per_edit: int = 2
    burst_turns: int = 6


class _Words:
    """Token ids and lengths from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def some(self, average: int) -> tuple[int, ...]:
        """Long ones are rare and very long, as files and test logs are."""
        length = max(8, int(self.random.lognormvariate(0.0, 0.8) * average * 0.73))
        return self.exactly(length)

    def exactly(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(50_000), k=length))


@dataclass
class _Conversation:
    history: tuple[int, ...]
    first_question: tuple[int, ...]
    rests_after: int | None
    again_at: int | None
    edit_at: int | None
    turn: int = 0


@dataclass
class _Key:
    scope: bytes
    system: tuple[int, ...]
    title_system: tuple[int, ...]
    waiting: list[_Conversation]
    active: list[_Conversation] = field(default_factory=list[_Conversation])
    resting: list[_Conversation] = field(default_factory=list[_Conversation])


def agent_trace(shape: TraceShape, seed: int) -> list[Asked]:
    """All requests, in order."""
    words = _Words(seed)
    keys = [_key(shape, words, number) for number in range(shape.keys)]
    asked: list[Asked] = []
    while busy := [key for key in keys if key.waiting or key.active or key.resting]:
        key = words.random.choice(busy)
        _fill(key, shape.at_a_time)
        conversation = words.random.choice(key.active)
        for _ in range(words.random.randint(1, 2 * shape.burst_turns - 1)):
            asked += _turn(shape, words, key, conversation)
            if conversation.turn == TURNS or conversation.turn == conversation.rests_after:
                key.active.remove(conversation)
                if conversation.turn < TURNS:
                    conversation.rests_after = None
                    key.resting.append(conversation)
                break
    return asked


def needed_tokens(trace: Sequence[Asked]) -> int:
    """How many different tokens all prompts and answers have, prefixes counted once: what would have to be hot."""
    seen: set[tuple[bytes, int]] = set()
    for asked in trace:
        digest = 0
        for token in (*asked.prompt, *asked.answer):
            digest = hash((digest, token))
            seen.add((asked.scope, digest))
    return len(seen)


def working_set_tokens(trace: Sequence[Asked]) -> int:
    """The most of these tokens that were asked at one moment and will be asked again later: what RAM would have to
    hold for nothing to be computed twice."""
    first: dict[tuple[bytes, int], int] = {}
    last: dict[tuple[bytes, int], int] = {}
    for number, asked in enumerate(trace):
        digest = 0
        for token in asked.prompt + asked.answer:
            digest = hash((digest, token))
            first.setdefault((asked.scope, digest), number)
            last[asked.scope, digest] = number
    changes = [0] * len(trace)
    for key, number in first.items():
        changes[number] += 1
        changes[last[key]] -= 1
    return max(itertools.accumulate(changes))


def _key(shape: TraceShape, words: _Words, number: int) -> _Key:
    system = words.exactly(shape.system_tokens)
    conversations: list[_Conversation] = []
    for position in range(shape.conversations_per_key):
        question = words.some(shape.question_tokens)
        conversations.append(
            _Conversation(
                history=system + question,
                first_question=question,
                rests_after=TURNS // 2 if position == 0 else None,
                again_at=words.random.randrange(TURNS) if position % shape.conversations_per_again == 0 else None,
                edit_at=words.random.randrange(3, TURNS) if position % shape.conversations_per_edit == 1 else None,
            )
        )
    return _Key(f"key {number}".encode(), system, words.exactly(shape.title_system_tokens), conversations)


def _fill(key: _Key, at_a_time: int) -> None:
    while key.waiting and len(key.active) < at_a_time:
        key.active.append(key.waiting.pop(0))
    if not key.active:
        key.active, key.resting = key.resting, []


def _turn(shape: TraceShape, words: _Words, key: _Key, conversation: _Conversation) -> Iterator[Asked]:
    if conversation.turn == 0:
        title = key.title_system + conversation.first_question
        yield Asked("title", key.scope, title, words.exactly(12))
    kind: Kind = "turn"
    if conversation.turn == conversation.edit_at:
        kind = "edit"
        after = len(key.system)
        kept = after + int((len(conversation.history) - after) * words.random.uniform(0.2, 0.9))
        conversation.history = conversation.history[:kept] + words.some(shape.question_tokens)
    prompt = conversation.history
    if conversation.turn == conversation.again_at:
        yield Asked("again", key.scope, prompt, words.some(shape.answer_tokens))
    answer = words.some(shape.answer_tokens)
    yield Asked(kind, key.scope, prompt, answer)
    conversation.history = prompt + answer + words.some(shape.result_tokens)
    conversation.turn += 1
