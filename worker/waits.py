"""What those who do not run wait for, and for how long they did, by reason. Pure.

Most wait for the same as their neighbours: so time is counted once for each group, and a sequence's own share is made
out when it leaves its group, or when somebody asks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from protocol.ids import RequestId
from worker.live_kv import Entrance
from worker.places import Places
from worker.sequence import LANES, MEMORY, Lane, Sequence

Stage = Literal["in line", "fetching", "no room", "in prefill", "parked"]


@dataclass
class _Group:
    """Those who wait for the same: how many they are, and how long the group has waited, by reason."""

    lane: Lane
    stage: Stage
    members: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True)
class Holders:
    """Who holds whom at this moment: `top` is the highest lane that waits or decodes, `full` are the lanes for which no
    row is free, `slices_held_by` is whom all slices of this worker wait for, if they do."""

    top: Lane
    full: frozenset[Lane]
    rows_are_full: bool
    slices_held_by: str

    def of(self, lane: Lane, stage: Stage) -> str:
        """What sequences of this lane wait for at this stage; empty if only their turn has not come."""
        match stage:
            case "parked":
                return "rows" if self.rows_are_full else "higher_class"
            case "fetching":
                return "disk"
            case "in line" | "no room" if lane in self.full:
                return "rows"
            case "no room":
                return MEMORY
            case _:
                return "higher_class" if self.top < lane else self.slices_held_by


class WaitingTimes:
    """Seconds of the device that went to others, in `Sequence.held`. Tell it of every move."""

    def __init__(self) -> None:
        self._groups = [{stage: _Group(lane, stage) for stage in get_args(Stage)} for lane in LANES]
        self._all_groups = [group for by_stage in self._groups for group in by_stage.values()]
        self._group_of: dict[RequestId, _Group] = {}
        self._seconds_before: dict[RequestId, dict[str, float]] = {}

    def enter(self, sequence: Sequence, stage: Stage) -> None:
        """It waits, from now on, at this stage: it may have waited at another one."""
        self.leave(sequence)
        group = self._groups[sequence.lane][stage]
        group.members += 1
        self._group_of[sequence.request_id] = group
        self._seconds_before[sequence.request_id] = dict(group.seconds)

    def leave(self, sequence: Sequence) -> None:
        """It runs, or is gone."""
        group = self._group_of.pop(sequence.request_id, None)
        if group is None:
            return
        group.members -= 1
        before = self._seconds_before.pop(sequence.request_id)
        for reason, seconds in group.seconds.items():
            if (waited := seconds - before.get(reason, 0.0)) > 0:
                sequence.held[reason] = sequence.held.get(reason, 0.0) + waited

    def settle(self, sequence: Sequence) -> None:
        """Bring its own `held` up to date."""
        if (group := self._group_of.get(sequence.request_id)) is not None:
            self.enter(sequence, group.stage)

    def stage_of(self, sequence: Sequence) -> Stage:
        """Of one that waits."""
        return self._group_of[sequence.request_id].stage

    def count(self, seconds: float, holders: Holders, served: Sequence | None) -> None:
        """So much of the device went to others than those who wait, but for `served`, who had it."""
        stage = None if served is None else self.stage_of(served)
        if served is not None:
            self.leave(served)
        for group in self._all_groups:
            if group.members and (reason := holders.of(group.lane, group.stage)):
                group.seconds[reason] = group.seconds.get(reason, 0.0) + seconds
        if served is not None and stage is not None:
            self.enter(served, stage)


def sort_by_room(waits: WaitingTimes, prompts: Iterable[Sequence], entrance: Entrance) -> None:
    """Tell apart those in line for whose KV there is no room."""
    for prompt in prompts:
        stage: Stage = "in line" if entrance.admits(prompt) else "no room"
        if stage != waits.stage_of(prompt):
            waits.enter(prompt, stage)


def holders(places: Places, full: frozenset[Lane], max_rows: int, slices_held_by: str) -> Holders:
    """As things stand."""
    tops = [lane for lane in (places.highest_waiting, places.highest_row) if lane is not None]
    return Holders(
        top=min(tops, default=Lane.WARM),
        full=full,
        rows_are_full=len(places.decoding) >= max_rows,
        slices_held_by=slices_held_by,
    )
