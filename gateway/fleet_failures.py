"""What clients hear of a model's process: each failure of the fleet, in words that say what to do next."""

from gateway.fleet_terms import FleetSettings, WorkerExited
from protocol.failures import Failure, FailureKind
from protocol.handshake import Refused
from protocol.ids import ModelName


def shutting_down() -> Failure:
    """The failure of a request that meets a service about to stop."""
    return Failure(
        kind=FailureKind.SHUTTING_DOWN,
        message="the service is stopping; send the request again in a while",
        retry_after_seconds=10.0,
    )


def died(event: WorkerExited) -> Failure:
    """Of a request that was in the hands of this process."""
    return Failure(
        kind=FailureKind.WORKER_DIED,
        message=f"the process of model {event.model} ended ({_how(event)}) while it served this request; "
        "it restarts by itself: send the request again",
        retry_after_seconds=1.0,
    )


def hung(model: ModelName) -> Failure:
    """Of a request in the hands of a process that is stopped because it does nothing more."""
    return Failure(
        kind=FailureKind.WORKER_DIED,
        message=f"the process of model {model} stopped working on this request and is being replaced: "
        "send the request again",
        retry_after_seconds=1.0,
    )


def unloaded(model: ModelName) -> Failure:
    """Of whoever still had, or wanted, a model that the operator took out."""
    return Failure(
        kind=FailureKind.MODEL_UNAVAILABLE,
        message=f"model {model} was unloaded by the operator; send the request again to load it",
        retry_after_seconds=1.0,
    )


def stranded(model: ModelName) -> Failure:
    """Of whoever wants a model whose last process survived SIGKILL."""
    return Failure(
        kind=FailureKind.MODEL_UNAVAILABLE,
        message=f"the last process of model {model} does not end, so no new one starts; "
        "the operator must restart the machine",
        retry_after_seconds=60.0,
    )


def refused_at_hello(model: ModelName, refused: Refused, settings: FleetSettings) -> Failure:
    """Of a model whose process does not fit this gateway."""
    return Failure(
        kind=FailureKind.MODEL_UNAVAILABLE,
        message=f"model {model} cannot be started: {refused.reason}; the operator must restart mlxd",
        retry_after_seconds=settings.given_up_seconds,
    )


def not_ready_in_time(model: ModelName, seconds: float, settings: FleetSettings) -> Failure:
    """Of a model that was still loading when its time was up."""
    return Failure(
        kind=FailureKind.MODEL_UNAVAILABLE,
        message=f"model {model} was not ready {seconds:.0f} s after its start; "
        "if it only loads slowly, the operator can raise load_timeout_seconds in mlxd.toml",
        retry_after_seconds=settings.given_up_seconds,
    )


def crashed_too_often(event: WorkerExited, crashes: int, settings: FleetSettings) -> Failure:
    """Of a model that is given up for a while; `event` is its last crash."""
    what = f"its process ended {crashes} time(s) within {settings.crash_window_seconds:.0f} s, last by {_how(event)}"
    if event.last_words is not None:
        what += f": {event.last_words.message}"
    return Failure(
        kind=FailureKind.MODEL_UNAVAILABLE,
        message=f"model {event.model} is not available: {what}. It is tried again when asked for after "
        f"{settings.given_up_seconds:.0f} s; the server's owner sees more with `mlxd status`",
        retry_after_seconds=settings.given_up_seconds,
    )


def _how(event: WorkerExited) -> str:
    if event.signal is not None:
        return f"signal {event.signal}"
    return "a failed start" if event.exit_code is None else f"exit code {event.exit_code}"
