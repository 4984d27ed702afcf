"""The prompts of one lane that have not started, kept in the orders in which the scheduler asks for them. Pure.

However long a line is, to ask whether somebody could start costs next to nothing. To ask who does costs about as
much as there are tenants in it; where there is room for some of them only, a glance at each prompt.
"""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator

from protocol.ids import RequestId
from worker.live_kv import Bound, Entrance
from worker.sequence import Lane, Sequence


class Line:
    """A prompt in it changes in nothing but its `blocks_deadline`, and that only through `blocks_arrived`."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._prompts: dict[RequestId, Sequence] = {}
        self._fetching: dict[RequestId, Sequence] = {}
        self._by_work: list[tuple[int, int, Sequence]] = []
        self._by_most_tokens: list[tuple[int, int, Sequence]] = []
        self._by_arrival: list[tuple[float, int, Sequence]] = []
        self._by_work_of: dict[str, list[tuple[int, int, Sequence]]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._prompts.values())

    def get(self, request_id: RequestId) -> Sequence | None:
        return self._prompts.get(request_id)

    @property
    def ready(self) -> Iterator[Sequence]:
        """Those that wait for no blocks from disk."""
        return (sequence for _, _, sequence in self._by_work)

    @property
    def fetching(self) -> Iterator[Sequence]:
        """Those that wait for blocks from disk."""
        return iter(self._fetching.values())

    def add(self, sequence: Sequence) -> None:
        """One whose `ticket` nobody else has."""
        self._prompts[sequence.request_id] = sequence
        if sequence.blocks_deadline is None:
            self._order(sequence)
        else:
            self._fetching[sequence.request_id] = sequence

    def blocks_arrived(self, request_id: RequestId) -> Sequence | None:
        """Its blocks from disk came, or never will. None when it did not wait for any."""
        sequence = self._fetching.pop(request_id, None)
        if sequence is not None:
            sequence.blocks_deadline = None
            self._order(sequence)
        return sequence

    def remove(self, request_id: RequestId) -> Sequence | None:
        """An unknown id is fine."""
        sequence = self._prompts.pop(request_id, None)
        if sequence is None or self._fetching.pop(request_id, None) is not None:
            return sequence
        work = _work_tokens(sequence), sequence.ticket
        del self._by_work[bisect_left(self._by_work, work)]
        of_tenant = self._by_work_of[sequence.tenant]
        del of_tenant[bisect_left(of_tenant, work)]
        if not of_tenant:
            del self._by_work_of[sequence.tenant]
        del self._by_most_tokens[bisect_left(self._by_most_tokens, (sequence.most_tokens, sequence.ticket))]
        del self._by_arrival[bisect_left(self._by_arrival, (sequence.arrived, sequence.ticket))]
        return sequence

    def has_candidate(self, entrance: Entrance, now: float) -> bool:
        """Whether there is one that may start now."""
        if entrance.only is None and self._by_most_tokens and entrance.admits(self._by_most_tokens[0][-1]):
            return True
        return next(self.shortest(entrance, now), None) is not None

    def shortest(self, entrance: Entrance, now: float) -> Iterator[Sequence]:
        """Of each tenant the one with the least work among those that may start now, and perhaps some more; those whose
        blocks never came in time first."""
        if entrance.only is not None:
            yield from self._only(entrance.only, entrance, now)
            return
        yield from (each for each in self._overdue(now) if entrance.admits(each))
        bound = entrance.bound(self._lane)
        longest_tokens = bound.most_tokens if self._some_stay_short(bound) else bound.tokens
        if not self._by_work or self._by_work[0][0] >= longest_tokens:
            return
        # By tenant: to find one that has long prompts only, all others' shorter ones would be looked at each time.
        for by_work in self._by_work_of.values():
            for work_tokens, _, sequence in by_work:
                if work_tokens >= longest_tokens:
                    break
                if bound.may_admit(sequence) and entrance.admits(sequence):
                    yield sequence
                    break

    def oldest(self, entrance: Entrance, now: float) -> Iterator[Sequence]:
        """The one that came first among those that may start now, and perhaps some more."""
        if entrance.only is not None:
            yield from self._only(entrance.only, entrance, now)
            return
        yield from (each for each in self._overdue(now) if entrance.admits(each))
        bound = entrance.bound(self._lane)
        if not self._some_stay_short(bound) and not (self._by_work and bound.may_admit(self._by_work[0][-1])):
            return
        in_order = (sequence for _, _, sequence in self._by_arrival if bound.may_admit(sequence))
        yield from itertools.islice(filter(entrance.admits, in_order), 1)

    def _only(self, sequence: Sequence, entrance: Entrance, now: float) -> list[Sequence]:
        """Nobody else may start now, and this one only if it is in this line."""
        is_here = self._prompts.get(sequence.request_id) is sequence
        is_ready = sequence.blocks_deadline is None or sequence.blocks_deadline <= now
        return [sequence] if is_here and is_ready and entrance.admits(sequence) else []

    def _some_stay_short(self, bound: Bound) -> bool:
        """Whether there is one that may start however long its answer gets."""
        return bool(self._by_most_tokens) and self._by_most_tokens[0][0] <= bound.most_tokens

    def _overdue(self, now: float) -> list[Sequence]:
        """Whose blocks did not come in time: it is computed without them."""
        late = self._fetching.values()
        return [each for each in late if each.blocks_deadline is not None and each.blocks_deadline <= now]

    def _order(self, sequence: Sequence) -> None:
        work = _work_tokens(sequence), sequence.ticket, sequence
        insort(self._by_work, work)
        insort(self._by_work_of.setdefault(sequence.tenant, []), work)
        insort(self._by_most_tokens, (sequence.most_tokens, sequence.ticket, sequence))
        insort(self._by_arrival, (sequence.arrived, sequence.ticket, sequence))


def _work_tokens(sequence: Sequence) -> int:
    """All that is to be computed of one that has no KV: less than its tokens."""
    return sequence.prefill_total
