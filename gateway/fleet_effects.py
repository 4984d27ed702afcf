"""The fleet is told what happened, and what it decides is carried out: processes, sockets, timers, open requests."""

import asyncio
from collections.abc import Callable
from typing import Literal, assert_never

import structlog

from gateway.answer_timings import HELD_BY_RESTART
from gateway.dispatch_state import DispatchState
from gateway.dispatch_terms import Inbox
from gateway.fleet_failures import stranded
from gateway.fleet_terms import (
    AnswerHello,
    CrashRecorded,
    Draining,
    Effect,
    FailOpen,
    FailWaiting,
    FleetEvent,
    GaveUp,
    ModelWanted,
    PingWorker,
    ReleaseWaiting,
    StartWorker,
    StopWorker,
    SuspensionNoted,
    TimerFired,
    WakeAt,
    WorkChanged,
    WorkerLost,
    WorkerSeen,
    WorkerStuck,
)
from gateway.open_requests import OpenRequest
from gateway.worker_socket import WorkerSocket
from protocol.generation import Waiting
from protocol.ids import Incarnation, ModelName
from protocol.sockets import PeerGone

_log = structlog.get_logger()

_DEATHS_FOR_FAILURE = 2
"""A request without an answer goes to the next process once, in case it was not what killed the first."""


class FleetEffects:
    """The way to the fleet while dispatch runs. An effect may be an event for the fleet in its turn."""

    def __init__(
        self,
        state: DispatchState,
        socket: WorkerSocket,
        tasks: asyncio.TaskGroup,
        post: Callable[[Inbox], None],
    ) -> None:
        self._fleet = state.fleet
        self._open = state.open_requests
        self._waiters = state.waiters
        self._processes = state.processes
        self._clock = state.clock
        self._socket = socket
        self._tasks = tasks
        self._post = post
        self._timer: asyncio.TimerHandle | None = None

    async def tell(self, event: FleetEvent) -> None:
        """Let the fleet decide what follows, and carry it out."""
        for effect in self._fleet.handle(event, self._clock()):
            await self._perform(effect)

    async def time_passed(self) -> None:
        """The fleet's timer fired. Before it judges who is late it hears who is held."""
        for worker in tuple(self._processes.everything()):
            model, incarnation = worker.model, worker.incarnation
            if self._processes.is_suspended(worker):
                await self.tell(WorkerSeen(model=model, incarnation=incarnation, condition="suspended"))
            elif self._fleet.is_suspended(model):
                await self.tell(WorkerSeen(model=model, incarnation=incarnation, condition="continued"))
                if worker.has_tokenizer:
                    await self.release(model, incarnation, what="tokenizing")
        await self.tell(TimerFired())

    async def release(
        self,
        model: ModelName,
        incarnation: Incarnation,
        *,
        what: Literal["everything", "tokenizing"] = "everything",
    ) -> None:
        """Give those who wait to a process: all of them, or those that need no weights. One that somebody holds gets
        none: it reads nothing, so that what its clients leave behind would pile up in its queue."""
        if self._fleet.is_suspended(model):
            return
        for request in self._open.waiting(model):
            if what == "tokenizing" and request.needs_weights:
                continue
            self._open.send(request, incarnation)
            try:
                await self._socket.send(incarnation, request.work)
                request.reply.hand_over()
            except PeerGone:
                # It never got this one, so the request waits for the next process.
                self._open.wait(request)
                await self.tell(WorkerLost(model=model, incarnation=incarnation, reason="it is no longer connected"))
                await self._want_again(model)
                return
        await self.work_changed(model, incarnation)

    async def _fail_open(self, effect: FailOpen) -> None:
        again: list[OpenRequest] = []
        for request in self._open.sent_to(effect.incarnation):
            request.deaths += 1
            if effect.unanswered == "retry" and request.has_no_answer and request.deaths < _DEATHS_FOR_FAILURE:
                again.append(request)
            else:
                self._open.remove(request)
                request.fail(effect.failure)
        for request in again:
            self._open.wait(request)
            if request.needs_weights:  # the others are in no book of those who wait
                request.reply.put(Waiting(request_id=request.request_id, ahead=0, held_by=HELD_BY_RESTART))
        if again:
            await self._want_again(effect.model)
        await self.work_changed(effect.model, effect.incarnation)

    async def _want_again(self, model: ModelName) -> None:
        """Those who were put back wait for the next process; for a check alone there is none."""
        if any(request.takes_place for request in self._open.waiting(model)):
            await self.tell(ModelWanted(model=model))

    async def work_changed(self, model: ModelName, incarnation: Incarnation) -> None:
        """The number of requests that this process has is another one."""
        count = len(self._open.sent_to(incarnation))
        await self.tell(WorkChanged(model=model, incarnation=incarnation, open_requests=count))

    def tell_if_stranded(self, model: ModelName) -> None:
        """Nobody waits for the end of a process that does not die."""
        state = self._fleet.state(model)
        if isinstance(state, Draining) and state.rung == "stranded":
            self._waiters.does_not_end(state.incarnation, stranded(model))

    def close(self) -> None:
        """No timer fires any more."""
        self._set_timer(None)

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case StartWorker(model=model, incarnation=incarnation):
                self._processes.start(model, incarnation, self._tasks)
            case StopWorker():
                await self._processes.stop(effect, self._socket)
            case AnswerHello(incarnation=incarnation, answer=answer):
                await self._socket.send_if_there(incarnation, answer)
            case PingWorker(incarnation=incarnation):
                # A process that is gone shows by its exit, a deaf one by steps that do not come.
                await self._socket.ping_if_there(incarnation)
            case ReleaseWaiting(model=model, incarnation=incarnation):
                await self.release(model, incarnation)
                self._waiters.loaded(model)
            case FailWaiting(model=model, failure=failure):
                self._waiters.not_loaded(model, failure)
                for request in self._open.waiting(model):
                    self._open.remove(request)
                    request.fail(failure)
            case FailOpen():
                await self._fail_open(effect)
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
                self.tell_if_stranded(effect.model)
            case SuspensionNoted():
                _log.warning(
                    f"worker_{effect.change}",
                    model=effect.model,
                    incarnation=effect.incarnation,
                    seconds=round(effect.seconds, 1),
                )
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
