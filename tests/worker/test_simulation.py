"""The scheduler over hours of a day, on a device that is a table of costs (see `tests.bench.simulate`)."""

from collections import Counter

import pytest

from tests.bench import simulated_device
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


def test_rounds_in_one_go_are_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step costs the same whatever its rows hold, it is no matter whether each is decided on its own."""
    device = DEVICES["m-series"]._replace(context=0.0)
    seen: list[dict[Lane, simulated_device.Seen]] = []
    for rounds in (128, 1):
        monkeypatch.setattr(simulated_device, "_LONGEST_RUN_ROUNDS", rounds)
        simulation = Simulation(device, day(1, 11, 1, seed=5), SchedulerSettings(max_rows=8, slices="mixed"))
        simulation.run()
        seen.append(simulation.seen)
    for lane in (Lane.INTERACTIVE, Lane.STANDARD):
        assert seen[0][lane].done == seen[1][lane].done > 0
        assert seen[0][lane].first_token_seconds == pytest.approx(seen[1][lane].first_token_seconds)
        assert seen[0][lane].gaps_ms.total() == seen[1][lane].gaps_ms.total()


def test_batch_work_of_another_model_leaves_people_their_pace() -> None:
    """Two models of one device, one of them with more batch work than it can do: it rests beside people's rows, and all
    of it ends."""
    people = [arrival for arrival in day(1, 11, 1, seed=3) if arrival.kind is Lane.INTERACTIVE]
    batch = [
        Arrival(10.0 + i, f"night{i}", Lane.BATCH, Lane.BATCH, "night", 1000 + i, 0, 150, model=1) for i in range(200)
    ]
    alone = run([*people]).seen[Lane.INTERACTIVE]
    beside = run([*people, *batch])
    seen = beside.seen[Lane.INTERACTIVE]

    assert len(beside.workers) == 2
    assert (seen.done, beside.seen[Lane.BATCH].done) == (len(people), 200)
    assert percentile(seen.gaps_ms, 0.5) <= 1.25 * percentile(alone.gaps_ms, 0.5)
    waits = [percentile(Counter(each.first_token_seconds), 0.95) for each in (alone, seen)]
    assert waits[1] <= waits[0] + 1.0
