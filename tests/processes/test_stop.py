"""Stopping: asked first, then told, killed only when deaf; and never a request without an answer."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
from msgspec.structs import replace

from gateway.dispatch import Dispatch
from protocol.failures import FailureKind
from protocol.generation import Finished, Prefilling, Queued
from protocol.ids import ModelName
from tests.processes.gateway_stand_in import cachestore_settings
from tests.processes.serving import QUICK, serving, settings_for, status_of, submit, until

WEDGED = replace(QUICK, hang_seconds=0.5, terminate_grace_seconds=0.3)


async def test_drain_waits_until_the_deadline_then_fails_the_rest(runtime_directory: Path) -> None:
    """E04: one streams, one's model loads, one comes late; all get their end, children and sockets are gone."""
    settings = settings_for(runtime_directory, cachestore=cachestore_settings(runtime_directory))
    async with serving(settings) as dispatch:
        streaming = submit(dispatch, "well_behaved", "forever")
        loading = submit(dispatch, "never_ready")
        await streaming.has_text()
        began = time.monotonic()
        draining = asyncio.create_task(dispatch.drain(0.5))
        assert (await loading.failure(within_seconds=0.4)).kind is FailureKind.SHUTTING_DOWN
        late = submit(dispatch, "well_behaved")
        assert (await late.failure(within_seconds=0.4)).kind is FailureKind.SHUTTING_DOWN
        assert (await streaming.failure()).kind is FailureKind.SHUTTING_DOWN
        assert time.monotonic() - began >= 0.5
        await draining
        assert psutil.Process().children() == []
        last_exit = status_of(dispatch, "well_behaved").last_exit
        assert last_exit is not None
        assert last_exit.exit_code == 0
    assert not (runtime_directory / "gateway.sock").exists()


