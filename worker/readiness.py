"""Which prompts can run a slice now. Pure.

One that has started can. One that has not may start when its blocks from disk came (or their deadline passed), a row
will be free for it, fewer than `max_prefills` prompts of its lane are in prefill, and its KV has room (`live_kv`).

Rows of lower classes are as good as free, since they give way. Where those of higher ones leave none, a lane may start
one prompt every `parked_seconds` nevertheless, up to `max_rows` of its own: that one comes to a row as who was parked
does. While somebody has waited for room for his KV for too long, there is none for anybody else.
"""

import math

from worker.live_kv import Entrance, overdue_first
from worker.pacing import SchedulerSettings
from worker.places import Places
from worker.sequence import LANES, Lane, Sequence


class Readiness:
    """Looks at `places`, which others move."""

    def __init__(self, settings: SchedulerSettings, places: Places) -> None:
        self._settings = settings
        self._places = places
        self._overdue: list[Sequence] = []
        self._started_at = [-math.inf for _ in LANES]

    def can_run(self, lane: Lane, entrance: Entrance, now: float) -> bool:
        """Whether a prompt of this lane can run a slice."""
        if self._places.in_prefill[lane]:
            return True
        return self.may_open(lane, now) and self._places.lines[lane].has_candidate(entrance, now)

    def may_open(self, lane: Lane, now: float) -> bool:
        """Whether one more prompt of this lane may start."""
        if len(self._places.in_prefill[lane]) >= self._settings.max_prefills:
            return False
        return not self.rows_are_taken(lane) or now >= self.next_start_without_a_row(lane)

    def rows_are_taken(self, lane: Lane) -> bool:
        """Whether no row would be free for one more prompt of this lane. Rows of lower ones give way."""
        return lane is not Lane.WARM and self._places.live_down_to(lane) >= self._settings.max_rows

    def next_start_without_a_row(self, lane: Lane) -> float:
        """From when on a prompt of this lane may start although higher lanes have all rows; never with too many."""
        if self._places.live_of(lane) >= self._settings.max_rows:
            return math.inf
        return self._started_at[lane] + self._settings.parked_seconds

    def started(self, lane: Lane, now: float) -> None:
        """A prompt of this lane has."""
        self._started_at[lane] = now

    def entrance(self, now: float) -> Entrance:
        """For whose KV there is room at this moment."""
        open_lanes = {lane for lane in LANES if self.may_open(lane, now)}
        return self._entrance(next((each for each in self._overdue if each.lane in open_lanes), None))

    def left_line(self, sequence: Sequence) -> None:
        """It started, or is gone: nobody waits for it to come in first."""
        self._overdue = [each for each in self._overdue if each is not sequence]

    def candidates(self) -> list[Sequence]:
        """Those in line whom only memory may keep from starting, as far as rows go."""
        lines = (self._places.lines[lane] for lane in LANES if not self.rows_are_taken(lane))
        return [each for line in lines for each in line.ready]

    def look_at_room(self, candidates: list[Sequence]) -> Entrance:
        """For which of these there is room, and who of them has waited too long for it. Their `held` is up to date."""
        self._overdue = overdue_first(candidates)
        return self._entrance(next(iter(self._overdue), None))

    def _entrance(self, only: Sequence | None) -> Entrance:
        return self._settings.live_kv.entrance(self._places.live(), only)
