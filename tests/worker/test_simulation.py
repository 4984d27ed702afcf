"""The scheduler over hours of a day, on a device that is a table of costs (see `tests.bench.simulate`)."""

from collections import Counter

from tests.bench.day_trace import Arrival, day
from tests.bench.simulate import percentile
from tests.bench.simulated_device import DEVICES, Simulation
from worker.pacing import SchedulerSettings
from worker.sequence import Lane


def run(arrivals: list[Arrival], device: str = "m-series") -> Simulation:
    simulation = Simulation(DEVICES[device], arrivals, SchedulerSettings(max_rows=8, slices="mixed"))
    simulation.run()
    return simulation


def test_batch_work_is_done_and_nobody_notices() -> None:
    """With a saturated batch lane, an interactive request's wait and gap stay near what they are without; and all of
    the batch is done."""
    people = [arrival for arrival in day(2, 11, 1, seed=3) if arrival.kind is Lane.INTERACTIVE]
    batch = [Arrival(10.0 + i, f"night{i}", Lane.BATCH, Lane.BATCH, "night", 1000 + i, 0, 150) for i in range(500)]
    alone = run([*people]).seen[Lane.INTERACTIVE]
    beside = run([*people, *batch])
    seen = beside.seen[Lane.INTERACTIVE]

    assert seen.done == len(people)
    assert beside.seen[Lane.BATCH].done == 500
    assert percentile(seen.gaps_ms, 0.95) <= 1.25 * percentile(alone.gaps_ms, 0.95)
    waits = [percentile(Counter(each.first_token_seconds), 0.95) for each in (alone, seen)]
    assert waits[1] <= waits[0] + 0.6  # a slice of the batch, which nothing could interrupt
