"""Which of the workers that share one device may go next: this worker's side of it. Pure.

No operating system ranks GPU work between processes, so workers do it themselves. Each says on a board what it does
(`Activity`), sees what the others say (`Neighbour`), and holds itself back. The rules, in the order they are asked:

1. *Debt.* Whoever ran a slice of a prompt waits until the rows of other models, unless of a lower class, have kept
   their share of the time since the slice began: their steps since then, times what a step of theirs takes
   undisturbed. No longer than `patience` times what would be owed if they had stood still, or than so many steps of
   theirs, if those are longer: a short slice must not be over and forgotten before a slow row could make one.
2. *Rest.* While a higher class is active elsewhere, work of T seconds is followed by a rest that leaves it its class's
   guaranteed share of the time: half for standard, since somebody waits for that, too, and with many models one of them
   is always answering an interactive request; a tenth for batch.
3. *Turn.* Of several that could prefill now, the highest class goes first, then who waits longest. Who waits for
   long counts as of the highest class, so no class starves.
4. *Lease.* One worker at a time prefills, from its slice's beginning until its debt is paid.

A neighbour that is active and has said nothing for `stopped_after_seconds` counts as stopped: nothing is owed to it,
and its lease stops nobody. Being wrong about that costs one slice beside another.
"""

import enum
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import Struct

from protocol.latency import LatencyClass

WARM_RANK = max(latency_class.rank for latency_class in LatencyClass) + 1
"""What only warms the cache comes after every class that somebody waits for."""

_STEP_SAMPLES = 15


class PrefillState(enum.IntEnum):
    """Where a worker stands with its prompts, as others need to know it."""

    NONE = 0
    WANTED = 1
    """Could run a slice now, and waits for its turn or the lease."""
    RUNNING = 2
    PAYING = 3
    """Its slice ended; other models' rows catch up."""


class Activity(Struct, frozen=True, kw_only=True):
    """What a worker says of itself. Ranks are those of `LatencyClass`, or WARM_RANK.

    `active_rank` is the highest class waiting or running, None when idle; `decoding_rank` that of its decoding rows.
    `step_seconds` is what one of its decode steps takes when no other model prefills; 0 is not known yet.
    `prefill_since` is when the present prefill state began (monotonic, which all processes of a machine share).
    """

    active_rank: int | None = None
    decoding_rank: int | None = None
    decoding_rows: int = 0
    decode_steps: int = 0
    step_seconds: float = 0.0
    slices: int = 0
    prefill_state: PrefillState = PrefillState.NONE
    prefill_rank: int = 0
    prefill_since: float = 0.0


class WorkerKey(Struct, frozen=True, order=True):
    """One life of one worker."""

    incarnation: int
    pid: int


class Neighbour(Struct, frozen=True, kw_only=True):
    """Another worker's latest word, said at `updated` (monotonic)."""

    key: WorkerKey
    activity: Activity
    updated: float


class Load(Struct, frozen=True, kw_only=True):
    """What this worker's scheduler has: see `Activity`."""

    active_rank: int | None = None
    decoding_rank: int | None = None
    decoding_rows: int = 0


HeldBy = Literal["other_model", "higher_class"]


class Hold(Struct, frozen=True, kw_only=True):
    """Not now. Ask again at `until`, or earlier."""

    held_by: HeldBy
    until: float


@dataclass(frozen=True, kw_only=True)
class SharingSettings:
    """`decode_shares` of the time, by their class, are kept for other models' rows while a prompt of no higher class is
    read, as beside rows of one's own. `guaranteed_shares`, by the class of the work, are kept for it beside higher
    classes; the first has none above it. All are above 0.

    `rested_steps` decode steps run between two rests.
    """

    decode_shares: tuple[float, ...] = (0.5, 0.2, 0.2)
    guaranteed_shares: tuple[float, ...] = (1.0, 0.5, 0.1, 0.1)
    patience: float = 2.0
    stopped_after_seconds: float = 3.0
    longest_rest_seconds: float = 2.0
    turn_seconds: float = 0.1
    poll_seconds: float = 0.004
    rested_steps: int = 4


