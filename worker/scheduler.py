"""Which step comes next. Pure: asking changes nothing.

Who goes next, in the order it is asked:

1. **Memory.** When the rows' KV outgrows its budget, `live_kv` says who is *preempted*: he gives up his KV, waits
   again, and goes on from where he was; what the prefix cache kept of it need not be computed again. So is a lower
   class's row when a prompt whose turn has come finds no room otherwise.
2. **Rows.** A prompt that is done joins the decode batch as soon as a row is free. A row is *parked*, with its KV, when
   a higher class needs its place; rows of the batch class also when they would stretch the others' decode steps to
   more than `stretch` times. Who had no stint of `stint_seconds` in `parked_seconds` is *due*: every other row that
   gets free is his before anybody else's, who was due first first, and for a stint nobody parks him again (`rows`).
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

A prompt can run a slice when it has started, or may: `readiness` says when.

So nobody waits without end, however many others come, but what only warms the cache. A lane starts a prompt at least
every `parked_seconds` and `lower_lane_every` slices of higher lanes, and one of `oldest_every` is its oldest. Started,
that one waits for as many slices at most for each of its own, and for what those owe. Its prompt done, it is due after
`parked_seconds`, and waits for two rows to get free for each that is due before it. And who is of the highest class
waits for a row that one of a lower has for a stint at most, and for another for each of his class before him.

A slice is bounded by *time*, as `pacing` says. For `attended_seconds` after somebody of a higher class was here, a
batch prompt goes as it does beside his row: the next who comes waits for a short pass to end, not for a long one.

Where the engine can, and where it was measured to be no slower, a slice beside decoding rows is *mixed*: the same pass
gives each row its next token. Rows of the batch class alone do not ride along with a prompt of a higher one: they would
make its passes longer.

What the rules look at is in `books`, which also hear what happened; who stands where, in `places`.
"""

from collections.abc import Collection

from protocol.ids import BLOCK_TOKENS, RequestId
from worker import pacing
from worker.books import SchedulerBooks
from worker.line import Line
from worker.live_kv import Entrance
from worker.row_ends import RowEnds
from worker.sequence import LANES, Lane, Sequence, shared_tokens
from worker.standings import Order, Pace, RowsToCome, Standing, eta_seconds_of, standings_of
from worker.steps import Decode, Idle, Mixed, Open, Preempt, Prefill, Step


class Scheduler(SchedulerBooks):
    """The books, and the rules that read them. Owned by the step thread."""

    def next_step(self, now: float) -> Step:
        """The first rule that has something to do says what. Asking changes nothing."""
        places = self.places
        if victim := self._settings.live_kv.victim(places.live()):  # rule 1
            return Preempt(victim.request_id)
        if change := self._rows.change(now):  # rule 2
            return change
        if not self._has_to_learn_steps():
            entrance = self._readiness.entrance(now)
            lanes = [lane for lane in self._lanes_not_owing() if self._readiness.can_run(lane, entrance, now)]  # rule 3
            if lanes:
                lane = self._lane_of_next(lanes)  # rule 4
                sequence = self._prompt_of_next(lane, entrance, now)  # rule 5
                return self._slice_of(self._leader_of(sequence) or sequence, lane)  # rule 6
        if places.decoding:
            return Decode()
        deadlines = (s.blocks_deadline for line in places.lines for s in line.fetching)
        return Idle(min((each for each in deadlines if each is not None), default=None))

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
        if self.is_mixing and not self._goes_before_batch_rows(lane):
            beside = pacing.Beside(len(self.places.decoding), min(self._lanes_beside(lane)))
            tokens = pacing.mixed_tokens(self._settings, self.costs, sequence, lane, beside)
            return Mixed(sequence.request_id, tokens, lane)
        tokens = pacing.slice_tokens(self._settings, self.costs, sequence, self._slice_seconds(lane))
        return Prefill(sequence.request_id, tokens, lane)

    def _goes_before_batch_rows(self, lane: Lane) -> bool:
        return self.places.highest_row is Lane.BATCH and lane < Lane.BATCH

    def _has_to_learn_steps(self) -> bool:
        """Whether a step must run alone first: what a mixed pass takes is told from what a step takes."""
        return self.is_mixing and self.costs.step_seconds(len(self.places.decoding)) == 0

    def _slice_seconds(self, lane: Lane) -> float:
        """Of a slice alone. A gap between two tokens is a slice and the step after it."""
        beside = self._lanes_beside(lane)
        if not beside:
            return pacing.idle_slice_seconds(self._settings, lane)
        gap = pacing.gap_seconds(self._settings, lane, min(beside))
        return max(gap - self.costs.step_seconds(len(self.places.decoding)), gap / 2)

    def _lanes_beside(self, prompt: Lane) -> list[Lane]:
        """The highest lanes of the rows that decode on this device, here and in other workers. For a batch prompt also
        that of those who were here lately."""
        expected = Lane.STANDARD if prompt >= Lane.BATCH and self.is_attended else None
        return [lane for lane in (self.places.highest_row, self._rows_elsewhere, expected) if lane is not None]

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
            self._lanes_beside,
            "mixed" if self.is_mixing and not self._has_to_learn_steps() else "apart",
        )


def _arrival(sequence: Sequence) -> tuple[float, int]:
    """Who came first."""
    return sequence.arrived, sequence.ticket
