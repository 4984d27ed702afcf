"""The gateway's one task: it owns the fleet and the open requests, and carries out what the fleet decides.

Everything that happens (a submit, a message, an exit, a timer) becomes one entry of the inbox, so nothing here needs
a lock and every decision sees all that came before it.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, assert_never, cast

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from gateway.abilities import cannot_do
from gateway.cachestore_child import CachestoreChild, CachestoreSettings, last_exit
from gateway.fleet import Fleet
from gateway.fleet_failures import shutting_down, stranded
from gateway.fleet_terms import (
    AdmissionClosed,
    AnswerHello,
    CrashRecorded,
    Draining,
    Effect,
    FailOpen,
    FailWaiting,
    FleetEvent,
    FleetSettings,
    GaveUp,
    ModelWanted,
    PingWorker,
    PongReceived,
    Ready,
    ReleaseWaiting,
    ShutdownAsked,
    StartWorker,
    StopAsked,
    StopWorker,
    TimerFired,
    WaitersLeft,
    WakeAt,
    WorkChanged,
    WorkerExited,
    WorkerHello,
    WorkerLost,
    WorkerReady,
    WorkerStuck,
)
from gateway.model_status import ModelFacts, model_status
from gateway.model_waiters import ModelWaiters, Outcome
from gateway.open_requests import OpenRequest, OpenRequests
from gateway.ports import CacheOrder, CacheQuestion
from gateway.processes import ChildExit, ChildProcess, spawn
from gateway.replies import Reply
from gateway.residency import Resident
from gateway.status import LastExit, ModelStatus, ServiceStatus
from protocol import generation
from protocol.addresses import gateway_socket
from protocol.blocks import BlockReply
from protocol.failures import Failure, FailureKind
from protocol.framing import MalformedMessage
from protocol.generation import (
    Cancel,
    Drain,
    Failed,
    Finished,
    LastEvent,
    LastWords,
    Loading,
    Ping,
    Pong,
    RequestEvent,
    SetBudget,
    Warmed,
    Work,
    WorkerCommand,
    WorkerEvent,
)
from protocol.handshake import Hello, Refused
from protocol.ids import Incarnation, ModelName, RequestId
from protocol.latency import LatencyClass
from protocol.launch import PersistPolicy, WorkerLaunch
from protocol.model_kind import ModelKind
from protocol.sockets import AsyncListener, PeerGone

_log = structlog.get_logger()

_UNREAD_MESSAGES = 256
"""Messages taken from the socket and not handled yet. More wait in ZeroMQ, which takes turns between workers."""

_LAST_MESSAGES_SECONDS = 0.05
"""What a worker sent just before its exit may still be in ZeroMQ's thread when the exit is seen."""

_LOST_AFTER_FAULTS = 20
_OVERLOADED_RETRY_SECONDS = 5.0
_DEATHS_FOR_FAILURE = 2
_FRESH_BOOKS_SECONDS = 1.0
_CACHESTORE_SECONDS = 60.0
"""To forget a full cache is to delete a hundred thousand files."""


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
    persist: PersistPolicy = "second-touch"
    prefill_slice_seconds: float = 0.2
    log_level: str = "info"
    first_incarnation: int = 1


class _Submitted(Struct, frozen=True, kw_only=True):
    request: OpenRequest


class _Cancelled(Struct, frozen=True, kw_only=True):
    request_id: RequestId


class _Ordered(Struct, frozen=True, kw_only=True):
    model: ModelName
    order: CacheOrder


class _LoadAsked(Struct, frozen=True, kw_only=True):
    wanted: ModelWanted
    outcome: Outcome


class _UnloadAsked(Struct, frozen=True, kw_only=True):
    model: ModelName
    outcome: Outcome


class _BooksWanted(Struct, frozen=True, kw_only=True):
    """`nonces` are filled in by the loop, and emptied as the Pongs come."""

    nonces: set[int]
    fresh: asyncio.Event


