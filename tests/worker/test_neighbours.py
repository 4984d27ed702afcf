"""Tables of the rules, and whole rooms of workers on a made-up device, by the hour and in milliseconds."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.latency import LatencyClass
from worker.neighbours import (
    WARM_RANK,
    Activity,
    Alone,
    Hold,
    Load,
    Neighbour,
    Permits,
    PrefillState,
    Sharing,
    SharingSettings,
    SliceTaken,
    StepTime,
    WorkerKey,
    has_higher_class,
    is_paid,
    is_stopped,
    rest_seconds,
)

SETTINGS = SharingSettings()
ROOMS = settings.default.max_examples // 5 if settings.default else 20
"""A room is some thousand decisions."""
INTERACTIVE, STANDARD, BATCH = (latency_class.rank for latency_class in LatencyClass)
ME = WorkerKey(incarnation=5, pid=50)


def neighbour(incarnation: int = 1, updated: float = 100.0, **activity: object) -> Neighbour:
    return Neighbour(
        key=WorkerKey(incarnation, incarnation * 10),
        activity=Activity(**activity),  # pyright: ignore[reportArgumentType]
        updated=updated,
    )


def decoding(steps: int, rank: int = INTERACTIVE, *, step_seconds: float = 0.02, updated: float = 100.0) -> Neighbour:
    return neighbour(
        active_rank=rank,
        decoding_rank=rank,
        decoding_rows=1,
        decode_steps=steps,
        step_seconds=step_seconds,
        updated=updated,
    )


# --- debt -----------------------------------------------------------------------------------------------------------

TAKEN = SliceTaken(rank=INTERACTIVE, started=99.8, ended=100.0, steps_before={WorkerKey(1, 10): 500})


@pytest.mark.parametrize(
    ("neighbours", "now", "paid"),
    [
        pytest.param((), 100.0, True, id="nobody there"),
        pytest.param((decoding(500),), 100.0, False, id="stood still"),
        pytest.param((decoding(509),), 100.2, False, id="nearly its half"),
        pytest.param((decoding(510),), 100.19, True, id="its half"),
        pytest.param((decoding(506),), 100.0, True, id="kept its half during the slice"),
        pytest.param((decoding(500),), 100.39, False, id="slow"),
        pytest.param((decoding(500),), 100.4, True, id="had its chance"),
        pytest.param((decoding(500, BATCH),), 100.0, True, id="a lower class"),
        pytest.param((decoding(500, step_seconds=0.3),), 100.59, False, id="in the midst of a long step"),
        pytest.param((decoding(500, step_seconds=0.3),), 100.6, True, id="had its chance of a long step"),
        pytest.param((decoding(500, step_seconds=0.0),), 100.1, False, id="no step, of unknown length"),
        pytest.param((decoding(501, step_seconds=0.0),), 100.1, True, id="one step of unknown length"),
        pytest.param((neighbour(active_rank=0, decode_steps=500),), 100.0, True, id="its rows ended"),
        pytest.param((decoding(500, updated=96.9),), 100.0, True, id="stopped"),
    ],
)
def test_debt(*, neighbours: tuple[Neighbour, ...], now: float, paid: bool) -> None:
    """A slice is paid for when the rows it delayed have kept their share since it began, and never waits for ever."""
    assert is_paid(TAKEN, neighbours, now, SETTINGS) is paid


def test_who_came_during_the_slice_is_owed_nothing() -> None:
    """It was not delayed by what was there before."""
    other = Neighbour(key=WorkerKey(2, 20), activity=decoding(0).activity, updated=100.0)

    assert is_paid(TAKEN, (other,), 100.0, SETTINGS)


@given(
    st.floats(0.001, 5.0),
    st.floats(0.0, 20.0),
    st.integers(0, 1000),
    st.integers(0, 100),
    st.floats(0.0, 1.0),
    st.floats(0.1, 0.9),
)
def test_debt_is_monotonic(
    slice_seconds: float, waited: float, before: int, steps: int, step_seconds: float, share: float
) -> None:
    """More steps never make a paid debt unpaid, and patience ends every debt."""
    settings = SharingSettings(decode_shares=(share,), stopped_after_seconds=1e9)
    key = WorkerKey(1, 10)
    taken = SliceTaken(rank=INTERACTIVE, started=0.0, ended=slice_seconds, steps_before={key: before})
    now = slice_seconds + waited

    def paid(made: int, at: float) -> bool:
        return is_paid(taken, (decoding(before + made, step_seconds=step_seconds),), at, settings)

    assert paid(steps + 1, now) or not paid(steps, now)
    full_debt_seconds = slice_seconds * share / (1 - share)
    assert paid(0, slice_seconds + settings.patience * max(full_debt_seconds, step_seconds) + 1e-6)


# --- classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "other", "higher"),
    [
        (BATCH, neighbour(active_rank=INTERACTIVE), True),
        (WARM_RANK, neighbour(active_rank=BATCH), True),
        (BATCH, neighbour(active_rank=BATCH), False),
        (INTERACTIVE, neighbour(active_rank=BATCH), False),
        (BATCH, neighbour(), False),
        (BATCH, neighbour(active_rank=INTERACTIVE, updated=96.9), False),
    ],
)
def test_higher_class(*, rank: int, other: Neighbour, higher: bool) -> None:
    """Only what is active, above and alive holds anybody back."""
    assert has_higher_class(rank, (other,), 100.0, SETTINGS) is higher


def test_an_idle_neighbour_is_never_stopped() -> None:
    """It sleeps until a message comes, and says nothing meanwhile."""
    assert not is_stopped(neighbour(updated=0.0), 100.0, SETTINGS)
    assert is_stopped(neighbour(active_rank=0, updated=0.0), 100.0, SETTINGS)


@given(st.sampled_from((INTERACTIVE, STANDARD, BATCH, WARM_RANK)), st.floats(0.0, 10.0))
def test_rest_leaves_the_guaranteed_share(rank: int, worked: float) -> None:
    """At least that share of the time, since a rest has a longest. The highest class never rests."""
    rest = rest_seconds(rank, worked, SETTINGS)
    assert worked >= SETTINGS.guaranteed_shares[rank] * (worked + rest) - 1e-9
    assert rest == 0 or rank != INTERACTIVE


# --- turns and lease ------------------------------------------------------------------------------------------------


def asks(rank: int, *neighbours: Neighbour, now: float = 100.0, sharing: Sharing | None = None) -> Hold | None:
    sharing = sharing or Sharing(ME, SETTINGS)
    sharing.sees(Load(active_rank=rank), neighbours, now)
    return sharing.hold_prefill(rank, now)


WANTED = PrefillState.WANTED


@pytest.mark.parametrize(
    ("other", "goes"),
    [
        pytest.param(neighbour(prefill_state=WANTED, prefill_rank=STANDARD, prefill_since=99.9), False, id="earlier"),
        pytest.param(neighbour(prefill_state=WANTED, prefill_rank=INTERACTIVE, prefill_since=100.0), False, id="above"),
        pytest.param(neighbour(prefill_state=WANTED, prefill_rank=BATCH, prefill_since=99.0), True, id="below"),
        pytest.param(neighbour(prefill_state=WANTED, prefill_rank=BATCH, prefill_since=97.0), False, id="aged"),
        pytest.param(
            neighbour(prefill_state=WANTED, prefill_rank=INTERACTIVE, prefill_since=99.0, updated=99.8),
            True,
            id="not about to ask",
        ),
        pytest.param(neighbour(active_rank=1, prefill_state=PrefillState.RUNNING), False, id="runs"),
        pytest.param(neighbour(active_rank=1, prefill_state=PrefillState.PAYING), False, id="pays"),
        pytest.param(neighbour(active_rank=1, prefill_state=PrefillState.RUNNING, updated=96.9), True, id="stopped"),
    ],
)
def test_turns(*, other: Neighbour, goes: bool) -> None:
    """The highest class first, then who waits longest; who waited long is of the highest."""
    assert (asks(STANDARD, other) is None) is goes


def test_a_refused_lease() -> None:
    """Its holder may be between two words on the board; if none is seen for long, or it stopped, one goes without."""
    sharing = Sharing(ME, SETTINGS)
    assert asks(0, sharing=sharing) is None
    assert sharing.lease_refused(100.0) is not None
    assert sharing.lease_refused(102.9) is not None
    assert sharing.lease_refused(103.1) is None

    stopped = neighbour(active_rank=1, prefill_state=PrefillState.PAYING, updated=96.9)
    sharing = Sharing(ME, SETTINGS)
    assert asks(0, stopped, sharing=sharing) is None
    assert sharing.lease_refused(100.0) is None


def test_a_want_ends_with_its_prompt() -> None:
    """Others do not wait for a turn that nobody takes."""
    sharing = Sharing(ME, SETTINGS)
    asks(0, sharing=sharing)
    assert sharing.activity().prefill_state is PrefillState.WANTED
    sharing.wants_no_prefill(100.1)

    assert sharing.activity().prefill_state is PrefillState.NONE


def test_idle_owes_nothing() -> None:
    """Who sleeps until a message comes cannot see a debt being paid: it gives the lease back at once."""
    sharing = Sharing(ME, SETTINGS)
    asks(0, decoding(5), sharing=sharing)
    sharing.slice_started(100.0)
    sharing.slice_ended(100.2)
    assert sharing.needs_lease
    sharing.idle(100.2)

    assert not sharing.needs_lease


def test_alone_never_holds() -> None:
    """The policy `ignore`."""
    assert Alone().ask(Load(active_rank=BATCH), BATCH) == Permits()
    assert Alone().rows_elsewhere() is None


# --- what a step takes ----------------------------------------------------------------------------------------------


def test_step_time_is_that_of_quiet_steps() -> None:
    """A step beside another's slice says nothing of what steps take; without a quiet one, the best guess does."""
    time = StepTime()
    runs = (neighbour(prefill_state=PrefillState.RUNNING),)
    for seconds in (0.3, 0.2, 0.5):
        time.took(seconds, ())
        time.sees(runs)
    assert time.seconds == 0.2

    time.took(0.5, (neighbour(slices=1),))
    time.sees((neighbour(slices=2),))  # began and ended within the step
    assert time.seconds == 0.2

    for seconds in (0.02, 0.03, 0.02):
        time.took(seconds, (neighbour(slices=2),))
        time.sees((neighbour(slices=2),))
    time.sees(())
    assert time.seconds == 0.02


