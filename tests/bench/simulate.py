# pyright: basic
"""A day of one worker in seconds: the real scheduler on a device that is only a table of costs.

    python -m tests.bench.simulate [--device cpu|m-series|h200] [--fit FILE] [--hours H] [--scale X] [--classes one]
                                   [--rows N] [--slices apart] [--seed N] [--picture FILE]

The trace: people who chat by day, agents that call with prefixes of some 50K tokens (hot but for the first call), and
a batch of thousands that starts at 20:00. `--classes one` gives everybody the same class and tenant: what classes are
worth. `--slices apart` runs slices and decode steps one after the other, as for models whose passes cannot be mixed;
a mixed pass takes as long as the step and the slice's tokens. `--fit` takes the costs from a real run: a file of JSON
lines with prompt_tokens, cached_tokens, prefill_seconds, completion_tokens and decode_seconds, as they stand in each
answer's usage and timings, of requests that ran alone.
It judges policies, not devices: no figure of this table was measured on the device it names.
"""

import argparse
import heapq
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from protocol.ids import RequestId
from tests.bench.measuring import print_table
from worker.cost_model import CostModel, PrefillCost
from worker.pacing import SchedulerSettings
from worker.scheduler import Decode, Idle, Join, Mixed, Open, Park, Prefill, Scheduler
from worker.sequence import Lane, Sequence


class Device(NamedTuple):
    """`step` seconds of a decode step as such, `row` of each row in it, `context` of each token those rows hold."""

    prefill: PrefillCost
    step: float
    row: float
    context: float
    park: float = 0.01

    def decode(self, rows: int, held_tokens: int) -> float:
        return self.step + rows * self.row + held_tokens * self.context


DEVICES = {
    # SmolLM2-135M in float32 on two cores; a 30B model of 3B active on an M-series Ultra; 8B in bf16 on one H200.
    "cpu": Device(PrefillCost(fixed=0.03, token=0.0038, attention=4e-8), step=0.02, row=0.01, context=2e-7),
    "m-series": Device(PrefillCost(fixed=0.015, token=0.00065, attention=1.2e-8), step=0.011, row=0.0015, context=5e-8),
    "h200": Device(PrefillCost(fixed=0.004, token=0.00005, attention=3e-10), step=0.008, row=0.0003, context=4e-8),
}


@dataclass(order=True)
class Arrival:
    at: float
    name: str = field(compare=False)
    kind: Lane = field(compare=False)
    lane: Lane = field(compare=False)
    tenant: str = field(compare=False)
    prompt_tokens: int = field(compare=False)
    cached_tokens: int = field(compare=False)
    answer_tokens: int = field(compare=False)


def day(hours: float, scale: float, seed: int) -> list[Arrival]:
    """From 08:00 on; `scale` multiplies the number of people, agents and batch requests."""
    draw = random.Random(seed)
    arrivals: list[Arrival] = []
    end = hours * 3600

    def poisson(mean_seconds: float, start: float, until: float) -> Iterator[float]:
        at = start + draw.expovariate(1 / mean_seconds)
        while at < min(until, end):
            yield at
            at += draw.expovariate(1 / mean_seconds)

    def add(kind: str, lane: Lane, tenant: str, at: float, prompt: int, cached: int, answer: int) -> None:
        arrivals.append(
            Arrival(at, f"{kind}{len(arrivals)}", lane, lane, tenant, prompt, min(cached, prompt - 1), answer)
        )

    for person in range(round(8 * scale)):
        history = 0
        for at in poisson(240, 0, 12 * 3600):
            history = 0 if draw.random() < 0.2 else history
            question = int(draw.lognormvariate(4, 1)) + 5
            answer = min(800, int(draw.lognormvariate(5, 0.7)) + 5)
            add("chat", Lane.INTERACTIVE, f"p{person}", at, history + question, history, answer)
            history += question + answer
    for agent in range(round(3 * scale)):
        for session in poisson(5400, 0, 12 * 3600):
            at, held = session, 0
            prompt = draw.randrange(20_000, 50_000)
            for _ in range(draw.randrange(10, 30)):
                answer = draw.randrange(30, 400)
                add("agent", Lane.STANDARD, f"a{agent}", at, prompt, held, answer)
                held = prompt + answer
                prompt = held + draw.randrange(100, 2500)
                at += draw.uniform(10, 60)
    for at in sorted(12 * 3600 + draw.uniform(0, 600) for _ in range(round(1500 * scale))):
        if at < end:
            add("batch", Lane.BATCH, "night", at, draw.randrange(200, 3000), 0, draw.randrange(50, 300))
    # Somebody's batch by day, too: the case that classes are for.
    for at in poisson(180 / scale, 3600, 10 * 3600):
        add("batch", Lane.BATCH, "day", at, draw.randrange(500, 6000), 0, draw.randrange(50, 300))
    return sorted(arrivals)