class _Said(Struct, frozen=True, kw_only=True):
    peer: bytes
    message: WorkerEvent | MalformedMessage


class _Exited(Struct, frozen=True, kw_only=True):
    worker: "_Worker"
    ended: ChildExit


class _DrainDeadlinePassed(Struct, frozen=True, kw_only=True):
    pass


class _Stopped(Struct, frozen=True, kw_only=True):
    pass


_Inbox = (
    _Submitted
    | _Cancelled
    | _Ordered
    | _LoadAsked
    | _UnloadAsked
    | _BooksWanted
    | _Said
    | _Exited
    | _DrainDeadlinePassed
    | _Stopped
    | FleetEvent
)


class _Worker(Struct, kw_only=True):
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


class Dispatch:
    """Requests in, replies out. Call `submit` and `status` on the event loop that runs `run`; neither blocks."""

    def __init__(
        self,
        settings: DispatchSettings,
        folders: ModelFolders,
        *,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        observer: RequestObserver | None = None,
    ) -> None:
        self._settings = settings
        self._observer = observer
        self._folders = folders
        self._clock = clock
        self._unix_clock = unix_clock
        self._fleet = Fleet(settings.fleet, settings.first_incarnation)
        self._open = OpenRequests()
        self._waiters = ModelWaiters()
        self._workers: dict[Incarnation, _Worker] = {}
        self._worker_tasks: set[asyncio.Task[None]] = set()
        self._last_exits: dict[ModelName, LastExit] = {}
        self._inbox: asyncio.Queue[_Inbox] = asyncio.Queue()
        self._unread_room = asyncio.Semaphore(_UNREAD_MESSAGES)
        self._nonces = itertools.count(1)
        self._budgets: dict[ModelName, int] = {}
        self._books_wanted: list[_BooksWanted] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._workers_gone = asyncio.Event()
        self._done = asyncio.Event()
        self._cachestore = (
            CachestoreChild(settings.cachestore, clock=clock, unix_clock=unix_clock) if settings.cachestore else None
        )

    # --- for others ------------------------------------------------------------------------------------------------

    def submit(self, model: ModelName, work: Work) -> Reply:
        """Run a request. The reply ends exactly once, whatever happens to the model's process."""
        reply = Reply(work.request_id, lambda request_id: self._post(_Cancelled(request_id=request_id)))
        if self._done.is_set():
            reply.put(Failed(request_id=work.request_id, failure=shutting_down()))
        else:
            self._post(_Submitted(request=OpenRequest(model=model, work=work, reply=reply)))
        return reply

    def preload(self, model: ModelName) -> None:
        """Load a model although nobody asked for it yet. One that cannot be loaded is logged."""
        folder = self._folders.find(model)
        if folder is None or folder.problem is not None:
            _log.warning("not_preloaded", model=model, why=folder.problem if folder else "no model of that name")
            return
        self._post(_wanted(model, folder))

    def unload(self, model: ModelName) -> None:
        """End this model's process after its open requests. Also lets a model that was given up start again."""
        self._post(StopAsked(model=model))

    async def load_and_wait(self, model: ModelName) -> Failure | None:
        """Load a model; None once it is ready, else why it is not. One that was given up waits as a request would."""
        folder = self._folders.find(model)
        if folder is None or folder.problem is not None:
            return _cannot_serve(model, None if folder is None else folder.problem)
        outcome: Outcome = asyncio.get_running_loop().create_future()
        return await self._outcome(_LoadAsked(wanted=_wanted(model, folder), outcome=outcome), outcome)

    async def unload_and_wait(self, model: ModelName) -> Failure | None:
        """As `unload`; None once the process that it has now is gone, at once if it has none."""
        outcome: Outcome = asyncio.get_running_loop().create_future()
        return await self._outcome(_UnloadAsked(model=model, outcome=outcome), outcome)

    def tell(self, model: ModelName, order: CacheOrder) -> Literal["told", "not_loaded"]:
        """Order a model's process. A budget holds for its later processes, too; everything else dies with a process."""
        if isinstance(order, SetBudget):
            self._budgets[model] = order.hot_cache_bytes
        self._post(_Ordered(model=model, order=order))
        return "told" if isinstance(self._fleet.state(model), Ready) else "not_loaded"

    async def fresh_status(self) -> ServiceStatus:
        """The status after every ready process was asked for its books; those of a busy one may be its last."""
        wanted = _BooksWanted(nonces=set(), fresh=asyncio.Event())
        if not self._done.is_set():
            self._post(wanted)
            await _within(wanted.fresh, _FRESH_BOOKS_SECONDS)
            if wanted in self._books_wanted:
                self._books_wanted.remove(wanted)
        return self.status()

    async def ask_cachestore(self, question: CacheQuestion) -> BlockReply | None:
        """Its reply, None when caching on disk is off. Raises CachestoreSilent."""
        if self._cachestore is None:
            return None
        return await self._cachestore.ask(question, within_seconds=_CACHESTORE_SECONDS)

    def status(self) -> ServiceStatus:
        """What every model and the cachestore are doing now."""
        now = self._clock()
        return ServiceStatus(
            models=tuple(self._model_status(model, now) for model in self._fleet.models),
            cachestore=self._cachestore.status() if self._cachestore else None,
        )

    def residents(self) -> tuple[Resident, ...]:
        """Who has memory now, or waits for it, as the ledger counts it."""
        return self._fleet.residents()

    async def drain(self, deadline_seconds: float) -> None:
        """Stop: refuse new requests, give open ones until the deadline, end every child, let `run` return."""
        self._post(AdmissionClosed())
        await _within(self._idle, deadline_seconds)
        self._post(_DrainDeadlinePassed())
        await self._workers_gone.wait()
        if self._cachestore:
            self._cachestore.stop()
        self._post(_Stopped())
        await self._done.wait()

    async def run(self) -> None:
        """Serve until `drain` is through. When cancelled instead, children are killed and open requests failed."""
        path = gateway_socket(Path(self._settings.runtime_directory))
        listener: AsyncListener[WorkerEvent, WorkerCommand] = AsyncListener(
            path, cast("type[WorkerEvent]", WorkerEvent)
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._cachestore:
                    tasks.create_task(self._cachestore.run())
                reading = tasks.create_task(self._read_socket(listener))
                await self._serve(listener, tasks)
                for task in (reading, *self._worker_tasks):
                    task.cancel()
        finally:
            self._end_everything()
            listener.close()
            path.unlink(missing_ok=True)

    # --- the loop --------------------------------------------------------------------------------------------------

    async def _serve(self, listener: AsyncListener[WorkerEvent, WorkerCommand], tasks: asyncio.TaskGroup) -> None:
        hands = _Hands(listener, tasks)
        while True:
            entry = await self._inbox.get()
            match entry:
                case _Submitted(request=request):
                    await self._submitted(request, hands)
                case _Cancelled(request_id=request_id):
                    await self._cancelled(request_id, hands)
                case _Ordered(model=model, order=order):
                    await self._ordered(model, order, hands)
                case _LoadAsked(wanted=wanted, outcome=outcome):
                    self._waiters.wait_for_load(wanted.model, outcome)
                    await self._tell_fleet(wanted, hands)
                case _UnloadAsked(model=model, outcome=outcome):
                    await self._unload_asked(model, outcome, hands)
                case _BooksWanted():
                    await self._want_books(entry, hands)
                case _Said(peer=peer, message=message):
                    self._unread_room.release()
                    await self._said(peer, message, hands)
                case _Exited(worker=worker, ended=ended):
                    await self._exited(worker, ended, hands)
                case _DrainDeadlinePassed():
                    await self._drain_deadline_passed(hands)
                case _Stopped():
                    return
                case AdmissionClosed():
                    self._closed = True
                    await self._tell_fleet(entry, hands)
                case _:
                    await self._tell_fleet(entry, hands)
            if self._closed and not len(self._open):
                self._idle.set()
            if self._closed and not any(self._can_end(worker) for worker in self._workers.values()):
                self._workers_gone.set()

    def _can_end(self, worker: _Worker) -> bool:
        """A process that survives SIGKILL must not keep the service from stopping."""
        state = self._fleet.state(worker.model)
        return not (isinstance(state, Draining) and state.rung == "stranded")

    async def _read_socket(self, listener: AsyncListener[WorkerEvent, WorkerCommand]) -> None:
        while True:
            peer, message = await listener.receive()
            await self._unread_room.acquire()
            self._post(_Said(peer=peer, message=message))

    async def _outcome(self, asked: _LoadAsked | _UnloadAsked, outcome: Outcome) -> Failure | None:
        if self._done.is_set():
            return shutting_down()
        self._post(asked)
        return await outcome

    def _post(self, entry: _Inbox) -> None:
        self._inbox.put_nowait(entry)

    def _end_everything(self) -> None:
        """The loop has ended, perhaps by an exception: nobody may wait for an answer that cannot come."""
        if self._timer:
            self._timer.cancel()
        while not self._inbox.empty():
            entry = self._inbox.get_nowait()
            if isinstance(entry, _Submitted):
                _fail(entry.request, shutting_down())
            elif isinstance(entry, (_LoadAsked, _UnloadAsked)) and not entry.outcome.done():
                entry.outcome.set_result(shutting_down())
        self._waiters.give_up(shutting_down())
        for request in self._open.everything():
            self._open.remove(request)
            _fail(request, shutting_down())
        for event in (self._done, self._idle, self._workers_gone):
            event.set()

    # --- requests --------------------------------------------------------------------------------------------------

    async def _submitted(self, request: OpenRequest, hands: "_Hands") -> None:
        model = request.model
        folder = self._folders.find(model)
        if folder is None or folder.problem is not None:
            _fail(request, _cannot_serve(model, None if folder is None else folder.problem))
            return
        unable = cannot_do(model, folder.kind, request.work)
        if unable is not None:
            _fail(request, unable)
            return
        if self._count(model, request.latency_class) >= self._most(model):
            _fail(request, _overloaded(model))
            return
        self._open.wait(request)
        await self._tell_fleet(_wanted(model, folder), hands)
        incarnation = self._fleet.incarnation(model)
        worker = None if incarnation is None else self._workers.get(incarnation)
        if request.phase == "waiting" and worker is not None and worker.has_tokenizer:
            await self._release(model, worker.incarnation, hands, what="tokenizing")

    def _count(self, model: ModelName, latency_class: LatencyClass | None) -> int:
        """Those that go before a new one of this class: nobody is refused for the sake of who comes after them."""
        incarnation = self._fleet.incarnation(model)
        sent = self._open.sent_to(incarnation) if incarnation is not None else ()
        return sum(
            latency_class is None
            or (other.latency_class is not None and other.latency_class.rank <= latency_class.rank)
            for other in (*self._open.waiting(model), *sent)
        )

    def _most(self, model: ModelName) -> int:
        """A process that serves takes its rows off those that wait."""
        state = self._fleet.state(model)
        return self._settings.max_waiting_per_model + (state.limits.max_rows if isinstance(state, Ready) else 0)

    async def _cancelled(self, request_id: RequestId, hands: "_Hands") -> None:
        request = self._open.find(request_id)
        if request is None:
            return
        _fail(request, Failure(kind=FailureKind.CANCELLED, message="the client is gone"))
        if request.incarnation is None:
            self._open.remove(request)
            if not self._open.waiting(request.model) and not self._waiters.wanted(request.model):
                await self._tell_fleet(WaitersLeft(model=request.model), hands)
            return
        self._open.cancel(request)
        # When the process is gone its exit takes the request out of the book.
        await hands.send_if_there(request.incarnation, Cancel(request_id=request_id))

    async def _unload_asked(self, model: ModelName, outcome: Outcome, hands: "_Hands") -> None:
        incarnation = self._fleet.incarnation(model)
        await self._tell_fleet(StopAsked(model=model), hands)
        if incarnation is None:
            outcome.set_result(None)
            return
        self._waiters.wait_for_end(incarnation, outcome)
        self._tell_if_stranded(model)

    def _tell_if_stranded(self, model: ModelName) -> None:
        """Nobody waits for the end of a process that does not die."""
        state = self._fleet.state(model)
        if isinstance(state, Draining) and state.rung == "stranded":
            self._waiters.does_not_end(state.incarnation, stranded(model))

    async def _ordered(self, model: ModelName, order: CacheOrder, hands: "_Hands") -> None:
        """One that is not ready has nothing to unpin or to forget; its budget is looked at when it is."""
        state = self._fleet.state(model)
        if isinstance(state, Ready):
            await hands.send_if_there(state.incarnation, order)

    async def _want_books(self, wanted: _BooksWanted, hands: "_Hands") -> None:
        for model in self._fleet.models:
            state = self._fleet.state(model)
            if isinstance(state, Ready):
                nonce = next(self._nonces)
                wanted.nonces.add(nonce)
                await hands.send_if_there(state.incarnation, Ping(nonce=nonce))
        if wanted.nonces:
            self._books_wanted.append(wanted)
        else:
            wanted.fresh.set()

    def _books_came(self, nonce: int) -> None:
        for wanted in self._books_wanted:
            wanted.nonces.discard(nonce)
            if not wanted.nonces:
                wanted.fresh.set()
        self._books_wanted = [wanted for wanted in self._books_wanted if wanted.nonces]

    async def _release(
        self,
        model: ModelName,
        incarnation: Incarnation,
        hands: "_Hands",
        *,
        what: Literal["everything", "tokenizing"] = "everything",
    ) -> None:
        for request in self._open.waiting(model):
            if what == "tokenizing" and request.needs_weights:
                continue
            self._open.send(request, incarnation)
            try:
                await hands.send(incarnation, request.work)
            except PeerGone:
                # It never got this one, so the request waits for the next process.
                self._open.wait(request)
                await self._tell_fleet(
                    WorkerLost(model=model, incarnation=incarnation, reason="it is no longer connected"), hands
                )
                await self._tell_fleet(ModelWanted(model=model), hands)
                return
        await self._work_changed(model, incarnation, hands)

    async def _fail_open(self, effect: FailOpen, hands: "_Hands") -> None:
        again: list[OpenRequest] = []
        for request in self._open.sent_to(effect.incarnation):
            request.deaths += 1
            if effect.unanswered == "retry" and request.phase == "sent" and request.deaths < _DEATHS_FOR_FAILURE:
                again.append(request)
            else:
                self._open.remove(request)
                _fail(request, effect.failure)
        for request in again:
            self._open.wait(request)
        if again:
            await self._tell_fleet(ModelWanted(model=effect.model), hands)
        await self._work_changed(effect.model, effect.incarnation, hands)

    async def _work_changed(self, model: ModelName, incarnation: Incarnation, hands: "_Hands") -> None:
        count = len(self._open.sent_to(incarnation))
        await self._tell_fleet(WorkChanged(model=model, incarnation=incarnation, open_requests=count), hands)

    async def _drain_deadline_passed(self, hands: "_Hands") -> None:
        for request in self._open.everything():
            _fail(request, shutting_down())
            if request.incarnation is None:
                self._open.remove(request)
            elif request.phase != "cancelled":
                self._open.cancel(request)
                await hands.send_if_there(request.incarnation, Cancel(request_id=request.request_id))
        drain_seconds = self._settings.fleet.terminate_grace_seconds
        await self._tell_fleet(ShutdownAsked(drain_seconds=drain_seconds), hands)

    # --- what workers say ------------------------------------------------------------------------------------------

    async def _said(self, peer: bytes, message: WorkerEvent | MalformedMessage, hands: "_Hands") -> None:
        worker = self._workers.get(_incarnation_of(peer))
        if worker is None:
            if isinstance(message, Hello):
                await self._stranger(peer, message, hands)
            # Anything else is the echo of a process that has ended.
            return
        model, incarnation = worker.model, worker.incarnation
        match message:
            case MalformedMessage():
                await self._fault(worker, f"malformed message: {message}", hands)
            case Hello():
                if message.incarnation != incarnation:
                    await self._fault(worker, f"said Hello as incarnation {message.incarnation}", hands)
                    return
                await self._tell_fleet(WorkerHello(hello=message), hands)
            case generation.Ready():
                await self._tell_fleet(WorkerReady(model=model, incarnation=incarnation, limits=message), hands)
                budget = self._budgets.get(model)
                if budget is not None and budget != worker.hot_cache_bytes:  # it was changed while the model loaded
                    await self._ordered(model, SetBudget(hot_cache_bytes=budget), hands)
            case Loading():
                worker.loading = message
            case generation.TokenizerReady():
                worker.has_tokenizer = True
                await self._release(model, incarnation, hands, what="tokenizing")
            case Pong():
                worker.books, worker.pong_at = message, self._clock()
                self._books_came(message.nonce)
                await self._tell_fleet(PongReceived(model=model, incarnation=incarnation, steps=message.steps), hands)
            case LastWords(failure=failure):
                worker.last_words = failure
            case _:
                await self._request_event(worker, message, hands)

    async def _stranger(self, peer: bytes, hello: Hello, hands: "_Hands") -> None:
        _log.warning("stranger_refused", model=hello.model, incarnation=hello.incarnation, pid=hello.pid)
        reason = f"this gateway started no process of incarnation {hello.incarnation}; end this one"
        await hands.answer_if_there(peer, Refused(reason=reason))

    async def _request_event(self, worker: _Worker, event: RequestEvent, hands: "_Hands") -> None:
        request = self._open.advance(worker.incarnation, event)
        if request is None:
            self._count_fault(worker, f"{type(event).__name__} for a request that it does not have")
            return
        request.reply.put(event)
        if self._observer and isinstance(event, (Finished, Warmed)) and request.phase != "cancelled":
            self._observer.finished(request, worker.incarnation, event)
        if isinstance(event, LastEvent):
            await self._work_changed(worker.model, worker.incarnation, hands)

    async def _fault(self, worker: _Worker, what: str, hands: "_Hands") -> None:
        if self._count_fault(worker, what) == _LOST_AFTER_FAULTS:
            reason = f"{worker.faults} messages that make no sense, last: {what}"
            await self._tell_fleet(WorkerLost(model=worker.model, incarnation=worker.incarnation, reason=reason), hands)

    def _count_fault(self, worker: _Worker, what: str) -> int:
        worker.faults += 1
        if worker.faults & (worker.faults - 1) == 0:  # the 1st, 2nd, 4th, 8th…: a babbler must not fill the log
            _log.warning(
                "worker_fault", model=worker.model, incarnation=worker.incarnation, what=what, count=worker.faults
            )
        return worker.faults

    async def _exited(self, worker: _Worker, ended: ChildExit, hands: "_Hands") -> None:
        del self._workers[worker.incarnation]
        words = worker.last_words
        state = self._fleet.state(worker.model)
        asked_to = isinstance(state, Draining)
        self._last_exits[worker.model] = replace(
            last_exit(ended, at_unix=self._unix_clock()),
            was_ordered=isinstance(state, Draining) and state.purpose in ("unload", "shutdown"),
            last_words=words.message if words else None,
        )
        _log.log(
            logging.INFO if asked_to else logging.WARNING,
            "worker_exited",
            model=worker.model,
            incarnation=worker.incarnation,
            exit_code=ended.exit_code,
            signal=ended.signal,
            last_words=words.message if words else None,
            stderr_tail=ended.stderr_tail[-5:],
            open_requests=len(self._open.sent_to(worker.incarnation)),
        )
        event = WorkerExited(
            model=worker.model,
            incarnation=worker.incarnation,
            exit_code=ended.exit_code,
            signal=ended.signal,
            stderr_tail=ended.stderr_tail,
            last_words=words,
        )
        await self._tell_fleet(event, hands)
        self._waiters.ended(worker.incarnation)

    # --- what the fleet decides ------------------------------------------------------------------------------------

    async def _tell_fleet(self, event: FleetEvent, hands: "_Hands") -> None:
        for effect in self._fleet.handle(event, self._clock()):
            await self._perform(effect, hands)

    async def _perform(self, effect: Effect, hands: "_Hands") -> None:
        match effect:
            case StartWorker(model=model, incarnation=incarnation):
                worker = _Worker(model=model, incarnation=incarnation)
                self._workers[incarnation] = worker
                task = hands.tasks.create_task(self._run_worker(worker))
                self._worker_tasks.add(task)
                task.add_done_callback(self._worker_tasks.discard)
            case StopWorker():
                await self._stop_worker(effect, hands)
            case AnswerHello(incarnation=incarnation, answer=answer):
                await hands.send_if_there(incarnation, answer)
            case PingWorker(incarnation=incarnation):
                # A process that is gone shows by its exit, a deaf one by steps that do not come.
                await hands.send_if_there(incarnation, Ping(nonce=next(self._nonces)))
            case ReleaseWaiting(model=model, incarnation=incarnation):
                await self._release(model, incarnation, hands)
                self._waiters.loaded(model)
            case FailWaiting(model=model, failure=failure):
                self._waiters.not_loaded(model, failure)
                for request in self._open.waiting(model):
                    self._open.remove(request)
                    _fail(request, failure)
            case FailOpen():
                await self._fail_open(effect, hands)
            case WakeAt(when=when):
                self._set_timer(when)
            case CrashRecorded():
                _log.warning(
                    "worker_crashed",
                    model=effect.model,
                    incarnation=effect.incarnation,
                    crashes_in_window=effect.crashes_in_window,
                    then=effect.then,
                )
            case WorkerStuck():
                _log.warning("worker_stuck", model=effect.model, incarnation=effect.incarnation, reason=effect.reason)
                self._tell_if_stranded(effect.model)
            case GaveUp():
                _log.error("model_given_up", model=effect.model, reason=effect.failure.message)
            case _:
                assert_never(effect)

    def _set_timer(self, when: float | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if when is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, when - self._clock()), self._post, TimerFired())

    async def _run_worker(self, worker: _Worker) -> None:
        """From spawn to exit; the exit always reaches the inbox."""
        settings = self._settings
        folder = self._folders.find(worker.model)
        try:
            if folder is None:
                raise FileNotFoundError(f"the folder of model {worker.model} is no longer there")
            worker.hot_cache_bytes = self._budgets.get(worker.model, settings.hot_cache_bytes)
            launch = WorkerLaunch(
                model=worker.model,
                model_path=folder.path,
                runtime_directory=settings.runtime_directory,
                incarnation=worker.incarnation,
                max_rows=settings.max_rows,
                context_tokens=settings.context_tokens,
                hot_cache_bytes=worker.hot_cache_bytes,
                persist=settings.persist,
                prefill_slice_seconds=settings.prefill_slice_seconds,
                log_level=settings.log_level,
            )
            child = await spawn(
                settings.worker_command,
                launch_line=msgspec.json.encode(launch),
                environment=settings.worker_environment,
                on_line=lambda line: _log.info(
                    "child_output", model=worker.model, incarnation=worker.incarnation, line=line
                ),
            )
        except (OSError, ValueError) as why:
            self._post(_Exited(worker=worker, ended=ChildExit(stderr_tail=(str(why),))))
            return
        _log.info("worker_started", model=worker.model, incarnation=worker.incarnation, pid=child.pid)
        worker.child = child
        if worker.stop_at_birth:
            worker.stop_at_birth(child)
        ended = await child.wait()
        await asyncio.sleep(_LAST_MESSAGES_SECONDS)
        self._post(_Exited(worker=worker, ended=ended))

    async def _stop_worker(self, effect: StopWorker, hands: "_Hands") -> None:
        worker = self._workers.get(effect.incarnation)
        if worker is None:
            return
        _log.info("worker_stopping", model=effect.model, incarnation=effect.incarnation, how=effect.how)
        match effect.how:
            case "drain":
                await hands.send_if_there(effect.incarnation, Drain(deadline_seconds=effect.within_seconds))
            case "terminate":
                _signal(worker, ChildProcess.terminate)
            case "kill":
                _signal(worker, ChildProcess.kill)
            case _:
                assert_never(effect.how)

    # --- status ----------------------------------------------------------------------------------------------------

    def _model_status(self, model: ModelName, now: float) -> ModelStatus:
        incarnation = self._fleet.incarnation(model)
        worker = self._workers.get(incarnation) if incarnation is not None else None
        facts = ModelFacts(
            name=model,
            state=self._fleet.state(model),
            incarnation=incarnation,
            pid=worker.child.pid if worker and worker.child else None,
            restarts=self._fleet.restarts(model),
            last_exit=self._last_exits.get(model),
            open_requests=len(self._open.sent_to(incarnation)) if incarnation is not None else 0,
            waiting_requests=len(self._open.waiting(model)),
            loading=worker.loading if worker else None,
            books=worker.books if worker else None,
            pong_at=worker.pong_at if worker else None,
            stuck_reason=self._fleet.stuck_reason(model, now),
        )
        return model_status(facts, now=now, unix_now=self._unix_clock())