# --- rooms ----------------------------------------------------------------------------------------------------------


@dataclass
class Room:
    """Workers on one device on which a slice stops every decode step, as seen on Macs; and one lease."""

    now: float = 0.0
    workers: "list[SimulatedWorker]" = field(default_factory=list["SimulatedWorker"])
    lease: "SimulatedWorker | None" = None
    slices: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def run(self, seconds: float) -> None:
        queue = [(worker.starts, number) for number, worker in enumerate(self.workers)]
        while queue and queue[0][0] < seconds:
            self.now, number = heappop(queue)
            again = self.workers[number].wake(self)
            if again is not None:
                heappush(queue, (again, number))

    def sliced_seconds(self, start: float, end: float) -> float:
        return sum(max(0.0, min(end, b) - max(start, a)) for a, b in self.slices[-20:])


@dataclass
class SimulatedWorker:
    """Decodes all the time, or prefills all the time, or both; may stop for ever in its n-th slice."""

    key: WorkerKey
    rank: int
    step_seconds: float | None = None
    prefill_seconds: float = 0.0
    slice_seconds: float = 0.2
    stops_in_slice: int | None = None
    starts: float = 0.0
    settings: SharingSettings = SETTINGS
    prefilled: float = 0.0
    done_at: float | None = None
    decoded: float = 0.0
    word: Neighbour | None = None
    longest_wait: float = 0.0

    def __post_init__(self) -> None:
        self.sharing = Sharing(self.key, self.settings)
        self.doing: tuple[str, float, float] | None = None
        self.last_slice_ended = self.starts

    def says(self, room: Room) -> None:
        self.word = Neighbour(key=self.key, activity=self.sharing.activity(), updated=room.now)

    def wake(self, room: Room) -> float | None:
        now = room.now
        if self.doing is not None:
            what, started, left = self.doing
            if what == "decode":
                left -= now - started - room.sliced_seconds(started, now)
                if left > 1e-6:
                    self.doing = "decode", now, left
                    running = [end for start, end in room.slices[-20:] if start <= now < end]
                    return max(running) if running else now + left
                assert self.step_seconds is not None
                self.decoded += self.step_seconds
                self.sharing.decoded(now)
            else:
                self.prefilled += now - started
                self.last_slice_ended = now
                self.sharing.slice_ended(now)
                if self.prefilled >= self.prefill_seconds - 1e-6:
                    self.done_at = now
                self.says(room)
            self.doing = None
        return self.choose(room)

    def choose(self, room: Room) -> float | None:
        now = room.now
        wants = self.done_at is None and self.prefill_seconds > 0
        decodes = self.step_seconds is not None
        load = Load(
            active_rank=self.rank if wants or decodes else None,
            decoding_rank=self.rank if decodes else None,
            decoding_rows=int(decodes),
        )
        others = tuple(w.word for w in room.workers if w is not self and w.word is not None)
        self.sharing.sees(load, others, now)
        if not self.sharing.needs_lease and room.lease is self:
            room.lease = None
        if not wants and not decodes:
            self.sharing.idle(now)
            if room.lease is self:
                room.lease = None
            self.says(room)
            return None
        if wants:
            hold = self.sharing.hold_prefill(self.rank, now)
            if hold is None and room.lease not in (None, self):
                hold = self.sharing.lease_refused(now)
            elif hold is None:
                room.lease = self
                self.sharing.lease_taken()
            if hold is None:
                self.longest_wait = max(self.longest_wait, now - self.last_slice_ended)
                self.sharing.slice_started(now)
                self.says(room)
                room.slices.append((now, now + self.slice_seconds))
                self.doing = "prefill", now, self.slice_seconds
                if self.stops_in_slice is not None:
                    self.stops_in_slice -= 1
                    if self.stops_in_slice < 0:
                        return None
                return now + self.slice_seconds
        else:
            self.sharing.wants_no_prefill(now)
        hold = self.sharing.hold_decode(now)
        self.says(room)
        if decodes and hold is None:
            assert self.step_seconds is not None
            self.doing = "decode", now, self.step_seconds
            return now + self.step_seconds
        return now + self.settings.poll_seconds