@dataclass
class Seen:
    """What the requests of one lane met."""

    first_token_seconds: list[float] = field(default_factory=list)
    gaps_ms: Counter[int] = field(default_factory=Counter)
    done: int = 0
    done_at: float = 0.0


def percentile(weighted: dict, part: float) -> float:
    total = sum(weighted.values())
    for value in sorted(weighted):
        total -= weighted[value]
        if total <= (1 - part) * sum(weighted.values()):
            return float(value)
    return 0.0


class Simulation:
    """One worker. A decode step that nothing can change is followed by all of its kind in one go."""

    def __init__(
        self,
        device: Device,
        arrivals: list[Arrival],
        max_rows: int,
        first_rate: float,
        slices: Literal["apart", "mixed"] = "mixed",
    ) -> None:
        self._device = device
        self._scheduler = Scheduler(
            SchedulerSettings(max_rows=max_rows, first_rate_tokens_per_second=first_rate, slices=slices)
        )
        self._todo = arrivals
        heapq.heapify(self._todo)
        self._asked: dict[RequestId, Arrival] = {}
        self._left: dict[RequestId, int] = {}
        self._last_token: dict[RequestId, float] = {}
        self.seen = {lane: Seen() for lane in Lane}
        self.now = 0.0
        self.steps = 0

    def run(self) -> None:
        while self._todo or not self._scheduler.is_empty:
            while self._todo and (self._todo[0].at <= self.now):
                self._arrive(heapq.heappop(self._todo))
            self._step()
            self.steps += 1
            if self.steps % 1000 == 0:
                self._scheduler.check()

    def _arrive(self, arrival: Arrival) -> None:
        name = RequestId(arrival.name)
        self._asked[name] = arrival
        self._left[name] = arrival.answer_tokens
        self._scheduler.add(
            Sequence(
                request_id=name,
                prompt_tokens=arrival.prompt_tokens,
                arrived=arrival.at,
                lane=arrival.lane,
                tenant=arrival.tenant,
            )
        )

    def _step(self) -> None:
        scheduler = self._scheduler
        step = scheduler.next_step(self.now)
        match step:
            case Open(request_id=name):
                scheduler.opened(name, self._asked[name].cached_tokens, self.now)
            case Prefill(request_id=name, tokens=tokens):
                sequence = scheduler.get(name)
                assert sequence is not None
                seconds = self._device.prefill.seconds(tokens, sequence.prefilled)
                self.now += seconds
                scheduler.prefilled(step, seconds, self.now)
            case Mixed(request_id=name, tokens=tokens):
                sequence = scheduler.get(name)
                assert sequence is not None
                rows = self._rows()
                started = self.now
                seconds = self._step_seconds(rows) + self._device.prefill.tokens_seconds(tokens, sequence.prefilled)
                self.now += seconds
                scheduler.mixed(step, seconds, self.now)
                self._drew(rows, 1, started, seconds)
            case Join(request_id=name):
                self.now += self._device.park
                scheduler.joined(name, self.now)
            case Park(request_id=name):
                self.now += self._device.park
                scheduler.parked(name, self.now)
            case Decode():
                self._decode()
            case Idle(until=until):
                ends = [at for at in (until, self._todo[0].at if self._todo else None) if at is not None]
                self.now = max(self.now, min(ends))

    def _rows(self) -> list[Sequence]:
        return [s for s in self._scheduler.sequences() if s.prefill_left == 0 and self._scheduler.decodes(s.request_id)]

    def _step_seconds(self, rows: list[Sequence]) -> float:
        held = sum(s.prompt_tokens + self._asked[s.request_id].answer_tokens - self._left[s.request_id] for s in rows)
        return self._device.decode(len(rows), held)

    def _decode(self) -> None:
        rows = self._rows()
        seconds = self._step_seconds(rows)
        until = [self._todo[0].at - self.now] if self._todo else []
        if self._scheduler.debt_seconds > 0:
            until.append(self._scheduler.debt_seconds)
        elif self._scheduler.waiting:
            until.append(0.0)  # a step is timed before passes are mixed
        if self._scheduler.running > len(rows):
            until.append(0.25)  # parked rows come and go by the clock
        steps = max(1, min([self._left[s.request_id] for s in rows] + [int(each / seconds) for each in until]))
        self._scheduler.decoded(seconds * steps, len(rows), steps=steps)
        started = self.now
        self.now += seconds * steps
        self._drew(rows, steps, started, seconds)

    def _drew(self, rows: list[Sequence], steps: int, started: float, seconds: float) -> None:
        """Each row drew so many tokens, from `started` on, one each `seconds`."""
        first = started + seconds
        for sequence in rows:
            name = sequence.request_id
            seen = self.seen[self._asked[name].kind]
            if (last := self._last_token.get(name)) is None:
                seen.first_token_seconds.append(first - sequence.arrived)
            else:
                seen.gaps_ms[round((first - last) * 1000)] += 1
            seen.gaps_ms[round(seconds * 1000)] += steps - 1
            self._last_token[name] = self.now
            self._left[name] -= steps
            if self._left[name] == 0:
                self._scheduler.remove(name)
                seen.done += 1
                seen.done_at = self.now
                del self._last_token[name], self._left[name], self._asked[name]


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


