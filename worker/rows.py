"""Which of the rows that are done with their prompt should decode now, or stop to. Pure: rule 2 of the scheduler."""

from worker.cost_model import CostModel
from worker.pacing import SchedulerSettings
from worker.places import Places
from worker.sequence import Lane
from worker.steps import Join, Park


def row_change(places: Places, costs: CostModel, settings: SchedulerSettings, now: float) -> Join | Park | None:
    """The next row to come or to go: first those that are due after `parked_seconds`, then by lane, then by arrival."""
    batch_rows = places.rows_of(Lane.BATCH)
    if not places.parked and not batch_rows:
        return None
    higher_rows = len(places.decoding) - batch_rows
    batch = [s for s in places.decoding.values() if s.lane is Lane.BATCH] if batch_rows else []
    parkable = [s for s in batch if now >= s.may_be_parked_at and not s.steps_owed]
    due = {s.request_id for s in places.parked.values() if now - s.parked_since >= settings.parked_seconds}
    for sequence in sorted(places.parked.values(), key=lambda s: (s.request_id not in due, s.lane, s.arrived)):
        if len(places.decoding) < settings.max_rows:
            if (
                sequence.lane is not Lane.BATCH
                or sequence.request_id in due
                or not _would_stretch(costs, settings.stretch, higher_rows, batch_rows + 1)
            ):
                return Join(sequence.request_id)
        elif sequence.lane is not Lane.BATCH and parkable:
            return Park(parkable[-1].request_id)
    if parkable and _would_stretch(costs, settings.stretch, higher_rows, batch_rows):
        return Park(parkable[-1].request_id)
    return None


def _would_stretch(costs: CostModel, stretch: float, higher_rows: int, batch_rows: int) -> bool:
    """Whether so many rows of the batch class make the others' decode steps more than `stretch` times as long."""
    if not higher_rows or not batch_rows:
        return False
    if not costs.knows_step(higher_rows):
        return True  # how else to learn what the higher rows alone would take
    return costs.step_seconds(higher_rows + batch_rows) > stretch * costs.step_seconds(higher_rows)
