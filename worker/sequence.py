"""One request's progress through the engine. Arithmetic as properties, so the scheduler reads as prose."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from protocol.generation import Generate, OutputWarning, Timings, Warm
from protocol.ids import GRAIN_TOKENS, Grain, RequestId
from worker import hashing
from worker.answers.plan import AnswerPlan
from worker.hashing import Root


class BooksDoNotAddUp(Exception):
    """An invariant of the worker's own state is broken: a fault of ours, and no state to go on from."""


class Matcher(Protocol):
    """Where a row's answer stands in the grammar that it must keep to. It goes forward only, with its row."""

    @property
    def binds(self) -> bool:
        """Whether `next_mask` must be asked before the next draw, after all that was drawn before it is consumed. While
        it need not be, one token more may be drawn than was consumed."""
        ...

    def consume(self, token_id: int) -> None:
        """The row drew this."""
        ...

    def next_mask(self) -> bytes | None:
        """Which tokens may follow: a bit for each of the vocabulary, the lowest first, at least one of them set, and
        none for those behind the last byte. None: any token."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the text plane makes of a `Generate`: its tokens, its end, and the names of its prefix.

    `message_starts` are the positions at which the messages' texts begin, if that is known.
    `boundaries` are positions in the prompt at which a later prompt is likely to part from it, ascending, multiples of
    GRAIN_TOKENS. `warm` is set when the request only fills the cache; `request` then draws nothing.
    `max_tokens` is resolved: never beyond the context. `arrived` is on the worker's monotonic clock, in seconds.
    `matcher` is this row's own; without one it may say anything. `answer` says how its text is to be read; `warnings`
    are there for its client before anything is drawn.
    The last `drawn_tokens` of `token_ids` are no prompt: the row drew them before it was preempted.
    """

    request: Generate
    token_ids: tuple[int, ...]
    max_tokens: int
    root: Root
    grains: tuple[Grain, ...]
    arrived: float
    message_starts: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    warm: Warm | None = None
    matcher: Matcher | None = None
    answer: AnswerPlan = field(default_factory=AnswerPlan)
    warnings: tuple[OutputWarning, ...] = ()
    drawn_tokens: int = 0

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id


def resumed(prepared: Prepared, token_ids: Iterable[int], drawn_tokens: int) -> Prepared:
    """The same request after it drew `drawn_tokens`, the last of `token_ids`: to be opened anew and to go on."""
    tokens = tuple(token_ids)
    return replace(
        prepared,
        token_ids=tokens,
        drawn_tokens=drawn_tokens,
        grains=hashing.grains(prepared.root.secret, prepared.root.digest, tokens),
    )


