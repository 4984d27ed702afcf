"""Loading and unloading at the operator's word: whoever orders hears exactly once what came of it."""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from gateway.dispatch import Dispatch
from protocol.failures import FailureKind
from protocol.generation import Finished
from protocol.ids import ModelName
from tests.processes.serving import QUICK, serving, settings_for, status_of, submit, until

GOOD = ModelName("well_behaved")


def pid_of(dispatch: Dispatch, model: str) -> int:
    pid = status_of(dispatch, model).pid
    assert pid is not None
    return pid


async def test_load_returns_when_the_model_is_ready(runtime_directory: Path) -> None:
    """Ten at once are one process; one that is ready already is no work; unloading twice is as good as once."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        assert await asyncio.gather(*(dispatch.load_and_wait(GOOD) for _ in range(10))) == [None] * 10
        status = status_of(dispatch, GOOD)
        assert (status.state, status.incarnation) == ("ready", 1)
        assert await dispatch.load_and_wait(GOOD) is None
        assert await asyncio.gather(dispatch.unload_and_wait(GOOD), dispatch.unload_and_wait(GOOD)) == [None, None]
        assert (status_of(dispatch, GOOD).state, status_of(dispatch, GOOD).pid) == ("absent", None)
        assert await dispatch.unload_and_wait(GOOD) is None
        assert await dispatch.unload_and_wait(ModelName("unknown")) is None


async def test_load_says_why_not(runtime_directory: Path) -> None:
    """Not in the catalog, hopeless at the first try, given up after three: the failure that a request would get."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        unknown = await dispatch.load_and_wait(ModelName("unknown"))
        assert unknown is not None
        assert unknown.kind is FailureKind.MODEL_NOT_FOUND
        broken = await dispatch.load_and_wait(ModelName("broken_folder"))
        assert broken is not None
        assert "config.json is not valid" in broken.message
        dying = await dispatch.load_and_wait(ModelName("dies_at_start"))
        assert dying is not None
        assert "3 time(s)" in dying.message
        assert status_of(dispatch, "dies_at_start").state == "given_up"
        again = await dispatch.load_and_wait(ModelName("dies_at_start"))
        assert again is not None
        assert again.retry_after_seconds is not None
        assert status_of(dispatch, "dies_at_start").incarnation == 0


async def test_unload_ends_a_given_up_state(runtime_directory: Path) -> None:
    """After it, a load tries again with a clean record: three more attempts."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        model = ModelName("dies_at_start")
        assert await dispatch.load_and_wait(model) is not None
        assert await dispatch.unload_and_wait(model) is None
        assert status_of(dispatch, model).state == "absent"
        again = await dispatch.load_and_wait(model)
        assert again is not None
        assert "3 time(s)" in again.message


async def test_a_load_is_waited_for_although_a_client_leaves(runtime_directory: Path) -> None:
    """The last waiting client's leaving does not end the wait of who ordered the load."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        model = ModelName("dies_at_start")
        loading = asyncio.create_task(dispatch.load_and_wait(model))
        client = submit(dispatch, model)
        client.reply.cancel()
        await client.failure()
        assert await loading is not None
        assert status_of(dispatch, model).state == "given_up"


async def test_unload_waits_for_open_requests_and_for_the_exit(runtime_directory: Path) -> None:
    """What runs may end; what comes meanwhile is served by the next process, and its load does not wait for it."""
    async with serving(settings_for(runtime_directory, replace(QUICK, drain_seconds=20.0))) as dispatch:
        streaming = submit(dispatch, GOOD, "forever")
        await streaming.has_text()
        first = pid_of(dispatch, GOOD)
        unloading = asyncio.create_task(dispatch.unload_and_wait(GOOD))
        await until(lambda: status_of(dispatch, GOOD).state == "draining")
        loading = asyncio.create_task(dispatch.load_and_wait(GOOD))
        late = submit(dispatch, GOOD)
        assert not unloading.done()
        streaming.reply.cancel()
        assert await unloading is None
        assert await loading is None
        assert isinstance(await late.end(), Finished)
        assert pid_of(dispatch, GOOD) != first


async def test_an_unload_ends_a_load(runtime_directory: Path) -> None:
    """Who waits for the load hears that it was unloaded; who unloads hears when the process is gone."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        model = ModelName("never_ready")
        loading = asyncio.create_task(dispatch.load_and_wait(model))
        await until(lambda: status_of(dispatch, model).pid is not None if dispatch.status().models else False)
        assert await dispatch.unload_and_wait(model) is None
        failure = await loading
        assert failure is not None
        assert "unloaded by the operator" in failure.message
        status = status_of(dispatch, model)
        assert status.pid is None
        assert status.last_exit is not None
        assert status.last_exit.was_ordered


async def test_nobody_waits_beyond_the_services_end(runtime_directory: Path) -> None:
    """A stop answers those who wait for a load, and those who come after it."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        loading = asyncio.create_task(dispatch.load_and_wait(ModelName("never_ready")))
        await until(lambda: bool(dispatch.status().models))
        await dispatch.drain(0.0)
        for failure in (await loading, await dispatch.load_and_wait(GOOD)):
            assert failure is not None
            assert failure.kind is FailureKind.SHUTTING_DOWN
        late = await dispatch.unload_and_wait(GOOD)
        assert late is not None
        assert late.kind is FailureKind.SHUTTING_DOWN
