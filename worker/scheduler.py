"""Which step comes next. Pure: `next_step` decides and changes nothing; the other methods are told what happened.

Who goes next, in the order it is asked:

1. **Rows.** A prompt that is done joins the decode batch as soon as a row is free. A row is *parked*, with its KV, when
   a higher class needs its place; rows of the batch class also when they would stretch the others' decode steps to
   more than `stretch` times. Who had no stint of `stint_seconds` in `parked_seconds` is *due*: every other row that
   gets free is his before anybody else's, who was due first first, and for a stint nobody parks him again.
2. **Decode before prefill, while decode is owed.** What a slice owes the decoding rows is paid before the next slice
   of its lane or a lower one (`pacing`).
3. **Lane.** Of the prompts that can run a slice, those of the highest lane go first. A lane that let
   `lower_lane_every` slices of higher lanes by takes the next one. What only warms the cache never does.
4. **Prompt.** In a lane the prompt with the least work left goes first, where a tenant's lead over the others counts as
   work, up to `tenant_lead_seconds`. So a ten-token question does not wait behind a repository: it goes between two
   slices of it. Every `oldest_every`th slice of a lane goes to its oldest prompt, and every `oldest_every`th start to
   the oldest that has not started, so the repository gets done.
5. **A prefix is computed once.** A prompt that has not started, and shares more with one in prefill than was hot, gives
   its turn to that one.

6. **Memory.** Before all that: when the rows' KV outgrows its budget, or a higher class has no room, `live_kv` says who
   is *preempted*. He gives up his KV, waits again, and goes on from where he was; what the prefix cache kept of it need
   not be computed again.

A prompt can run a slice when its blocks from disk came (or their deadline passed), and it has started or may: a row
will be free for it, fewer than `max_prefills` prompts of its lane are in prefill, and its KV has room. Rows of lower
classes are as good as free, since they give way. Where those of higher ones leave none, a lane may start one prompt
every `parked_seconds` nevertheless, up to `max_rows` of its own: that one comes to a row as who was parked does.

So nobody waits without end, however many others come, but what only warms the cache. A lane starts a prompt at least
every `parked_seconds` and `lower_lane_every` slices of higher lanes, and one of `oldest_every` is its oldest. Started,
that one waits for as many slices at most for each of its own, and for what those owe. Its prompt done, it is due after
`parked_seconds`, and waits for two rows to get free for each that is due before it. And who is of the highest class
waits for a row that one of a lower has for a stint at most, and for another for each of his class before him.

A slice is bounded by *time*, as `pacing` says. Where the engine can, and where it was measured to be no slower, a slice
beside decoding rows is *mixed*: the same pass gives each row its next token.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from protocol.ids import BLOCK_TOKENS, RequestId
from worker import live_kv, pacing
from worker.cost_model import CostModel
from worker.pacing import SchedulerSettings
from worker.sequence import MEMORY, BooksDoNotAddUp, Lane, Sequence, shared_tokens
from worker.tenants import TenantBooks


@dataclass(frozen=True)
class Open:
    """Give this sequence its KV cache, filled with what is cached of its prefix."""

    request_id: RequestId


@dataclass(frozen=True)
class Prefill:
    """Run the next `tokens` of this prompt, on behalf of `lane`: its own, or that of a prompt that waits for it."""

    request_id: RequestId
    tokens: int
    lane: Lane = Lane.STANDARD


@dataclass(frozen=True)
class Mixed:
    """As `Prefill`, and a decode step of all rows, in one pass."""

    request_id: RequestId
    tokens: int
    lane: Lane = Lane.STANDARD


@dataclass(frozen=True)
class Join:
    """This row's prompt is done: it takes part in decode from the next step on."""

    request_id: RequestId


@dataclass(frozen=True)
class Park:
    """Take this row out of the decode batch, keeping its KV."""

    request_id: RequestId


@dataclass(frozen=True)
class Preempt:
    """Take this row's KV, keeping it in the prefix cache: it waits, and is opened again with all its tokens."""

    request_id: RequestId


