"""What the service says about itself: written by dispatch, read by the operations routes and the command line."""

from typing import Literal, Protocol

from msgspec import Struct

from protocol.blocks import Described
from protocol.generation import Loading, Pong, Ready
from protocol.ids import Incarnation, ModelName

ModelState = Literal["absent", "waiting_for_memory", "starting", "ready", "draining", "backing_off", "given_up"]
"""Where a model's process is in its life. `absent` is a known model that nobody asked for yet."""


class LastExit(Struct, frozen=True, kw_only=True):
    """How a child ended last. Exactly one of `exit_code` and `signal` is set, unless it never started.

    `was_ordered`: it was unloaded, or the service stopped, so that no end of it is an error. `last_words` is what it
    said on the socket before it ended. `stderr_tail` holds its last lines, which hold no prompt: children do not log
    prompts.
    """

    reason: str
    at_unix: float
    exit_code: int | None = None
    signal: int | None = None
    was_ordered: bool = False
    last_words: str | None = None
    stderr_tail: tuple[str, ...] = ()


class ModelStatus(Struct, frozen=True, kw_only=True):
    """One model that dispatch knows of. A model of the catalog without an entry is `absent`.

    `loading` is there while weights are read, `loaded_in_seconds` while a process starts, or will, and others tell how
    long that takes. `stuck_reason` is set while the model has work that does not get on: its step loop made no step for
    half of its limit, the process is being stopped for that, or somebody holds it. `held_reason` is set as long as
    somebody holds it (SIGSTOP, a debugger), with work or without. Both are words that an operator can act on. `books`
    is the process's last Pong.
    """

    name: ModelName
    state: ModelState
    since_unix: float
    pid: int | None = None
    incarnation: Incarnation = Incarnation(0)
    restarts: int = 0
    limits: Ready | None = None
    loading: Loading | None = None
    loaded_in_seconds: float | None = None
    last_exit: LastExit | None = None
    open_requests: int = 0
    waiting_requests: int = 0
    steps: int = 0
    seconds_since_pong: float | None = None
    retry_after_seconds: float | None = None
    memory_bytes: int | None = None
    books: Pong | None = None
    stuck_reason: str | None = None
    held_reason: str | None = None


class CachestoreStatus(Struct, frozen=True, kw_only=True):
    """The cachestore's process and its books; `books` is None until it described itself."""

    state: ModelState
    since_unix: float
    pid: int | None = None
    incarnation: Incarnation = Incarnation(0)
    restarts: int = 0
    last_exit: LastExit | None = None
    books: Described | None = None


class ServiceStatus(Struct, frozen=True, kw_only=True):
    """Everything dispatch knows, at one moment. `cachestore` is None when caching on disk is off."""

    models: tuple[ModelStatus, ...] = ()
    cachestore: CachestoreStatus | None = None


class GatewayStatus(Struct, frozen=True, kw_only=True):
    """The gateway's own process."""

    pid: int
    version: str
    uptime_seconds: float


class AdminModel(Struct, frozen=True, kw_only=True):
    """A model of the catalog with its process, if it ever had one."""

    name: ModelName
    path: str
    weight_bytes: int
    context_tokens: int | None
    problem: str | None
    process: ModelStatus | None


class AdminStatus(Struct, frozen=True, kw_only=True):
    """Everything an operator may ask in one answer. Also holds models that left the catalog and still run."""

    gateway: GatewayStatus
    models: tuple[AdminModel, ...]
    cachestore: CachestoreStatus | None


class StatusSource(Protocol):
    """Whoever can say how the service is. Called on the event loop; must not block."""

    def status(self) -> ServiceStatus: ...
