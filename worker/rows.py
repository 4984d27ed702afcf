"""Which of the rows that are done with their prompt should decode now, or stop to. Pure: rule 2 of the scheduler."""

from collections.abc import Collection, Iterable
from typing import Literal

from worker.cost_model import CostModel
from worker.pacing import SchedulerSettings
from worker.places import Places
from worker.sequence import Lane, Sequence
from worker.steps import Join, Park

_ATTENDED_STEP = 1.15
"""How long a step of batch rows may be, in steps of one row, while somebody of a higher class may come."""

_BATCH_WAITS = 6
"""How many times as long a batch row waits: each time one comes, somebody's steps are longer for a stint."""


def due_after_seconds(settings: SchedulerSettings, lane: Lane) -> float:
    """How long a parked row of this lane waits until it is due."""
    return settings.parked_seconds * (_BATCH_WAITS if lane is Lane.BATCH else 1)


class RowTurns:
    """Who has the next row: those that are due and those of the highest class take turns."""

    def __init__(self, settings: SchedulerSettings, costs: CostModel, places: Places) -> None:
        self._settings = settings
        self._costs = costs
        self._places = places
        self._next_row_is_for: Literal["due", "highest"] = "due"

    def change(self, now: float, *, higher_prompts: Literal["now", "any moment", "none"]) -> Join | Park | None:
        """The next row to come or to go; `higher_prompts` says when prompts of a higher class than batch have something
        to run. Asking changes nothing."""
        places = self._places
        if not places.parked and not places.rows_of(Lane.BATCH):
            return None
        parkable = [s for s in places.decoding.values() if now >= s.may_be_parked_at and not s.steps_owed]
        last = max(reversed(parkable), key=lambda s: s.lane, default=None)  # of the lowest class who joined last
        for sequence in self.in_turn(now):
            if len(places.decoding) < self._settings.max_rows:
                is_served = sequence.lane is not Lane.BATCH or self.is_due(sequence, now)
                if is_served or self._may_come(sequence, higher_prompts):
                    # Before it joins: while it waits for its token, and before its KV is one with theirs.
                    goes = self._in_the_way(last, beside=sequence)
                    return Park(goes.request_id) if goes else Join(sequence.request_id)
            elif last is not None and sequence.lane < last.lane:
                return Park(last.request_id)
        goes = self._in_the_way(last)
        return Park(goes.request_id) if goes else None

    def is_due(self, parked: Sequence, now: float) -> bool:
        """Whether it had no stint for so long that a row is its own, before one of the highest class has the next."""
        return now - parked.parked_since >= due_after_seconds(self._settings, parked.lane)

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

    def _may_come(self, sequence: Sequence, higher_prompts: Literal["now", "any moment", "none"]) -> bool:
        """Whether a batch row, which is not due, makes nobody of a higher class wait."""
        rows = [*self._places.decoding.values(), sequence]
        # The step after a row came is slow, and who lengthens steps a bit more than was thought has to go again.
        much = (1 + self._settings.stretch) / 2
        if higher_prompts == "now" and self._lengthens(rows, much, coming=1):
            return False
        if _higher(rows):
            return not self._lengthens(rows, much)
        return higher_prompts != "any moment" or not self._are_enough(len(rows) - 1)

    def _are_enough(self, rows: int) -> bool:
        """Whether with one batch row more a step would be too long for who may come meanwhile, and waits for its end.
        One may decode in any case."""
        return rows > 0 and self._costs.step_seconds(rows + 1) > _ATTENDED_STEP * self._costs.step_seconds(1)

    def _in_the_way(self, last: Sequence | None, *, beside: Sequence | None = None) -> Sequence | None:
        """The batch row that joined last, if the batch rows stretch decode steps of the others, and of the one that is
        to join."""
        if last is None or last.lane is not Lane.BATCH:
            return None
        rows = [*self._places.decoding.values(), *([] if beside is None else [beside])]
        return last if _higher(rows) and self._lengthens(rows, self._settings.stretch) else None

    def _lengthens(self, rows: Collection[Sequence], times: float, *, coming: int = 0) -> bool:
        """Whether steps of these rows, and of so many that come, take more than `times` as long as without the batch
        rows, with what they hold now."""
        higher = _higher(rows)
        if not self._costs.knows_step(len(higher) + coming):
            return True  # how else to learn what the higher rows alone would take
        alone_seconds = self._costs.step_seconds(len(higher) + coming, sum(s.tokens for s in higher))
        together_seconds = self._costs.step_seconds(len(rows) + coming, sum(s.tokens for s in rows))
        return together_seconds > times * alone_seconds


def _higher(rows: Iterable[Sequence]) -> list[Sequence]:
    return [s for s in rows if s.lane is not Lane.BATCH]