@dataclass(frozen=True)
class Decode:
    """Run one decode step of all rows."""


@dataclass(frozen=True)
class Idle:
    """Nothing can run before a message arrives, or before `until` (on the caller's clock) if there is one."""

    until: float | None = None


Step = Open | Prefill | Mixed | Join | Park | Preempt | Decode | Idle

_TOLD_AFTER_SECONDS = 2.0
"""A prompt that has begun and then waits for so long is told why: slices of others may be a second each."""


@dataclass(frozen=True)
class Standing:
    """Where a request stands that cannot run yet, as in `protocol.generation.Waiting`."""

    request_id: RequestId
    ahead: int
    eta_seconds: float | None
    held_by: str


class Scheduler:
    """Owned by the step thread. A sequence is waiting (its prompt is not done), parked, or decoding."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.costs = CostModel(settings.first_rate_tokens_per_second)
        self._settings = settings
        self._waiting: dict[RequestId, Sequence] = {}
        self._parked: dict[RequestId, Sequence] = {}
        self._decoding: dict[RequestId, Sequence] = {}
        self._tenants = TenantBooks()
        self._debts = dict.fromkeys(Lane, 0.0)
        self._slices = dict.fromkeys(Lane, 0)
        self._let_by = dict.fromkeys(Lane, 0)
        self._starts = dict.fromkeys(Lane, 0)
        self._started_at = dict.fromkeys(Lane, -math.inf)
        self._next_row_is_for: Literal["due", "highest"] = "due"
        self._rows_elsewhere: Lane | None = None
        self._slices_held_by = ""
        self.preemptions = 0

    # --- books -----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._decoding) + len(self._parked)

    @property
    def is_decoding(self) -> bool:
        return bool(self._decoding)

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._parked and not self._decoding

    @property
    def rate_tokens_per_second(self) -> float:
        """How fast prompts are prefilled, by the latest slices."""
        return self.costs.tokens_per_second

    @property
    def debt_seconds(self) -> float:
        return max(self._debts.values())

    def get(self, request_id: RequestId) -> Sequence | None:
        return self._waiting.get(request_id) or self._parked.get(request_id) or self._decoding.get(request_id)

    def decodes(self, request_id: RequestId) -> bool:
        """Whether it is a row of the decode batch now."""
        return request_id in self._decoding

    def decoding_lanes(self) -> list[Lane]:
        return [sequence.lane for sequence in self._decoding.values()]

    def sequences(self) -> list[Sequence]:
        return [*self._waiting.values(), *self._parked.values(), *self._decoding.values()]

    @property
    def live_kv_budget_bytes(self) -> int | None:
        """How much the KV of all rows may take."""
        return self._settings.live_kv.budget_bytes

    def _live(self) -> list[Sequence]:
        """All that have KV."""
        started = (s for s in self._waiting.values() if s.has_started)
        return [*self._decoding.values(), *self._parked.values(), *started]

    # --- what comes next -------------------------------------------------------------------------------------------

    def next_step(self, now: float) -> Step:
        """The first rule that has something to do says what. Asking changes nothing."""
        if victim := self._settings.live_kv.victim(self._live()):  # rule 6
            return Preempt(victim.request_id)
        if change := self._row_change(now):  # rule 1
            return change
        ready = [s for s in self._ready(now) if not self._is_owed(s.lane)]  # rule 2
        if ready and not self._has_to_learn_steps():
            return self._slice_of(ready)  # rules 3, 4 and 5
        if self._decoding:
            return Decode()
        deadlines = [s.blocks_deadline for s in self._waiting.values() if s.blocks_deadline is not None]
        return Idle(min(deadlines, default=None))

    def _row_change(self, now: float) -> Join | Park | None:
        """Rule 1: of the rows that are done with their prompt, which should decode now, or stop to."""
        batch = sum(s.lane is Lane.BATCH for s in self._decoding.values())
        higher = len(self._decoding) - batch
        parkable = [s for s in self._decoding.values() if now >= s.may_be_parked_at and not s.steps_owed]
        last = max(reversed(parkable), key=lambda s: s.lane, default=None)  # of the lowest class who joined last
        for sequence in self._in_turn(now):
            if len(self._decoding) < self._settings.max_rows:
                if (
                    sequence.lane is not Lane.BATCH
                    or self._is_due(sequence, now)
                    or not self._would_stretch(higher, batch + 1)
                ):
                    return Join(sequence.request_id)
            elif last is not None and sequence.lane < last.lane:
                return Park(last.request_id)
        if last is not None and last.lane is Lane.BATCH and self._would_stretch(higher, batch):
            return Park(last.request_id)
        return None

    def _is_due(self, parked: Sequence, now: float) -> bool:
        return now - parked.parked_since >= self._settings.parked_seconds

    def _in_turn(self, now: float) -> list[Sequence]:
        """Those that are parked: the first has the next row."""
        due_first = self._next_row_is_for == "due"

        def turn(sequence: Sequence) -> tuple[float, ...]:
            is_due = due_first and self._is_due(sequence, now)
            return (0, sequence.parked_since) if is_due else (1, sequence.lane, sequence.arrived)

        return sorted(self._parked.values(), key=turn)

    def _would_stretch(self, higher_rows: int, batch_rows: int) -> bool:
        """Whether so many rows of the batch class make the others' decode steps more than `stretch` times as long."""
        if not higher_rows or not batch_rows:
            return False
        if not self.costs.knows_step(higher_rows):
            return True  # how else to learn what the higher rows alone would take
        alone = self.costs.step_seconds(higher_rows)
        return self.costs.step_seconds(higher_rows + batch_rows) > self._settings.stretch * alone

    def _is_owed(self, lane: Lane) -> bool:
        """Rule 2: whether the rows that decode are owed time by slices of this lane or a higher one."""
        # What a mixed pass leaves owing is less than a step, mostly: to run one for it would pay far too much.
        payable = self.costs.step_seconds(len(self._decoding)) if self._is_mixing else 0.0
        return any(0 < self._debts[other] >= payable for other in Lane if other <= lane)

    def _ready(self, now: float) -> list[Sequence]:
        """The prompts that can run a slice."""
        openable = {lane for lane in {s.lane for s in self._waiting.values()} if self._may_open(lane, now)}
        ready = [
            s
            for s in self._waiting.values()
            if (s.has_started or s.lane in openable) and (s.blocks_deadline is None or s.blocks_deadline <= now)
        ]
        shut_out = self._shut_out([s for s in ready if not s.has_started])
        return [s for s in ready if s.request_id not in shut_out]

    def _shut_out(self, candidates: list[Sequence]) -> set[RequestId]:
        """For whose KV there is no room. While somebody is overdue, that is everybody else."""
        if self._settings.live_kv.budget_bytes is None:
            return set()
        first = live_kv.overdue(candidates)
        entries = self._settings.live_kv.entries(candidates if first is None else [first], self._live())
        return {s.request_id for s in candidates if entries.get(s.request_id, "none") == "none"}

    def _may_open(self, lane: Lane, now: float) -> bool:
        """Whether one more prompt of this lane may start."""
        in_prefill = sum(s.has_started for s in self._waiting.values() if s.lane is lane)
        if in_prefill >= self._settings.max_prefills:
            return False
        if not self._rows_are_taken(lane):
            return True
        own = sum(s.lane is lane for s in self._row_holders())
        return own < self._settings.max_rows and now - self._started_at[lane] >= self._settings.parked_seconds

    def _rows_are_taken(self, lane: Lane) -> bool:
        """Whether no row would be free for one more prompt of this lane. Rows of lower ones give way."""
        if lane is Lane.WARM:
            return False
        return sum(s.lane <= lane for s in self._row_holders()) >= self._settings.max_rows

    def _row_holders(self) -> Iterable[Sequence]:
        """All that decode, or will as soon as they can."""
        return (s for s in self._live() if s.lane is not Lane.WARM)

    def _slice_of(self, ready: list[Sequence]) -> Open | Preempt | Prefill | Mixed:
        """Lane, then prompt, then whoever already computes what this prompt shares with it."""
        lane = self._lane_of_next(s.lane for s in ready)
        sequence = self._prompt_of_next([s for s in ready if s.lane is lane])
        sequence = self._leader_of(sequence) or sequence
        if not sequence.has_started:
            victim = self._settings.live_kv.gives_way(sequence, self._live())
            return Open(sequence.request_id) if victim is None else Preempt(victim.request_id)
        if self._is_mixing:
            return Mixed(sequence.request_id, self._mixed_tokens(sequence, lane), lane)
        tokens = pacing.slice_tokens(self._settings, self.costs, sequence, self._slice_seconds(lane))
        return Prefill(sequence.request_id, tokens, lane)

    def _lane_of_next(self, lanes: Iterable[Lane]) -> Lane:
        """Rule 3: the highest, unless a lower one has let enough slices by."""
        ordered = sorted(set(lanes))
        passed = [lane for lane in ordered if self._let_by[lane] >= self._settings.lower_lane_every]
        return passed[0] if passed and passed[0] is not Lane.WARM else ordered[0]

    def _prompt_of_next(self, ready: list[Sequence]) -> Sequence:
        """Rule 4: the one with the least work left, and now and then the oldest. `ready` are of one lane."""
        lane = ready[0].lane
        if self._slices[lane] % self._settings.oldest_every == self._settings.oldest_every - 1:
            return min(ready, key=lambda s: s.arrived)
        leads = self._tenants.leads()
        least = min(ready, key=lambda s: (self._work_left(s, leads), not s.has_started))
        if least.has_started or self._starts[lane] % self._settings.oldest_every != self._settings.oldest_every - 1:
            return least
        return min((s for s in ready if not s.has_started), key=lambda s: s.arrived)

    def _work_left(self, sequence: Sequence, leads: dict[str, float]) -> float:
        """In seconds, with what its tenant had more of the device than others lately."""
        lead = min(leads[sequence.tenant], self._settings.tenant_lead_seconds)
        return lead + self.costs.prefill_seconds(sequence.prefill_left, sequence.prefilled)

    def _leader_of(self, sequence: Sequence) -> Sequence | None:
        """Rule 5: the prompt in prefill that is still to compute most of what this one has in common with it."""
        if sequence.has_started:
            return None
        leaders: list[tuple[int, Sequence]] = []
        for other in self._waiting.values():
            if other.has_started and (shared := shared_tokens(sequence.grains, other.grains)) > other.cached:
                # Whole blocks are kept as they are computed, what fills none when the prompt is done.
                kept_at = min(-(-shared // BLOCK_TOKENS) * BLOCK_TOKENS, other.prefill_total)
                if other.prefilled < kept_at:
                    leaders.append((shared, other))
        return max(leaders, key=lambda pair: pair[0])[1] if leaders else None

    # --- how big a slice is ----------------------------------------------------------------------------------------

    @property
    def _is_mixing(self) -> bool:
        """Whether the rows that decode ride along in slices."""
        return self._settings.slices == "mixed" and bool(self._decoding) and self.costs.mixing_pays()

    def _has_to_learn_steps(self) -> bool:
        """Whether a step must run alone first: what a mixed pass takes is told from what a step takes."""
        return self._is_mixing and self.costs.step_seconds(len(self._decoding)) == 0

    def _slice_seconds(self, lane: Lane) -> float:
        """Of a slice alone. A gap between two tokens is a slice and the step after it."""
        rows = self._lanes_beside()
        if not rows:
            return pacing.idle_slice_seconds(self._settings, lane)
        gap = pacing.gap_seconds(self._settings, lane, min(rows))
        step_seconds = self.costs.step_seconds(len(self._decoding)) if self._decoding else 0.0
        return max(gap - step_seconds, gap / 2)

    def _mixed_tokens(self, sequence: Sequence, lane: Lane) -> int:
        gap = pacing.gap_seconds(self._settings, lane, min(self._lanes_beside()))
        return pacing.mixed_tokens(self._settings, self.costs, sequence, gap, len(self._decoding))

    def _lanes_beside(self) -> list[Lane]:
        """Of the rows that decode on this device, here or in other workers."""
        return self.decoding_lanes() + ([] if self._rows_elsewhere is None else [self._rows_elsewhere])

    # --- what happened ---------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence.request_id] = sequence
        self._tenants.arrived(sequence.tenant)

    def blocks_arrived(self, request_id: RequestId) -> None:
        """Its blocks from disk came, or never will. An unknown id is fine."""
        if sequence := self._waiting.get(request_id):
            sequence.blocks_deadline = None

    def remove(self, request_id: RequestId) -> Sequence | None:
        """It finished, failed or was cancelled. Idempotent; an unknown id is fine."""
        for place in (self._waiting, self._parked, self._decoding):
            if sequence := place.pop(request_id, None):
                self._tenants.left(sequence.tenant)
                self._forgive()
                return sequence
        return None

    def beside(self, rows_elsewhere: Lane | None, slices_held_by: str) -> None:
        """What other models on this device do: the highest lane that decodes there, and whom our slices wait for."""
        self._rows_elsewhere = rows_elsewhere
        self._slices_held_by = slices_held_by

    def waited(self, seconds: float) -> None:
        """Nothing ran here for others' sake."""
        self._count_held(seconds, None)

    def opened(self, request_id: RequestId, cached_tokens: int, now: float) -> None:
        """Its KV cache exists and holds `cached_tokens` of its prompt (and of what it drew before it was preempted)."""
        sequence = self._waiting[request_id]
        self._starts[sequence.lane] += 1
        self._started_at[sequence.lane] = now
        sequence.is_open = True
        sequence.memory_held_before = sequence.held.get(MEMORY, 0.0)
        sequence.advanced_at = now
        sequence.prefilled = cached_tokens
        if sequence.prefill_started is None:
            sequence.prefill_started = now
            sequence.cached = cached_tokens
        self._prompt_may_be_done(sequence, now)

    def prefilled(self, step: Prefill, seconds: float, now: float) -> None:
        """A slice ran. When nothing is left the prompt is parked, or is gone if it was only to warm."""
        self.costs.prefilled(step.tokens, self._waiting[step.request_id].prefilled, seconds)
        self._advanced(step, seconds, 0.0, now)

    def mixed(self, step: Mixed, seconds: float, now: float) -> None:
        """As `prefilled`, and each row drew a token."""
        rows = len(self._decoding)
        self.costs.mixed(step.tokens, self._waiting[step.request_id].prefilled, rows, seconds)
        decoded_seconds = min(self.costs.step_seconds(rows), seconds)
        for sequence in self._decoding.values():
            sequence.steps_owed = 0
            self._tenants.charge(sequence.tenant, decoded_seconds / rows)
        # What its own lane owes is less by this step below; of the others' debts it pays as much as any step does.
        for lane in set(Lane) - {step.lane}:
            self._debts[lane] = max(0.0, self._debts[lane] - decoded_seconds)
        self._advanced(step, seconds, decoded_seconds, now)

    def _advanced(self, step: Prefill | Mixed, seconds: float, decoded_seconds: float, now: float) -> None:
        sequence = self._waiting[step.request_id]
        self._count_held(seconds, sequence)
        sequence.prefilled += step.tokens
        sequence.slices += 1
        sequence.advanced_at = now
        self._tenants.charge(sequence.tenant, seconds - decoded_seconds)
        self._slices[step.lane] += 1
        self._let_by[step.lane] = 0
        for lane in {s.lane for s in self._ready(now) if s.lane > step.lane}:
            self._let_by[lane] += 1
        if self._decoding:
            rows = min(self.decoding_lanes())
            self._debts[step.lane] += pacing.owed_seconds(
                step.lane, rows, seconds=seconds, decoded_seconds=decoded_seconds
            )
        self._prompt_may_be_done(sequence, now)

    def joined(self, request_id: RequestId, now: float) -> None:
        """A parked row takes part in decode."""
        sequence = self._parked.pop(request_id)
        is_stint = self._is_due(sequence, now)
        self._next_row_is_for = "highest" if is_stint and self._next_row_is_for == "due" else "due"
        sequence.joined_at = now
        sequence.may_be_parked_at = now + self._settings.stint_seconds if is_stint else now
        sequence.steps_owed = 1 if is_stint else 0
        if sequence.decode_started is None:
            sequence.decode_started = now
        self._decoding[request_id] = sequence

    def parked(self, request_id: RequestId, now: float) -> None:
        """A decoding row left the batch, for a while."""
        sequence = self._decoding.pop(request_id)
        if now - sequence.joined_at >= self._settings.stint_seconds:  # else it is still due when it would have been
            sequence.parked_since = now
        self._parked[request_id] = sequence
        self._forgive()

    def preempted(self, request_id: RequestId) -> None:
        """It has no KV any more, and waits."""
        if (sequence := self._waiting.get(request_id)) is not None:
            sequence.furthest = max(sequence.furthest, sequence.prefilled)
        else:
            sequence = self._parked.pop(request_id, None) or self._decoding.pop(request_id)
            sequence.furthest = sequence.tokens - 1
        sequence.replayed = sequence.drawn
        sequence.prefilled = 0
        sequence.is_open = False
        sequence.preemptions += 1
        self.preemptions += 1
        self._waiting[request_id] = sequence
        self._forgive()

    def drew(self, request_id: RequestId) -> None:
        """A row has a token more."""
        self._decoding[request_id].drawn += 1

    def decoded(self, seconds: float, rows: int, *, steps: int = 1) -> None:
        """Rows had `seconds` of the device; in each of `steps` steps, `rows` of them drew a token."""
        if rows:  # else the time is that of a launch only
            self.costs.stepped(rows, seconds / steps)
        for lane in Lane:
            self._debts[lane] = max(0.0, self._debts[lane] - seconds)
        for sequence in self._decoding.values():
            sequence.steps_owed = 0
            self._tenants.charge(sequence.tenant, seconds / len(self._decoding))
        self._count_held(seconds, None)

    def _prompt_may_be_done(self, sequence: Sequence, now: float) -> None:
        """One with nothing left waits for a row, as a parked one does."""
        if sequence.prefill_left > 0:
            return
        del self._waiting[sequence.request_id]
        if sequence.lane is Lane.WARM:
            self._tenants.left(sequence.tenant)
            return
        sequence.parked_since = now
        self._parked[sequence.request_id] = sequence

    def _count_held(self, seconds: float, served: Sequence | None) -> None:
        """These seconds of the device went to others."""
        if not self._waiting and not self._parked:
            return
        for name, held_by in self._holders().items():
            sequence = self._waiting.get(name) or self._parked[name]
            if held_by and sequence is not served:
                sequence.held[held_by] = sequence.held.get(held_by, 0.0) + seconds

    def _forgive(self) -> None:
        """A debt to nobody is none."""
        if not self._decoding:
            self._debts = dict.fromkeys(Lane, 0.0)

    def check(self) -> None:
        """Raise BooksDoNotAddUp if an invariant is broken."""
        places = [*self._waiting, *self._parked, *self._decoding]
        done = [*self._parked.values(), *self._decoding.values()]
        in_prefill = [s.lane for s in self._waiting.values() if s.has_started]
        laws = {
            "debt is never negative": min(self._debts.values()) >= 0,
            "no debt to nobody": bool(self._decoding) or self.debt_seconds == 0,
            "no more rows than allowed": len(self._decoding) <= self._settings.max_rows,
            "a sequence is in one place": len(places) == len(set(places)),
            "decoding or parked means prefilled": all(s.prefill_left == 0 for s in done),
            "waiting means that some of the prompt is left": all(s.prefill_left >= 0 for s in self._waiting.values()),
            "what waits without KV has none": all(s.prefilled == 0 for s in self._waiting.values() if not s.is_open),
            "live KV keeps to its budget": self._settings.live_kv.holds(self._live()),
            "few prompts in prefill": all(in_prefill.count(lane) <= self._settings.max_prefills for lane in Lane),
        }
        if broken := [law for law, holds in laws.items() if not holds]:
            raise BooksDoNotAddUp("; ".join(broken))

    # --- what those who wait are told -------------------------------------------------------------------------------

    def standings(self, now: float) -> list[Standing]:
        """Of every request that has not started, is parked or has not advanced for a while: how many go first, how long
        that takes, and why."""
        leads = self._tenants.leads()
        ordered = sorted(self._waiting.values(), key=lambda s: (s.lane, self._work_left(s, leads)))
        holders = self._holders()
        standings = [Standing(name, 0, None, holders[name]) for name in self._parked]
        seconds = 0.0
        for ahead, sequence in enumerate(ordered):
            seconds += self._seconds_left(sequence)
            if not sequence.has_started or now - sequence.advanced_at >= _TOLD_AFTER_SECONDS:
                held_by = holders[sequence.request_id]
                is_known = held_by in ("", "higher_class")
                standings.append(Standing(sequence.request_id, ahead, seconds if is_known else None, held_by))
        return standings

    def eta_seconds(self, request_id: RequestId) -> float:
        """Until this prompt is done, if none comes that goes before it."""
        sequence = self._waiting.get(request_id)
        if sequence is None:
            return 0.0
        leads = self._tenants.leads()
        own = (sequence.lane, self._work_left(sequence, leads))
        return self._seconds_left(sequence) + sum(
            self._seconds_left(other)
            for other in self._waiting.values()
            if other is not sequence and (other.lane, self._work_left(other, leads)) < own
        )

    def _seconds_left(self, sequence: Sequence) -> float:
        """Until this prompt is done if every slice is its own, with the decode that they owe."""
        seconds = self.costs.prefill_seconds(sequence.prefill_left, sequence.prefilled)
        if not self._decoding or sequence.prefill_left <= 0:
            return seconds
        rows, decoded_seconds, part = min(self.decoding_lanes()), 0.0, 1.0
        if not self._has_to_learn_steps() and self._is_mixing:
            tokens = self._mixed_tokens(sequence, sequence.lane)
            seconds = self.costs.mixed_seconds(tokens, sequence.prefilled, len(self._decoding))
            decoded_seconds = self.costs.step_seconds(len(self._decoding))
            part = tokens / sequence.prefill_left
        owed = pacing.owed_seconds(sequence.lane, rows, seconds=seconds, decoded_seconds=decoded_seconds)
        return (seconds + owed) / part

    def _holders(self) -> dict[RequestId, str]:
        """What each sequence that waits or is parked waits for; empty for those whose turn has not come."""
        top = min((s.lane for s in (*self._waiting.values(), *self._decoding.values())), default=Lane.WARM)
        full = {lane for lane in Lane if self._rows_are_taken(lane)}
        shut_out = self._shut_out([s for s in self._waiting.values() if not s.has_started and s.lane not in full])
        holders: dict[RequestId, str] = {}
        for name, sequence in self._waiting.items():
            if sequence.blocks_deadline is not None:
                holders[name] = "disk"
            elif not sequence.has_started and sequence.lane in full:
                holders[name] = "rows"
            elif name in shut_out:
                holders[name] = MEMORY
            else:
                holders[name] = "higher_class" if top < sequence.lane else self._slices_held_by
        parked_by = "rows" if len(self._decoding) >= self._settings.max_rows else "higher_class"
        return holders | dict.fromkeys(self._parked, parked_by)
