"""The ladder on which a process is stopped: asked to drain, SIGTERM, SIGKILL, and then nothing more can be done.

SIGKILL can strand wired memory on macOS, so SIGTERM has long to work.
"""

from typing import assert_never

from msgspec.structs import replace

from gateway.fleet_failures import hung, stranded, unloaded
from gateway.fleet_life import Life, fail_waiting, forgive_if_stable
from gateway.fleet_terms import (
    Draining,
    Effect,
    FailOpen,
    FleetSettings,
    Ready,
    Rung,
    StopPurpose,
    StopWorker,
    WorkerStuck,
)
from protocol.failures import Failure
from protocol.ids import Incarnation

_GIB = 1024**3


def drain(life: Life, purpose: StopPurpose, drain_seconds: float, now: float) -> list[Effect]:
    """Ask a process that serves to end after its open requests. One that drains already may only get less time."""
    if isinstance(life.state, Draining) and life.state.rung == "drain":
        life.state = replace(life.state, deadline=min(life.state.deadline, now + drain_seconds))
    if not isinstance(life.state, Ready):
        return []
    incarnation = life.state.incarnation
    life.state = Draining(
        incarnation=incarnation,
        since=now,
        deadline=now + drain_seconds,
        purpose=purpose,
        rung="drain",
        weight_bytes=life.weight_bytes,
    )
    return [StopWorker(model=life.model, incarnation=incarnation, how="drain", within_seconds=drain_seconds)]


def climb(
    life: Life,
    incarnation: Incarnation,
    purpose: StopPurpose,
    rung: Rung,
    settings: FleetSettings,
    now: float,
    failure: Failure | None = None,
) -> StopWorker:
    """Put the process on a rung. `failure` is what its model is given up with after the exit, if it is."""
    if rung == "kill":
        patience = settings.kill_grace_seconds
    else:
        patience = settings.terminate_grace_seconds + settings.stop_seconds_per_gib * life.weight_bytes / _GIB
    since = life.state.since if isinstance(life.state, Draining) else now
    life.state = Draining(
        incarnation=incarnation,
        since=since,
        deadline=now + patience,
        purpose=purpose,
        rung=rung,
        failure=failure,
        weight_bytes=life.weight_bytes,
    )
    how = "kill" if rung == "kill" else "terminate"
    return StopWorker(model=life.model, incarnation=incarnation, how=how, within_seconds=patience)


def next_rung(life: Life, state: Draining, settings: FleetSettings, now: float) -> list[Effect]:
    """What follows when a process has outlived the patience of its rung."""
    match state.rung:
        case "drain":
            effects: list[Effect] = []
            if state.purpose == "unload":
                failure = unloaded(life.model)
                effects.append(FailOpen(model=life.model, incarnation=state.incarnation, failure=failure))
            stop = climb(life, state.incarnation, state.purpose, "terminate", settings, now, state.failure)
            return [*effects, stop]
        case "terminate":
            return [climb(life, state.incarnation, state.purpose, "kill", settings, now, state.failure)]
        case "kill":
            life.state = replace(state, rung="stranded")
            stuck = WorkerStuck(model=life.model, incarnation=state.incarnation, reason="SIGKILL did not end it")
            return [stuck, *fail_waiting(life, stranded(life.model))]
        case "stranded":
            return []
        case _:
            assert_never(state.rung)


def lose(
    life: Life,
    incarnation: Incarnation,
    reason: str,
    settings: FleetSettings,
    now: float,
) -> list[Effect]:
    """Its step loop is deaf, so there is no point in asking it to drain. Who has no answer yet gets it of the next.

    One that is being stopped already is lost on nobody.
    """
    if isinstance(life.state, Draining):
        return []
    forgive_if_stable(life, settings, now)
    stop = climb(life, incarnation, "lost", "terminate", settings, now)
    return [
        WorkerStuck(model=life.model, incarnation=incarnation, reason=reason),
        FailOpen(model=life.model, incarnation=incarnation, failure=hung(life.model), unanswered="retry"),
        stop,
    ]
