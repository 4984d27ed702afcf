"""Which of the rows that are done with their prompt should decode now, or stop to. Pure: rule 2 of the scheduler."""

from typing import Literal

from worker.cost_model import CostModel
from worker.pacing import SchedulerSettings
from worker.places import Places
from worker.sequence import Lane, Sequence
from worker.steps import Join, Park


class RowTurns:
    """Who has the next row: those that are due and those of the highest class take turns."""

    def __init__(self, settings: SchedulerSettings, costs: CostModel, places: Places) -> None:
        self._settings = settings
        self._costs = costs
        self._places = places
        self._next_row_is_for: Literal["due", "highest"] = "due"

    def change(self, now: float, *, expected: Literal["higher class", "nobody"]) -> Join | Park | None:
        """The next row to come or to go; `expected` is who may come at any moment. Asking changes nothing."""
        places = self._places
        batch_rows = places.rows_of(Lane.BATCH)
        if not places.parked and not batch_rows:
            return None
        parkable = [s for s in places.decoding.values() if now >= s.may_be_parked_at and not s.steps_owed]
        last = max(reversed(parkable), key=lambda s: s.lane, default=None)  # of the lowest class who joined last
        for sequence in self.in_turn(now):
            if len(places.decoding) < self._settings.max_rows:
                if (
                    sequence.lane is not Lane.BATCH
                    or self.is_due(sequence, now)
                    or not (self._would_stretch(beside=sequence) or self._are_enough(expected))
                ):
                    return Join(sequence.request_id)
            elif last is not None and sequence.lane < last.lane:
                return Park(last.request_id)
        # Not before a first token: to park takes as long as a step.
        is_beginning = places.first_token_of in (Lane.INTERACTIVE, Lane.STANDARD)
        if last is not None and last.lane is Lane.BATCH and not is_beginning and self._would_stretch():
            return Park(last.request_id)
        return None

    def is_due(self, parked: Sequence, now: float) -> bool:
        """Whether it had no stint for so long that a row is its own, before one of the highest class has the next."""
        return now - parked.parked_since >= self._settings.parked_seconds

    def given(self, to: Literal["due", "not due"]) -> None:
        """A row went to somebody."""
        self._next_row_is_for = "highest" if to == "due" and self._next_row_is_for == "due" else "due"

    def in_turn(self, now: float) -> list[Sequence]:
        """Those that are parked. The first has the next row."""
        due_first = self._next_row_is_for == "due"

        def turn(sequence: Sequence) -> tuple[float, ...]:
            is_due = due_first and self.is_due(sequence, now)
            return (0, sequence.parked_since) if is_due else (1, sequence.lane, sequence.arrived)

        return sorted(self._places.parked.values(), key=turn)

    def _are_enough(self, expected: Literal["higher class", "nobody"]) -> bool:
        """Whether one batch row more would stretch the steps of a row of a higher class that may come: then it would be
        parked, which takes as long as a step. One may decode in any case."""
        rows = len(self._places.decoding)
        if expected == "nobody" or not rows or self._places.rows_of(Lane.BATCH) < rows:
            return False
        return self._costs.step_seconds(rows + 2) > self._settings.stretch * self._costs.step_seconds(1)

    def _would_stretch(self, *, beside: Sequence | None = None) -> bool:
        """Whether the batch rows, and the one that would join, make the others' decode steps more than `stretch` times
        as long as they would be of these rows alone, with what they hold now."""
        rows = [*self._places.decoding.values(), *([] if beside is None else [beside])]
        higher = [s for s in rows if s.lane is not Lane.BATCH]
        if not higher or len(higher) == len(rows):
            return False
        if not self._costs.knows_step(len(higher)):
            return True  # how else to learn what the higher rows alone would take
        alone_seconds = self._costs.step_seconds(len(higher), sum(s.tokens for s in higher))
        together_seconds = self._costs.step_seconds(len(rows), sum(s.tokens for s in rows))
        return together_seconds > self._settings.stretch * alone_seconds
