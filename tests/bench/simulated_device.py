# pyright: basic
"""Workers on one device that is only a table of costs: the real schedulers, and the real rules between workers.

What is modelled: the device runs one pass at a time, in *rounds*. In a round each worker that has something to run runs
one pass (a decode step, a slice, a mixed pass), and each finds that its pass took as long as the round, as the workers
of a device that nobody ranks do. So a slice of one worker is a gap in the rows of all. Who may go is asked of
`worker.shared_device` with a board and a lease in memory: turns, debts to other models' rows, rests of lower classes.
What is not: the memory of the device, blocks that come from disk, time between passes, workers that stop or die.

Rounds in which nothing can change are run in one go: all rows decode, nobody who waits could start, no clock runs out.
In those the length of a step is what it was at their beginning, for 128 rounds at most. With one model that is the only
difference to asking for each round; with several a rest may end up to a round later (half an hour of 250 clients of 8
models: interactive first tokens p50 0.14 s both ways, p95 0.31 s instead of 0.27 s; gaps the same to 5 %).
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec.structs import replace

from protocol.ids import RequestId
from tests.bench.day_trace import Arrival
from worker.cost_model import PrefillCost
from worker.neighbours import Alone, DeviceSharing, Hold, Load, Neighbour, SharingSettings, WorkerKey
from worker.pacing import SchedulerSettings
from worker.scheduler import Scheduler
from worker.sequence import LANES, Lane, Sequence
from worker.shared_device import SharedDevice
from worker.steps import Decode, Idle, Join, Mixed, Open, Park, Preempt, Prefill, Rest

_LONGEST_RUN_ROUNDS = 128


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


@dataclass
class Seen:
    """What the requests of one kind met."""

    first_token_seconds: list[float] = field(default_factory=list)
    gaps_ms: Counter[int] = field(default_factory=Counter)
    done: int = 0
    done_at: float = 0.0


class Pass(NamedTuple):
    """What a worker runs in a round; `seconds` if it ran alone."""

    step: Prefill | Mixed | Decode | Join | Park
    seconds: float


@dataclass
class _Row:
    arrival: Arrival
    left: int
    last_token: float | None = None


class _Lease:
    """As `PrefillLease`, between workers that are objects."""

    def __init__(self, held_by: list["_Lease"]) -> None:
        self._held_by = held_by

    def try_take(self) -> Literal["taken", "refused"]:
        if not self._held_by:
            self._held_by.append(self)
        return "taken" if self._held_by[0] is self else "refused"

    def release(self) -> None:
        if self._held_by and self._held_by[0] is self:
            self._held_by.clear()

    def close(self) -> None:
        self.release()


class _Board:
    """As `Board`, in memory: what each worker says, with the steps that it made since it said it."""

    def __init__(self, simulation: "Simulation", number: int) -> None:
        self.key = WorkerKey(1, number)
        self._simulation = simulation
        self._said = None

    def publish(self, activity: object) -> None:
        self._said = activity

    def snapshot(self) -> tuple[Neighbour, ...]:
        return tuple(
            neighbour
            for worker in self._simulation.workers
            if worker.board is not self and (neighbour := worker.board.neighbour(worker)) is not None
        )

    def neighbour(self, worker: "Worker") -> Neighbour | None:
        if self._said is None:
            return None
        activity = self._said
        if worker.runs_since is not None and (steps := self._simulation.rounds - worker.runs_since):
            activity = replace(activity, decode_steps=activity.decode_steps + steps)
        return Neighbour(key=self.key, activity=activity, updated=self._simulation.now)

    def close(self) -> None:
        self._said = None


class Worker:
    """One model's scheduler, and its rows' progress."""

    def __init__(self, simulation: "Simulation", number: int, settings: SchedulerSettings, lease: list) -> None:
        self.scheduler = Scheduler(settings)
        self.board = _Board(simulation, number)
        self.sharing: DeviceSharing = Alone()
        if lease is not simulation.no_lease:
            clock = lambda: simulation.now  # noqa: E731
            self.sharing = SharedDevice(self.board, _Lease(lease), simulation.sharing, clock=clock)  # type: ignore[arg-type]
        self.runs_since: int | None = None
        """The round in which it began to do nothing but decode."""
        self.run_rounds = 0
        self.run_until = math.inf
        self.run_started = 0.0
        self.run_seconds = 0.0
        self.run_kinds: Counter[Lane] = Counter()
        self._simulation = simulation
        self._device = simulation.device
        self._rows: dict[RequestId, _Row] = {}

    # --- one round ---------------------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival) -> None:
        name = RequestId(arrival.name)
        self._rows[name] = _Row(arrival, arrival.answer_tokens)
        self.scheduler.add(
            Sequence(
                request_id=name,
                prompt_tokens=arrival.prompt_tokens,
                arrived=arrival.at,
                lane=arrival.lane,
                tenant=arrival.tenant,
                max_tokens=arrival.answer_tokens,
            )
        )

    def ask(self) -> Pass | Hold | None:
        """Its pass of this round; None when it has nothing to do."""
        now = self._simulation.now
        while True:
            step = self.scheduler.next_step(now)
            match step:
                case Open(request_id=name):
                    self.scheduler.opened(name, self._rows[name].arrival.cached_tokens, now)
                case Preempt() | Rest():
                    raise AssertionError("neither memory nor a disk is modelled")
                case Idle():
                    self.sharing.idle(self._load())
                    return None
                case Join() | Park():
                    return Pass(step, self._device.park)
                case _:
                    return self._permitted(step)

    def _permitted(self, step: Prefill | Mixed | Decode) -> Pass | Hold:
        """As the step loop does it."""
        permits = self.sharing.ask(self._load(), None if isinstance(step, Decode) else step.lane)
        elsewhere = self.sharing.rows_elsewhere()
        self.scheduler.beside(
            None if elsewhere is None else Lane(elsewhere), permits.prefill.held_by if permits.prefill else ""
        )
        if not isinstance(step, Decode):
            if permits.prefill is None:
                is_alone = isinstance(step, Mixed) and permits.decode is not None
                return self._slice(Prefill(step.request_id, step.tokens, step.lane) if is_alone else step)
            if not self.scheduler.is_decoding:
                return permits.prefill
        return permits.decode or Pass(Decode(), self.step_seconds())

    def _slice(self, step: Prefill | Mixed) -> Pass:
        context = self._waiting(step.request_id).prefilled
        self.sharing.slice_started()
        if isinstance(step, Prefill):
            return Pass(step, self._device.prefill.seconds(step.tokens, context))
        return Pass(step, self.step_seconds() + self._device.prefill.tokens_seconds(step.tokens, context))

    def ran(self, done: Pass, seconds: float) -> None:
        """Its pass ended now, after so long."""
        now, scheduler = self._simulation.now, self.scheduler
        match done.step:
            case Prefill() as step:
                self.sharing.slice_ended()
                scheduler.prefilled(step, seconds, now)
            case Mixed() as step:
                rows = list(scheduler.places.decoding)
                self.sharing.slice_ended()
                self.sharing.decoded()
                scheduler.mixed(step, seconds, now)
                self._drew(rows)
            case Decode():
                rows = list(scheduler.places.decoding)
                self.sharing.decoded()
                scheduler.decoded(seconds, len(rows))
                self._drew(rows)
            case Join(request_id=name):
                scheduler.joined(name, now)
            case Park(request_id=name):
                scheduler.parked(name, now)

    def _drew(self, names: list[RequestId]) -> None:
        now = self._simulation.now
        for name in names:
            row = self._rows[name]
            seen = self._simulation.seen[row.arrival.kind]
            if row.last_token is None:
                seen.first_token_seconds.append(now - row.arrival.at)
            else:
                seen.gaps_ms[round((now - row.last_token) * 1000)] += 1
            row.last_token = now
            self._took(name, row, 1)

    def _took(self, name: RequestId, row: _Row, tokens: int) -> None:
        row.left -= tokens
        self.scheduler.places.decoding[name].drawn += tokens
        if row.left == 0:
            self.scheduler.remove(name)
            del self._rows[name]
            seen = self._simulation.seen[row.arrival.kind]
            seen.done += 1
            seen.done_at = self._simulation.now

    # --- many rounds of which nothing comes but tokens ---------------------------------------------------------------

    def quiet(self) -> tuple[int, float] | None:
        """For how many decode steps, and until when, nothing here can change; None when each step must be asked for.
        After a decode step was permitted only."""
        scheduler, now = self.scheduler, self._simulation.now
        places = scheduler.places
        if self._has_lease():
            return None
        if places.parked or (places.rows_of(Lane.BATCH) and places.highest_row != Lane.BATCH):
            return None
        if any(self._rows[name].last_token != now for name in places.decoding):
            return None
        until = math.inf
        if places.waiting_count:
            lanes = (lane for lane in LANES if places.lines[lane])
            until = min(map(scheduler._readiness.next_start_without_a_row, lanes), default=math.inf)
            if not isinstance(scheduler.next_step(now), Decode):
                until = min(until, self._slices_rest_until())
            elif scheduler.debt_seconds:
                until = min(until, now + scheduler.debt_seconds / 2)
            if until - now < self.step_seconds():
                return None
        return min(_LONGEST_RUN_ROUNDS, *(self._rows[name].left for name in places.decoding)), until

    def begin_run(self, rounds: int, until: float) -> None:
        self.runs_since = self._simulation.rounds
        self.run_rounds = rounds
        self.run_until = until
        self.run_started = self._simulation.now
        self.run_seconds = self.step_seconds()
        self.run_kinds = Counter(self._rows[name].arrival.kind for name in self.scheduler.places.decoding)

    def end_run(self) -> None:
        """So far: the rows have what they drew."""
        assert self.runs_since is not None
        steps, now = self._simulation.rounds - self.runs_since, self._simulation.now
        self.runs_since = None
        if not steps:
            return
        rows = list(self.scheduler.places.decoding)
        seconds = now - self.run_started
        # One step tells what a step takes; the time of the others goes the same way, and teaches nothing new.
        self.scheduler.decoded(seconds / steps, len(rows))
        self.scheduler.decoded(seconds - seconds / steps, 0)
        self._tell_steps(steps, seconds)
        for name in rows:
            row = self._rows[name]
            row.last_token = now
            self._took(name, row, steps)

    def _tell_steps(self, steps: int, seconds: float) -> None:
        if not isinstance(self.sharing, SharedDevice):
            return
        sharing = self.sharing._sharing
        sharing._last_decoded = self._simulation.now - seconds / steps
        sharing.decoded(self._simulation.now)
        sharing._decode_steps += steps - 1
        self.board.publish(sharing.activity())

    # --- small things ------------------------------------------------------------------------------------------------

    def rests_until(self) -> float:
        """When its rows, of a lower class than others' elsewhere, may go on; 0 while it must be asked each time."""
        if not isinstance(self.sharing, SharedDevice) or self._has_lease():
            return 0.0
        is_all = isinstance(self.scheduler.next_step(self._simulation.now), Decode)
        return self.sharing._sharing._decode_rests_until if is_all else 0.0

    def _has_lease(self) -> bool:
        """Whether others may wait until it sees that its slice is paid for."""
        return isinstance(self.sharing, SharedDevice) and self.sharing._sharing.needs_lease

    def _slices_rest_until(self) -> float:
        """When a slice that is held for a higher class elsewhere may run; 0 when it is held for another reason."""
        is_rest = isinstance(self.sharing, SharedDevice) and self.scheduler._slices_held_by == "higher_class"
        return self.sharing._sharing._prefill_rests_until if is_rest else 0.0

    def step_seconds(self) -> float:
        rows = self.scheduler.places.decoding
        return self._device.decode(len(rows), sum(each.tokens for each in rows.values()))

    def _load(self) -> Load:
        places = self.scheduler.places
        return Load(active_rank=places.highest, decoding_rank=places.highest_row, decoding_rows=len(places.decoding))

    def _waiting(self, name: RequestId) -> Sequence:
        sequence = self.scheduler.places.get_waiting(name)
        assert sequence is not None
        return sequence


