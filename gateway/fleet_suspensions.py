"""Processes that somebody holds: stopped by SIGSTOP, by a shell's Ctrl-Z, at a debugger's breakpoint.

Such a process makes no step and is not stuck. It is left alone for as long as it is held: it gets no request, is not
unloaded for being idle, nor for another model's sake; its requests wait. When it goes on it has all its patience anew;
what it rested before counts on. What is being stopped anyhow is not spared, nor is it when an operator unloads it.
"""

from typing import assert_never

from msgspec.structs import replace

from gateway.fleet_life import Life, release_waiting, start_patience
from gateway.fleet_terms import (
    Absent,
    BackingOff,
    Draining,
    Effect,
    FleetSettings,
    GivenUp,
    Ready,
    Starting,
    SuspensionNoted,
    WaitingForMemory,
    WorkerState,
)


def suspended_at(state: WorkerState) -> float | None:
    """When the process of this state was first seen held; None for one that runs, and where there is none."""
    match state:
        case Starting(suspended_at=at) | Ready(suspended_at=at):
            return at
        case Absent() | WaitingForMemory() | Draining() | BackingOff() | GivenUp():
            return None
        case _:
            assert_never(state)


def note_suspended(life: Life, settings: FleetSettings, now: float) -> list[Effect]:
    """It is held, at this moment. No deadline may pass before the next look at it."""
    state = life.state
    since = suspended_at(state)
    began = now if since is None else since
    next_look_at = now + settings.ping_working_seconds
    match state:
        case Starting():
            life.state = replace(state, suspended_at=began, deadline=max(state.deadline, next_look_at))
        case Ready():
            # Between two looks that found it held it did not rest; its progress was noted at the first of them.
            held_on = now - state.progress_at if since is not None else 0.0
            life.state = replace(
                state,
                suspended_at=began,
                progress_at=now,
                idle_since=min(now, state.idle_since + held_on),
                next_ping_at=min(state.next_ping_at, next_look_at),
            )
        case Absent() | WaitingForMemory() | Draining() | BackingOff() | GivenUp():
            return []
        case _:
            assert_never(state)
    if since is not None:
        return []
    return [SuspensionNoted(model=life.model, incarnation=state.incarnation, change="suspended")]


def note_continued(life: Life, settings: FleetSettings, now: float) -> list[Effect]:
    """It goes on, with as much time for its work as if it had just begun, and gets what waited for it meanwhile."""
    state = life.state
    since = suspended_at(state)
    if since is None:
        return []
    match state:
        case Starting():
            life.state = replace(state, suspended_at=None, deadline=now + start_patience(life, settings))
        case Ready():
            life.state = replace(state, suspended_at=None, progress_at=now)
        case Absent() | WaitingForMemory() | Draining() | BackingOff() | GivenUp():
            return []
        case _:
            assert_never(state)
    noted = SuspensionNoted(model=life.model, incarnation=state.incarnation, change="continued", seconds=now - since)
    return [noted, *release_waiting(life, settings, now)]