@dataclass(frozen=True, kw_only=True)
class SliceTaken:
    """A slice of ours: when, of which class, and how many steps each decoding neighbour had made when it began."""

    rank: int
    started: float
    ended: float
    steps_before: dict[WorkerKey, int]


def is_stopped(neighbour: Neighbour, now: float, settings: SharingSettings) -> bool:
    """Whether it went silent in the midst of work: stopped, wedged or gone."""
    return neighbour.activity.active_rank is not None and now - neighbour.updated > settings.stopped_after_seconds


def is_paid(taken: SliceTaken, neighbours: tuple[Neighbour, ...], now: float, settings: SharingSettings) -> bool:
    """Whether other models' rows have kept their share of the time since this slice began, or had their chance."""
    return not any(_is_owed(taken, neighbour, now, settings) for neighbour in neighbours)


def _is_owed(taken: SliceTaken, neighbour: Neighbour, now: float, settings: SharingSettings) -> bool:
    activity = neighbour.activity
    before = taken.steps_before.get(neighbour.key)
    if before is None or activity.decoding_rank is None or activity.decoding_rank > taken.rank:
        return False
    share = settings.decode_shares[activity.decoding_rank]
    full_debt_seconds = (taken.ended - taken.started) * share / (1 - share)
    had_its_chance = now >= taken.ended + settings.patience * max(full_debt_seconds, activity.step_seconds)
    if had_its_chance or is_stopped(neighbour, now, settings):
        return False
    steps = activity.decode_steps - before
    if activity.step_seconds <= 0:
        return steps == 0
    return steps * activity.step_seconds < share * (now - taken.started)


def has_higher_class(rank: int, neighbours: tuple[Neighbour, ...], now: float, settings: SharingSettings) -> bool:
    """Whether a class above `rank` is active in another worker that runs."""
    return any(
        (active := neighbour.activity.active_rank) is not None
        and active < rank
        and not is_stopped(neighbour, now, settings)
        for neighbour in neighbours
    )


def rest_seconds(rank: int, worked_seconds: float, settings: SharingSettings) -> float:
    """How long work of this class rests after it worked, beside a higher one."""
    share = settings.guaranteed_shares[rank]
    return min(worked_seconds * (1 - share) / share, settings.longest_rest_seconds)


class Permits(Struct, frozen=True, kw_only=True):
    """What may run now; None is no hold. `company`: another worker is at work."""

    prefill: Hold | None = None
    decode: Hold | None = None
    company: bool = False


class DeviceSharing(Protocol):
    """What the step loop asks before a step and tells after it. Owned by the step thread."""

    def ask(self, load: Load, prefill_rank: int | None) -> Permits:
        """What may run. `prefill_rank` is the class of the slice that would come next; if it is not held it must."""
        ...

    def rows_elsewhere(self) -> int | None:
        """The highest class that decodes in other models, when `ask` was called: slices should be short beside it."""
        ...

    def has_company(self, load: Load) -> bool:
        """Whether another worker is at work at this moment; says what this one does. Asked while a slice stands."""
        ...

    def slice_started(self) -> None:
        """The slice that `ask` permitted begins."""
        ...

    def slice_ended(self) -> None:
        """It is in the KV cache."""
        ...

    def decoded(self) -> None:
        """A decode step ended."""
        ...

    def idle(self, load: Load) -> None:
        """Nothing can run before a message comes."""
        ...

    def close(self) -> None:
        """This worker ends."""
        ...


class Alone:
    """A `DeviceSharing` as if no other worker were there: never holds."""

    def __init__(self, share_cores: Callable[[int], None] = lambda _workers: None) -> None:
        """`share_cores` is told before each step that one worker is at work."""
        self._share_cores = share_cores

    def ask(self, load: Load, prefill_rank: int | None) -> Permits:
        self._share_cores(1)
        return Permits()

    def rows_elsewhere(self) -> int | None:
        return None

    def has_company(self, load: Load) -> bool:
        return False

    def slice_started(self) -> None:
        pass

    def slice_ended(self) -> None:
        pass

    def decoded(self) -> None:
        pass

    def idle(self, load: Load) -> None:
        pass

    def close(self) -> None:
        pass


