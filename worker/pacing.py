"""How long a prompt's slice may be beside rows that decode, and what it owes them. Pure.

Two promises pull at each other: who reads along wants the next token soon, who asked wants the first one soon. Here
stands what each gets; the scheduler asks, and does.

- *Gap.* What runs between two tokens of a row lasts at most `_GAPS`, slow passes included. Apart, that is a slice and
  the step after it; mixed, it is one pass, which is the step as well.
- *Worth.* But a slice is not so short that starting it costs more than its tokens do, and a mixed pass not so short
  that less than `_WORTHWHILE` of it is the prompt's. A batch prompt beside rows of a higher class has no such claim:
  its mixed passes, which it has while another model is at work, are `_MIXED_STRETCH` times a step, or a few tokens.
- *Share.* Rows keep `_SHARES` of the time. A slice of T seconds owes them `share / (1 - share) * T` of decode before
  the next one. In a mixed pass they decoded already: it owes only what a step lacks to their share of its T seconds,
  and that is paid when it has become a step.

Nothing of a mixed pass is paid twice, so the prompt's speed and the rows' speed, each as a part of what it is alone,
add up to about one: half for the rows is twice the wait for the prompt. Rows get their share, or what a step is of the
longest gap, whichever is more; the prompt gets the rest.

A slice of a class that others go before stops for them between two layers: it has *parts* of about `part_seconds`. So
how long it is costs those nothing who come meanwhile. Not while another model is at work, which waits for its end.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from protocol.ids import BLOCK_TOKENS
from worker.cost_model import CostModel
from worker.live_kv import LiveKV
from worker.sequence import Lane, Sequence


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """`slice_seconds` is the gap between two tokens that a slice may make; `_GAPS` says how classes differ. `live_kv`
    bounds the memory that rows may have together. `idle_slice_seconds` bounds a slice that delays nobody, and so how
    long a cancel can wait. `slices` says whether the engine can run a slice and a decode step in one pass."""

    max_rows: int
    live_kv: LiveKV = field(default_factory=LiveKV)
    max_prefills: int = 4
    slices: Literal["apart", "mixed"] = "apart"
    slice_seconds: float = 0.2
    idle_slice_seconds: float = 1.0
    floor_tokens: int = 16
    mixed_floor_tokens: int = 8
    ceiling_tokens: int = 2048
    first_rate_tokens_per_second: float = 256.0
    oldest_every: int = 4
    lower_lane_every: int = 16
    tenant_lead_seconds: float = 5.0
    stretch: float = 1.1
    attended_seconds: float = 10.0
    unmixed_seconds: float = 300.0
    part_seconds: float = 0.02
    parked_seconds: float = 10.0
    stint_seconds: float = 0.5


@dataclass(frozen=True)
class Beside:
    """The rows that ride along: how many, and the highest lane that decodes on the device."""

    rows: int
    lane: Lane


@dataclass(frozen=True)
class _Values:
    """A value for slices of a higher lane than that of the decoding rows, of the same, and of a lower one."""

    higher: float
    same: float
    lower: float

    def of(self, prompt: Lane, rows: Lane) -> float:
        return self.higher if prompt < rows else self.same if prompt == rows else self.lower


_GAPS = {
    Lane.INTERACTIVE: _Values(0.75, 0.75, 0.5),
    Lane.STANDARD: _Values(1.05, 1.05, 0.5),
    Lane.BATCH: _Values(5.0, 1.0, 1.0),
}
"""By the highest lane that decodes: how long a gap between its tokens may be, in `slice_seconds`. Nobody reads along
with batch rows; but who comes meanwhile waits for the pass to end."""

_SHARES = {
    Lane.INTERACTIVE: _Values(0.54, 0.54, 0.9),
    Lane.STANDARD: _Values(0.15, 0.15, 0.8),
    Lane.BATCH: _Values(0.1, 0.2, 0.5),
}
"""By the highest lane that decodes: the part of the time it keeps while a prompt is prefilled. Who reads along keeps
half of his speed, with something for what the books do not see; a program's stream only has to go on, so that the next
program's first token comes soon."""

