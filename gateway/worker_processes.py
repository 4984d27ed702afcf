"""The workers' processes, from spawn to exit, and what is known of each. Owned by the dispatch task.

The fleet decides which there are; this carries it out and reports every end.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import assert_never

import msgspec
import psutil
import structlog

from gateway.dispatch_terms import DispatchSettings, Exited, Inbox, ModelFolders, WorkerProcess
from gateway.fleet_terms import StopWorker
from gateway.processes import ChildExit, ChildProcess, spawn
from gateway.status import LastExit
from gateway.worker_socket import WorkerSocket
from protocol.generation import Drain
from protocol.ids import Incarnation, ModelName
from protocol.launch import WorkerLaunch

_log = structlog.get_logger()

_SUSPENDED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})

_LAST_MESSAGES_SECONDS = 0.05
"""What a worker sent just before its exit may still be in ZeroMQ's thread when the exit is seen."""


class WorkerProcesses:
    """Every process from `start` until `remove`, which follows its `Exited`."""

    def __init__(self, settings: DispatchSettings, folders: ModelFolders, post: Callable[[Inbox], None]) -> None:
        self._settings = settings
        self._folders = folders
        self._post = post
        self._workers: dict[Incarnation, WorkerProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._budgets: dict[ModelName, int] = {}
        self._last_exits: dict[ModelName, LastExit] = {}

    def find(self, incarnation: Incarnation | None) -> WorkerProcess | None:
        return None if incarnation is None else self._workers.get(incarnation)

    def everything(self) -> Iterable[WorkerProcess]:
        return self._workers.values()

    def last_exit(self, model: ModelName) -> LastExit | None:
        """How the model's last process ended."""
        return self._last_exits.get(model)

    def remove(self, worker: WorkerProcess, its_exit: LastExit) -> None:
        """It has ended."""
        del self._workers[worker.incarnation]
        self._last_exits[worker.model] = its_exit

    def remember_budget(self, model: ModelName, hot_cache_bytes: int) -> None:
        """For this process of the model and those after it."""
        self._budgets[model] = hot_cache_bytes

    def changed_budget(self, worker: WorkerProcess) -> int | None:
        """The budget that was ordered while this process loaded with another one."""
        budget = self._budgets.get(worker.model)
        return budget if budget != worker.hot_cache_bytes else None

    def start(self, model: ModelName, incarnation: Incarnation, tasks: asyncio.TaskGroup) -> None:
        """Its exit, or why it could not start, comes into the inbox."""
        worker = WorkerProcess(model=model, incarnation=incarnation)
        self._workers[incarnation] = worker
        task = tasks.create_task(self._run(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def is_suspended(self, worker: WorkerProcess) -> bool:
        """Whether somebody holds it: a signal stopped it, or a debugger. One that has ended is held by nobody."""
        if worker.child is None:
            return False
        try:
            return psutil.Process(worker.child.pid).status() in _SUSPENDED
        except psutil.Error:
            return False

    async def stop(self, effect: StopWorker, socket: WorkerSocket) -> None:
        """One rung of the ladder; nothing when the process is gone."""
        worker = self._workers.get(effect.incarnation)
        if worker is None:
            return
        _log.info("worker_stopping", model=effect.model, incarnation=effect.incarnation, how=effect.how)
        match effect.how:
            case "drain":
                await socket.send_if_there(effect.incarnation, Drain(deadline_seconds=effect.within_seconds))
            case "terminate":
                _signal(worker, ChildProcess.terminate)
            case "kill":
                _signal(worker, ChildProcess.kill)
            case _:
                assert_never(effect.how)

    def abandon(self) -> None:
        """Await no exit any more. The processes die with their tasks."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _run(self, worker: WorkerProcess) -> None:
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
                live_kv_bytes=settings.fleet.memory.live_kv_bytes,
                kv=settings.kv.of(worker.model),
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
            self._post(Exited(worker=worker, ended=ChildExit(stderr_tail=(str(why),))))
            return
        _log.info("worker_started", model=worker.model, incarnation=worker.incarnation, pid=child.pid)
        worker.child = child
        if worker.stop_at_birth:
            worker.stop_at_birth(child)
        ended = await child.wait()
        await asyncio.sleep(_LAST_MESSAGES_SECONDS)
        self._post(Exited(worker=worker, ended=ended))


def _signal(worker: WorkerProcess, signal: Callable[[ChildProcess], None]) -> None:
    if worker.child:
        signal(worker.child)
    else:
        worker.stop_at_birth = signal