def save_picture(path: Path, seen: dict[Lane, Seen], title: str) -> None:
    from matplotlib import pyplot

    figure, (waits, gaps) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=110)
    for lane, each in seen.items():
        if not each.first_token_seconds:
            continue
        ordered = sorted(each.first_token_seconds)
        waits.plot(ordered, [i / len(ordered) for i in range(1, len(ordered) + 1)], label=lane.name.lower())
        values = sorted(each.gaps_ms)
        total = sum(each.gaps_ms.values())
        gaps.plot(values, list(itertools.accumulate(each.gaps_ms[v] / total for v in values)), label=lane.name.lower())
    for axes, label in ((waits, "seconds to the first token"), (gaps, "milliseconds between tokens")):
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("part of all")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="m-series")
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--classes", choices=("asked", "one"), default="asked")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--slices", choices=("mixed", "apart"), default="mixed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    device = fitted(options.fit) if options.fit else DEVICES[options.device]
    arrivals = day(options.hours, options.scale, options.seed)
    count = len(arrivals)
    if options.classes == "one":
        for arrival in arrivals:
            arrival.lane, arrival.tenant = Lane.STANDARD, ""
    started = time.perf_counter()
    simulation = Simulation(device, arrivals, options.rows, first_rate=256.0, slices=options.slices)
    simulation.run()
    title = f"{options.fit or options.device}, {count} requests, classes: {options.classes}"
    print(f"{title}; {simulation.steps} steps in {time.perf_counter() - started:.1f} s")
    rows = []
    for lane, seen in simulation.seen.items():
        if not seen.done:
            continue
        waits = Counter(seen.first_token_seconds)
        parts = [f"{percentile(waits, p):.2f}" for p in (0.5, 0.95, 0.99)]
        gaps = [f"{percentile(seen.gaps_ms, p):.0f}" for p in (0.5, 0.95, 0.99)]
        worst = f"{max(seen.gaps_ms) / 1000:.2f}"
        rows.append([lane.name.lower(), str(seen.done), *parts, *gaps, worst, clock(seen.done_at)])
    columns = ["class", "done", "TTFT p50 s", "p95", "p99", "gap p50 ms", "p95", "p99", "max s", "last at"]
    print_table("Seconds to the first token; milliseconds between tokens", columns, rows)
    if options.picture:
        save_picture(options.picture, simulation.seen, title)


if __name__ == "__main__":
    main()
