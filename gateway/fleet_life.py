"""What the fleet remembers of one model, and the small steps that every part of the fleet takes with it."""

from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from gateway.fleet_terms import (
    Absent,
    BackingOff,
    Draining,
    Effect,
    FailWaiting,
    FleetSettings,
    GivenUp,
    Ready,
    ReleaseWaiting,
    Starting,
    WaitingForMemory,
    WorkerState,
)
from protocol.failures import Failure
from protocol.ids import Incarnation, ModelName
from protocol.model_kind import ModelKind

_GIB = 1024**3


class Life(Struct, kw_only=True):
    """One model, whatever process it has. Only the fleet and its parts change it.

    `waiting_since`: somebody waits for the model. `attempts`: crashes in a row. `restarts`: how many processes were
    started because the one before crashed.
    """

    model: ModelName
    state: WorkerState = Absent()
    weight_bytes: int = 0
    kind: ModelKind = "generation"
    waiting_since: float | None = None
    crashes: list[float] = []
    attempts: int = 0
    restarts: int = 0


def incarnation_of(state: WorkerState) -> Incarnation | None:
    """The process that there is in this state, if there is one."""
    match state:
        case Starting(incarnation=incarnation) | Ready(incarnation=incarnation) | Draining(incarnation=incarnation):
            return incarnation
        case Absent() | WaitingForMemory() | BackingOff() | GivenUp():
            return None
        case _:
            assert_never(state)


def fail_waiting(life: Life, failure: Failure) -> list[Effect]:
    """Tell those who wait for the model, if there are any."""
    if life.waiting_since is None:
        return []
    life.waiting_since = None
    return [FailWaiting(model=life.model, failure=failure)]


def note_work(life: Life, open_requests: int, settings: FleetSettings, now: float) -> None:
    """A process that serves has so many open requests now. Its step loop's clock starts with the first of them."""
    state = life.state
    if not isinstance(state, Ready):
        return
    began = state.open_requests == 0 and open_requests > 0
    life.state = replace(
        state,
        open_requests=open_requests,
        idle_since=now,
        progress_at=now if began else state.progress_at,
        next_ping_at=min(state.next_ping_at, now + settings.ping_working_seconds)
        if open_requests
        else state.next_ping_at,
    )


def release_waiting(life: Life, settings: FleetSettings, now: float) -> list[Effect]:
    """A process that serves gets those who wait for the model, if there are any and nobody holds it."""
    state = life.state
    if not isinstance(state, Ready) or state.suspended_at is not None or life.waiting_since is None:
        return []
    life.waiting_since = None
    note_work(life, state.open_requests or 1, settings, now)  # the exact number follows; it must not leave until then
    return [ReleaseWaiting(model=life.model, incarnation=state.incarnation)]


def start_patience(life: Life, settings: FleetSettings) -> float:
    """How many seconds a load may take."""
    return settings.start_timeout_seconds + settings.start_seconds_per_gib * life.weight_bytes / _GIB


def forgive_if_stable(life: Life, settings: FleetSettings, now: float) -> None:
    """A process that served for a while clears its predecessors' crashes in a row."""
    if isinstance(life.state, Ready) and now - life.state.since >= settings.stable_seconds:
        life.attempts = 0
