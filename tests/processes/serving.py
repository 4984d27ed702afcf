"""A running Dispatch with problem workers, for the tests beside this file."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct
from msgspec.structs import replace

from gateway.dispatch import Dispatch
from gateway.dispatch_terms import DispatchSettings
from gateway.fleet_terms import FleetSettings
from gateway.replies import Reply
from gateway.status import ModelStatus
from protocol.failures import Failure
from protocol.generation import Delta, Failed, Finished, Generate, RequestEvent, TextPrompt
from protocol.ids import ModelName, RequestId
from protocol.model_kind import ModelKind
from protocol.sampling import Sampling

HERE = Path(__file__).parent
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HERE.parent.parent)}

QUICK = FleetSettings(
    start_timeout_seconds=20.0,
    backoff_first_seconds=0.1,
    backoff_longest_seconds=0.4,
    given_up_seconds=30.0,
    hang_seconds=10.0,
    ping_working_seconds=0.1,
    ping_idle_seconds=0.2,
    drain_seconds=2.0,
    terminate_grace_seconds=2.0,
    kill_grace_seconds=5.0,
)

DEADLINE_SECONDS = 20.0


class Folder(Struct, frozen=True, kw_only=True):
    path: str
    weight_bytes: int = 0
    problem: str | None = None
    kind: ModelKind = "generation"


class Folders:
    """A catalog in which a model `fault` or `fault/anything` has the path `fault`."""

    def find(self, name: str) -> Folder | None:
        fault = name.split("/")[0]
        return None if fault == "unknown" else Folder(path=fault)


def settings_for(runtime_directory: Path, fleet: FleetSettings = QUICK, **changes: Any) -> DispatchSettings:
    settings = DispatchSettings(
        runtime_directory=str(runtime_directory),
        worker_command=(sys.executable, "-P", str(HERE / "problem_workers.py")),
        worker_environment=ENVIRONMENT,
        fleet=fleet,
    )
    return replace(settings, **changes)


@asynccontextmanager
async def serving(settings: DispatchSettings) -> AsyncIterator[Dispatch]:
    """Run a Dispatch and drain it at the end; every child must be gone then."""
    dispatch = Dispatch(settings, Folders(), clock=time.monotonic, unix_clock=time.time)
    running = asyncio.create_task(dispatch.run())
    try:
        yield dispatch
    finally:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await dispatch.drain(0.0)
            if not running.cancelled():
                await running
        assert psutil.Process().children(recursive=True) == []


_numbers = iter(range(1, 1_000_000))


def generate(text: str) -> Generate:
    request_id = RequestId(f"request-{next(_numbers)}")
    return Generate(request_id=request_id, prompt=TextPrompt(text=text), sampling=Sampling())


class Collected:
    """Reads a reply in the background, to its end."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.events: list[RequestEvent] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.reply:
            self.events.append(event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))

    async def end(self, within_seconds: float = DEADLINE_SECONDS) -> Finished | Failed:
        """The last event. Exactly one event of the reply is an end."""
        async with asyncio.timeout(within_seconds):
            await self.task
        ends = [event for event in self.events if isinstance(event, (Finished, Failed))]
        assert len(ends) == 1
        assert self.events[-1] is ends[0]
        return ends[0]

    async def failure(self, within_seconds: float = DEADLINE_SECONDS) -> Failure:
        end = await self.end(within_seconds)
        assert isinstance(end, Failed), end
        return end.failure

    async def has_text(self) -> None:
        await until(lambda: bool(self.text))


def submit(dispatch: Dispatch, model: str, text: str = "hello there") -> Collected:
    return Collected(dispatch.submit(ModelName(model), generate(text)))


def status_of(dispatch: Dispatch, model: str) -> ModelStatus:
    return next(status for status in dispatch.status().models if status.name == model)


async def until(condition: Callable[[], bool], within_seconds: float = DEADLINE_SECONDS) -> None:
    """Wait for a condition that no event announces."""
    async with asyncio.timeout(within_seconds):
        while not condition():  # noqa: ASYNC110  (there is no event to wait for)
            await asyncio.sleep(0.005)