async def test_drain_does_not_wait_longer_than_the_work(runtime_directory: Path) -> None:
    """With nothing open the deadline does not matter."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        assert isinstance(await submit(dispatch, "well_behaved").end(), Finished)
        async with asyncio.timeout(10):
            await dispatch.drain(1000.0)


async def test_a_worker_that_ignores_everything_is_killed_at_shutdown(runtime_directory: Path) -> None:
    """Drain, SIGTERM, and after both were ignored SIGKILL."""
    async with serving(settings_for(runtime_directory, WEDGED)) as dispatch:
        await submit(dispatch, "ignores_sigterm").end()
        await dispatch.drain(0.0)
        last_exit = status_of(dispatch, "ignores_sigterm").last_exit
        assert last_exit is not None
        assert last_exit.signal == 9


async def test_a_worker_that_makes_no_step_is_replaced(runtime_directory: Path) -> None:
    """A hung step loop is found by the steps that do not come; its requests fail, the next process serves."""
    async with serving(settings_for(runtime_directory, WEDGED)) as dispatch:
        stuck = submit(dispatch, "hangs_mid_step", "hang")
        failure = await stuck.failure()
        assert failure.kind is FailureKind.WORKER_DIED
        assert stuck.text == "la "
        assert isinstance(await submit(dispatch, "hangs_mid_step").end(), Finished)
        status = status_of(dispatch, "hangs_mid_step")
        assert status.restarts == 1
        assert status.last_exit is not None
        assert status.last_exit.signal == 15


async def test_who_has_no_answer_yet_gets_it_of_the_next_process(runtime_directory: Path) -> None:
    """A hung process is replaced; what it had only accepted, and what it never read, is answered by the next one, and
    each is accepted once as far as its client hears."""
    async with serving(settings_for(runtime_directory, WEDGED)) as dispatch:
        accepted = submit(dispatch, "hangs_before_the_answer")
        await until(lambda: any(isinstance(event, Prefilling) for event in accepted.events))
        unread = [submit(dispatch, "hangs_before_the_answer") for _ in range(3)]
        for one in (accepted, *unread):
            assert isinstance(await one.end(), Finished)
            assert one.text == "hello there "
            assert sum(isinstance(event, Queued) for event in one.events) == 1
        status = status_of(dispatch, "hangs_before_the_answer")
        assert (status.restarts, status.incarnation) == (1, 2)


async def test_a_worker_that_somebody_holds_is_not_replaced(runtime_directory: Path) -> None:
    """Stopped by a signal for several limits, with work in mid-answer and unread: nothing is killed, both go on."""
    async with serving(settings_for(runtime_directory, WEDGED)) as dispatch:
        streaming = submit(dispatch, "well_behaved", "forever")
        await streaming.has_text()
        pid = status_of(dispatch, "well_behaved").pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            unread = submit(dispatch, "well_behaved")
            await until(lambda: time.monotonic() - began > 4 * WEDGED.hang_seconds)
            reason = status_of(dispatch, "well_behaved").stuck_reason
            assert reason is not None
            assert "SIGCONT" in reason
        finally:
            os.kill(pid, signal.SIGCONT)
        length = len(streaming.text)
        assert isinstance(await unread.end(), Finished)
        await until(lambda: len(streaming.text) > length)
        await until(lambda: status_of(dispatch, "well_behaved").stuck_reason is None)
        status = status_of(dispatch, "well_behaved")
        assert (status.pid, status.restarts) == (pid, 0)
        streaming.reply.cancel()


async def come_and_leave(dispatch: Dispatch, *, times: int) -> None:
    for _ in range(times):
        left = submit(dispatch, "well_behaved")
        left.reply.cancel()
        assert (await left.failure()).kind is FailureKind.CANCELLED


async def test_clients_of_a_held_process_that_leave_are_in_nobodys_way(runtime_directory: Path) -> None:
    """However many came and left before it was seen to be held, and after: the next one is not refused, nothing piles
    up at the process, and who stayed is answered when it goes on."""
    settings = settings_for(runtime_directory, WEDGED, max_waiting_per_model=2, max_rows=1)
    async with serving(settings) as dispatch:
        await submit(dispatch, "well_behaved").end()
        pid = status_of(dispatch, "well_behaved").pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await come_and_leave(dispatch, times=5)
            await until(lambda: status_of(dispatch, "well_behaved").held_reason is not None)
            before = status_of(dispatch, "well_behaved").open_requests
            await come_and_leave(dispatch, times=5)
            assert status_of(dispatch, "well_behaved").open_requests == before
            stayed = submit(dispatch, "well_behaved")
            await until(lambda: status_of(dispatch, "well_behaved").waiting_requests == 1)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert isinstance(await stayed.end(), Finished)
        assert status_of(dispatch, "well_behaved").pid == pid


async def test_a_hung_worker_that_ignores_sigterm_is_killed(runtime_directory: Path) -> None:
    """The last rung is for a proven wedge, and it is reached."""
    async with serving(settings_for(runtime_directory, WEDGED)) as dispatch:
        await submit(dispatch, "hangs_and_ignores_sigterm", "hang").failure()
        assert isinstance(await submit(dispatch, "hangs_and_ignores_sigterm").end(), Finished)
        last_exit = status_of(dispatch, "hangs_and_ignores_sigterm").last_exit
        assert last_exit is not None
        assert last_exit.signal == 9


async def test_an_idle_worker_is_never_called_stuck(runtime_directory: Path) -> None:
    """No steps without work is no fault, however long."""
    async with serving(settings_for(runtime_directory, WEDGED)) as dispatch:
        await submit(dispatch, "well_behaved").end()
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 2 * WEDGED.hang_seconds)
        status = status_of(dispatch, "well_behaved")
        assert (status.state, status.stuck_reason, status.restarts) == ("ready", None, 0)
        assert status.seconds_since_pong is not None
        assert status.steps == 2


async def test_unload_finishes_what_runs_and_the_next_request_loads_again(runtime_directory: Path) -> None:
    """E03: an unload during a stream ends it with an error that says so, and is no crash."""
    fleet = replace(QUICK, drain_seconds=0.3)
    async with serving(settings_for(runtime_directory, fleet)) as dispatch:
        streaming = submit(dispatch, "well_behaved", "forever")
        await streaming.has_text()
        dispatch.unload(ModelName("well_behaved"))
        dispatch.unload(ModelName("well_behaved"))
        meanwhile = submit(dispatch, "well_behaved")
        failure = await streaming.failure()
        assert "unloaded" in failure.message
        assert isinstance(await meanwhile.end(), Finished)
        status = status_of(dispatch, "well_behaved")
        assert (status.incarnation, status.restarts) == (2, 0)


async def test_cancelling_reaches_the_worker(runtime_directory: Path) -> None:
    """B07: a client that leaves frees its row; cancelling twice, or after the end, is harmless."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        stream = submit(dispatch, "well_behaved", "forever")
        await stream.has_text()
        stream.reply.cancel()
        stream.reply.cancel()
        assert (await stream.failure()).kind is FailureKind.CANCELLED
        await until(lambda: status_of(dispatch, "well_behaved").open_requests == 0)
        stream.reply.cancel()
        assert isinstance(await submit(dispatch, "well_behaved").end(), Finished)