class _Hands:
    """What the loop acts with: the socket, and the group that its children's tasks belong to."""

    def __init__(self, listener: AsyncListener[WorkerEvent, WorkerCommand], tasks: asyncio.TaskGroup) -> None:
        self._listener = listener
        self.tasks = tasks

    async def send(self, incarnation: Incarnation, command: WorkerCommand) -> None:
        """Raises PeerGone."""
        await self._listener.send(b"w%d" % incarnation, command)

    async def send_if_there(self, incarnation: Incarnation, command: WorkerCommand) -> None:
        """For commands that a process which is gone does not need."""
        await self.answer_if_there(b"w%d" % incarnation, command)

    async def answer_if_there(self, peer: bytes, command: WorkerCommand) -> None:
        try:
            await self._listener.send(peer, command)
        except PeerGone as why:
            _log.debug("peer_gone", command=type(command).__name__, why=str(why))


def _fail(request: OpenRequest, failure: Failure) -> None:
    request.reply.put(Failed(request_id=request.request_id, failure=failure))


def _signal(worker: _Worker, signal: Callable[[ChildProcess], None]) -> None:
    if worker.child:
        signal(worker.child)
    else:
        worker.stop_at_birth = signal


def _incarnation_of(peer: bytes) -> Incarnation:
    digits = peer[1:]
    return Incarnation(int(digits)) if peer[:1] == b"w" and digits.isdigit() and len(digits) < 20 else Incarnation(-1)


def _wanted(model: ModelName, folder: ModelFolder) -> ModelWanted:
    return ModelWanted(model=model, weight_bytes=folder.weight_bytes, kind=folder.kind)


def _cannot_serve(model: ModelName, problem: str | None) -> Failure:
    if problem is None:
        return Failure(
            kind=FailureKind.MODEL_NOT_FOUND, message=f"no model {model!r}; GET /v1/models lists those there are"
        )
    return Failure(kind=FailureKind.MODEL_UNAVAILABLE, message=f"model {model} cannot be loaded: {problem}")


def _overloaded(model: ModelName) -> Failure:
    return Failure(
        kind=FailureKind.OVERLOADED,
        message=f"too many requests wait for model {model}; send this one again later",
        retry_after_seconds=_OVERLOADED_RETRY_SECONDS,
    )


async def _within(event: asyncio.Event, timeout_seconds: float) -> None:
    try:
        async with asyncio.timeout(timeout_seconds):
            await event.wait()
    except TimeoutError:
        return