_IDLE_GAPS = {Lane.INTERACTIVE: 1.0, Lane.STANDARD: 1.0, Lane.BATCH: 0.25, Lane.WARM: 0.25}
"""When nothing decodes, in `idle_slice_seconds`: the lower the lane, the sooner it has to let a higher one by."""

_PARTS = {Lane.STANDARD: 1.0, Lane.BATCH: 0.5, Lane.WARM: 0.5}
"""How long a part of a slice may be, in `part_seconds`. One of a batch slice comes between two tokens of somebody."""

_WORTHWHILE = 0.4
_MIXED_STRETCH = 1.25


def idle_slice_seconds(settings: SchedulerSettings, prompt: Lane) -> float:
    """How long a slice may be that delays no row."""
    return settings.idle_slice_seconds * _IDLE_GAPS[prompt]


def gap_seconds(settings: SchedulerSettings, prompt: Lane, rows: Lane) -> float:
    """How long a gap between two tokens of the rows a slice may make; `rows` is the highest lane of them."""
    return settings.slice_seconds * _GAPS[rows].of(prompt, rows)


def owed_seconds(prompt: Lane, rows: Lane, *, seconds: float, decoded_seconds: float) -> float:
    """What a pass of `seconds` owes the rows, when `decoded_seconds` of it were a step of theirs."""
    share = _SHARES[rows].of(prompt, rows)
    return max(0.0, share * seconds - decoded_seconds) / (1 - share)


def slice_tokens(settings: SchedulerSettings, costs: CostModel, prompt: Sequence, seconds: float) -> int:
    """Of a slice that runs alone and is to last `seconds`."""
    context = prompt.prefilled
    least = max(settings.floor_tokens, costs.break_even_tokens(context))
    tokens = _inside(settings, prompt, max(costs.tokens_in(seconds, context), least))
    # End on the block grid where that costs less than half the slice: whole blocks are what the cache keeps.
    beyond = (context + tokens) % BLOCK_TOKENS
    if tokens < prompt.prefill_left and context + tokens != prompt.next_boundary and beyond < tokens / 2:
        tokens -= beyond
    return tokens


def parts(settings: SchedulerSettings, costs: CostModel, prompt: Sequence, tokens: int, lane: Lane) -> int:
    """Of a pass of so many tokens on behalf of `lane`: in how many parts it runs."""
    if lane is Lane.INTERACTIVE:
        return 1
    seconds = settings.part_seconds * _PARTS[lane]
    return max(1, math.ceil(costs.prefill_seconds(tokens, prompt.prefilled) / seconds))


def mixed_tokens(settings: SchedulerSettings, costs: CostModel, prompt: Sequence, lane: Lane, beside: Beside) -> int:
    """Of a slice on behalf of `lane` that rows ride along with."""
    return _inside(settings, prompt, mixed_pass_tokens(settings, costs, prompt.prefilled, lane, beside))


def mixed_pass_tokens(settings: SchedulerSettings, costs: CostModel, context: int, lane: Lane, beside: Beside) -> int:
    """The same, of a prompt that has no end.

    Never less than the floor: what a pass takes beyond a step is laid to its tokens. Where it is slow for another
    reason (a number of rows whose step was never measured, a busy machine) few tokens look dear, and fewer dearer.
    """
    rows, least = beside.rows, settings.mixed_floor_tokens
    if lane > beside.lane and lane >= Lane.BATCH:
        seconds = _MIXED_STRETCH * costs.step_seconds(rows)
    else:
        seconds = gap_seconds(settings, lane, beside.lane)
        least = max(least, costs.worthwhile_tokens(_WORTHWHILE, context, rows))
    return min(max(costs.mixed_tokens_in(seconds, context, rows), least), settings.ceiling_tokens)


def _inside(settings: SchedulerSettings, prompt: Sequence, tokens: int) -> int:
    """No more than is left, up to the next boundary, and in any case not too many."""
    end = prompt.prefill_total if prompt.next_boundary is None else prompt.next_boundary
    return min(tokens, settings.ceiling_tokens, end - prompt.prefilled)
