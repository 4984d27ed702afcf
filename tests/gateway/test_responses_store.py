"""The file in which responses are kept: its bounds, its time, whose they are, and what a damaged one costs."""

import json
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.caller import Caller
from gateway.responses.answers import Status
from gateway.responses.store import ResponseStore, StoreLimits
from gateway.responses.stored import CHAIN_MAX, StoredResponse, holder_of, identified, response_of_item
from tests.fakes.responses_app import LIMITS, SetClock, make_store


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def store(tmp_path: Path, clock: SetClock) -> Iterator[ResponseStore]:
    made = make_store(tmp_path, clock=clock)
    yield made
    made.close()


def response(
    id_: str, *, holder: str = "alice", previous: str | None = None, status: Status = "completed", size_bytes: int = 0
) -> StoredResponse:
    body = json.dumps({"id": id_, "status": status, "error": None, "output": [], "padding": "x" * size_bytes})
    return StoredResponse(
        holder=holder,
        id=id_,
        created_unix=1.0,
        status=status,
        background=False,
        previous_response_id=previous,
        input_items=b"[]",
        response=body.encode(),
    )


async def ids(store: ResponseStore, *names: str, holder: str = "alice") -> list[str]:
    """Which of them are there."""
    return [name for name in names if await store.get(holder, name) is not None]


# --- what comes back -------------------------------------------------------------------------------------------------


async def test_what_was_put_comes_back(store: ResponseStore, tmp_path: Path) -> None:
    """To its holder, byte for byte, from another store of the same file, too; nothing to anybody else."""
    await store.put(response("a"))
    assert await store.get("alice", "a") == response("a")
    assert await store.get("bob", "a") is None
    store.close()
    again = make_store(tmp_path)
    assert await again.get("alice", "a") == response("a")
    again.close()


async def test_a_chain_is_found_whole_or_not_at_all(store: ResponseStore) -> None:
    """The first of it first; a missing link breaks it; another's link is none."""
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        await store.put(response(name, previous=previous))
    chain = await store.chain("alice", "c")
    assert [stored.id for stored in chain or []] == ["a", "b", "c"]
    await store.put(response("d", previous="elsewhere"))
    await store.put(response("elsewhere", holder="bob"))
    assert await store.chain("alice", "d") is None
    assert await store.delete("alice", "b")
    assert await store.chain("alice", "c") is None


async def test_a_chain_without_end_is_cut(store: ResponseStore) -> None:
    """One that leads back to itself cannot be made by clients; it must not hang the service if it is there."""
    await store.put(response("a", previous="b"))
    await store.put(response("b", previous="a"))
    assert len(await store.chain("alice", "a") or []) == CHAIN_MAX + 1


async def test_replacing_changes_what_is_there_only(store: ResponseStore) -> None:
    """What was deleted meanwhile does not come back."""
    await store.put(response("a", status="queued"))
    await store.replace("alice", "a", status="completed", response=b'{"output": []}')
    found = await store.get("alice", "a")
    assert found is not None
    assert (found.status, found.response) == ("completed", b'{"output": []}')
    assert await store.delete("alice", "a")
    assert not await store.delete("alice", "a")
    await store.replace("alice", "a", status="completed", response=b"{}")
    assert await store.get("alice", "a") is None


# --- bounds ----------------------------------------------------------------------------------------------------------


async def test_its_time_starts_again_with_each_use(store: ResponseStore, clock: SetClock) -> None:
    """A conversation lives as long as it goes on, all of it; what nobody builds on goes."""
    await store.put(response("a"))
    await store.put(response("alone"))
    clock.now += LIMITS.keep_seconds * 0.6
    await store.put(response("b", previous="a"))
    assert await store.chain("alice", "b") is not None
    clock.now += LIMITS.keep_seconds * 0.6
    assert await ids(store, "a", "b", "alone") == ["a", "b"]
    clock.now += LIMITS.keep_seconds * 2
    assert await ids(store, "a", "b") == []


async def test_what_is_over_its_time_leaves_the_file(tmp_path: Path, clock: SetClock) -> None:
    """Though nobody asks for anything: at the next start, and its text is overwritten."""
    store = make_store(tmp_path, clock=clock)
    await store.put(replace(response("a"), input_items=b'["a very secret text"]'))
    store.close()
    clock.now += LIMITS.keep_seconds * 2
    store = make_store(tmp_path, clock=clock)
    assert await store.get("alice", "none") is None
    store.close()
    assert all(b"secret" not in path.read_bytes() for path in tmp_path.iterdir())  # noqa: ASYNC240


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (replace(LIMITS, holder_responses=2), ["c", "d"]),
        (replace(LIMITS, holder_bytes=2500), ["c", "d"]),
        (replace(LIMITS, total_bytes=2500), ["c", "d"]),
    ],
)
async def test_the_longest_unused_make_room(
    tmp_path: Path, clock: SetClock, limits: StoreLimits, left: list[str]
) -> None:
    """By number and by bytes, of one holder and of all."""
    store = make_store(tmp_path, limits=limits, clock=clock)
    for name in ("a", "b", "c", "d"):
        clock.now += 1
        await store.put(response(name, size_bytes=1000))
    assert await ids(store, "a", "b", "c", "d") == left
    store.close()


