"""Which prompts can run a slice now. Pure.

One that has started can. One that has not may start when its blocks from disk came (or their deadline passed), a row
will be free for it, fewer than `max_prefills` prompts of its lane are in prefill, and its KV has room (`live_kv`).
While somebody has waited for room for too long, there is none for anybody else.
"""

from worker.live_kv import Entrance, is_overdue, longest_held
from worker.pacing import SchedulerSettings
from worker.places import Places
from worker.sequence import LANES, Lane, Sequence


class Readiness:
    """Looks at `places`, which others move."""

    def __init__(self, settings: SchedulerSettings, places: Places) -> None:
        self._settings = settings
        self._places = places
        self._overdue: list[Sequence] = []

    def can_run(self, lane: Lane, entrance: Entrance, now: float) -> bool:
        """Whether a prompt of this lane can run a slice."""
        if self._places.in_prefill[lane]:
            return True
        return self.may_open(lane) and self._places.lines[lane].has_candidate(entrance, now)

    def may_open(self, lane: Lane) -> bool:
        """Whether one more prompt of this lane may start."""
        in_prefill = len(self._places.in_prefill[lane])
        return in_prefill < self._settings.max_prefills and not self.rows_are_taken(lane)

    def rows_are_taken(self, lane: Lane) -> bool:
        """Whether no row would be free for one more prompt of this lane. Rows of the batch class give way to others."""
        if lane is Lane.WARM:
            return False
        return self._places.live_down_to(max(lane, Lane.STANDARD)) >= self._settings.max_rows

    def entrance(self) -> Entrance:
        """For whose KV there is room at this moment."""
        late = [each for each in self._overdue if not each.is_open and self.may_open(each.lane)]
        return self._settings.live_kv.entrance(self._places.live(), longest_held(late))

    def candidates(self) -> list[Sequence]:
        """Those in line whom only memory may keep from starting, as far as rows go."""
        lines = (self._places.lines[lane] for lane in LANES if not self.rows_are_taken(lane))
        return [each for line in lines for each in line.ready]

    def note_overdue(self, candidates: list[Sequence]) -> None:
        """Look who has waited for memory for too long. Their `held` must be up to date."""
        self._overdue = [each for each in candidates if is_overdue(each)]
