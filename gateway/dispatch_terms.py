"""The words of `gateway.dispatch`: its settings, what it must be given, and what can come into its inbox."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from msgspec import Struct

from gateway.cachestore_child import CachestoreSettings
from gateway.fleet_terms import FleetEvent, FleetSettings, ModelWanted
from gateway.model_settings import KVSettings
from gateway.model_waiters import Outcome
from gateway.open_requests import OpenRequest
from gateway.ports import CacheOrder
from gateway.processes import ChildExit, ChildProcess
from protocol.failures import Failure
from protocol.framing import MalformedMessage
from protocol.generation import Finished, Loading, Pong, Warmed, WorkerEvent
from protocol.ids import Incarnation, ModelName, RequestId
from protocol.launch import PersistPolicy
from protocol.model_kind import ModelKind


class ModelFolder(Protocol):
    """What dispatch must know of a model."""

    @property
    def path(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def problem(self) -> str | None: ...
    @property
    def kind(self) -> ModelKind: ...


class ModelFolders(Protocol):
    """The catalog, as dispatch sees it. Called on the event loop."""

    def find(self, name: str) -> ModelFolder | None: ...


class RequestObserver(Protocol):
    """Whoever wants to know of requests that ended well. Called on the event loop; must not raise."""

    def finished(self, request: OpenRequest, incarnation: Incarnation, end: Finished | Warmed) -> None: ...


class DispatchSettings(Struct, frozen=True, kw_only=True):
    """`worker_environment` is all that a worker gets. `first_incarnation` should differ from one start of the gateway
    to the next, so that an orphan of the one before cannot pass for a worker of this one."""

    runtime_directory: str
    worker_command: tuple[str, ...]
    worker_environment: Mapping[str, str]
    cachestore: CachestoreSettings | None = None
    fleet: FleetSettings = FleetSettings()
    max_waiting_per_model: int = 64
    max_rows: int = 16
    context_tokens: int | None = None
    hot_cache_bytes: int = 2 * 1024**3
    kv: KVSettings = KVSettings()
    persist: PersistPolicy = "second-touch"
    prefill_slice_seconds: float = 0.2
    log_level: str = "info"
    first_incarnation: int = 1


class Submitted(Struct, frozen=True, kw_only=True):
    """A request came in."""

    request: OpenRequest


class Cancelled(Struct, frozen=True, kw_only=True):
    """The client of this request is gone."""

    request_id: RequestId


class Ordered(Struct, frozen=True, kw_only=True):
    """Something is to be told to a model's process, if it has one that is ready or drains."""

    model: ModelName
    order: CacheOrder


class LoadAsked(Struct, frozen=True, kw_only=True):
    """Somebody waits until the model is loaded."""

    wanted: ModelWanted
    outcome: Outcome


class UnloadAsked(Struct, frozen=True, kw_only=True):
    """Somebody waits until the process that the model has now is gone."""

    model: ModelName
    outcome: Outcome


class BooksWanted(Struct, frozen=True, kw_only=True):
    """`asked` is filled in by the loop, by the nonces of its Pings, and emptied as the Pongs come or the processes
    go."""

    whose: Literal["ready", "ready and draining"]
    asked: dict[int, Incarnation]
    fresh: asyncio.Event


class Said(Struct, frozen=True, kw_only=True):
    """A message came over the socket."""

    peer: bytes
    message: WorkerEvent | MalformedMessage


class Exited(Struct, frozen=True, kw_only=True):
    """A process has ended, or could not be started."""

    worker: "WorkerProcess"
    ended: ChildExit


class DrainDeadlinePassed(Struct, frozen=True, kw_only=True):
    """The requests that are still open have had their time."""


class Stopped(Struct, frozen=True, kw_only=True):
    """Every worker is gone, and nothing more will come."""


Inbox = (
    Submitted
    | Cancelled
    | Ordered
    | LoadAsked
    | UnloadAsked
    | BooksWanted
    | Said
    | Exited
    | DrainDeadlinePassed
    | Stopped
    | FleetEvent
)
"""What happens to dispatch, in one line of arrival."""


class WorkerProcess(Struct, kw_only=True):
    """One spawned process and what it said."""

    model: ModelName
    incarnation: Incarnation
    child: ChildProcess | None = None
    stop_at_birth: Callable[[ChildProcess], None] | None = None
    last_words: Failure | None = None
    loading: Loading | None = None
    hot_cache_bytes: int | None = None
    has_tokenizer: bool = False
    books: Pong | None = None
    pong_at: float | None = None
    faults: int = 0
