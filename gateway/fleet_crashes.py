"""What a crash costs: the first one a restart, more in a row a longer and longer wait, too many of them the model."""

from msgspec.structs import replace

from gateway.fleet_failures import crashed_too_often
from gateway.fleet_life import Life, fail_waiting, forgive_if_stable
from gateway.fleet_starts import FleetStarts
from gateway.fleet_terms import (
    Absent,
    BackingOff,
    CrashRecorded,
    Draining,
    Effect,
    FleetSettings,
    GaveUp,
    GivenUp,
    Ready,
    Starting,
    WorkerExited,
)
from protocol.failures import Failure, FailureKind

_HOPELESS = frozenset({FailureKind.MODEL_UNAVAILABLE, FailureKind.UNSUPPORTED})
"""Last words of a load that the next load would repeat: the folder is broken, or the model is not known."""


def crashed(event: WorkerExited, life: Life, starts: FleetStarts, settings: FleetSettings, now: float) -> list[Effect]:
    """What follows when the model's process has ended although nobody asked it to."""
    state = life.state
    forgive_if_stable(life, settings, now)
    half_open = isinstance(state, Starting) and state.kind == "half_open"
    half_open |= isinstance(state, Ready) and state.kind == "half_open" and life.attempts > 0
    served = isinstance(state, (Ready, Draining))
    life.crashes = [at for at in life.crashes if now - at < settings.crash_window_seconds] + [now]
    life.attempts += 1
    count = len(life.crashes)
    hopeless = isinstance(state, Starting) and event.last_words is not None and event.last_words.kind in _HOPELESS
    recorded = CrashRecorded(
        model=life.model, incarnation=event.incarnation, crashes_in_window=count, then="stays_absent"
    )
    if half_open or hopeless or count >= settings.crash_limit:
        failure = crashed_too_often(event, count, settings)
        return [replace(recorded, then="gives_up"), *give_up(life, failure, settings, now)]
    if life.waiting_since is None and not served:
        life.state = Absent()
        return [recorded]
    if life.attempts == 1 and served:
        life.restarts += 1
        return [replace(recorded, then="restarts"), *starts.start(life, "normal", now)]
    delay = backoff_seconds(life.attempts, settings)
    life.state = BackingOff(since=now, until=now + delay, attempts=life.attempts)
    return [replace(recorded, then="backs_off")]


def give_up(life: Life, failure: Failure, settings: FleetSettings, now: float) -> list[Effect]:
    """Close the model for a while; whoever asks meanwhile hears `failure`."""
    life.state = GivenUp(since=now, until=now + settings.given_up_seconds, failure=failure)
    return [GaveUp(model=life.model, failure=failure), *fail_waiting(life, failure)]


def backoff_seconds(attempts: int, settings: FleetSettings) -> float:
    """How long to wait after the `attempts`-th crash in a row: doubling, bounded."""
    doublings = min(attempts - 1, 30)  # bounded, so that the power cannot overflow
    return min(settings.backoff_longest_seconds, settings.backoff_first_seconds * 2.0**doublings)
