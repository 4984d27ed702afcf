# pyright: basic
"""A day in seconds: the real schedulers, and the real rules between them, on a device that is only a table of costs.

    python -m tests.bench.simulate [--device cpu|m-series|h200] [--fit FILE] [--clients N] [--models N] [--hours H]
                                   [--classes asked one] [--rows N] [--slices apart] [--standard-share 0…1]
                                   [--seed N] [--picture FILE]

What is asked is in `day_trace`, what of workers and device is modelled in `simulated_device`. Eleven clients of one
model are the default; `--device h200 --clients 500 --models 8` is what no machine of ours can run. `--classes one`
gives everybody the same class and tenant, and `--classes asked one` runs both: what classes are worth. `--slices apart`
runs slices and decode steps one after the other, as for models whose passes cannot be mixed; a mixed pass takes as long
as the step and the slice's tokens. `--standard-share` is what that class keeps beside interactive work of other models.
`--fit` takes the costs from a real run: a file of JSON lines with prompt_tokens,
cached_tokens, prefill_seconds, completion_tokens and decode_seconds, as they stand in each answer's usage and timings,
of requests that ran alone.
A slice does not stop for who comes meanwhile, as it does in a worker, so first tokens beside lower classes look later
here than they are: by a slice at most.
It judges policies, not devices: no figure of this table was measured on the device it names.
"""

import argparse
import copy
import itertools
import json
import time
from collections import Counter
from pathlib import Path

from tests.bench.day_trace import Arrival, day
from tests.bench.measuring import print_table
from tests.bench.simulated_device import DEVICES, Device, Seen, Simulation
from worker.cost_model import CostModel
from worker.neighbours import SharingSettings
from worker.pacing import SchedulerSettings
from worker.sequence import Lane


def percentile(weighted: dict, part: float) -> float:
    """Of values that occur so often."""
    total = sum(weighted.values())
    beyond = (1 - part) * total
    for value in sorted(weighted):
        total -= weighted[value]
        if total <= beyond:
            return float(value)
    return 0.0


def fitted(file: Path) -> Device:
    """The costs of the device that these requests ran on, each alone."""
    costs = CostModel(256.0)
    steps: list[float] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        seen = json.loads(line)
        tokens = seen["prompt_tokens"] - 1 - seen["cached_tokens"]
        costs.prefilled(tokens, seen["cached_tokens"], seen["prefill_seconds"])
        if seen["completion_tokens"] > 4:
            steps.append(seen["decode_seconds"] / seen["completion_tokens"])
    step = sorted(steps)[len(steps) // 2]
    # Of rows together nothing is known from requests that ran alone: a tenth of a step each is a guess.
    return Device(costs.prefill, step=0.9 * step, row=0.1 * step, context=0.0)


def clock(seconds: float) -> str:
    minutes = int(8 * 60 + seconds / 60)
    return f"{minutes // 60 % 24:02}:{minutes % 60:02}"


def of_one_class(arrivals: list[Arrival]) -> list[Arrival]:
    """The same requests, asked as standard and by one tenant."""
    alike = copy.deepcopy(arrivals)
    for arrival in alike:
        arrival.lane, arrival.tenant = Lane.STANDARD, ""
    return alike


def save_picture(path: Path, seen: dict[str, dict[Lane, Seen]], title: str) -> None:
    """Waits and gaps by class; of the second run, if there is one, in broken lines."""
    from matplotlib import pyplot

    figure, (waits, gaps) = pyplot.subplots(1, 2, figsize=(10, 4.2), dpi=110)
    for (classes, by_lane), style in zip(seen.items(), ("-", "--"), strict=False):
        for lane, each in by_lane.items():
            if not each.first_token_seconds:
                continue
            label = lane.name.lower() + (", without classes" if classes == "one" else "")
            ordered = sorted(each.first_token_seconds)
            look = {"label": label, "linestyle": style, "color": f"C{lane.value}"}
            waits.plot(ordered, [i / len(ordered) for i in range(1, len(ordered) + 1)], **look)
            values = sorted(each.gaps_ms)
            total = sum(each.gaps_ms.values())
            gaps.plot(values, list(itertools.accumulate(each.gaps_ms[v] / total for v in values)), **look)
    for axes, label in ((waits, "seconds to the first token"), (gaps, "milliseconds between tokens")):
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("part of all")
        axes.grid(alpha=0.3)
    gaps.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path)


def print_seen(by_lane: dict[Lane, Seen]) -> None:
    rows = []
    for lane, seen in by_lane.items():
        if not seen.done:
            continue
        waits = Counter(seen.first_token_seconds)
        parts = [f"{percentile(waits, p):.2f}" for p in (0.5, 0.95, 0.99, 1)]
        gaps = [f"{percentile(seen.gaps_ms, p):.0f}" for p in (0.5, 0.95, 0.99)]
        worst = f"{max(seen.gaps_ms, default=0) / 1000:.2f}"
        rows.append([lane.name.lower(), str(seen.done), *parts, *gaps, worst, clock(seen.done_at)])
    columns = ["class", "done", "TTFT p50 s", "p95", "p99", "max", "gap p50 ms", "p95", "p99", "max s", "last at"]
    print_table("Seconds to the first token; milliseconds between tokens", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="m-series")
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--clients", type=int, default=11)
    parser.add_argument("--models", type=int, default=1)
    parser.add_argument("--classes", choices=("asked", "one"), nargs="+", default=["asked"])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--slices", choices=("mixed", "apart"), default="mixed")
    _, standard_share, *lower_shares = SharingSettings().guaranteed_shares
    parser.add_argument("--standard-share", type=float, default=standard_share)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    device = fitted(options.fit) if options.fit else DEVICES[options.device]
    arrivals = day(options.hours, options.clients, options.models, options.seed)
    title = f"{options.fit or options.device}, {options.clients} clients of {options.models} model(s)"
    title += f", {len(arrivals)} requests"
    seen: dict[str, dict[Lane, Seen]] = {}
    for classes in options.classes:
        settings = SchedulerSettings(max_rows=options.rows, slices=options.slices)
        asked = copy.deepcopy(arrivals) if classes == "asked" else of_one_class(arrivals)
        sharing = SharingSettings(guaranteed_shares=(1.0, options.standard_share, *lower_shares))
        simulation = Simulation(device, asked, settings, sharing)
        started = time.perf_counter()
        simulation.run()
        took = f"{time.perf_counter() - started:.1f} s for {simulation.rounds} rounds, {simulation.asked} decisions"
        print(f"{title}; classes: {classes}; {took}")
        print_seen(simulation.seen)
        seen[classes] = simulation.seen
    if options.picture:
        save_picture(options.picture, seen, title)


if __name__ == "__main__":
    main()
