"""What those who wait are told: how many go first, how long that takes, and whom they wait for. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from protocol.ids import RequestId
from worker import pacing
from worker.cost_model import CostModel
from worker.pacing import SchedulerSettings
from worker.places import Places
from worker.sequence import Lane, Sequence

_TOLD_AFTER_SECONDS = 2.0
"""A prompt that has begun and then waits for so long is told why: slices of others may be a second each."""

Order = Callable[[Sequence], tuple[Lane, float]]
"""Who goes before whom: the smaller first."""


@dataclass(frozen=True)
class Standing:
    """Where a request stands that cannot run yet, as in `protocol.generation.Waiting`."""

    request_id: RequestId
    ahead: int
    eta_seconds: float | None
    held_by: str


class Pace:
    """How long prompts take with the decode that their slices owe, as things stand: good for one moment."""

    def __init__(
        self, settings: SchedulerSettings, costs: CostModel, places: Places, slices: Literal["apart", "mixed"]
    ) -> None:
        self._settings = settings
        self._costs = costs
        self._rows = len(places.decoding)
        self._highest_row = places.highest_row
        self._slices = slices
        self._passes: dict[Lane, int] = {}

    def seconds_left(self, sequence: Sequence) -> float:
        """Until this prompt is done if every slice is its own."""
        left, context = sequence.prefill_left, sequence.prefilled
        if left <= 0:
            return 0.0
        rows = self._highest_row
        if rows is None:
            return self._costs.prefill_seconds(left, context)
        if self._slices == "apart" or (rows is Lane.BATCH and sequence.lane < rows):
            seconds = self._costs.prefill_seconds(left, context)
            return seconds + pacing.owed_seconds(sequence.lane, rows, seconds=seconds, decoded_seconds=0.0)
        tokens = min(self._pass_tokens(sequence.lane, rows, context), left)
        seconds = self._costs.mixed_seconds(tokens, context, self._rows)
        decoded_seconds = self._costs.step_seconds(self._rows)
        owed = pacing.owed_seconds(sequence.lane, rows, seconds=seconds, decoded_seconds=decoded_seconds)
        return (seconds + owed) * left / tokens

    def _pass_tokens(self, lane: Lane, rows: Lane, context: int) -> int:
        """Of a mixed pass of a long prompt; those that have not begun all have the same."""
        if context == 0 and lane in self._passes:
            return self._passes[lane]
        beside = pacing.Beside(self._rows, rows)
        tokens = pacing.mixed_pass_tokens(self._settings, self._costs, context, lane, beside)
        if context == 0:
            self._passes[lane] = tokens
        return tokens


def standings_of(
    places: Places, order: Order, pace: Pace, held_by: Callable[[Sequence], str], now: float
) -> list[Standing]:
    """Of every request that has not started, is parked or has not advanced for a while."""
    told = [Standing(each.request_id, 0, None, held_by(each)) for each in places.parked.values()]
    seconds = 0.0
    for ahead, sequence in enumerate(sorted(places.waiting(), key=order)):
        seconds += pace.seconds_left(sequence)
        if not sequence.is_open or now - sequence.advanced_at >= _TOLD_AFTER_SECONDS:
            held = held_by(sequence)
            is_known = held in ("", "higher_class")
            told.append(Standing(sequence.request_id, ahead, seconds if is_known else None, held))
    return told


def eta_seconds_of(sequence: Sequence, places: Places, order: Order, pace: Pace) -> float:
    """Until this prompt is done, if none comes that goes before it."""
    own = order(sequence)
    before = sum(
        pace.seconds_left(other)
        for other in places.waiting()
        if other.lane <= sequence.lane and other is not sequence and order(other) < own
    )
    return pace.seconds_left(sequence) + before
