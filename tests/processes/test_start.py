"""Starting: one load per model, and every way in which a load can come to nothing."""

import sys
import time
from pathlib import Path

import psutil
from msgspec.structs import replace

from protocol.failures import FailureKind
from protocol.generation import Finished
from protocol.handshake import PROTOCOL_VERSION
from protocol.ids import ModelName
from tests.processes.serving import QUICK, serving, settings_for, status_of, submit, until


async def test_ten_first_requests_cause_one_load(runtime_directory: Path) -> None:
    """E02: one process per model, however many ask at once; all are answered."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        many = [submit(dispatch, "well_behaved", f"hello {number}") for number in range(10)]
        for number, one in enumerate(many):
            assert isinstance(await one.end(), Finished)
            assert one.text == f"hello {number} "
        assert len(psutil.Process().children()) == 1
        status = status_of(dispatch, "well_behaved")
        assert (status.incarnation, status.restarts, status.state) == (1, 0, "ready")


async def test_a_model_that_is_never_ready_is_refused_after_the_start_timeout(runtime_directory: Path) -> None:
    """Waiting ends with a reason and a time to come back, and the process that never got ready is ended."""
    fleet = replace(QUICK, start_timeout_seconds=0.8)
    async with serving(settings_for(runtime_directory, fleet)) as dispatch:
        failure = await submit(dispatch, "never_ready").failure()
        assert failure.kind is FailureKind.MODEL_UNAVAILABLE
        assert "was not ready" in failure.message
        await until(lambda: status_of(dispatch, "never_ready").state == "given_up")
        assert status_of(dispatch, "never_ready").restarts == 0


async def test_a_worker_of_another_version_is_refused_without_a_crash_loop(runtime_directory: Path) -> None:
    """The failure names both versions; the process is not started again."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        failure = await submit(dispatch, "speaks_old_protocol").failure()
        assert failure.kind is FailureKind.MODEL_UNAVAILABLE
        assert f"protocol {PROTOCOL_VERSION - 1}" in failure.message
        await until(lambda: status_of(dispatch, "speaks_old_protocol").state == "given_up")
        status = status_of(dispatch, "speaks_old_protocol")
        assert status.restarts == 0
        assert status.last_exit is not None
        assert status.last_exit.exit_code == 4


async def test_a_broken_folder_is_refused_at_the_first_attempt(runtime_directory: Path) -> None:
    """Last words that the next load would repeat are believed (E06)."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        failure = await submit(dispatch, "broken_folder").failure()
        assert failure.kind is FailureKind.MODEL_UNAVAILABLE
        assert "config.json is not valid" in failure.message
        assert status_of(dispatch, "broken_folder").restarts == 0


async def test_a_command_that_cannot_be_run_is_a_crash_with_a_reason(runtime_directory: Path) -> None:
    """Even without a process the requests end."""
    settings = settings_for(runtime_directory, worker_command=("/nonexistent/worker",))
    async with serving(settings) as dispatch:
        failure = await submit(dispatch, "well_behaved").failure()
        assert failure.kind is FailureKind.MODEL_UNAVAILABLE
        assert "a failed start" in failure.message
        assert "/nonexistent" not in failure.message
        last_exit = status_of(dispatch, "well_behaved").last_exit
        assert last_exit is not None
        assert "No such file" in last_exit.stderr_tail[-1]


async def test_a_child_that_speaks_no_protocol_is_judged_by_its_exit(runtime_directory: Path) -> None:
    """A program that prints and ends is a crash. Clients hear how it ended, the operator what it printed."""
    command = (sys.executable, "-c", "print('this is no worker')")
    async with serving(settings_for(runtime_directory, worker_command=command)) as dispatch:
        failure = await submit(dispatch, "well_behaved").failure()
        assert "exit code 0" in failure.message
        assert "this is no worker" not in failure.message
        last_exit = status_of(dispatch, "well_behaved").last_exit
        assert last_exit is not None
        assert last_exit.stderr_tail == ("this is no worker",)


async def test_an_unknown_model_starts_nothing(runtime_directory: Path) -> None:
    """A name that is not in the catalog is refused by name."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        assert (await submit(dispatch, "unknown").failure()).kind is FailureKind.MODEL_NOT_FOUND
        assert psutil.Process().children() == []


async def test_too_many_waiting_requests_are_refused_with_a_time_to_come_back(runtime_directory: Path) -> None:
    """The queue of a model that loads is bounded; cancelling makes room."""
    settings = settings_for(runtime_directory, max_waiting_per_model=3)
    async with serving(settings) as dispatch:
        waiting = [submit(dispatch, "never_ready") for _ in range(3)]
        failure = await submit(dispatch, "never_ready").failure()
        assert failure.kind is FailureKind.OVERLOADED
        assert failure.retry_after_seconds is not None
        waiting[0].reply.cancel()
        assert (await waiting[0].failure()).kind is FailureKind.CANCELLED
        another = submit(dispatch, "never_ready")
        await until(lambda: status_of(dispatch, "never_ready").waiting_requests == 3)
    assert (await another.failure()).kind is FailureKind.SHUTTING_DOWN


async def test_a_preloaded_model_is_ready_before_anybody_asks(runtime_directory: Path) -> None:
    """And a preload of nothing is a line in the log."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        dispatch.preload(ModelName("well_behaved"))
        dispatch.preload(ModelName("unknown"))
        await until(lambda: [model.state for model in dispatch.status().models] == ["ready"])
        assert len(psutil.Process().children()) == 1


async def test_who_waits_for_a_second_load_is_told_how_long_it_takes(runtime_directory: Path) -> None:
    """As long as the first one; of that nobody knew. A model that is ready has nothing to tell."""
    model = ModelName("well_behaved")
    async with serving(settings_for(runtime_directory)) as dispatch:
        began = time.monotonic()
        dispatch.preload(model)
        await until(lambda: [each.state for each in dispatch.status().models] == ["starting"])
        assert status_of(dispatch, model).loaded_in_seconds is None
        await until(lambda: status_of(dispatch, model).state == "ready")
        first_seconds = time.monotonic() - began
        assert await dispatch.unload_and_wait(model) is None
        dispatch.preload(model)
        await until(lambda: status_of(dispatch, model).state == "starting")
        told = status_of(dispatch, model).loaded_in_seconds
        assert told is not None
        assert 0 < told <= first_seconds
        await until(lambda: status_of(dispatch, model).state == "ready")
        assert status_of(dispatch, model).loaded_in_seconds is None
