"""Dispatch without children; with them it is tested in tests/processes."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from msgspec.structs import replace
from structlog.testing import capture_logs

from gateway.dispatch import Dispatch
from gateway.dispatch_terms import DispatchSettings
from gateway.fleet_terms import FleetSettings
from gateway.status import ServiceStatus
from protocol.addresses import gateway_socket
from protocol.failures import FailureKind
from protocol.generation import CacheUse, Generate, TextPrompt, WorkerCommand, WorkerEvent
from protocol.handshake import PROTOCOL_VERSION, Hello, Refused
from protocol.ids import Incarnation, ModelName, RequestId
from protocol.latency import LatencyClass
from protocol.sampling import Sampling
from protocol.sockets import AsyncPeer
from tests.processes.serving import Collected, Folder

SECRET = "the-marker-in-my-prompt"


class OneModel:
    def find(self, name: str) -> Folder | None:
        match name:
            case "good":
                return Folder(path="anywhere")
            case "broken":
                return Folder(path="anywhere", problem="config.json is not there")
            case _:
                return None


def settings_for(runtime_directory: Path, worker_command: Sequence[str]) -> DispatchSettings:
    return DispatchSettings(
        runtime_directory=str(runtime_directory),
        worker_command=tuple(worker_command),
        worker_environment={},
        fleet=FleetSettings(backoff_first_seconds=0.01, backoff_longest_seconds=0.02),
    )


@asynccontextmanager
async def running(runtime_directory: Path, *worker_command: str) -> AsyncIterator[Dispatch]:
    settings = settings_for(runtime_directory, worker_command or ("/nonexistent/worker",))
    dispatch = Dispatch(settings, OneModel(), clock=time.monotonic, unix_clock=time.time)
    task = asyncio.create_task(dispatch.run())
    yield dispatch
    async with asyncio.timeout(10):
        await dispatch.drain(0.0)
        await task


def submit(dispatch: Dispatch, model: str) -> Collected:
    prompt = TextPrompt(text=SECRET)
    generate = Generate(
        request_id=RequestId("r"), prompt=prompt, sampling=Sampling(), cache=CacheUse(scope=SECRET.encode())
    )
    return Collected(dispatch.submit(ModelName(model), generate))


async def test_a_model_that_cannot_be_served_is_refused_with_its_problem(runtime_directory: Path) -> None:
    """Unknown and broken are told apart, and neither starts anything."""
    async with running(runtime_directory) as dispatch:
        assert (await submit(dispatch, "nobody").failure()).kind is FailureKind.MODEL_NOT_FOUND
        failure = await submit(dispatch, "broken").failure()
        assert failure.kind is FailureKind.MODEL_UNAVAILABLE
        assert "config.json is not there" in failure.message
        assert dispatch.status() == ServiceStatus()


async def test_prompts_and_scopes_are_in_no_log_line(runtime_directory: Path) -> None:
    """S02: through a whole crash loop, nothing that a client sent is logged."""
    structlog.reset_defaults()
    with capture_logs() as logs:
        async with running(runtime_directory) as dispatch:
            assert (await submit(dispatch, "good").failure()).kind is FailureKind.MODEL_UNAVAILABLE
    assert any(line["event"] == "model_given_up" for line in logs)
    assert SECRET not in repr(logs)


async def test_a_request_before_run_is_served_and_one_after_it_is_refused(runtime_directory: Path) -> None:
    """The order of starting does not matter, and the end is final."""
    settings = settings_for(runtime_directory, ["/nonexistent/worker"])
    dispatch = Dispatch(settings, OneModel(), clock=time.monotonic, unix_clock=time.time)
    early = submit(dispatch, "broken")
    task = asyncio.create_task(dispatch.run())
    assert (await early.failure()).kind is FailureKind.MODEL_UNAVAILABLE
    await dispatch.drain(0.0)
    await task
    assert (await submit(dispatch, "good").failure()).kind is FailureKind.SHUTTING_DOWN
    await dispatch.drain(0.0)


async def test_a_stranger_at_the_socket_is_refused_and_told_to_end(runtime_directory: Path) -> None:
    """An orphan of an earlier gateway that says Hello here gets an answer, and no model."""
    async with running(runtime_directory) as dispatch:
        peer: AsyncPeer[WorkerCommand, WorkerEvent] = AsyncPeer(
            gateway_socket(runtime_directory),
            b"w99",
            WorkerCommand,  # pyright: ignore[reportArgumentType]
        )
        hello = Hello(protocol_version=PROTOCOL_VERSION, model=ModelName("good"), incarnation=Incarnation(99), pid=1)
        await peer.send(hello)
        async with asyncio.timeout(5):
            assert isinstance(await peer.receive(), Refused)
        assert dispatch.status() == ServiceStatus()
        peer.close()


def of_class(number: int, latency_class: LatencyClass) -> Generate:
    prompt = TextPrompt(text=SECRET)
    return Generate(request_id=RequestId(f"r{number}"), prompt=prompt, sampling=Sampling(), latency_class=latency_class)


async def test_a_full_queue_of_a_lower_class_refuses_nobody_above_it(runtime_directory: Path) -> None:
    """Batch fills a model's queue: one more of it is overloaded, an interactive one waits; not the other way round."""
    settings = replace(settings_for(runtime_directory, ["/bin/sleep", "60"]), max_waiting_per_model=2)
    dispatch = Dispatch(settings, OneModel(), clock=time.monotonic, unix_clock=time.time)
    task = asyncio.create_task(dispatch.run())
    good = ModelName("good")
    batch = [Collected(dispatch.submit(good, of_class(number, LatencyClass.BATCH))) for number in range(3)]
    refused = await batch[2].failure()
    assert refused.kind is FailureKind.OVERLOADED
    assert "max_queued_requests 2" in refused.message
    urgent = [Collected(dispatch.submit(good, of_class(10 + number, LatencyClass.INTERACTIVE))) for number in range(3)]
    assert (await urgent[2].failure()).kind is FailureKind.OVERLOADED
    assert not any(collected.reply.is_complete for collected in (*batch[:2], *urgent[:2]))
    async with asyncio.timeout(10):
        await dispatch.drain(0.0)
        await task
    assert {(await collected.failure()).kind for collected in (*batch[:2], *urgent[:2])} == {FailureKind.SHUTTING_DOWN}
