"""One model's status from what dispatch knows of it. Decides only."""

from typing import assert_never

from msgspec import Struct

from gateway.fleet_terms import Absent, BackingOff, Draining, GivenUp, Ready, Starting, WaitingForMemory, WorkerState
from gateway.status import LastExit, ModelState, ModelStatus
from protocol.generation import Loading, Pong
from protocol.ids import Incarnation, ModelName


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What there is to know. Moments are by the monotonic clock."""

    name: ModelName
    state: WorkerState
    incarnation: Incarnation | None
    pid: int | None
    restarts: int
    last_exit: LastExit | None
    open_requests: int
    waiting_requests: int
    loading: Loading | None
    loaded_in_seconds: float | None
    books: Pong | None
    pong_at: float | None
    stuck_reason: str | None
    held_reason: str | None


def model_status(facts: ModelFacts, *, now: float, unix_now: float) -> ModelStatus:
    """The status page's entry, with moments as Unix time."""
    state, books = facts.state, facts.books
    name, since = _state_name(state)
    if since is not None:
        since_unix = unix_now - (now - since)
    else:
        since_unix = facts.last_exit.at_unix if facts.last_exit else unix_now
    return ModelStatus(
        name=facts.name,
        state=name,
        since_unix=since_unix,
        pid=facts.pid,
        incarnation=facts.incarnation or Incarnation(0),
        restarts=facts.restarts,
        limits=state.limits if isinstance(state, Ready) else None,
        loading=facts.loading if isinstance(state, Starting) else None,
        loaded_in_seconds=facts.loaded_in_seconds,
        last_exit=facts.last_exit,
        open_requests=facts.open_requests,
        waiting_requests=facts.waiting_requests,
        steps=books.steps if books else 0,
        seconds_since_pong=now - facts.pong_at if facts.pong_at is not None else None,
        retry_after_seconds=max(0.0, state.until - now) if isinstance(state, (BackingOff, GivenUp)) else None,
        memory_bytes=books.active_bytes if books else None,
        books=books,
        stuck_reason=facts.stuck_reason,
        held_reason=facts.held_reason,
    )


def _state_name(state: WorkerState) -> tuple[ModelState, float | None]:
    match state:
        case Absent():
            return "absent", None
        case WaitingForMemory(since=since):
            return "waiting_for_memory", since
        case Starting(since=since):
            return "starting", since
        case Ready(since=since):
            return "ready", since
        case Draining(since=since):
            return "draining", since
        case BackingOff(since=since):
            return "backing_off", since
        case GivenUp(since=since):
            return "given_up", since
        case _:
            assert_never(state)