def key(number: int) -> WorkerKey:
    return WorkerKey(number, number)


def overlapping(slices: list[tuple[float, float]]) -> int:
    ordered = sorted(slices)
    return sum(b[0] < a[1] - 1e-9 for a, b in pairwise(ordered))


@settings(max_examples=ROOMS)
@given(
    st.lists(st.tuples(st.floats(0.005, 0.15), st.integers(0, 1)), min_size=1, max_size=4),
    st.lists(st.floats(0.05, 0.3), min_size=1, max_size=3),
)
@example(decoders=[(0.140625, 0)], prompts=[0.25, 0.0625])  # a slow row: the patience of the short slice ran out
def test_rows_keep_their_share_beside_prompts_of_other_models(
    decoders: list[tuple[float, int]], prompts: list[float]
) -> None:
    """Whatever the steps and slices, every decoding row of no lower class keeps half of its rate, slices never
    overlap, and each prompt still gets its part of the device."""
    room = Room()
    room.workers = [
        SimulatedWorker(key(n), INTERACTIVE, step_seconds=step, starts=n / 1000) for n, (step, _) in enumerate(decoders)
    ]
    prefillers = [
        SimulatedWorker(key(10 + n), INTERACTIVE, prefill_seconds=1e9, slice_seconds=seconds, starts=3.0 + n / 1000)
        for n, seconds in enumerate(prompts)
    ]
    room.workers += prefillers
    room.run(3.0)
    before = [worker.decoded for worker in room.workers]
    room = Room(workers=room.workers)
    seconds = 20.0
    for worker in room.workers:
        worker.starts = max(worker.starts, 3.0)
    room.run(3.0 + seconds)

    for worker, start in zip(room.workers, before, strict=True):
        if worker.step_seconds is not None:
            # The last slice may not be paid for, and what a step takes is a median: hence not quite the half.
            assert worker.decoded - start >= 0.48 * seconds
    assert overlapping(room.slices) == 0
    assert sum(worker.prefilled for worker in prefillers) >= 0.2 * seconds
    shares = sorted(worker.prefilled / worker.slice_seconds for worker in prefillers)
    assert shares[0] >= 0.6 * shares[-1] - 2, "slices go round"


