"""The gateway's one task: it owns the fleet and the open requests, and carries out what the fleet decides.

Everything that happens (a submit, a message, an exit, a timer) becomes one entry of the inbox, so nothing here needs
a lock and every decision sees all that came before it.

Here are the doors for others and the loop. What an entry means: `request_intake` (somebody in the gateway asked),
`worker_words` (a process spoke or ended), `fleet_effects` (what the fleet decides is done).
"""

import asyncio
from collections.abc import Callable
from typing import Literal

import structlog

from gateway.admission import RecentEnds
from gateway.cachestore_child import CachestoreChild
from gateway.dispatch_state import DispatchState
from gateway.dispatch_terms import (
    BooksWanted,
    Cancelled,
    DispatchSettings,
    DrainDeadlinePassed,
    Exited,
    Inbox,
    LoadAsked,
    ModelFolders,
    Ordered,
    RequestObserver,
    Said,
    Stopped,
    Submitted,
    UnloadAsked,
    WorkerProcess,
)
from gateway.fleet import Fleet
from gateway.fleet_effects import FleetEffects
from gateway.fleet_failures import shutting_down
from gateway.fleet_terms import AdmissionClosed, BackingOff, Draining, Ready, Starting, StopAsked, TimerFired
from gateway.fresh_books import FreshBooks
from gateway.load_times import LoadTimes
from gateway.model_status import ModelFacts, model_status
from gateway.model_waiters import ModelWaiters, Outcome
from gateway.open_requests import OpenRequest, OpenRequests
from gateway.ports import CacheOrder, CacheQuestion
from gateway.replies import Reply
from gateway.request_intake import RequestIntake, cannot_serve, model_wanted
from gateway.residency import Resident
from gateway.status import ModelStatus, ServiceStatus
from gateway.worker_processes import WorkerProcesses
from gateway.worker_socket import WorkerSocket
from gateway.worker_words import WorkerWords
from protocol.blocks import BlockReply
from protocol.failures import Failure
from protocol.generation import Failed, SetBudget, Work
from protocol.ids import ModelName

_log = structlog.get_logger()

_UNREAD_MESSAGES = 256
"""Messages taken from the socket and not handled yet. More wait in ZeroMQ, which takes turns between workers."""

_FRESH_BOOKS_SECONDS = 1.0
_ORDERS_SECONDS = 10.0
"""A busy process looks at what it was told between two slices of a prompt, one that drains between two writes."""