async def test_one_holder_does_not_push_out_another(tmp_path: Path, clock: SetClock) -> None:
    """Its own bound is met first."""
    store = make_store(tmp_path, limits=replace(LIMITS, holder_responses=2), clock=clock)
    await store.put(response("mine", holder="bob"))
    for name in ("a", "b", "c"):
        clock.now += 1
        await store.put(response(name))
    assert await ids(store, "mine", holder="bob") == ["mine"]
    store.close()


async def test_what_is_still_made_is_not_pushed_out(tmp_path: Path, clock: SetClock) -> None:
    """Its client polls for it."""
    store = make_store(tmp_path, limits=replace(LIMITS, holder_responses=1), clock=clock)
    await store.put(response("running", status="queued"))
    clock.now += 1
    await store.put(response("a"))
    assert await ids(store, "running") == ["running"]
    store.close()


# --- the file --------------------------------------------------------------------------------------------------------


async def test_no_file_without_a_response(store: ResponseStore, tmp_path: Path) -> None:
    """Looking makes none."""
    assert await store.get("alice", "a") is None
    assert await store.chain("alice", "a") is None
    assert not await store.delete("alice", "a")
    assert os.listdir(tmp_path) == []  # noqa: PTH208


async def test_only_its_owner_can_read_it(store: ResponseStore, tmp_path: Path) -> None:
    """Whatever the process's mask, its companions included; and a file that others could read is closed to them."""
    mask = os.umask(0)
    try:
        await store.put(response("a"))
        modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in os.listdir(tmp_path)}  # noqa: PTH208
        assert modes == {0o600}
    finally:
        os.umask(mask)
    store.close()
    path = tmp_path / "responses.sqlite3"
    path.chmod(0o644)
    again = make_store(tmp_path)
    assert await again.get("alice", "a") is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again.close()


async def test_what_a_crash_left_over_is_failed(store: ResponseStore, tmp_path: Path) -> None:
    """Nobody works on it any more, and whoever polls for it must hear that."""
    for status in ("queued", "in_progress", "completed", "cancelled"):
        await store.put(response(status, status=status))
    store.close()
    again = make_store(tmp_path)
    for name, expected in (("queued", "failed"), ("in_progress", "failed"), ("completed", "completed")):
        found = await again.get("alice", name)
        assert found is not None
        body: dict[str, Any] = json.loads(found.response)
        assert (found.status, body["status"]) == (expected, expected)
        assert (body["error"] is not None) == (expected == "failed")
    again.close()


async def test_a_damaged_file_is_put_aside(store: ResponseStore, tmp_path: Path) -> None:
    """A store that cannot be read costs what was in it, not the service."""
    path = tmp_path / "responses.sqlite3"
    path.write_bytes(b"this is no database" * 100)
    with structlog.testing.capture_logs() as logs:
        await store.put(response("a"))
    assert await ids(store, "a") == ["a"]
    assert (tmp_path / "responses.damaged").exists()
    assert [entry["event"] for entry in logs] == ["responses_damaged"]


async def test_a_closed_store_says_so(store: ResponseStore) -> None:
    """What ends while the service stops is not written, and raises nothing that nobody expects."""
    store.close()
    with pytest.raises(sqlite3.Error):
        await store.put(response("a"))


# --- names -----------------------------------------------------------------------------------------------------------


def test_holders_are_keys() -> None:
    """Not those who share their cache, nor one that has an old one's name."""
    alice = Caller(key_name="alice", cache_scope=b"1")
    others = [Caller(key_name="bob", cache_scope=b"1"), Caller(key_name="alice", cache_scope=b"2")]
    assert holder_of(alice) not in [holder_of(other) for other in others]


@given(st.text(max_size=60))
def test_any_text_may_be_asked_for_as_an_item(text: str) -> None:
    """Only ids that were made here lead to a response."""
    found = response_of_item(text)
    assert found is None or found.startswith("resp_")


def test_items_get_ids_and_types() -> None:
    """Those they lack; the rest is as it was sent."""
    items = [b' {"role": "user", "content": "a"}', b'{"type":"function_call","id":"mine","call_id":"c"}']
    stored = json.loads(identified([msgspec.Raw(item) for item in items], bare_id="f" * 32))
    assert stored == [
        {"id": f"in_{'f' * 32}_0", "type": "message", "role": "user", "content": "a"},
        {"type": "function_call", "id": "mine", "call_id": "c"},
    ]
    assert response_of_item(f"msg_{'f' * 32}_3") == f"resp_{'f' * 32}"
