"""What those who wait are told: how many go first, how long that takes, and whom they wait for. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from protocol.ids import RequestId
from worker import pacing
from worker.cost_model import CostModel
from worker.pacing import SchedulerSettings
from worker.places import Places
from worker.row_ends import RowEnds
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
        self,
        settings: SchedulerSettings,
        costs: CostModel,
        places: Places,
        beside: Lane | None,
        rows_stay_behind: Callable[[Lane], bool],
        slices: Literal["apart", "mixed"],
    ) -> None:
        """`beside` is the highest lane of the rows that decode on this device; `rows_stay_behind` tells of a prompt's
        lane whether those here do not ride along in its slices, though slices are mixed."""
        self._settings = settings
        self._costs = costs
        self._rows = len(places.decoding)
        self._highest_row = places.highest_row
        self._beside = beside
        self._rows_stay_behind = rows_stay_behind
        self._slices = slices
        self._passes: dict[Lane, int] = {}

    def seconds_left(self, sequence: Sequence) -> float:
        """Until this prompt is done if every slice is its own."""
        left, context = sequence.prefill_left, sequence.prefilled
        if left <= 0:
            return 0.0
        rows = self._highest_row
        if rows is None or self._beside is None:
            return self._costs.prefill_seconds(left, context)
        if self._slices == "apart" or self._rows_stay_behind(sequence.lane):
            seconds = self._costs.prefill_seconds(left, context)
            return seconds + pacing.owed_seconds(sequence.lane, rows, seconds=seconds, decoded_seconds=0.0)
        tokens = min(self._pass_tokens(sequence.lane, context, self._beside), left)
        seconds = self._costs.mixed_seconds(tokens, context, self._rows)
        decoded_seconds = self._costs.step_seconds(self._rows)
        owed = pacing.owed_seconds(sequence.lane, rows, seconds=seconds, decoded_seconds=decoded_seconds)
        return (seconds + owed) * left / tokens

    def _pass_tokens(self, lane: Lane, context: int, rows: Lane) -> int:
        """Of a mixed pass of a long prompt; those that have not begun all have the same."""
        if context == 0 and lane in self._passes:
            return self._passes[lane]
        beside = pacing.Beside(self._rows, rows)
        tokens = pacing.mixed_pass_tokens(self._settings, self._costs, context, lane, beside)
        if context == 0:
            self._passes[lane] = tokens
        return tokens


class RowsToCome:
    """How many rows must get free for who waits for one, and how long that takes. Ask in the order in which they go."""

    def __init__(self, places: Places, max_rows: int, row_ends: RowEnds) -> None:
        self._places = places
        self._max_rows = max_rows
        self._row_ends = row_ends
        self._before = 0

    def for_parked(self, ahead: int) -> float | None:
        """Of one that has its KV, behind so many of these."""
        return self._row_ends.seconds_until(ahead + 1)

    def for_next_in_line(self, lane: Lane) -> float | None:
        """Of one that may not start before: all that have KV now, down to its lane, and those before it need a row."""
        too_many = max(0, self._places.live_down_to(lane) - self._max_rows)
        seconds = self._row_ends.seconds_until(too_many + self._before + 1)
        self._before += 1
        return seconds


def standings_of(
    places: Places,
    parked: Iterable[Sequence],
    order: Order,
    pace: Pace,
    held_by: Callable[[Sequence], str],
    rows: RowsToCome,
    now: float,
) -> list[Standing]:
    """Of every request that has not started, is parked or has not advanced for a while. `parked` are in the order in
    which they get rows."""
    told: list[Standing] = []
    for ahead, sequence in enumerate(parked):
        held = held_by(sequence)
        told.append(Standing(sequence.request_id, ahead, rows.for_parked(ahead) if held == "rows" else None, held))
    seconds = 0.0
    for ahead, sequence in enumerate(sorted(places.waiting(), key=order)):
        own_seconds = pace.seconds_left(sequence)
        seconds += own_seconds
        if not sequence.is_open or now - sequence.advanced_at >= _TOLD_AFTER_SECONDS:
            eta_seconds: float | None = None
            match held := held_by(sequence):
                case "" | "higher_class":
                    eta_seconds = seconds
                case "rows" if (free := rows.for_next_in_line(sequence.lane)) is not None:
                    eta_seconds = max(seconds, free + own_seconds)
                case _:
                    pass
            told.append(Standing(sequence.request_id, ahead, eta_seconds, held))
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
