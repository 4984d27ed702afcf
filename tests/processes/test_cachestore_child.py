"""The cachestore is looked after and never waited for."""

import os
import signal
from pathlib import Path

from msgspec.structs import replace

from gateway.dispatch import Dispatch
from gateway.status import CachestoreStatus
from protocol.generation import Finished
from tests.processes.gateway_stand_in import cachestore_settings
from tests.processes.serving import serving, settings_for, submit, until


def cachestore_of(dispatch: Dispatch) -> CachestoreStatus:
    status = dispatch.status().cachestore
    assert status is not None
    return status


async def test_a_killed_cachestore_comes_back_and_requests_go_on(runtime_directory: Path) -> None:
    """Its books are in the status; after a kill there is a new process, and no worker noticed."""
    settings = settings_for(runtime_directory, cachestore=cachestore_settings(runtime_directory))
    async with serving(settings) as dispatch:
        await until(lambda: cachestore_of(dispatch).state == "ready")
        first = cachestore_of(dispatch)
        assert first.books is not None
        assert first.books.blocks == 7
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        assert isinstance(await submit(dispatch, "well_behaved").end(), Finished)
        await until(lambda: cachestore_of(dispatch).restarts == 1 and cachestore_of(dispatch).state == "ready")
        last_exit = cachestore_of(dispatch).last_exit
        assert last_exit is not None
        assert last_exit.signal == signal.SIGKILL


async def test_a_cachestore_that_cannot_run_stops_nobody(runtime_directory: Path) -> None:
    """Requests are served while it crashes again and again."""
    settings = settings_for(
        runtime_directory, cachestore=cachestore_settings(runtime_directory, directory="dies_at_start")
    )
    async with serving(settings) as dispatch:
        assert isinstance(await submit(dispatch, "well_behaved").end(), Finished)
        await until(lambda: cachestore_of(dispatch).restarts >= 2)
        last_exit = cachestore_of(dispatch).last_exit
        assert last_exit is not None
        assert last_exit.exit_code == 3
        assert last_exit.stderr_tail == ("no such disk",)


async def test_a_silent_cachestore_is_replaced(runtime_directory: Path) -> None:
    """One that is stopped in its tracks answers nothing, and is put down."""
    quick = replace(
        cachestore_settings(runtime_directory),
        describe_within_seconds=1.0,
        silent_limit=2,
        terminate_grace_seconds=0.1,
    )
    async with serving(settings_for(runtime_directory, cachestore=quick)) as dispatch:
        await until(lambda: cachestore_of(dispatch).state == "ready")
        pid = cachestore_of(dispatch).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: cachestore_of(dispatch).restarts == 1 and cachestore_of(dispatch).state == "ready")
        assert cachestore_of(dispatch).pid != pid
