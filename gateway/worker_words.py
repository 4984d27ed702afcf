"""What workers say, and how they end: what each message means for the fleet, the requests and the books."""

import logging

import structlog
from msgspec.structs import replace

from gateway.cachestore_child import last_exit
from gateway.dispatch_state import DispatchState
from gateway.dispatch_terms import RequestObserver, WorkerProcess
from gateway.fleet_effects import FleetEffects
from gateway.fleet_terms import Draining, PongReceived, Starting, WorkerExited, WorkerHello, WorkerLost, WorkerReady
from gateway.processes import ChildExit
from gateway.worker_socket import WorkerSocket, incarnation_of_peer
from protocol import generation
from protocol.framing import MalformedMessage
from protocol.generation import (
    Finished,
    LastEvent,
    LastWords,
    Loading,
    Pong,
    RequestEvent,
    SetBudget,
    Warmed,
    WorkerEvent,
)
from protocol.handshake import Hello, Refused

_log = structlog.get_logger()

_LOST_AFTER_FAULTS = 20


class WorkerWords:
    """Called by the loop for every message and every exit, in the order in which they came."""

    def __init__(
        self,
        state: DispatchState,
        effects: FleetEffects,
        socket: WorkerSocket,
        observer: RequestObserver | None,
    ) -> None:
        self._fleet = state.fleet
        self._open = state.open_requests
        self._waiters = state.waiters
        self._processes = state.processes
        self._books = state.books
        self._ends = state.ends
        self._loads = state.loads
        self._clock = state.clock
        self._unix_clock = state.unix_clock
        self._effects = effects
        self._socket = socket
        self._observer = observer

    async def said(self, peer: bytes, message: WorkerEvent | MalformedMessage) -> None:
        """One message from the socket, whoever sent it."""
        worker = self._processes.find(incarnation_of_peer(peer))
        if worker is None:
            if isinstance(message, Hello):
                await self._stranger(peer, message)
            # Anything else is the echo of a process that has ended.
            return
        model, incarnation = worker.model, worker.incarnation
        match message:
            case MalformedMessage():
                await self._fault(worker, f"malformed message: {message}")
            case Hello():
                if message.incarnation != incarnation:
                    await self._fault(worker, f"said Hello as incarnation {message.incarnation}")
                    return
                await self._effects.tell(WorkerHello(hello=message))
            case generation.Ready():
                self._note_load(worker)
                await self._effects.tell(WorkerReady(model=model, incarnation=incarnation, limits=message))
                budget = self._processes.changed_budget(worker)
                if budget is not None:
                    await self._socket.send_if_there(incarnation, SetBudget(hot_cache_bytes=budget))
            case Loading():
                worker.loading = message
            case generation.TokenizerReady():
                worker.has_tokenizer = True
                await self._effects.release(model, incarnation, what="tokenizing")
            case Pong():
                worker.books, worker.pong_at = message, self._clock()
                self._books.came(message.nonce)
                await self._effects.tell(PongReceived(model=model, incarnation=incarnation, steps=message.steps))
            case LastWords(failure=failure):
                worker.last_words = failure
            case _:
                await self._request_event(worker, message)

    def _note_load(self, worker: WorkerProcess) -> None:
        state = self._fleet.state(worker.model)
        # One that was held meanwhile (SIGSTOP, a debugger) says nothing of how long the next one takes.
        if isinstance(state, Starting) and state.incarnation == worker.incarnation and state.suspended_at is None:
            size_bytes = worker.loading.total_bytes if worker.loading else None
            self._loads.loaded(worker.model, size_bytes=size_bytes, seconds=self._clock() - state.since)

    async def _stranger(self, peer: bytes, hello: Hello) -> None:
        _log.warning("stranger_refused", model=hello.model, incarnation=hello.incarnation, pid=hello.pid)
        reason = f"this gateway started no process of incarnation {hello.incarnation}; end this one"
        await self._socket.answer_if_there(peer, Refused(reason=reason))

    async def _request_event(self, worker: WorkerProcess, event: RequestEvent) -> None:
        request = self._open.advance(worker.incarnation, event)
        if request is None:
            self._count_fault(worker, f"{type(event).__name__} for a request that it does not have")
            return
        request.reply.put(event)
        if self._observer and isinstance(event, (Finished, Warmed)) and request.phase != "cancelled":
            self._observer.finished(request, worker.incarnation, event)
        if isinstance(event, LastEvent):
            if request.needs_weights:
                now = self._clock()
                self._ends.ended(request.model, seconds=now - request.arrived, now=now)
            await self._effects.work_changed(worker.model, worker.incarnation)

    async def _fault(self, worker: WorkerProcess, what: str) -> None:
        if self._count_fault(worker, what) == _LOST_AFTER_FAULTS:
            reason = f"{worker.faults} messages that make no sense, last: {what}"
            await self._effects.tell(WorkerLost(model=worker.model, incarnation=worker.incarnation, reason=reason))

    def _count_fault(self, worker: WorkerProcess, what: str) -> int:
        worker.faults += 1
        if worker.faults & (worker.faults - 1) == 0:  # the 1st, 2nd, 4th, 8th…: a babbler must not fill the log
            _log.warning(
                "worker_fault", model=worker.model, incarnation=worker.incarnation, what=what, count=worker.faults
            )
        return worker.faults

    async def exited(self, worker: WorkerProcess, ended: ChildExit) -> None:
        """The process has ended, whether it was asked to or not."""
        words = worker.last_words
        state = self._fleet.state(worker.model)
        asked_to = isinstance(state, Draining)
        its_exit = replace(
            last_exit(ended, at_unix=self._unix_clock()),
            was_ordered=isinstance(state, Draining) and state.purpose in ("unload", "shutdown"),
            last_words=words.message if words else None,
        )
        self._processes.remove(worker, its_exit)
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
        await self._effects.tell(event)
        self._waiters.ended(worker.incarnation)
        self._books.ended(worker.incarnation)
