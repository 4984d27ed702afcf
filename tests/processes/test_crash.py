"""A worker that dies takes nothing else with it."""

import asyncio
import os
import signal
import time
from pathlib import Path

from msgspec.structs import replace

from protocol.failures import FailureKind
from protocol.generation import Failed, Finished
from tests.processes.serving import QUICK, serving, settings_for, status_of, submit, until


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_killing_one_worker_mid_stream_fails_its_requests_and_no_others(runtime_directory: Path) -> None:
    """E01: the victim gets an error within 2 s, the neighbour streams on, the dead model restarts once and serves."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        victim = submit(dispatch, "well_behaved/a", "forever")
        neighbour = submit(dispatch, "well_behaved/b", "forever")
        await victim.has_text()
        await neighbour.has_text()
        kill(status_of(dispatch, "well_behaved/a").pid)
        failure = await victim.failure(within_seconds=2.0)
        assert failure.kind is FailureKind.WORKER_DIED
        assert failure.retry_after_seconds == 1.0
        assert "well_behaved/a" in failure.message
        length = len(neighbour.text)
        many = [submit(dispatch, "well_behaved/a") for _ in range(20)]
        ends = [await one.end() for one in many]
        assert all(isinstance(end, Finished) for end in ends)
        assert status_of(dispatch, "well_behaved/a").restarts == 1
        await until(lambda: len(neighbour.text) > length)
        neighbour.reply.cancel()
        assert (await neighbour.failure()).kind is FailureKind.CANCELLED
        assert status_of(dispatch, "well_behaved/b").restarts == 0


async def test_a_burst_at_the_moment_of_death_is_answered(runtime_directory: Path) -> None:
    """Requests sent to a process whose death nobody has noticed yet all end; those it never answered are retried."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        assert isinstance(await submit(dispatch, "well_behaved").end(), Finished)
        kill(status_of(dispatch, "well_behaved").pid)
        many = [submit(dispatch, "well_behaved") for _ in range(20)]
        ends = [await one.end() for one in many]
        assert all(
            isinstance(end, Finished) or (isinstance(end, Failed) and end.failure.kind is FailureKind.WORKER_DIED)
            for end in ends
        )
        assert isinstance(await submit(dispatch, "well_behaved").end(), Finished)
        assert status_of(dispatch, "well_behaved").restarts == 1


async def test_a_serving_model_restarts_though_nobody_asks(runtime_directory: Path) -> None:
    """A model that was ready comes back by itself, in a new incarnation."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        await submit(dispatch, "well_behaved").end()
        first = status_of(dispatch, "well_behaved")
        kill(first.pid)
        await until(lambda: status_of(dispatch, "well_behaved").incarnation not in (0, first.incarnation))
        await until(lambda: status_of(dispatch, "well_behaved").state == "ready")
        last_exit = status_of(dispatch, "well_behaved").last_exit
        assert last_exit is not None
        assert last_exit.signal == signal.SIGKILL


async def test_a_crash_loop_ends_in_a_clear_refusal(runtime_directory: Path) -> None:
    """Three crashes in five minutes: refused at once from then on, with a time to come back, and no further spawn.

    What the process printed is for the operator: a client hears how it ended.
    """
    async with serving(settings_for(runtime_directory)) as dispatch:
        failure = await submit(dispatch, "dies_at_start").failure()
        assert failure.kind is FailureKind.MODEL_UNAVAILABLE
        assert "exit code 3" in failure.message
        assert "cursed" not in failure.message
        assert failure.retry_after_seconds is not None
        status = status_of(dispatch, "dies_at_start")
        assert status.last_exit is not None
        assert "boom: the weights are cursed" in status.last_exit.stderr_tail
        assert (status.state, status.restarts, status.pid) == ("given_up", 2, None)
        again = await submit(dispatch, "dies_at_start").failure(within_seconds=1.0)
        assert again.kind is FailureKind.MODEL_UNAVAILABLE
        assert again.retry_after_seconds is not None
        assert 0 < again.retry_after_seconds <= QUICK.given_up_seconds
        assert status_of(dispatch, "dies_at_start").restarts == 2


async def test_five_quick_kills_are_no_spin(runtime_directory: Path) -> None:
    """E01: crashing it again and again gives up at the third; every request is answered."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        kinds: list[FailureKind] = []
        for _ in range(5):
            kinds.append((await submit(dispatch, "dies_mid_stream").failure()).kind)
        assert kinds == [FailureKind.WORKER_DIED] * 3 + [FailureKind.MODEL_UNAVAILABLE] * 2
        assert status_of(dispatch, "dies_mid_stream").state == "given_up"


async def test_after_giving_up_one_attempt_is_made_when_asked(runtime_directory: Path) -> None:
    """The breaker is half open after its time: one process, whose crash closes it again."""
    fleet = replace(QUICK, given_up_seconds=0.2)
    async with serving(settings_for(runtime_directory, fleet)) as dispatch:
        await submit(dispatch, "dies_at_start").failure()
        incarnation = status_of(dispatch, "dies_at_start").last_exit
        await until(lambda: status_of(dispatch, "dies_at_start").retry_after_seconds == 0.0)
        failure = await submit(dispatch, "dies_at_start").failure()
        assert failure.kind is FailureKind.MODEL_UNAVAILABLE
        assert status_of(dispatch, "dies_at_start").last_exit != incarnation
        assert status_of(dispatch, "dies_at_start").restarts == 2


async def test_a_death_right_after_text_delivers_that_text(runtime_directory: Path) -> None:
    """What a worker sent before it died reaches the client before the error does."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        victim = submit(dispatch, "dies_mid_stream")
        began = time.monotonic()
        assert (await victim.failure()).kind is FailureKind.WORKER_DIED
        assert victim.text == "last "
        assert time.monotonic() - began < 10


async def test_cancelling_run_kills_the_children_and_fails_the_requests(runtime_directory: Path) -> None:
    """However `run` ends, nobody waits for an answer for ever and no child stays."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        stream = submit(dispatch, "well_behaved", "forever")
        await stream.has_text()
        [running] = [task for task in asyncio.all_tasks() if "Dispatch.run" in repr(task.get_coro())]
        running.cancel()
        assert (await stream.failure()).kind is FailureKind.SHUTTING_DOWN
        await asyncio.gather(running, return_exceptions=True)
        assert (await submit(dispatch, "well_behaved").failure()).kind is FailureKind.SHUTTING_DOWN
