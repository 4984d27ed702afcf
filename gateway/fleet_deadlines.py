"""When the fleet must look at a model again, in each state of its process."""

from typing import assert_never

from msgspec.structs import replace

from gateway.fleet_life import Life
from gateway.fleet_suspensions import suspended_at
from gateway.fleet_terms import (
    Absent,
    BackingOff,
    Draining,
    FleetSettings,
    GivenUp,
    Ready,
    Starting,
    WaitingForMemory,
    WorkerState,
)


def due_at(life: Life, settings: FleetSettings) -> float | None:
    """The moment at which something follows although nothing happened; None when nothing would."""
    match life.state:
        case Absent() | GivenUp():
            return None
        case Starting(deadline=deadline, next_look_at=next_look_at):
            return min(deadline, next_look_at)
        case Ready(next_ping_at=next_ping_at, progress_at=progress_at) if life.state.open_requests:
            return min(next_ping_at, progress_at + settings.hang_seconds)
        case Ready(next_ping_at=next_ping_at):
            return min(next_ping_at, unload_at(life, life.state, settings) or next_ping_at)
        case WaitingForMemory(until=until):
            return until
        case Draining(rung="stranded"):
            return None
        case Draining(deadline=deadline):
            return deadline
        case BackingOff(until=until):
            return until
        case _:
            assert_never(life.state)


def unload_at(life: Life, state: Ready, settings: FleetSettings) -> float | None:
    """When a model without work leaves by itself."""
    terms = settings.memory
    if terms.unload_after_seconds is None or state.open_requests or life.model in terms.pinned:
        return None
    if state.suspended_at is not None:
        return None
    return state.idle_since + terms.unload_after_seconds


def held_reason(state: WorkerState, now: float) -> str | None:
    """That a model's process is held, in words; None for one that runs, and where there is none."""
    at = suspended_at(state)
    if at is None:
        return None
    return (
        f"the process is stopped since {now - at:.0f} s, by a signal or a debugger, and left alone; "
        "its requests wait until it is continued (SIGCONT)"
    )


def stuck_reason(life: Life, settings: FleetSettings, now: float) -> str | None:
    """Why a model's work does not move, in words: its process is held, or has not moved for half of its limit or
    longer. A load is work; a process that is held and has none keeps nobody waiting."""
    match life.state:
        case Starting(suspended_at=float()):
            return held_reason(life.state, now)
        case Ready(suspended_at=float(), open_requests=count) if count or life.waiting_since is not None:
            return held_reason(life.state, now)
        case Ready(suspended_at=float()):
            return None
        case Ready(open_requests=count, progress_at=at) if count and now - at >= settings.hang_seconds / 2:
            return (
                f"{count} open request(s), no engine step for {now - at:.0f} s; "
                f"the process is restarted at {settings.hang_seconds:.0f} s"
            )
        case Draining(purpose="lost", since=since):
            return f"the process hung and is being stopped since {now - since:.0f} s"
        case Draining(rung="stranded"):
            return "the process does not die, even by SIGKILL; restarting the machine frees its memory"
        case _:
            return None


def postponed(state: WorkerState, seconds: float) -> WorkerState:
    """The same state with its deadlines so much later."""
    match state:
        case Starting() | Draining():
            return replace(state, deadline=state.deadline + seconds)
        case Ready():
            return replace(state, progress_at=state.progress_at + seconds, idle_since=state.idle_since + seconds)
        case WaitingForMemory():
            return replace(state, until=state.until + seconds)
        case Absent() | BackingOff() | GivenUp():
            return state
        case _:
            assert_never(state)