_CACHESTORE_SECONDS = 60.0
"""To forget a full cache is to delete a hundred thousand files."""


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
        self._books = FreshBooks()
        self._loads = LoadTimes()
        self._processes = WorkerProcesses(settings, folders, self._post)
        self._inbox: asyncio.Queue[Inbox] = asyncio.Queue()
        self._unread_room = asyncio.Semaphore(_UNREAD_MESSAGES)
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
        reply = Reply(work.request_id, lambda request_id: self._post(Cancelled(request_id=request_id)))
        if self._done.is_set():
            reply.put(Failed(request_id=work.request_id, failure=shutting_down()))
        else:
            self._post(Submitted(request=OpenRequest(model=model, work=work, reply=reply, arrived=self._clock())))
        return reply

    def preload(self, model: ModelName) -> None:
        """Load a model although nobody asked for it yet. One that cannot be loaded is logged."""
        folder = self._folders.find(model)
        if folder is None or folder.problem is not None:
            _log.warning("not_preloaded", model=model, why=folder.problem if folder else "no model of that name")
            return
        self._post(model_wanted(model, folder))

    def unload(self, model: ModelName) -> None:
        """End this model's process after its open requests. Also lets a model that was given up start again."""
        self._post(StopAsked(model=model))

    async def load_and_wait(self, model: ModelName) -> Failure | None:
        """Load a model; None once it is ready, else why it is not. One that was given up waits as a request would."""
        folder = self._folders.find(model)
        if folder is None or folder.problem is not None:
            return cannot_serve(model, folder)
        outcome: Outcome = asyncio.get_running_loop().create_future()
        return await self._outcome(LoadAsked(wanted=model_wanted(model, folder), outcome=outcome), outcome)

    async def unload_and_wait(self, model: ModelName) -> Failure | None:
        """As `unload`; None once the process that it has now is gone, at once if it has none."""
        outcome: Outcome = asyncio.get_running_loop().create_future()
        return await self._outcome(UnloadAsked(model=model, outcome=outcome), outcome)

    def tell(self, model: ModelName, order: CacheOrder) -> Literal["told", "not_loaded"]:
        """Order a model's process. A budget holds for its later processes, too; everything else dies with a process."""
        if isinstance(order, SetBudget):
            self._processes.remember_budget(model, order.hot_cache_bytes)
        self._post(Ordered(model=model, order=order))
        return "told" if isinstance(self._fleet.state(model), Ready | Draining) else "not_loaded"

    async def orders_followed(self) -> Literal["followed", "unknown"]:
        """Whether every process has done what it was told so far, or is gone. Unknown of one that is silent."""
        # A process does what it is told in its turn: its answer to what was asked last says that all before is done.
        return await self._asked_for_books("ready and draining", _ORDERS_SECONDS)

    async def fresh_status(self) -> ServiceStatus:
        """The status after every ready process was asked for its books; those of a busy or held one may be its last."""
        await self._asked_for_books("ready", _FRESH_BOOKS_SECONDS)
        return self.status()

    async def _asked_for_books(
        self, whose: Literal["ready", "ready and draining"], within_seconds: float
    ) -> Literal["followed", "unknown"]:
        if self._done.is_set():
            return "followed"
        wanted = BooksWanted(whose=whose, asked={}, fresh=asyncio.Event())
        self._post(wanted)
        await _within(wanted.fresh, within_seconds)
        self._books.forget(wanted)
        return "followed" if wanted.fresh.is_set() else "unknown"

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
        self._post(DrainDeadlinePassed())
        await self._workers_gone.wait()
        if self._cachestore:
            self._cachestore.stop()
        self._post(Stopped())
        await self._done.wait()

    async def run(self) -> None:
        """Serve until `drain` is through. When cancelled instead, children are killed and open requests failed."""
        socket = WorkerSocket(self._settings.runtime_directory)
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._cachestore:
                    tasks.create_task(self._cachestore.run())
                reading = tasks.create_task(self._read_socket(socket))
                await self._serve(socket, tasks)
                reading.cancel()
                self._processes.abandon()
        finally:
            self._end_everything()
            socket.close()

    # --- the loop --------------------------------------------------------------------------------------------------

    async def _serve(self, socket: WorkerSocket, tasks: asyncio.TaskGroup) -> None:
        state = DispatchState(
            fleet=self._fleet,
            open_requests=self._open,
            waiters=self._waiters,
            processes=self._processes,
            books=self._books,
            ends=RecentEnds(),
            loads=self._loads,
            clock=self._clock,
            unix_clock=self._unix_clock,
        )
        effects = FleetEffects(state, socket, tasks, self._post)
        intake = RequestIntake(self._settings, self._folders, state, effects, socket)
        words = WorkerWords(state, effects, socket, self._observer)
        try:
            while True:
                entry = await self._inbox.get()
                if isinstance(entry, Stopped):
                    return
                await self._handle(entry, effects, intake, words, socket)
                if self._closed and not len(self._open):
                    self._idle.set()
                if self._closed and not any(self._can_end(worker) for worker in self._processes.everything()):
                    self._workers_gone.set()
        finally:
            effects.close()

    async def _handle(
        self, entry: Inbox, effects: FleetEffects, intake: RequestIntake, words: WorkerWords, socket: WorkerSocket
    ) -> None:
        match entry:
            case Submitted(request=request):
                await intake.submitted(request)
            case Cancelled(request_id=request_id):
                await intake.cancelled(request_id)
            case Ordered(model=model, order=order):
                await intake.ordered(model, order)
            case LoadAsked(wanted=wanted, outcome=outcome):
                self._waiters.wait_for_load(wanted.model, outcome)
                await effects.tell(wanted)
            case UnloadAsked(model=model, outcome=outcome):
                await intake.unload_asked(model, outcome)
            case BooksWanted():
                await self._books.want(entry, self._fleet, socket)
            case Said(peer=peer, message=message):
                self._unread_room.release()
                await words.said(peer, message)
            case Exited(worker=worker, ended=ended):
                await words.exited(worker, ended)
            case DrainDeadlinePassed():
                await intake.drain_deadline_passed()
            case Stopped():
                return
            case TimerFired():
                await effects.time_passed()
            case AdmissionClosed():
                self._closed = True
                await effects.tell(entry)
            case _:
                await effects.tell(entry)

    def _can_end(self, worker: WorkerProcess) -> bool:
        """A process that survives SIGKILL must not keep the service from stopping."""
        state = self._fleet.state(worker.model)
        return not (isinstance(state, Draining) and state.rung == "stranded")

    async def _read_socket(self, socket: WorkerSocket) -> None:
        while True:
            peer, message = await socket.receive()
            await self._unread_room.acquire()
            self._post(Said(peer=peer, message=message))

    async def _outcome(self, asked: LoadAsked | UnloadAsked, outcome: Outcome) -> Failure | None:
        if self._done.is_set():
            return shutting_down()
        self._post(asked)
        return await outcome

    def _post(self, entry: Inbox) -> None:
        self._inbox.put_nowait(entry)

    def _end_everything(self) -> None:
        """The loop has ended, perhaps by an exception: nobody may wait for an answer that cannot come."""
        while not self._inbox.empty():
            entry = self._inbox.get_nowait()
            if isinstance(entry, Submitted):
                entry.request.fail(shutting_down())
            elif isinstance(entry, (LoadAsked, UnloadAsked)) and not entry.outcome.done():
                entry.outcome.set_result(shutting_down())
        self._waiters.give_up(shutting_down())
        for request in self._open.everything():
            self._open.remove(request)
            request.fail(shutting_down())
        for event in (self._done, self._idle, self._workers_gone):
            event.set()

    def _model_status(self, model: ModelName, now: float) -> ModelStatus:
        incarnation = self._fleet.incarnation(model)
        worker = self._processes.find(incarnation)
        state, loading = self._fleet.state(model), worker.loading if worker else None
        began = state.since if isinstance(state, Starting) else state.until if isinstance(state, BackingOff) else None
        facts = ModelFacts(
            name=model,
            state=state,
            incarnation=incarnation,
            pid=worker.child.pid if worker and worker.child else None,
            restarts=self._fleet.restarts(model),
            last_exit=self._processes.last_exit(model),
            open_requests=len(self._open.sent_to(incarnation)) if incarnation is not None else 0,
            waiting_requests=sum(request.takes_place for request in self._open.waiting(model)),
            loading=loading,
            loaded_in_seconds=(
                None if began is None else self._loads.seconds_left(model, loading=loading, elapsed_seconds=now - began)
            ),
            books=worker.books if worker else None,
            pong_at=worker.pong_at if worker else None,
            stuck_reason=self._fleet.stuck_reason(model, now),
            held_reason=self._fleet.held_reason(model, now),
        )
        return model_status(facts, now=now, unix_now=self._unix_clock())


async def _within(event: asyncio.Event, timeout_seconds: float) -> None:
    try:
        async with asyncio.timeout(timeout_seconds):
            await event.wait()
    except TimeoutError:
        return