class Sharing:
    """This worker's side, with what it must remember. `shared_device` feeds it the board, the lease and the clock."""

    def __init__(self, key: WorkerKey, settings: SharingSettings) -> None:
        self._key = key
        self._settings = settings
        self._neighbours: tuple[Neighbour, ...] = ()
        self._load = Load()
        self._slices = 0
        self._decode_steps = 0
        self._state = PrefillState.NONE
        self._rank = 0
        self._since = 0.0
        self._slice_started = 0.0
        self._steps_before: dict[WorkerKey, int] = {}
        self._taken: SliceTaken | None = None
        self._refused_since: float | None = None
        self._prefill_rests_until = 0.0
        self._decode_rests_until = 0.0
        self._worked_steps = 0
        self._worked_seconds = 0.0
        self._last_decoded: float | None = None
        self._step_time = StepTime()

    def activity(self) -> Activity:
        """What to put on the board."""
        return Activity(
            active_rank=self._load.active_rank,
            decoding_rank=self._load.decoding_rank,
            decoding_rows=self._load.decoding_rows,
            decode_steps=self._decode_steps,
            step_seconds=self._step_time.seconds,
            slices=self._slices,
            prefill_state=self._state,
            prefill_rank=self._rank,
            prefill_since=self._since,
        )

    def sees(self, load: Load, neighbours: tuple[Neighbour, ...], now: float) -> None:
        """The state of things, before anything is asked."""
        self._load = load
        self._neighbours = neighbours
        self._step_time.sees(neighbours)
        if self._taken is not None and is_paid(self._taken, neighbours, now, self._settings):
            self._taken = None
            self._enter(PrefillState.NONE, now)

    @property
    def needs_lease(self) -> bool:
        """Whether a lease that is held must still be: a slice runs, or others have not caught up with it."""
        return self._state in (PrefillState.RUNNING, PrefillState.PAYING)

    def rows_elsewhere(self, now: float) -> int | None:
        """The highest class that decodes in a worker that runs."""
        running = [n.activity for n in self._neighbours if not is_stopped(n, now, self._settings)]
        return min((a.decoding_rank for a in running if a.decoding_rank is not None), default=None)

    def others_at_work(self, now: float) -> int:
        """How many other workers have something to do, and do it."""
        return sum(
            neighbour.activity.active_rank is not None and not is_stopped(neighbour, now, self._settings)
            for neighbour in self._neighbours
        )

    def wants_no_prefill(self, now: float) -> None:
        """There is no prompt, or its turn in this worker has not come."""
        if self._state is PrefillState.WANTED:
            self._enter(PrefillState.NONE, now)

    def hold_prefill(self, rank: int, now: float) -> Hold | None:
        """Debt, rest and turn. None: ask for the lease, and go if it is given.

        The lease comes last, since to hold it and not go would keep others from going.
        """
        settings = self._settings
        if self._taken is not None:
            return self._hold("other_model", now)
        if now < self._prefill_rests_until and has_higher_class(rank, self._neighbours, now, settings):
            self._enter(PrefillState.NONE, now)
            return self._hold("higher_class", now)
        if self._state is not PrefillState.WANTED or self._rank != rank:
            self._enter(PrefillState.WANTED, now)
            self._rank = rank
        if any(self._goes_first(neighbour, now) for neighbour in self._neighbours):
            return self._hold("other_model", now)
        if any(not is_stopped(holder, now, settings) for holder in self._holders()):
            return self._hold("other_model", now)
        return None

    def lease_refused(self, now: float) -> Hold | None:
        """Another has it. None: go without, since its holder is stopped, or for long nobody was seen to use it."""
        if self._refused_since is None:
            self._refused_since = now
        if self._holders() or now - self._refused_since > self._settings.stopped_after_seconds:
            return None
        return self._hold("other_model", now)

    def lease_taken(self) -> None:
        self._refused_since = None

    def hold_decode(self, now: float) -> Hold | None:
        """Rest, of rows whose class is lower than what runs elsewhere."""
        rank = self._load.decoding_rank
        if rank is None or now >= self._decode_rests_until:
            return None
        if not has_higher_class(rank, self._neighbours, now, self._settings):
            return None
        self._last_decoded = None
        return self._hold("higher_class", now)

    def slice_started(self, now: float) -> None:
        self._enter(PrefillState.RUNNING, now)
        self._slice_started = now
        self._last_decoded = None
        self._steps_before = {
            neighbour.key: neighbour.activity.decode_steps
            for neighbour in self._neighbours
            if neighbour.activity.decoding_rank is not None
        }

    def slice_ended(self, now: float) -> None:
        self._slices += 1
        self._taken = SliceTaken(
            rank=self._rank, started=self._slice_started, ended=now, steps_before=self._steps_before
        )
        self._prefill_rests_until = now + rest_seconds(self._rank, now - self._slice_started, self._settings)
        self._enter(PrefillState.PAYING, now)

    def decoded(self, now: float) -> None:
        """A step ended. It took the time since the one before, unless something else came between.

        Rests come after some steps, not each: on a GPU steps are pipelined, so one alone runs during the rest after it.
        """
        self._decode_steps += 1
        seconds = None if self._last_decoded is None else now - self._last_decoded
        self._last_decoded = now
        if seconds is not None:
            self._step_time.took(seconds, self._neighbours)
        self._worked_steps += 1
        self._worked_seconds += self._step_time.seconds if seconds is None else seconds
        if self._worked_steps >= self._settings.rested_steps:
            rank = self._load.decoding_rank or 0
            self._decode_rests_until = now + rest_seconds(rank, self._worked_seconds, self._settings)
            self._worked_steps, self._worked_seconds = 0, 0.0

    def idle(self, now: float) -> None:
        """The loop may now sleep until a message comes, and could not see a debt being paid."""
        self._taken = None
        self._refused_since = None
        self._last_decoded = None
        self._enter(PrefillState.NONE, now)

    def _holders(self) -> list[Neighbour]:
        return [neighbour for neighbour in self._neighbours if neighbour.activity.prefill_state in _HAVE_LEASE]

    def _goes_first(self, neighbour: Neighbour, now: float) -> bool:
        activity = neighbour.activity
        if activity.prefill_state is not PrefillState.WANTED:
            return False
        # It must be about to ask again, or its turn would be nobody's.
        if now - neighbour.updated > max(self._settings.turn_seconds, 2 * activity.step_seconds):
            return False
        theirs = (self._aged(activity.prefill_rank, activity.prefill_since, now), activity.prefill_since, neighbour.key)
        return theirs < (self._aged(self._rank, self._since, now), self._since, self._key)

    def _aged(self, rank: int, since: float, now: float) -> int:
        return 0 if now - since > self._settings.longest_rest_seconds else rank

    def _enter(self, state: PrefillState, now: float) -> None:
        if state is not self._state:
            self._state, self._since = state, now

    def _hold(self, held_by: HeldBy, now: float) -> Hold:
        return Hold(held_by=held_by, until=now + self._settings.poll_seconds)


