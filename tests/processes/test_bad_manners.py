"""Workers that say what is not so."""

from pathlib import Path

from protocol.failures import FailureKind
from protocol.generation import Finished, Prefilling
from tests.processes.serving import serving, settings_for, status_of, submit, until


async def test_a_lying_worker_cannot_touch_other_requests_or_end_one_twice(runtime_directory: Path) -> None:
    """Events for requests that a process does not have change nothing."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        neighbour = submit(dispatch, "well_behaved", "forever")
        await neighbour.has_text()
        liar = submit(dispatch, "lies_about_finish", neighbour.reply.request_id)
        assert isinstance(await liar.end(), Finished)
        assert liar.text == "true "
        again = submit(dispatch, "lies_about_finish", "nobody")
        await again.end()
        assert again.text == "true "
        assert not neighbour.reply.is_complete
        assert "stolen" not in neighbour.text
        assert status_of(dispatch, "lies_about_finish").restarts == 0
        neighbour.reply.cancel()


async def test_a_flood_is_one_string_and_starves_nobody(runtime_directory: Path) -> None:
    """Every character of a flood arrives, in few events; another model answers meanwhile."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        await submit(dispatch, "well_behaved").end()
        await submit(dispatch, "floods").end()
        flood = submit(dispatch, "floods", "flood")
        await flood.has_text()
        assert isinstance(await submit(dispatch, "well_behaved").end(within_seconds=5.0), Finished)
        assert isinstance(await flood.end(), Finished)
        assert flood.text == "x" * 20_000
        assert sum(isinstance(event, Prefilling) for event in flood.events) == 1


async def test_a_babbling_worker_is_replaced(runtime_directory: Path) -> None:
    """Malformed messages are counted; too many end the process, as a crash would."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        assert (await submit(dispatch, "babbles").failure()).kind in (
            FailureKind.WORKER_DIED,
            FailureKind.MODEL_UNAVAILABLE,
        )
        await until(lambda: status_of(dispatch, "babbles").last_exit is not None)