def test_standard_rows_keep_half_of_the_device_beside_interactive_ones_elsewhere() -> None:
    """Somebody waits for these, too: they rest as long as they work, and no longer."""
    room = Room()
    interactive = SimulatedWorker(key(1), INTERACTIVE, step_seconds=0.02)
    standard = SimulatedWorker(key(2), STANDARD, step_seconds=0.02)
    room.workers = [interactive, standard]
    room.run(100.0)

    assert 45.0 <= standard.decoded <= 55.0


def test_batch_keeps_its_guaranteed_share_and_not_much_more() -> None:
    """A batch prompt and batch rows beside an interactive row that never ends: held back, never starved."""
    room = Room()
    interactive = SimulatedWorker(key(1), INTERACTIVE, step_seconds=0.02)
    prompt = SimulatedWorker(key(2), BATCH, prefill_seconds=1e9)
    rows = SimulatedWorker(key(3), BATCH, step_seconds=0.02)
    room.workers = [interactive, prompt, rows]
    room.run(100.0)

    assert 8.0 <= prompt.prefilled <= 11.0
    assert 7.0 <= rows.decoded <= 12.0
    assert interactive.decoded >= 85.0


def test_without_a_higher_class_nothing_rests() -> None:
    """A batch prompt has the device when nobody is above it."""
    room = Room()
    room.workers = [SimulatedWorker(key(1), BATCH, prefill_seconds=10.0)]
    room.run(100.0)

    done = room.workers[0].done_at
    assert done is not None
    assert done <= 10.5


