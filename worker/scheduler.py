"""Which step comes next. Pure: asking changes nothing.

Who goes next, in the order it is asked:

1. **Memory.** When the rows' KV outgrows its budget, `live_kv` says who is *preempted*: he gives up his KV, waits
   again, and goes on from where he was; what the prefix cache kept of it need not be computed again. So is a lower
   class's row when a prompt whose turn has come finds no room otherwise.
2. **Rows.** A prompt that is done joins the decode batch as soon as a row is free. A row is *parked*, with its KV, when
   a higher class needs its place. Rows of the batch class also when they would stretch the decode steps of those who
   read along, or of one who is about to, to more than `stretch` times; half as much is too much for one to come. And
   only as many come, for `attended_seconds` after anybody higher, as make no step too long for the next. Who had no
   stint of `stint_seconds` in `parked_seconds` (batch rows: in six times as long) is *due*: every other row that gets
   free is his before anybody else's, who was due first first, and for a stint nobody parks him again (`rows`).
3. **Decode before prefill, while decode is owed.** What a slice owes the decoding rows is paid before the next slice
   of its lane or a lower one (`pacing`). So is a row's first token, before slices of its lane and of lower ones.
4. **Lane.** Of the prompts that can run a slice, those of the highest lane go first. A lane that let
   `lower_lane_every` slices of higher lanes by takes the next one. What only warms the cache never does.
5. **Prompt.** In a lane the prompt with the least work left goes first, where a tenant's lead over the others counts as
   work, up to `tenant_lead_seconds`. So a ten-token question does not wait behind a repository: it goes between two
   slices of it. Every `oldest_every`th slice of a lane goes to its oldest prompt, and every `oldest_every`th start to
   the oldest that has not started, so the repository gets done.
6. **A prefix is computed once.** A prompt that has not started, and shares more with one in prefill than was hot, gives
   its turn to that one.
7. When no rule has a slice to run, the rows decode.
8. **Rest.** Neither a slice nor a step of lower lanes begins in the few milliseconds in which the disk says whether it
   has a prompt's blocks (`answer_due`): they would last twenty times as long.

A prompt can run a slice when it has started, or may: `readiness` says when.

So nobody waits without end, however many others come, but what only warms the cache. A lane starts a prompt at least
every `parked_seconds` and `lower_lane_every` slices of higher lanes, and one of `oldest_every` is its oldest. Started,
that one waits for as many slices at most for each of its own, and for what those owe. Its prompt done, it is due when
`rows` says, and waits for two rows to get free for each that is due before it. And who is of the highest class
waits for a row that one of a lower has for a stint at most, and for another for each of his class before him.

A slice is bounded by *time*, as `pacing` says. One of a lower class stops between two layers when somebody of a higher
one came, and goes on in parts between the steps of his row (`next_before`).

Where the engine can, and where it was measured to be no slower, a slice beside decoding rows is *mixed*: the same pass
gives each row its next token. Rows of the batch class alone do not ride along with a prompt of a higher one: they would
make its passes longer. And no rows ride along with batch prompts while somebody of a higher class is here, and for
`unmixed_seconds` after: a mixed pass stops for nobody.

What the rules look at is in `books`, which also hear what happened; who stands where, in `places`.
"""

from collections.abc import Collection
from typing import Literal, assert_never

from protocol.ids import BLOCK_TOKENS, RequestId
from worker import pacing
from worker.books import SchedulerBooks
from worker.line import Line
from worker.live_kv import Entrance
from worker.row_ends import RowEnds
from worker.sequence import LANES, Lane, Sequence, shared_tokens
from worker.standings import Order, Pace, RowsToCome, Standing, eta_seconds_of, standings_of
from worker.steps import Decode, Idle, Join, Mixed, Open, Park, Preempt, Prefill, Rest, Step


