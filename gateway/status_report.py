"""`mlxd status --json`: a shape that scripts rely on. Its named fields stay; what mlxd knows beyond them is added."""

from msgspec import Struct

from gateway.status import AdminModel, AdminStatus, CachestoreStatus, LastExit, ModelState, ModelStatus
from protocol.blocks import Described


class ModelReport(Struct, frozen=True, kw_only=True):
    """One model. `pid`, `memory_bytes` are null without a process, `last_error` while nothing speaks against it.

    `incarnation` is 0 until it first had a process. `process` is all that is known of that.
    """

    id: str
    state: ModelState
    pid: int | None
    incarnation: int
    restarts: int
    memory_bytes: int | None
    last_error: str | None
    path: str
    weight_bytes: int
    context_tokens: int | None
    process: ModelStatus | None


class CachestoreReport(Struct, frozen=True, kw_only=True):
    """The cache on disk. `blocks` and `bytes` are null until it first told them."""

    pid: int | None
    state: ModelState
    blocks: int | None
    bytes: int | None
    restarts: int
    last_error: str | None
    books: Described | None


class StatusReport(Struct, frozen=True, kw_only=True):
    """The running service. `url` is where this machine reaches it; `cachestore` is null when nothing goes to disk."""

    version: str
    url: str
    pid: int
    uptime_seconds: float
    models: tuple[ModelReport, ...]
    cachestore: CachestoreReport | None


def status_report(status: AdminStatus, *, url: str) -> StatusReport:
    """The service's own answer in the words of the contract."""
    return StatusReport(
        version=status.gateway.version,
        url=url,
        pid=status.gateway.pid,
        uptime_seconds=status.gateway.uptime_seconds,
        models=tuple(_model(model) for model in status.models),
        cachestore=None if status.cachestore is None else _cachestore(status.cachestore),
    )


def last_error(model: AdminModel) -> str | None:
    """What is wrong with a model, or was when its last process ended; the most telling words there are."""
    if model.problem is not None:
        return model.problem
    process = model.process
    if process is None:
        return None
    return process.stuck_reason or process.held_reason or _exit_error(process.last_exit)


def _model(model: AdminModel) -> ModelReport:
    process = model.process
    return ModelReport(
        id=model.name,
        state="absent" if process is None else process.state,
        pid=None if process is None else process.pid,
        incarnation=0 if process is None else process.incarnation,
        restarts=0 if process is None else process.restarts,
        memory_bytes=None if process is None else process.memory_bytes,
        last_error=last_error(model),
        path=model.path,
        weight_bytes=model.weight_bytes,
        context_tokens=model.context_tokens,
        process=process,
    )


def _cachestore(store: CachestoreStatus) -> CachestoreReport:
    books = store.books
    return CachestoreReport(
        pid=store.pid,
        state=store.state,
        blocks=None if books is None else books.blocks,
        bytes=None if books is None else books.file_bytes,
        restarts=store.restarts,
        last_error=_exit_error(store.last_exit),
        books=books,
    )


def _exit_error(last: LastExit | None) -> str | None:
    """A process that ended well, or as it was told to, left no error."""
    if last is None or last.exit_code == 0 or last.was_ordered:
        return None
    words = last.last_words or (last.stderr_tail[-1] if last.stderr_tail else None)
    return last.reason if words is None else f"{last.reason}: {words}"
