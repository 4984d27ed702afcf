"""Which process starts and when: at once if there is room, else when others have left, first come, first in."""

from collections.abc import Mapping
from typing import assert_never

from msgspec.structs import replace

from gateway.fleet_life import Life, fail_waiting, start_patience
from gateway.fleet_stops import drain
from gateway.fleet_terms import (
    Absent,
    BackingOff,
    Draining,
    Effect,
    FleetSettings,
    GivenUp,
    Ready,
    Starting,
    StartKind,
    StartWorker,
    WaitingForMemory,
)
from gateway.residency import Fits, FitsAfter, NeverFits, Resident, need_of, room_for
from protocol.ids import Incarnation, ModelName


class FleetStarts:
    """Starts over the fleet's own `lives`. Each process gets the next incarnation."""

    def __init__(self, settings: FleetSettings, lives: Mapping[ModelName, Life], first_incarnation: int) -> None:
        self._settings = settings
        self._lives = lives
        self._next_incarnation = Incarnation(first_incarnation)

    def start(self, life: Life, kind: StartKind, now: float) -> list[Effect]:
        """Start a process, at once or when there is room for it."""
        terms = self._settings.memory
        need = need_of(life.weight_bytes, terms, life.kind)
        verdict = room_for(life.model, need.total_bytes, self._residents_before(life), terms)
        match verdict:
            case Fits():
                return [self._spawn(life, kind, now)]
            case FitsAfter(evict=evict, waits_for=waits_for):
                since = life.state.since if isinstance(life.state, WaitingForMemory) else now
                until = since + terms.wait_seconds
                life.state = WaitingForMemory(since=since, until=until, waits_for=waits_for, kind=kind)
                return [
                    effect
                    for other in evict
                    for effect in drain(self._lives[other], "unload", self._settings.drain_seconds, now)
                ]
            case NeverFits(failure=failure):
                life.state = Absent()
                return fail_waiting(life, failure)
            case _:
                assert_never(verdict)

    def give_freed_memory(self, now: float) -> list[Effect]:
        """What was freed goes to those who wait, in the order in which they came."""
        waiting: list[tuple[float, ModelName]] = [
            (life.state.since, model) for model, life in self._lives.items() if isinstance(life.state, WaitingForMemory)
        ]
        effects: list[Effect] = []
        for _, model in sorted(waiting):
            life = self._lives[model]
            if isinstance(life.state, WaitingForMemory):
                effects += self.start(life, life.state.kind, now)
        return effects

    def residents(self) -> tuple[Resident, ...]:
        """Who has memory, or waits for it."""
        found = (self._resident(life, None) for life in self._lives.values())
        return tuple(resident for resident in found if resident is not None)

    def _residents_before(self, life: Life) -> list[Resident]:
        """Who has memory, or waits for it and came before this one."""
        since = life.state.since if isinstance(life.state, WaitingForMemory) else None
        return [
            resident
            for other in self._lives.values()
            if other is not life and (resident := self._resident(other, since)) is not None
        ]

    def _resident(self, life: Life, before: float | None) -> Resident | None:
        terms = self._settings.memory
        resident = Resident(
            model=life.model,
            need_bytes=need_of(life.weight_bytes, terms, life.kind).total_bytes,
            state="loading",
            is_pinned=life.model in terms.pinned,
        )
        match life.state:
            case Starting():
                return resident
            case Ready(open_requests=0, suspended_at=None, idle_since=idle_since):
                # One that somebody holds keeps its memory: it would not hear that it shall go, and be killed.
                return replace(resident, state="serving", idle_since=idle_since)
            case Ready():
                return replace(resident, state="serving")
            case Draining():
                return replace(resident, state="leaving")
            case WaitingForMemory(since=since) if before is None or since < before:
                return replace(resident, state="waiting")
            case WaitingForMemory() | Absent() | BackingOff() | GivenUp():
                return None
            case _:
                assert_never(life.state)

    def _spawn(self, life: Life, kind: StartKind, now: float) -> StartWorker:
        incarnation = self._next_incarnation
        self._next_incarnation = Incarnation(incarnation + 1)
        deadline = now + start_patience(life, self._settings)
        next_look_at = now + self._settings.ping_working_seconds
        life.state = Starting(
            incarnation=incarnation, since=now, deadline=deadline, next_look_at=next_look_at, kind=kind
        )
        return StartWorker(model=life.model, incarnation=incarnation)
