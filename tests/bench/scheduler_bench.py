# pyright: basic
"""What a decision of the scheduler costs by how many wait, in microseconds of one core.

    python -m tests.bench.scheduler_bench [--waiting 10 100 1000] [--rounds N]

Eight rows decode and so many prompts wait, of 20 tenants and three classes, in places that a busy worker is in: *rows
taken* (nobody may start: each step is a decode step), *beside a slice* (one prompt is in prefill and others could
start), *memory full* (rows are free, but there is no room for anybody's KV), *memory nearly full* (each prompt would
fit, if it drew nothing), *somebody overdue* (all but one would fit, but that one has waited too long, and nobody comes
in before it). `next_step` is asked, and the scheduler is told what ran; `eta` is what a client is told after each
slice, `standings` once a second, with the look at the room before.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

from protocol.ids import RequestId
from tests.bench.measuring import print_head, print_table
from worker.live_kv import KVFootprint, LiveKV
from worker.pacing import SchedulerSettings
from worker.scheduler import Scheduler
from worker.sequence import Lane, Sequence
from worker.steps import Decode, Mixed, Open, Prefill

ROWS = 8
FOOTPRINT = KVFootprint(bytes_per_token=100)
NEARLY_FULL = LiveKV(footprint=FOOTPRINT, budget_bytes=(ROWS + 1) * FOOTPRINT.row_bytes(1100))
PLACES = {
    "rows taken": SchedulerSettings(max_rows=ROWS),
    "beside a slice": SchedulerSettings(max_rows=16, slices="mixed"),
    "memory full": SchedulerSettings(
        max_rows=16, live_kv=LiveKV(footprint=FOOTPRINT, budget_bytes=ROWS * FOOTPRINT.row_bytes(960) + 10**5)
    ),
    "memory nearly full": SchedulerSettings(max_rows=16, live_kv=NEARLY_FULL),
    "somebody overdue": SchedulerSettings(max_rows=16, live_kv=NEARLY_FULL),
}
PROMPT_TOKENS = {"memory nearly full": (900, 1100), "somebody overdue": (100, 800)}


def busy(settings: SchedulerSettings, waiting: int, place: str) -> Scheduler:
    draw = random.Random(waiting)
    scheduler = Scheduler(settings)

    def add(name: str, tokens: int, lane: Lane) -> RequestId:
        tenant = f"t{draw.randrange(20)}"
        request_id = RequestId(name)
        scheduler.add(
            Sequence(request_id=request_id, prompt_tokens=tokens, arrived=0.0, lane=lane, tenant=tenant, max_tokens=300)
        )
        return request_id

    for i in range(ROWS):
        name = add(f"row{i}", 700, Lane.INTERACTIVE)
        scheduler.opened(name, 699, 0.0)
        scheduler.joined(name, 0.0)
        scheduler.drew(name)  # a first token goes before any slice
    for _ in range(10):
        scheduler.decoded(0.02, ROWS)
    if place == "beside a slice":
        scheduler.opened(add("reading", 10**8, Lane.INTERACTIVE), 0, 0.0)
        passes = 0
        while not isinstance(step := scheduler.next_step(0.0), Mixed) or passes < 10:  # until what they cost is known
            passes += isinstance(step, Mixed)
            match step:
                case Mixed(tokens=tokens):
                    scheduler.mixed(step, 0.02 + tokens * 0.001, 0.0)
                case Prefill(tokens=tokens):
                    scheduler.prefilled(step, tokens * 0.001, 0.0)
                case _:
                    scheduler.decoded(0.02, ROWS)
    for i in range(waiting):
        lane = draw.choice((Lane.INTERACTIVE, Lane.STANDARD, Lane.BATCH))
        scheduler._readiness.started(lane, 0.0)  # it may start another one without a row in ten seconds
        add(f"w{i}", draw.randrange(*PROMPT_TOKENS.get(place, (900, 9000))), lane)
    if place == "somebody overdue":
        add("late", 9000, Lane.INTERACTIVE)
        for _ in range(25):  # after ten of these nobody comes in before it, after twenty others are overdue as well
            scheduler.decoded(1.0, ROWS)
    return scheduler


def microseconds(what: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        what()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e6


def told(scheduler: Scheduler, place: str) -> Callable[[], object]:
    """What the loop tells it after a step, costs included."""
    if place == "beside a slice":
        return lambda: scheduler.mixed(Mixed(RequestId("reading"), 100, Lane.INTERACTIVE), 0.12, 0.0)
    return lambda: scheduler.decoded(0.02, ROWS)


def reported(scheduler: Scheduler) -> object:
    scheduler.look_at_room()
    return scheduler.standings(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print_head("The scheduler, by how many wait")
    rows = []
    for place, settings in PLACES.items():
        for waiting in options.waiting:
            scheduler = busy(settings, waiting, place)
            step = type(scheduler.next_step(0.0)).__name__
            assert step == (Open if place == "beside a slice" else Decode).__name__, step
            asked = microseconds(lambda: scheduler.next_step(0.0), options.rounds)  # noqa: B023 - called at once
            heard = microseconds(told(scheduler, place), options.rounds)
            one = next(s.request_id for s in scheduler.places.waiting())
            eta = microseconds(lambda: scheduler.eta_seconds(one), options.rounds)  # noqa: B023
            standings = microseconds(lambda: reported(scheduler), max(1, options.rounds // 10))  # noqa: B023
            figures = [f"{each:.0f}" for each in (asked, heard, eta, standings)]
            rows.append([place, str(waiting), step, *figures])
    columns = ["place", "waiting", "step", "next_step µs", "told µs", "eta µs", "standings µs"]
    print_table("Median microseconds", columns, rows)


if __name__ == "__main__":
    main()
