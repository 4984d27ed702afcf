"""Orders and questions about the caches reach their owners, whatever the processes go through."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.cachestore_child import CachestoreSilent
from gateway.dispatch import Dispatch
from gateway.open_requests import OpenRequest
from protocol.blocks import Describe, Described, Forget, Forgotten
from protocol.generation import Finished, ForgetHot, Pong, SetBudget, Unpin, Warmed
from protocol.ids import Incarnation, ModelName
from tests.processes.gateway_stand_in import cachestore_settings
from tests.processes.serving import DEADLINE_SECONDS, QUICK, Folders, serving, settings_for, status_of, submit, until

MODEL = ModelName("well_behaved")


async def fresh_books(dispatch: Dispatch) -> Pong:
    books = next(model for model in (await dispatch.fresh_status()).models if model.name == MODEL).books
    assert books is not None
    return books


async def test_orders_reach_a_loaded_model_in_order(runtime_directory: Path) -> None:
    """And fresh books show what came of them: they were asked for after the orders."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        await submit(dispatch, MODEL).end()
        assert dispatch.tell(MODEL, Unpin(owner="o", name="n")) == "told"
        assert dispatch.tell(MODEL, ForgetHot()) == "told"
        assert dispatch.tell(MODEL, SetBudget(hot_cache_bytes=77)) == "told"
        books = await fresh_books(dispatch)
        assert (books.misses, books.hot_cache_budget_bytes) == ({"Unpin": 1, "ForgetHot": 1}, 77)


async def test_a_process_that_drains_is_told_to_forget(runtime_directory: Path) -> None:
    """What it has in memory goes to the disk before it ends, so that it must hear; its answer says that it has."""
    async with serving(settings_for(runtime_directory, replace(QUICK, drain_seconds=DEADLINE_SECONDS))) as dispatch:
        streaming = submit(dispatch, MODEL, "forever")
        await streaming.has_text()
        dispatch.unload(MODEL)
        await until(lambda: status_of(dispatch, MODEL).state == "draining")
        assert dispatch.tell(MODEL, ForgetHot()) == "told"
        assert await dispatch.orders_followed() == "followed"
        books = status_of(dispatch, MODEL).books
        assert books is not None
        assert books.misses == {"ForgetHot": 1}
        streaming.reply.cancel()