class Scheduler(SchedulerBooks):
    """The books, and the rules that read them. Owned by the step thread."""

    def next_step(self, now: float) -> Step:
        """The first rule that has something to do says what. Asking changes nothing."""
        places = self.places
        if victim := self._settings.live_kv.victim(places.live()):  # rule 1
            return Preempt(victim.request_id)
        entrance = self._readiness.entrance(now)
        can_run = [lane for lane in LANES if self._readiness.can_run(lane, entrance, now)]
        if change := self._rows.change(now, higher_prompts=self._higher_prompts(can_run, now)):  # rule 2
            return change
        lanes = [] if self._has_to_learn_steps() else [lane for lane in self._lanes_not_owing() if lane in can_run]
        if lanes:  # rule 3
            lane = self._lane_of_next(lanes)  # rule 4
            if rest := self._rest_before(lane, now):  # rule 8
                return rest
            sequence = self._prompt_of_next(lane, entrance, now)  # rule 5
            return self._slice_of(self._leader_of(sequence) or sequence, lane)  # rule 6
        if places.highest_row is not None:
            return self._rest_before(places.highest_row, now) or Decode()
        deadlines = [s.blocks_deadline for line in places.lines for s in line.fetching]
        if places.parked:  # a batch row, which waits for nothing but that
            deadlines.append(self._answer_due(Lane.BATCH, now))
        return Idle(min((each for each in deadlines if each is not None), default=None))

    def next_before(self, lane: Lane, stopped: Collection[RequestId], now: float) -> Step | None:
        """What goes before the next part of a slice of `lane`, the last of those that have `stopped`: what higher lanes
        can do without these, and what the slice owes their rows. None: it goes on."""
        step = self.next_step(now)
        match step:
            case Prefill(request_id=name, lane=higher) | Mixed(request_id=name, lane=higher):
                goes = higher < lane and name not in stopped
            case Open(request_id=name):
                sequence = self.places.get_waiting(name)
                goes = sequence is not None and sequence.lane < lane
            case Join() | Park() | Decode() | Rest():
                goes = self.places.highest is not None and self.places.highest < lane
            case Preempt() | Idle():
                goes = False
            case _:
                assert_never(step)
        return step if goes else None

    def parts_of(self, step: Prefill) -> int:
        """In how many parts this slice runs."""
        if not self._slices_stop:
            return 1
        return pacing.parts(self._settings, self.costs, self._waiting(step.request_id), step.tokens, step.lane)

    def _higher_prompts(self, can_run: Collection[Lane], now: float) -> Literal["now", "any moment", "none"]:
        """When prompts of a higher class than batch have something to run."""
        has_one = not self._slices_held_by and any(lane < Lane.BATCH for lane in can_run)
        if has_one or self._answer_due(Lane.BATCH, now) is not None:
            return "now"
        return "any moment" if self.is_attended(self._settings.attended_seconds) else "none"

    def _rest_before(self, lane: Lane, now: float) -> Rest | None:
        """Rule 8: until the disk should have answered those of higher lanes whom it has not."""
        until = self._answer_due(lane, now)
        return None if until is None else Rest(until)

    def _answer_due(self, lane: Lane, now: float) -> float | None:
        """By when the disk should have said what it has for a prompt of a lane above this one."""
        higher = (s.answer_due for line in self.places.lines[:lane] for s in line.fetching)
        return min((due for due in higher if now < due), default=None)

    def _lanes_not_owing(self) -> list[Lane]:
        """Rule 3: those whose slices, and those of higher lanes, owe nothing, nor does a row as high wait to begin."""
        # What a mixed pass leaves owing is less than a step, mostly: to run one for it would pay far too much.
        payable = self.costs.step_seconds(len(self.places.decoding)) if self.is_mixing else 0.0
        owing = [self._debts.highest_owing(payable), self.places.first_token_of]
        return [lane for lane in LANES if all(each is None or lane < each for each in owing)]

    def _lane_of_next(self, lanes: Collection[Lane]) -> Lane:
        """Rule 4: the highest, unless a lower one has let enough slices by."""
        passed = [lane for lane in lanes if self._let_by[lane] >= self._settings.lower_lane_every]
        return min(passed) if passed and min(passed) is not Lane.WARM else min(lanes)

    def _prompt_of_next(self, lane: Lane, entrance: Entrance, now: float) -> Sequence:
        """Rule 5: the one with the least work left, and now and then the oldest."""
        started = self.places.in_prefill[lane].values()
        line = self.places.lines[lane] if self._readiness.may_open(lane, now) else Line(lane)
        if self._is_the_oldests(self._slices[lane]):
            return min((*started, *line.oldest(entrance, now)), key=_arrival)
        leads = self._tenants.leads()
        least = min(
            (*started, *line.shortest(entrance, now)),
            key=lambda s: (self._work_left(s, leads(s.tenant)), not s.is_open, s.ticket),
        )
        if not least.is_open and self._is_the_oldests(self._starts[lane]):
            return min(line.oldest(entrance, now), key=_arrival)
        return least

    def _is_the_oldests(self, slices_or_starts: int) -> bool:
        """Whether, after so many in a lane, the next one belongs to its oldest prompt."""
        every = self._settings.oldest_every
        return slices_or_starts % every == every - 1

    def _work_left(self, sequence: Sequence, lead_seconds: float) -> float:
        """In seconds, with what its tenant had more of the device than others lately."""
        work_seconds = self.costs.prefill_seconds(sequence.prefill_left, sequence.prefilled)
        return min(lead_seconds, self._settings.tenant_lead_seconds) + work_seconds

    def _leader_of(self, sequence: Sequence) -> Sequence | None:
        """Rule 6: the prompt in prefill that is still to compute most of what this one has in common with it."""
        if sequence.is_open:
            return None
        leaders: list[tuple[int, int, Sequence]] = []
        for other in self.places.started():
            if (shared := shared_tokens(sequence.grains, other.grains)) > other.cached:
                # Whole blocks are kept as they are computed, what fills none when the prompt is done.
                kept_at = min(-(-shared // BLOCK_TOKENS) * BLOCK_TOKENS, other.prefill_total)
                if other.prefilled < kept_at:
                    leaders.append((shared, -other.ticket, other))
        return max(leaders)[-1] if leaders else None

    def _slice_of(self, sequence: Sequence, lane: Lane) -> Open | Preempt | Prefill | Mixed:
        """What this prompt needs next, on behalf of a lane: room, a KV cache, or a slice as long as `pacing` allows."""
        if not sequence.is_open:
            victim = self._settings.live_kv.gives_way(sequence, self.places.live())
            return Open(sequence.request_id) if victim is None else Preempt(victim.request_id)
        highest = self._lane_beside
        if self.is_mixing and highest is not None and not self._rows_stay_behind(lane):
            beside = pacing.Beside(len(self.places.decoding), highest)
            tokens = pacing.mixed_tokens(self._settings, self.costs, sequence, lane, beside)
            return Mixed(sequence.request_id, tokens, lane)
        tokens = pacing.slice_tokens(self._settings, self.costs, sequence, self._slice_seconds(lane))
        return Prefill(sequence.request_id, tokens, lane)

    def _rows_stay_behind(self, lane: Lane) -> bool:
        """Whether rows that could ride along in a slice do not."""
        if lane >= Lane.BATCH:
            return self._slices_stop and self.is_attended(self._settings.unmixed_seconds)
        return self.places.highest_row is Lane.BATCH

    def _has_to_learn_steps(self) -> bool:
        """Whether a step must run alone first: what a mixed pass takes is told from what a step takes."""
        return self.is_mixing and self.costs.step_seconds(len(self.places.decoding)) == 0

    def _slice_seconds(self, lane: Lane) -> float:
        """Of a slice alone. A gap between two tokens is a slice and the step after it."""
        beside = self._lane_beside
        stops_for_rows = self._slices_stop and lane >= Lane.BATCH and beside is not None and beside < lane
        if beside is None or stops_for_rows:
            return pacing.idle_slice_seconds(self._settings, lane)
        gap = pacing.gap_seconds(self._settings, lane, beside)
        return max(gap - self.costs.step_seconds(len(self.places.decoding)), gap / 2)

    @property
    def _lane_beside(self) -> Lane | None:
        """The highest lane of the rows that decode on this device, here and in other workers."""
        return min((lane for lane in (self.places.highest_row, self._rows_elsewhere) if lane is not None), default=None)

    # --- what those who wait are told ------------------------------------------------------------------------------

    def standings(self, now: float) -> list[Standing]:
        """Of every request that has not started, is parked or has not advanced for a while: how many go first, how long
        that takes, and why."""
        holders, decoding = self._holders(), self.places.decoding.values()
        row_ends = RowEnds(decoding, self._answers, self.costs.step_seconds(len(decoding)), now)
        return standings_of(
            self.places,
            self._rows.in_turn(now),
            self._order(),
            self._pace(),
            lambda s: holders.of(s.lane, self._waits.stage_of(s)),
            RowsToCome(self.places, self._settings.max_rows, row_ends),
            now,
        )

    def eta_seconds(self, request_id: RequestId) -> float:
        """Until this prompt is done, if none comes that goes before it."""
        sequence = self.places.get_waiting(request_id)
        if sequence is None:
            return 0.0
        return eta_seconds_of(sequence, self.places, self._order(), self._pace())

    def _order(self) -> Order:
        leads = self._tenants.leads()
        return lambda s: (s.lane, self._work_left(s, leads(s.tenant)))

    def _pace(self) -> Pace:
        return Pace(
            self._settings,
            self.costs,
            self.places,
            self._lane_beside,
            self._rows_stay_behind,
            "mixed" if self.is_mixing and not self._has_to_learn_steps() else "apart",
        )


def _arrival(sequence: Sequence) -> tuple[float, int]:
    """Who came first."""
    return sequence.arrived, sequence.ticket
