"""What the scheduler knows, and hears of what happened: places, costs, debts, tenants' shares, waits. Pure.

`Scheduler` adds the rules, which only read: what they say does not depend on what was asked before.
"""

import math
from typing import Literal

from protocol.ids import RequestId
from worker import pacing, waits
from worker.cost_model import CostModel
from worker.debts import DecodeDebts
from worker.pacing import SchedulerSettings
from worker.places import Places
from worker.readiness import Readiness
from worker.row_ends import AnswerLengths
from worker.rows import RowTurns
from worker.sequence import LANES, BooksDoNotAddUp, Lane, Sequence
from worker.steps import Mixed, Prefill
from worker.tenants import TenantBooks
from worker.waits import Holders, WaitingTimes

_ROOM_LOOKED_AT_EVERY_SECONDS = 0.1
"""How long it may take until a row that grew counts as the reason why somebody waits."""


class SchedulerBooks:
    """Owned by the step thread."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.costs = CostModel(settings.first_rate_tokens_per_second)
        self.places = Places()
        self.preemptions = 0
        self._settings = settings
        self._readiness = Readiness(settings, self.places)
        self._rows = RowTurns(settings, self.costs, self.places)
        self._tenants = TenantBooks()
        self._debts = DecodeDebts()
        self._answers = AnswerLengths()
        self._waits = WaitingTimes()
        self._room_seen_seconds_ago = math.inf
        self._unattended_seconds = math.inf
        self._slices = [0 for _ in LANES]
        self._let_by = [0 for _ in LANES]
        self._starts = [0 for _ in LANES]
        self._row_came = False
        self._rows_elsewhere: Lane | None = None
        self._slices_held_by = ""
        self._slices_stop = True

    # --- what there is ---------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return self.places.waiting_count

    @property
    def running(self) -> int:
        return len(self.places.decoding) + len(self.places.parked)

    @property
    def is_decoding(self) -> bool:
        return bool(self.places.decoding)

    @property
    def is_empty(self) -> bool:
        return self.places.is_empty

    @property
    def rate_tokens_per_second(self) -> float:
        """How fast prompts are prefilled, by the latest slices."""
        return self.costs.tokens_per_second

    @property
    def debt_seconds(self) -> float:
        return self._debts.most_seconds

    @property
    def live_kv_budget_bytes(self) -> int | None:
        """How much the KV of all rows may take."""
        return self._settings.live_kv.budget_bytes

    def get(self, request_id: RequestId) -> Sequence | None:
        """With the seconds it was held up to now."""
        sequence = self.places.get(request_id)
        if sequence is not None:
            self._waits.settle(sequence)
        return sequence

    @property
    def is_mixing(self) -> bool:
        """Whether the rows that decode ride along in slices."""
        return self._settings.slices == "mixed" and self.is_decoding and self.costs.mixing_pays()

    def is_attended(self, seconds: float) -> bool:
        """Whether somebody of a higher class than batch is here, or was in the last seconds that the device worked: the
        next may come at any moment."""
        return self._is_here() or self._unattended_seconds < seconds

    def _is_here(self) -> bool:
        highest = self.places.highest
        return highest is not None and highest < Lane.BATCH

    def _waiting(self, request_id: RequestId) -> Sequence:
        sequence = self.places.get_waiting(request_id)
        if sequence is None:
            raise BooksDoNotAddUp(f"{request_id} has no prompt that waits")
        return sequence

    # --- what happened ---------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._tenants.arrived(sequence.tenant, sequence.tenant_weight)
        self._into_line(sequence)

    def _into_line(self, sequence: Sequence) -> None:
        self.places.add(sequence)
        self._waits.enter(sequence, "in line" if sequence.blocks_deadline is None else "fetching")
        self._look_at_room_soon()

    def blocks_arrived(self, request_id: RequestId) -> None:
        """Its blocks from disk came, or never will. An unknown id is fine."""
        for line in self.places.lines:
            if sequence := line.blocks_arrived(request_id):
                self._waits.enter(sequence, "in line")
                self._look_at_room_soon()

    def remove(self, request_id: RequestId) -> Sequence | None:
        """It finished, failed or was cancelled. Idempotent; an unknown id is fine."""
        sequence = self.places.remove(request_id)
        if sequence is not None:
            self._answers.ended(sequence.lane, sequence.drawn)
            self._gone(sequence)
            self._forgive()
        return sequence

    def _gone(self, sequence: Sequence) -> None:
        self._waits.leave(sequence)
        self._tenants.left(sequence.tenant)
        self._readiness.left_line(sequence)
        self._look_at_room_soon()

    def beside(
        self, rows_elsewhere: Lane | None, slices_held_by: str, *, slices: Literal["stop", "run through"] = "stop"
    ) -> None:
        """What other models on this device do: the highest lane that decodes there, and whom our slices wait for.
        `slices` stop for who comes, unless others wait for them to end."""
        self._rows_elsewhere = rows_elsewhere
        self._slices_held_by = slices_held_by
        self._slices_stop = slices == "stop"

    def waited(self, seconds: float) -> None:
        """Nothing ran here for others' sake."""
        self._count_held(seconds, None)

    def opened(self, request_id: RequestId, cached_tokens: int, now: float) -> None:
        """Its KV cache exists and holds `cached_tokens` of its prompt (and of what it drew before it was preempted)."""
        sequence = self._waiting(request_id)
        self.places.start(sequence)
        self._readiness.left_line(sequence)
        self._readiness.started(sequence.lane, now)
        self._starts[sequence.lane] += 1
        self._waits.enter(sequence, "in prefill")
        self._look_at_room_soon()
        sequence.opened(cached_tokens, now)
        self._prompt_may_be_done(sequence, now)

    def stopped(self, step: Prefill, seconds: float) -> None:
        """A part of a slice ran, for so long, and the slice stops to let others by."""
        self._had_device(step, self._waiting(step.request_id), seconds)

    def prefilled(self, step: Prefill, seconds: float, now: float, *, told_seconds: float = 0.0) -> None:
        """A slice ran; `told_seconds` of it were told when it `stopped`. When nothing is left the prompt is parked, or
        is gone if it was only to warm."""
        sequence = self._waiting(step.request_id)
        self.costs.prefilled(step.tokens, sequence.prefilled, seconds)
        self._had_device(step, sequence, seconds - told_seconds)
        self._advanced(sequence, step, seconds, 0.0, now)

    def mixed(self, step: Mixed, seconds: float, now: float) -> None:
        """As `prefilled`, and each row drew a token."""
        rows, sequence = len(self.places.decoding), self._waiting(step.request_id)
        self.costs.mixed(step.tokens, sequence.prefilled, rows, seconds)
        decoded_seconds = min(self.costs.step_seconds(rows), seconds)
        self._charge_rows(decoded_seconds)
        self._stepped()
        # What its own lane owes is less by this step below; of the others' debts it pays as much as any step does.
        self._debts.pay(decoded_seconds, but=step.lane)
        self._had_device(step, sequence, seconds, decoded_seconds)
        self._advanced(sequence, step, seconds, decoded_seconds, now)

    def _advanced(
        self, sequence: Sequence, step: Prefill | Mixed, seconds: float, decoded_seconds: float, now: float
    ) -> None:
        sequence.advanced(step.tokens, now)
        self._tenants.charge(sequence.tenant, seconds - decoded_seconds)
        self._slices[step.lane] += 1
        self._let_by[step.lane] = 0
        entrance = self._readiness.entrance(now)
        for lane in LANES[step.lane + 1 :]:
            if self._readiness.can_run(lane, entrance, now):
                self._let_by[lane] += 1
        self._prompt_may_be_done(sequence, now)

    def _had_device(
        self, step: Prefill | Mixed, sequence: Sequence, seconds: float, decoded_seconds: float = 0.0
    ) -> None:
        """A slice, or a part of it, had the device for so long, and rows for a part of that."""
        self._count_held(seconds, sequence)
        self._count_unattended(seconds)
        if (rows := self.places.highest_row) is not None:
            owed = pacing.owed_seconds(step.lane, rows, seconds=seconds, decoded_seconds=decoded_seconds)
            self._debts.owe(step.lane, owed)

    def _prompt_may_be_done(self, sequence: Sequence, now: float) -> None:
        """One with nothing left waits for a row, as a parked one does."""
        if sequence.prefill_left > 0:
            return
        self.places.prompt_done(sequence)
        if sequence.lane is Lane.WARM:
            self._gone(sequence)
        else:
            sequence.parked_since = now
            self._waits.enter(sequence, "parked")

    def joined(self, request_id: RequestId, now: float) -> None:
        """A parked row takes part in decode."""
        sequence = self.places.join(request_id)
        self._row_came = True
        self._waits.leave(sequence)
        is_due = self._rows.is_due(sequence, now)
        self._rows.given("due" if is_due else "not due")
        sequence.joined(now, self._settings.stint_seconds if is_due else None)

    def parked(self, request_id: RequestId, now: float) -> None:
        """A decoding row left the batch, for a while."""
        sequence = self.places.park(request_id)
        self._waits.enter(sequence, "parked")
        was_a_stint = now - sequence.joined_at >= self._settings.stint_seconds
        if was_a_stint and sequence.has_stepped:  # else it is still due when it would have been
            sequence.parked_since = now
        self._forgive()

    def preempted(self, request_id: RequestId, blocks_deadline: float | None = None) -> None:
        """It has no KV any more, and waits; for blocks from disk, if there is a deadline."""
        sequence = self.places.remove(request_id)
        if sequence is None:
            raise BooksDoNotAddUp(f"{request_id} has nothing to give up")
        sequence.preempted(blocks_deadline)
        self.preemptions += 1
        self._into_line(sequence)
        self._forgive()

    def drew(self, request_id: RequestId) -> None:
        """A row has a token more."""
        self.places.decoding[request_id].drawn += 1

    def decoded(self, seconds: float, rows: int, *, launched_seconds: float = 0.0) -> None:
        """Rows had `seconds` of the device, in which a step of so many of them ended; it had been launched for
        `launched_seconds` before, which were told then. No rows: the time is that of a launch or of a read only."""
        decoding = self.places.decoding
        if rows:
            if not self._row_came or not self.costs.knows_step(rows):  # that step is slow for another reason
                held_tokens = sum(s.tokens for s in decoding.values()) if len(decoding) == rows else None
                self.costs.stepped(rows, launched_seconds + seconds, held_tokens)
            self._stepped()
        self._debts.pay(seconds)
        self._charge_rows(seconds)
        self._count_held(seconds, None)
        self._count_unattended(seconds)

    def _count_unattended(self, seconds: float) -> None:
        """The device worked for so long: with nobody of a higher class than batch here, or with somebody."""
        self._unattended_seconds = 0.0 if self._is_here() else self._unattended_seconds + seconds

    def _charge_rows(self, seconds: float) -> None:
        """A step of all rows, or more of them."""
        decoding = self.places.decoding
        for sequence in decoding.values():
            self._tenants.charge(sequence.tenant, seconds / len(decoding))

    def _stepped(self) -> None:
        self._row_came = False
        for sequence in self.places.decoding.values():
            sequence.steps_owed = 0
            sequence.has_stepped = True

    def _forgive(self) -> None:
        if not self.places.decoding:
            self._debts.forgive()

    def check(self) -> None:
        """Raise BooksDoNotAddUp if an invariant is broken."""
        settings = self._settings
        broken = self.places.broken_laws(
            max_rows=settings.max_rows, max_prefills=settings.max_prefills, live_kv=settings.live_kv
        )
        if not self.is_decoding and self.debt_seconds:
            broken.append("no debt to nobody")
        if broken:
            raise BooksDoNotAddUp("; ".join(broken))

    # --- those who wait --------------------------------------------------------------------------------------------

    def _count_held(self, seconds: float, served: Sequence | None) -> None:
        """These seconds of the device went to others."""
        if not self.places.waiting_count and not self.places.parked:
            return
        self._room_seen_seconds_ago += seconds
        if self._room_seen_seconds_ago >= _ROOM_LOOKED_AT_EVERY_SECONDS:
            self.look_at_room()
        self._waits.count(seconds, self._holders(), served)

    def look_at_room(self) -> None:
        """Who of those in line waits for memory, and who has for too long. Not at every step: all of them are looked
        at. To be told before `standings` are asked, which otherwise say what was so at the last look."""
        self._room_seen_seconds_ago = 0.0
        if self._settings.live_kv.budget_bytes is None:
            return
        candidates = self._readiness.candidates()
        for each in candidates:
            self._waits.settle(each)
        waits.sort_by_room(self._waits, candidates, self._readiness.look_at_room(candidates))

    def _look_at_room_soon(self) -> None:
        self._room_seen_seconds_ago = math.inf

    def _holders(self) -> Holders:
        full = frozenset(lane for lane in LANES if self._readiness.rows_are_taken(lane))
        return waits.holders(self.places, full, self._settings.max_rows, self._slices_held_by)