def test_batch_prompts_are_not_starved_by_a_stream_of_interactive_ones() -> None:
    """Strict between classes, with ageing."""
    room = Room()
    batch = SimulatedWorker(key(9), BATCH, prefill_seconds=1e9)
    room.workers = [SimulatedWorker(key(n), INTERACTIVE, prefill_seconds=1e9) for n in range(3)] + [batch]
    room.run(60.0)

    assert batch.longest_wait <= 2 * SETTINGS.longest_rest_seconds + 1.0
    assert batch.prefilled >= 0.05 * 60.0


@settings(max_examples=ROOMS)
@given(slices=st.integers(0, 5), has_row=st.booleans())
def test_a_stopped_holder_stops_nobody_for_long(*, slices: int, has_row: bool) -> None:
    """SIGSTOP amid a slice, lease in hand: the others go on after the limit, and keep their own order among them."""
    room = Room()
    stopped = SimulatedWorker(key(1), INTERACTIVE, prefill_seconds=1e9, stops_in_slice=slices)
    others = [SimulatedWorker(key(n), INTERACTIVE, prefill_seconds=4.0, starts=0.001 * n) for n in (2, 3)]
    room.workers = [stopped, *others]
    if has_row:
        room.workers.append(SimulatedWorker(key(4), INTERACTIVE, step_seconds=0.03))
    room.run(60.0)

    assert room.lease is stopped
    for other in others:
        assert other.done_at is not None
        assert other.longest_wait <= SETTINGS.stopped_after_seconds + 2.0
    assert overlapping(room.slices) == 0