class Simulation:
    """All workers of one device, to the end of the trace."""

    def __init__(
        self,
        device: Device,
        arrivals: list[Arrival],
        settings: SchedulerSettings,
        sharing: SharingSettings | None = None,
    ) -> None:
        self.device = device
        self.sharing = sharing or SharingSettings()
        self.no_lease: list = []
        models = max((arrival.model for arrival in arrivals), default=0) + 1
        lease = [] if models > 1 else self.no_lease
        self.workers = [Worker(self, number, settings, lease) for number in range(models)]
        self.seen = {lane: Seen() for lane in Lane}
        self.now = 0.0
        self.rounds = 0
        self.asked = 0
        self._todo = sorted(arrivals, reverse=True)
        self._asleep: dict[int, float] = {}

    def run(self) -> None:
        awake: set[int] = set()
        for turn in itertools.count():
            awake |= self._arrive()
            awake |= {number for number, until in self._asleep.items() if until <= self.now}
            for number in awake:
                self._asleep.pop(number, None)
            passes, held = self._ask(awake)
            awake -= self._asleep.keys()
            running = [worker for worker in self.workers if worker.runs_since is not None]
            if not passes and not running:
                if not self._skip_to_next(held):
                    return
                awake |= held
                continue
            rounds = 1 if passes or held else self._quiet_rounds(running)
            self._round(rounds, passes, running)
            awake = held | passes.keys() | self._end_due_runs()
            if turn % 20_000 == 0:
                for worker in self.workers:
                    worker.scheduler.check()

    def _arrive(self) -> set[int]:
        woken: set[int] = set()
        while self._todo and self._todo[-1].at <= self.now:
            arrival = self._todo.pop()
            worker = self.workers[arrival.model]
            if worker.runs_since is not None:
                worker.end_run()
            worker.arrive(arrival)
            woken.add(arrival.model)
            # Rows of a lower class elsewhere have to rest now and then, from now on.
            for number, other in enumerate(self.workers):
                row = other.scheduler.places.highest_row
                if other.runs_since is not None and row is not None and row > arrival.lane:
                    other.end_run()
                    woken.add(number)
        return woken

    def _ask(self, awake: set[int]) -> tuple[dict[int, Pass], set[int]]:
        """The passes of this round, and who is held back from a slice and must be asked again in the next one."""
        passes: dict[int, Pass] = {}
        held: set[int] = set()
        for number in sorted(awake):
            worker = self.workers[number]
            self.asked += 1
            answer = worker.ask()
            match answer:
                case None:
                    # Nobody waits for it now: who rested for its sake need not.
                    self._asleep = dict.fromkeys(self._asleep, self.now)
                    for other in self.workers:
                        other.run_until = min(other.run_until, self.now) if other.run_until < math.inf else math.inf
                    awake.discard(number)
                case Hold():
                    if (until := worker.rests_until()) > self.now:
                        self._asleep[number] = until
                    else:
                        held.add(number)
                case Pass(step=Decode()) if (quiet := self._quiet(worker)) is not None:
                    worker.begin_run(*quiet)
                case _:
                    passes[number] = answer
        return passes, held

    def _quiet(self, worker: Worker) -> tuple[int, float] | None:
        """As `Worker.quiet`; rows of a lower class than others elsewhere rest now and then, and are asked each time."""
        row = worker.scheduler.places.highest_row
        others = (other.scheduler.places.highest for other in self.workers if other is not worker)
        return None if any(None not in (each, row) and each < row for each in others) else worker.quiet()

    def _quiet_rounds(self, running: list[Worker]) -> int:
        """Until the first run ends, somebody wakes, or a request arrives: in whole rounds."""
        round_seconds = sum(worker.run_seconds for worker in running)
        ends = [*self._asleep.values(), *(worker.run_until for worker in running if worker.run_until < math.inf)]
        if self._todo:
            ends.append(self._todo[-1].at)
        rounds = min(worker.runs_since + worker.run_rounds - self.rounds for worker in running)  # type: ignore[operator]
        return max(1, min([rounds, *(int((end - self.now) / round_seconds) for end in ends)]))

    def _round(self, rounds: int, passes: dict[int, Pass], running: list[Worker]) -> None:
        seconds = sum(each.seconds for each in passes.values()) + sum(worker.run_seconds for worker in running)
        self.now += rounds * seconds
        self.rounds += rounds
        for worker in running:
            for kind, rows in worker.run_kinds.items():
                self.seen[kind].gaps_ms[round(seconds * 1000)] += rows * rounds
        for number, each in passes.items():
            self.workers[number].ran(each, seconds)

    def _end_due_runs(self) -> set[int]:
        ended: set[int] = set()
        for number, worker in enumerate(self.workers):
            since = worker.runs_since
            if since is not None and (self.rounds >= since + worker.run_rounds or self.now >= worker.run_until):
                worker.end_run()
                ended.add(number)
        return ended

    def _skip_to_next(self, held: set[int]) -> bool:
        """Nothing runs: on to what comes next. False when nothing does."""
        ends = [*self._asleep.values()]
        if held:
            ends.append(self.now + self.sharing.poll_seconds)
        if self._todo:
            ends.append(self._todo[-1].at)
        self.now = max(self.now, min(ends, default=self.now))
        return bool(ends)