async def test_it_is_known_whether_orders_were_followed(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a process that is silent; of one that goes on, it is; and nobody waits for one that has ended."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        await submit(dispatch, MODEL).end()
        pid = status_of(dispatch, MODEL).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        dispatch.tell(MODEL, ForgetHot())
        monkeypatch.setattr("gateway.dispatch._ORDERS_SECONDS", 0.1)
        assert await dispatch.orders_followed() == "unknown"
        monkeypatch.setattr("gateway.dispatch._ORDERS_SECONDS", DEADLINE_SECONDS)
        os.kill(pid, signal.SIGCONT)
        assert await dispatch.orders_followed() == "followed"
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.create_task(dispatch.orders_followed())
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert await asked == "followed"


async def test_nobody_asks_a_held_process_for_its_books(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last ones are shown at once, and when it goes on it finds no heap of old questions."""
    monkeypatch.setattr("gateway.dispatch._FRESH_BOOKS_SECONDS", DEADLINE_SECONDS)
    async with serving(settings_for(runtime_directory)) as dispatch:
        await submit(dispatch, MODEL).end()
        await dispatch.fresh_status()
        pid = status_of(dispatch, MODEL).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: status_of(dispatch, MODEL).held_reason is not None)
            async with asyncio.timeout(DEADLINE_SECONDS / 2):
                (held,) = (await dispatch.fresh_status()).models
            assert held.books is not None
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_a_budget_outlives_the_process(runtime_directory: Path) -> None:
    """Set before the first load it holds from that load on; set later, also for the process after a crash."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        assert dispatch.tell(MODEL, SetBudget(hot_cache_bytes=55)) == "not_loaded"
        assert dispatch.tell(MODEL, ForgetHot()) == "not_loaded"
        await submit(dispatch, MODEL).end()
        assert (await fresh_books(dispatch)).hot_cache_budget_bytes == 55
        dispatch.tell(MODEL, SetBudget(hot_cache_bytes=66))
        pid = status_of(dispatch, MODEL).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: status_of(dispatch, MODEL).pid != pid)
        await submit(dispatch, MODEL).end()
        books = await fresh_books(dispatch)
        assert (books.hot_cache_budget_bytes, books.misses) == (66, {})


async def test_a_budget_set_during_the_load_is_told_after_it(runtime_directory: Path) -> None:
    """The process was launched with the old one."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        request = submit(dispatch, MODEL)
        await until(lambda: bool(dispatch.status().models) and status_of(dispatch, MODEL).pid is not None)
        dispatch.tell(MODEL, SetBudget(hot_cache_bytes=44))
        await request.end()
        assert (await fresh_books(dispatch)).hot_cache_budget_bytes == 44


async def test_fresh_books_of_nobody(runtime_directory: Path) -> None:
    """With no model loaded there is nobody to wait for; nor after the end."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        assert (await dispatch.fresh_status()).models == ()
    assert (await dispatch.fresh_status()).models == ()


async def test_questions_to_the_cachestore_get_their_own_replies(runtime_directory: Path) -> None:
    """However many are asked at once, beside the liveness question, and in whatever order replies come."""
    settings = settings_for(runtime_directory, cachestore=cachestore_settings(runtime_directory))
    async with serving(settings) as dispatch:
        await until(lambda: (store := dispatch.status().cachestore) is not None and store.state == "ready")
        questions = [Forget(call_id=0), Describe(call_id=0), Forget(call_id=0, owner="o"), Describe(call_id=0)]
        replies = await asyncio.gather(*(dispatch.ask_cachestore(question) for question in questions))
        assert [type(reply) for reply in replies] == [Forgotten, Described, Forgotten, Described]
        assert len({reply.call_id for reply in replies if reply is not None}) == 4


async def test_a_cachestore_that_dies_is_silent_at_once(runtime_directory: Path) -> None:
    """Nobody waits out the deadline for a process that is gone, or not there yet."""
    slow = cachestore_settings(runtime_directory, directory="anywhere")
    async with serving(settings_for(runtime_directory, cachestore=slow)) as dispatch:
        with pytest.raises(CachestoreSilent, match=r"absent|starting"):
            await dispatch.ask_cachestore(Forget(call_id=0))
        await until(lambda: (store := dispatch.status().cachestore) is not None and store.state == "ready")
        store = dispatch.status().cachestore
        assert store is not None
        assert store.pid is not None
        os.kill(store.pid, signal.SIGSTOP)
        asked = asyncio.create_task(dispatch.ask_cachestore(Forget(call_id=0)))
        await asyncio.sleep(0)
        os.kill(store.pid, signal.SIGKILL)
        with pytest.raises(CachestoreSilent, match="ended before it answered"):
            await asked


async def test_without_a_cache_on_disk_there_is_nobody_to_ask(runtime_directory: Path) -> None:
    async with serving(settings_for(runtime_directory)) as dispatch:
        assert await dispatch.ask_cachestore(Forget(call_id=0)) is None


class Seen:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.ends: list[tuple[OpenRequest, Incarnation, Finished | Warmed]] = []

    def finished(self, request: OpenRequest, incarnation: Incarnation, end: Finished | Warmed) -> None:
        self.ends.append((request, incarnation, end))


async def test_the_observer_hears_of_good_ends_only(runtime_directory: Path) -> None:
    """Once each, with what the process said of the prompt and which process it was; not of those that were left."""
    seen = Seen()
    settings = settings_for(runtime_directory)
    dispatch = Dispatch(settings, Folders(), clock=time.monotonic, unix_clock=time.time, observer=seen)
    running = asyncio.create_task(dispatch.run())
    good = submit(dispatch, MODEL, "one two")
    end = await good.end()
    left = submit(dispatch, MODEL, "forever")
    await left.has_text()
    left.reply.cancel()
    await left.end()
    await submit(dispatch, "unknown").end()
    ((request, incarnation, told),) = seen.ends
    assert told is end
    assert incarnation == status_of(dispatch, MODEL).incarnation
    assert request.queued is not None
    assert request.queued.prompt_tokens == 1
    async with asyncio.timeout(10):
        await dispatch.drain(0.0)
        await running