_HAVE_LEASE = (PrefillState.RUNNING, PrefillState.PAYING)


class StepTime:
    """What a decode step takes when no other model prefills: the median of the latest such steps.

    Until there is one, the shortest of the disturbed ones.
    """

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._shortest = 0.0
        self._pending: tuple[float, tuple[Neighbour, ...]] | None = None
        self.seconds = 0.0

    def took(self, seconds: float, before: tuple[Neighbour, ...]) -> None:
        """A step ended that began when things stood as in `before`. Whether it was quiet, the next `sees` decides."""
        self._pending = seconds, before

    def sees(self, after: tuple[Neighbour, ...]) -> None:
        if self._pending is None:
            return
        seconds, before = self._pending
        self._pending = None
        if _slices(before) == _slices(after):
            self._quiet.append(seconds)
            self.seconds = statistics.median(self._quiet)
        elif not self._quiet:
            self._shortest = min(seconds, self._shortest) if self._shortest else seconds
            self.seconds = self._shortest


def _slices(neighbours: tuple[Neighbour, ...]) -> object:
    """Equal before and after a step if no slice ran beside it. A running one equals nothing."""
    if any(neighbour.activity.prefill_state is PrefillState.RUNNING for neighbour in neighbours):
        return object()
    return {neighbour.key: neighbour.activity.slices for neighbour in neighbours}
