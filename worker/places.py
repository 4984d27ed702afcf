"""Where every sequence stands: in line, in prefill, parked or decoding; counted by lane as it moves. Pure.

    in line → in prefill → parked ⇄ decoding
       ↑____________|________|_________|     preempted: its KV is gone

Only those in line have no KV. What only warms the cache is gone when its prompt is done.
"""

import itertools
from collections.abc import Iterator

from protocol.ids import RequestId
from worker.line import Line
from worker.live_kv import LiveKV
from worker.sequence import LANES, Lane, Sequence

Group = dict[RequestId, Sequence]


class Places:
    """A move raises KeyError when the sequence does not stand where it starts."""

    def __init__(self) -> None:
        self.lines = [Line(lane) for lane in LANES]
        self.in_prefill: list[Group] = [{} for _ in LANES]
        self.parked: Group = {}
        self.decoding: Group = {}
        self._live = [0 for _ in LANES]
        self._rows = [0 for _ in LANES]
        self._tickets = itertools.count()

    # --- who stands where --------------------------------------------------------------------------------------------

    def get(self, request_id: RequestId) -> Sequence | None:
        return self.decoding.get(request_id) or self.parked.get(request_id) or self.get_waiting(request_id)

    def get_waiting(self, request_id: RequestId) -> Sequence | None:
        """One whose prompt is not done."""
        for group, line in zip(self.in_prefill, self.lines, strict=True):
            if found := group.get(request_id) or line.get(request_id):
                return found
        return None

    @property
    def waiting_count(self) -> int:
        """How many prompts are not done."""
        return sum(map(len, self.lines)) + sum(map(len, self.in_prefill))

    @property
    def is_empty(self) -> bool:
        return not self.decoding and not self.parked and not self.waiting_count

    def started(self) -> Iterator[Sequence]:
        """Those in prefill."""
        for group in self.in_prefill:
            yield from group.values()

    def waiting(self) -> Iterator[Sequence]:
        """All whose prompts are not done."""
        yield from self.started()
        for line in self.lines:
            yield from line

    def live(self) -> list[Sequence]:
        """All that have KV."""
        return [*self.decoding.values(), *self.parked.values(), *self.started()]

    def live_down_to(self, lane: Lane) -> int:
        """How many of this lane and of higher ones have KV."""
        return sum(self._live[: lane + 1])

    def live_of(self, lane: Lane) -> int:
        """How many of this lane have KV."""
        return self._live[lane]

    def rows_of(self, lane: Lane) -> int:
        """How many rows of this lane decode."""
        return self._rows[lane]

    @property
    def highest_row(self) -> Lane | None:
        """The highest lane that decodes."""
        return next((lane for lane in LANES if self._rows[lane]), None)

    @property
    def first_token_of(self) -> Lane | None:
        """The highest lane of the rows that decode and have drawn nothing yet."""
        return min((row.lane for row in self.decoding.values() if not row.drawn), default=None)

    @property
    def highest_waiting(self) -> Lane | None:
        """The highest lane of the prompts that are not done."""
        return next((lane for lane in LANES if self.in_prefill[lane] or self.lines[lane]), None)

    @property
    def highest(self) -> Lane | None:
        """The highest lane of all."""
        return next((lane for lane in LANES if self._live[lane] or self.lines[lane]), None)

    # --- moves -------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Into the line of its lane, behind those that came before."""
        sequence.ticket = next(self._tickets)
        self.lines[sequence.lane].add(sequence)

    def start(self, sequence: Sequence) -> None:
        """Out of the line, with a KV cache: it waits for nothing from disk any more."""
        self.lines[sequence.lane].remove(sequence.request_id)
        sequence.blocks_deadline = None
        sequence.is_open = True
        self.in_prefill[sequence.lane][sequence.request_id] = sequence
        self._live[sequence.lane] += 1

    def prompt_done(self, sequence: Sequence) -> None:
        """It waits for a row, as a parked one does."""
        del self.in_prefill[sequence.lane][sequence.request_id]
        if sequence.lane is Lane.WARM:
            self._live[sequence.lane] -= 1
        else:
            self.parked[sequence.request_id] = sequence

    def join(self, request_id: RequestId) -> Sequence:
        sequence = self.decoding[request_id] = self.parked.pop(request_id)
        self._rows[sequence.lane] += 1
        return sequence

    def park(self, request_id: RequestId) -> Sequence:
        sequence = self.parked[request_id] = self.decoding.pop(request_id)
        self._rows[sequence.lane] -= 1
        return sequence

    def remove(self, request_id: RequestId) -> Sequence | None:
        """From wherever it stands. An unknown id is fine."""
        if (sequence := self.decoding.pop(request_id, None)) is not None:
            self._rows[sequence.lane] -= 1
        else:
            places = (self.parked, *self.in_prefill)
            sequence = next((found for place in places if (found := place.pop(request_id, None))), None)
        if sequence is not None:
            self._live[sequence.lane] -= 1
            return sequence
        return next((found for line in self.lines if (found := line.remove(request_id))), None)

    # --- laws --------------------------------------------------------------------------------------------------------

    def broken_laws(self, *, max_rows: int, max_prefills: int, live_kv: LiveKV) -> list[str]:
        """Those that do not hold; empty if the books add up."""
        waiting, live = list(self.waiting()), self.live()
        names = [each.request_id for each in (*waiting, *self.parked.values(), *self.decoding.values())]
        done = [*self.parked.values(), *self.decoding.values()]
        laws = {
            "no more rows than allowed": len(self.decoding) <= max_rows,
            "a sequence is in one place": len(names) == len(set(names)),
            "decoding or parked means prefilled": all(each.prefill_left == 0 for each in done),
            "waiting means that some of the prompt is left": all(each.prefill_left >= 0 for each in waiting),
            "what waits without KV has none": all(each.prefilled == 0 for each in waiting if not each.is_open),
            "in line means without KV": not any(each.is_open for line in self.lines for each in line),
            "who has KV is counted": all(
                self._live[lane] == sum(each.lane is lane and each.is_open for each in live) for lane in LANES
            ),
            "rows are counted": all(
                self._rows[lane] == sum(each.lane is lane for each in self.decoding.values()) for lane in LANES
            ),
            "live KV keeps to its budget": live_kv.holds(live),
            "few prompts in prefill": all(len(group) <= max_prefills for group in self.in_prefill),
        }
        return [law for law, holds in laws.items() if not holds]