class Lane(enum.IntEnum):
    """The latency classes and, after them, what only fills the cache. The smallest goes first."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2
    WARM = 3


LANES = tuple(Lane)
"""The highest first. What is counted by lane is a list in this order."""

STINT_TOKENS = 32
"""How many tokens a row that was preempted draws before it can be preempted again for a higher class."""

MEMORY = "memory"
"""Held by it: the KV of those that live leaves no room."""


def lane_of(prepared: Prepared) -> Lane:
    return Lane.WARM if prepared.warm is not None else Lane(prepared.request.latency_class.rank)


@dataclass(kw_only=True)
class Sequence:
    """A request the scheduler knows.

    `prefilled` tokens of the prompt are in its KV cache, `cached` of them came from the prefix cache. The last
    prompt token is never prefilled: it is the first input of decode. `grains` name its prefix (see `protocol.ids`).
    Blocks from disk are waited for until `blocks_deadline`; mostly there are none, and that is known by `answer_due`.
    `ticket` numbers those that wait in the order in which they came, or came back.
    `advanced_at` is when more of its prompt was done last. A sequence whose prompt is done and which takes no part in
    decode is parked: since `parked_since`, less than a stint in between not counted, nor one without a step of its own
    (`has_stepped`). When it comes back, `steps_owed` steps are its own before it may be parked again. `held` counts the
    seconds it gave way, by reason (see `protocol.generation.Waiting`).

    One that was preempted has no KV and waits again: the `replayed` tokens that it had drawn by then are as those of
    its prompt, and `furthest` is how many tokens of both had their KV. `max_tokens` is how many it may draw in all.
    """

    request_id: RequestId
    prompt_tokens: int
    arrived: float
    lane: Lane = Lane.STANDARD
    tenant: str = ""
    tenant_weight: float = 1.0
    blocks_deadline: float | None = None
    answer_due: float = 0.0
    boundaries: tuple[int, ...] = ()
    grains: tuple[Grain, ...] = ()
    prefilled: int = 0
    cached: int = 0
    slices: int = 0
    is_open: bool = False
    max_tokens: int = 0
    drawn: int = 0
    replayed: int = 0
    furthest: int = 0
    preemptions: int = 0
    memory_held_before: float = 0.0
    prefill_started: float | None = None
    advanced_at: float = 0.0
    decode_started: float | None = None
    parked_since: float = 0.0
    joined_at: float = 0.0
    has_stepped: bool = False
    may_be_parked_at: float = 0.0
    steps_owed: int = 0
    ticket: int = 0
    held: dict[str, float] = field(default_factory=dict[str, float])

    def opened(self, cached_tokens: int, now: float) -> None:
        """It has a KV cache, which holds so many tokens."""
        self.memory_held_before = self.held.get(MEMORY, 0.0)
        self.advanced_at = now
        self.prefilled = cached_tokens
        if self.prefill_started is None:
            self.prefill_started = now
            self.cached = cached_tokens

    def advanced(self, tokens: int, now: float) -> None:
        """A slice of so many tokens ran."""
        self.prefilled += tokens
        self.slices += 1
        self.advanced_at = now

    def joined(self, now: float, stint_seconds: float | None) -> None:
        """It decodes; unless `stint_seconds` is None, for so long at least, and a step."""
        self.joined_at = now
        self.has_stepped = False
        self.may_be_parked_at = now + (stint_seconds or 0.0)
        self.steps_owed = 0 if stint_seconds is None else 1
        if self.decode_started is None:
            self.decode_started = now

    def preempted(self, blocks_deadline: float | None) -> None:
        """It has no KV any more."""
        self.furthest = max(self.furthest, self.prefilled) if self.prefill_left > 0 else self.tokens - 1
        self.replayed = self.drawn
        self.prefilled = 0
        self.is_open = False
        self.preemptions += 1
        self.blocks_deadline = blocks_deadline

    @property
    def prefill_total(self) -> int:
        return self.prompt_tokens + self.replayed - 1

    @property
    def prefill_left(self) -> int:
        return self.prefill_total - self.prefilled

    @property
    def next_boundary(self) -> int | None:
        """The next position at which a slice must end, so that a state can be kept there."""
        return next((position for position in self.boundaries if position > self.prefilled), None)

    @property
    def tokens(self) -> int:
        """Of prompt and answer so far: no more than these have their KV in its cache, once it was open."""
        return self.prompt_tokens + self.drawn

    @property
    def most_tokens(self) -> int:
        return self.prompt_tokens + max(self.max_tokens, self.drawn)

    @property
    def has_gone_on(self) -> bool:
        """Whether it got further than it was when it was preempted last, by enough to be worth it."""
        return not self.preemptions or self.drawn >= self.replayed + STINT_TOKENS or self.prefilled > self.furthest

    @property
    def memory_held_seconds(self) -> float:
        """How long it has waited for memory since it was open last."""
        return self.held.get(MEMORY, 0.0) - self.memory_held_before

    @property
    def held_seconds(self) -> float:
        return sum(self.held.values())

    @property
    def held_by(self) -> str:
        return max(self.held, key=self.held.__getitem__, default="")


def timings(sequence: Sequence, now: float) -> Timings:
    """Of a sequence that ends now. What only warmed has no decode."""
    started = sequence.prefill_started if sequence.prefill_started is not None else now
    done = sequence.decode_started if sequence.decode_started is not None else now
    return Timings(
        queue_seconds=started - sequence.arrived,
        prefill_seconds=done - started,
        decode_seconds=now - done,
        prefill_slices=sequence.slices,
        held_seconds=sequence.held_seconds,
        held_by=sequence.held_by,
        held=dict(sequence.held),
        preemptions=sequence.preemptions,
    )


def shared_tokens(one: tuple[Grain, ...], other: tuple[Grain, ...]) -> int:
    """How many tokens two prompts have in common, in whole grains: equal grains mean equal prefixes up to there."""
    low, high = 0, min(len(one), len(other))
    if high == 0 or one[0] != other[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low * GRAIN_TOKENS
