"""Warm, pin, forget, explain: each caller on its own blocks, both tiers told, nothing done by halves in silence."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.cachestore_child import CachestoreSilent
from gateway.keys import change_key
from gateway.status import CachestoreStatus, ModelStatus
from protocol.blocks import Describe, Described, Forget, Forgotten, PinBooks, UnpinBlocks, Unpinned
from protocol.generation import (
    ChatPrompt,
    ForgetHot,
    Generate,
    Pin,
    PinnedPrefix,
    Pong,
    PrefixReuse,
    Ready,
    SetBudget,
    TextPrompt,
    Unpin,
    Warm,
)
from protocol.ids import ModelName
from protocol.scopes import owner_id
from tests.fakes.openai_app import until
from tests.gateway.http_parts import ADMIN_TOKEN, LOCAL_SCOPE, House, build_house, make_model

USER = {"role": "user", "content": "hello"}
LOCAL = owner_id(LOCAL_SCOPE)
ADMIN = {"authorization": f"Bearer {ADMIN_TOKEN}"}
BOOKS = Described(
    call_id=1,
    blocks=3,
    file_bytes=30,
    quota_bytes=100,
    leases=0,
    published=3,
    written_bytes=30,
    evicted=0,
    quarantined=0,
    pins=(
        PinBooks(owner=LOCAL, name="repo", blocks=2, file_bytes=20, expires_unix=5.0),
        PinBooks(owner=LOCAL, name="disk-only", blocks=1, file_bytes=10),
        PinBooks(owner="another", name="secret-plan", blocks=1, file_bytes=10),
    ),
)


@pytest.fixture
def house(tmp_path: Path) -> House:
    for name in ("tiny", "other"):
        make_model(tmp_path / "models" / name)
    built = build_house(tmp_path)
    built.caches.answers |= {
        Forget: Forgotten(call_id=1, blocks=4, file_bytes=40),
        UnpinBlocks: Unpinned(call_id=1, blocks=0),
        Describe: BOOKS,
    }
    return built


def loaded(name: str, *pins: PinnedPrefix) -> ModelStatus:
    limits = Ready(
        context_tokens=2048,
        max_rows=4,
        weight_bytes=10,
        load_seconds=1.0,
        prefix_reuse=PrefixReuse(available=True),
        fingerprint=f"print of {name}",
    )
    books = Pong(
        nonce=1,
        steps=1,
        running_rows=0,
        waiting_requests=0,
        active_bytes=5,
        hot_cache_bytes=7,
        hot_cache_blocks=2,
        misses={"absent": 3},
        pins=pins,
    )
    return ModelStatus(
        name=ModelName(name), state="ready", since_unix=1.0, limits=limits, books=books, seconds_since_pong=0.0
    )


async def warm(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/cache/warm", json={"model": "tiny", **({"messages": [USER]} | fields)})


async def admin(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    return await client.post(f"/admin/cache/{path}", json=fields, headers=ADMIN)


# --- warm ------------------------------------------------------------------------------------------------------------


async def test_a_warm_asks_as_a_chat_would_and_says_what_it_kept(house: House) -> None:
    """The same prompt and the same scope as a chat of the same caller, so that the chat finds the blocks."""
    async with house.client() as client:
        await client.post("/v1/chat/completions", json={"model": "tiny", "messages": [USER]})
        response = await warm(client, pin={"name": "repo", "ttl_seconds": 60})
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"].startswith("warm-")
    assert {name: answer[name] for name in ("object", "model", "prompt_tokens", "cached_tokens", "blocks")} == {
        "object": "cache.warm",
        "model": "tiny",
        "prompt_tokens": 300,
        "cached_tokens": 256,
        "blocks": 2,
    }
    assert (answer["bytes"], answer["durable_blocks"]) == (4096, 1)
    assert answer["pin"] == {"name": "repo", "ttl_seconds": 60}
    chat, warmed = house.generator.asked
    assert isinstance(chat, Generate)
    assert isinstance(warmed, Warm)
    assert (warmed.prompt, warmed.cache) == (chat.prompt, chat.cache)
    assert warmed.pin == Pin(name="repo", ttl_seconds=60)


async def test_a_text_prompt_can_be_warmed_too(house: House) -> None:
    async with house.client() as client:
        body = {"model": "tiny", "prompt": "Once upon a time", "prompt_cache_retention": "in-memory"}
        assert (await client.post("/v1/cache/warm", json=body)).status_code == 200
    (warmed,) = house.generator.asked
    assert warmed.prompt == TextPrompt(text="Once upon a time")
    assert warmed.cache.retention == "in_memory"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
        ({"prompt": "both"}, 400, "prompt"),
        ({"model": "unknown"}, 404, "model"),
        ({"pin": {"name": "../etc"}}, 400, "pin.name"),
        ({"pin": {"name": "ok", "ttl_seconds": 0}}, 400, "pin.ttl_seconds"),
        ({"pin": {"name": "ok", "ttl": 5}}, 400, "pin"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    ],
)
async def test_what_a_chat_would_be_refused_for(house: House, fields: Any, status: int, param: str) -> None:
    """One validator: 4xx that names the field, in OpenAI's envelope, and nothing is started."""
    async with house.client() as client:
        response = await warm(client, **fields)
        metrics = (await client.get("/metrics", headers=ADMIN)).text
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert house.generator.asked == []
    reason = "model_not_found" if status == 404 else "invalid_request"
    assert f'mlxd_requests_rejected_total{{reason="{reason}"}} 1.0' in metrics


async def test_equal_warms_share_one_run(house: House) -> None:
    """Single-flight: N agents that fan out share one prefill; another pin, prompt or scope is another one."""
    house.generator.warms = "held"
    async with house.client() as client:
        same = [asyncio.create_task(warm(client)) for _ in range(5)]
        other = asyncio.create_task(warm(client, cache_salt="mine"))
        await until(lambda: len(house.generator.asked) == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        house.generator.land()
        answers = [await task for task in (*same, other)]
        metrics = (await client.get("/metrics", headers=ADMIN)).text
    assert len(house.generator.asked) == 2
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len({answer.json()["id"] for answer in answers}) == 2
    assert 'mlxd_prompt_tokens_total{class="warm",model="tiny"} 600.0' in metrics
    assert 'mlxd_cached_prompt_tokens_total{class="warm",model="tiny",tier="ram"} 512.0' in metrics


async def test_a_run_is_cancelled_when_the_last_one_leaves(house: House) -> None:
    """And not before; who comes after that gets a run of its own."""
    house.generator.warms = "held"
    send = [_Connection(), _Connection()]
    tasks = [asyncio.create_task(_raw_warm(house, connection)) for connection in send]
    await until(lambda: all(connection.reads == 2 for connection in send))
    for _ in range(20):  # from there to the flight it is a few turns of the loop, and no other thread
        await asyncio.sleep(0)
    send[0].put_nowait({"type": "http.disconnect"})
    await tasks[0]
    assert house.generator.cancelled == []
    send[1].put_nowait({"type": "http.disconnect"})
    await tasks[1]
    assert len(house.generator.cancelled) == 1
    house.generator.warms = "answered"
    async with house.client() as client:
        assert (await warm(client)).status_code == 200
    assert len(house.generator.asked) == 2


class _Connection(asyncio.Queue[dict[str, Any]]):
    """What a client sends. At the second read its request is in, and it is only listened for its leaving."""

    reads = 0

    async def get(self) -> dict[str, Any]:
        self.reads += 1
        return await super().get()


async def _raw_warm(house: House, incoming: _Connection) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}'
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/cache/warm", "raw_path": b"/v1/cache/warm", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "client": None, "server": None,
    }  # fmt: skip
    async with asyncio.timeout(10):
        await house.app(scope, incoming.get, send)


async def test_a_pin_moves_to_the_model_that_was_warmed_last(house: House) -> None:
    """A name is unique within its owner: other models' memory is told to let it go."""
    house.status.models = [loaded("tiny"), loaded("other")]
    async with house.client() as client:
        await warm(client, pin={"name": "repo"})
    assert house.caches.told == [("other", Unpin(owner=LOCAL, name="repo"))]


# --- pins and forget -------------------------------------------------------------------------------------------------


async def test_pins_of_both_tiers_are_one_list_of_the_callers_own(house: House) -> None:
    """Another owner's pins are in neither the list nor any number of it."""
    hot = PinnedPrefix(owner=LOCAL, name="repo", tokens=300, size_bytes=9, expires_seconds=None)
    foreign = PinnedPrefix(owner="another", name="secret-plan", tokens=300, size_bytes=9)
    house.status.models = [loaded("tiny", hot, foreign)]
    async with house.client() as client:
        listed = (await client.get("/v1/cache/pins")).json()
    assert [(pin["name"], pin["models"], pin["tokens"], pin["disk_blocks"]) for pin in listed["data"]] == [
        ("disk-only", [], 0, 1),
        ("repo", ["tiny"], 300, 2),
    ]
    assert "secret-plan" not in repr(listed)


async def test_unpinning_tells_both_tiers(house: House) -> None:
    """Under the caller's own owner id; a name that nobody pinned is no error, and says so."""
    house.status.models = [loaded("tiny", PinnedPrefix(owner=LOCAL, name="repo", tokens=1, size_bytes=1))]
    async with house.client() as client:
        assert (await client.delete("/v1/cache/pins/repo")).json()["deleted"] is True
        assert (await client.delete("/v1/cache/pins/unknown")).json()["deleted"] is False
    assert house.caches.told[0] == ("tiny", Unpin(owner=LOCAL, name="repo"))
    assert house.caches.asked[0] == UnpinBlocks(call_id=0, owner=LOCAL, name="repo")


async def test_to_be_forgotten(house: House) -> None:
    """Own blocks only: hot ones in every model, those on disk, and the hashes that explain misses."""
    key, _ = house.add_key("ann"), house.add_key("bob")
    house.status.models = [loaded("tiny")]
    async with house.client(authorization=f"Bearer {key}") as client:
        chat = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": [USER]})
        explain = f"/v1/requests/{chat.json()['id']}/explain"
        assert (await client.get(explain)).status_code == 200
        answer = await client.post("/v1/cache/forget")
        assert (await client.get(explain)).status_code == 404
    assert answer.json() == {
        "object": "cache.forgotten",
        "models": ["tiny"],
        "disk": "forgotten",
        "disk_blocks": 4,
        "disk_bytes": 40,
    }
    owner = house.generator.asked[0].cache.owner
    assert house.caches.told == [("tiny", ForgetHot(owner=owner))]
    assert house.caches.asked == [Forget(call_id=0, owner=owner, asked_by="ann")]


async def test_a_disk_that_was_not_purged_is_no_success(house: House) -> None:
    """Who asks to be forgotten hears it when the cachestore does not answer, and that trying again helps."""
    house.caches.answers[Forget] = CachestoreSilent("the cachestore is backing_off")
    async with house.client() as client:
        response = await client.post("/v1/cache/forget", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "cache_unavailable")
    assert response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("has_disk", [True, False])
async def test_memory_that_may_still_be_written_is_no_success(house: House, *, has_disk: bool) -> None:
    """A process that did not say that it has forgotten may write it yet: all else is forgotten, and it is said."""
    house.status.models = [loaded("tiny")]
    house.caches.orders = "unknown"
    if not has_disk:
        house.caches.answers[Forget] = None
    async with house.client() as client:
        response = await client.post("/v1/cache/forget", json={})
        assert [type(asked) for asked in house.caches.asked] == [Forget]
        assert (response.status_code, response.json()["error"]["code"]) == (503, "cache_unavailable")
        assert response.headers["x-should-retry"] == "true"
        house.caches.orders = "followed"
        assert (await client.post("/v1/cache/forget", json={})).status_code == 200


async def test_with_no_cache_on_disk_memory_is_all_there_is(house: House) -> None:
    house.caches.answers[Forget] = None
    async with house.client() as client:
        assert (await client.post("/v1/cache/forget", json={})).json()["disk"] == "off"


# --- the operator's --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "forget", "budget", "unpin"])
async def test_the_operators_routes_need_the_token(house: House, path: str) -> None:
    async with house.client() as client:
        response = await client.request("POST" if path else "GET", f"/admin/cache/{path}", json={})
    assert response.status_code == 401
    assert house.caches.told == []
    assert house.caches.asked == []


@pytest.mark.parametrize("fields", [{}, {"all": True, "model": "tiny"}, {"al": True}, {"all": False}])
async def test_nothing_is_purged_by_a_typo(house: House, fields: dict[str, Any]) -> None:
    """`all` is said on purpose, and alone."""
    async with house.client() as client:
        response = await admin(client, "forget", **fields)
    assert response.status_code == 400
    assert house.caches.asked == []


async def test_purging_by_model_key_and_age(house: House) -> None:
    """Criteria become those of the cachestore; an age says nothing of what lies in memory."""
    house.add_key("ann")
    house.status.models = [loaded("tiny"), loaded("other")]
    async with house.client() as client:
        for fields in ({"model": "tiny"}, {"key": "ann", "model": "other"}, {"unused_for_seconds": 5}, {"all": True}):
            assert (await admin(client, "forget", **fields)).status_code == 200
        unknown = await admin(client, "forget", key="nobody")
        unloaded = await admin(client, "forget", model="never-loaded")
    first, second, third, fourth = house.caches.asked
    assert first == Forget(call_id=0, fingerprint="print of tiny", asked_by="admin")
    assert isinstance(second, Forget)
    assert second.fingerprint == "print of other"
    assert second.owner is not None
    assert third == Forget(call_id=0, unused_for_seconds=5, asked_by="admin")
    assert fourth == Forget(call_id=0, asked_by="admin")
    assert house.caches.told == [
        ("tiny", ForgetHot()),
        ("other", ForgetHot(owner=second.owner)),
        ("tiny", ForgetHot()),
        ("other", ForgetHot()),
    ]
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "key")
    assert (unloaded.status_code, unloaded.json()["error"]["param"]) == (400, "model")


async def test_a_budget_holds_now_or_from_the_next_load(house: House) -> None:
    house.status.models = [loaded("tiny")]
    async with house.client() as client:
        now = await admin(client, "budget", model="tiny", hot_cache_bytes=5)
        later = await admin(client, "budget", model="other", hot_cache_bytes=6)
        unknown = await admin(client, "budget", model="nothing", hot_cache_bytes=6)
    assert (now.json()["holds"], later.json()["holds"], unknown.status_code) == ("now", "from_next_load", 404)
    assert house.caches.told == [
        ("tiny", SetBudget(hot_cache_bytes=5)),
        ("other", SetBudget(hot_cache_bytes=6)),
    ]


async def test_the_operator_sees_all_books(house: House) -> None:
    """Every model of the catalog, loaded or not; the disk; and whose owner ids are whose."""
    house.add_key("ann")
    house.status.models = [loaded("tiny")]
    async with house.client() as client:
        books = (await client.get("/admin/cache", headers=ADMIN)).json()
        assert (await admin(client, "unpin", name="repo", key="ann")).status_code == 200
    assert {row["model"]: row["state"] for row in books["models"]} == {"tiny": "ready", "other": "absent"}
    assert next(row for row in books["models"] if row["model"] == "tiny")["books"]["misses"] == {"absent": 3}
    assert books["disk"]["blocks"] == 3
    assert [owner["key"] for owner in books["owners"]] == ["ann"]
    assert house.caches.told == [("tiny", Unpin(owner=books["owners"][0]["owner"], name="repo"))]


async def test_a_silent_disk_shows_its_last_books(house: House) -> None:
    """The view must not fail when it is needed most."""
    house.caches.answers[Describe] = CachestoreSilent("gone")
    async with house.client() as client:
        books = (await client.get("/admin/cache", headers=ADMIN)).json()
    assert (books["disk"], books["disk_state"]) == (None, "off")
    last = CachestoreStatus(state="backing_off", since_unix=1.0, books=replace(BOOKS, blocks=9))
    house.status.cachestore = last
    async with house.client() as client:
        books = (await client.get("/admin/cache", headers=ADMIN)).json()
    assert (books["disk"]["blocks"], books["disk_state"]) == (9, "backing_off")


# --- explain ---------------------------------------------------------------------------------------------------------


async def test_an_explanation_goes_by_every_id_and_to_its_own_key_only(house: House) -> None:
    """The header's id, the answer's, and the client's own; 404 for another key, as for an id that never was."""
    ann, bob = house.add_key("ann"), house.add_key("bob")
    async with house.client(authorization=f"Bearer {ann}") as client:
        body = {"model": "tiny", "messages": [USER]}
        first = await client.post("/v1/chat/completions", json=body)
        second = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "my-own.id"})
        ids = [first.json()["id"], first.headers["x-request-id"], "my-own.id", second.json()["id"]]
        answers = [(await client.get(f"/v1/requests/{asked}/explain")).json() for asked in ids]
        assert (await client.get("/v1/requests/req_0/explain")).json()["error"]["code"] == "not_found"
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    assert answers[0]["reason"] == "first_request"
    assert answers[2]["compared_with"] == answers[0]["request_id"]
    async with house.client(authorization=f"Bearer {bob}") as client:
        for asked in ids:
            assert (await client.get(f"/v1/requests/{asked}/explain")).status_code == 404


# --- keys and scopes -------------------------------------------------------------------------------------------------


async def test_s04_scopes_of_two_keys_never_meet_unless_they_were_made_to(house: House) -> None:
    """S04: the same request of two keys has two scopes and owners; a shared one is asked for at the key's making; a
    client's salt narrows within its own; a key's time on disk reaches the worker."""
    ann = house.add_key("ann")
    bob = house.add_key("bob", cache_ttl_seconds=3600.0)
    team = house.add_key("team", share_cache_with="ann")
    for key in (ann, bob, team, ann):
        async with house.client(x_api_key=key) as client:
            for fields in ({}, {"cache_salt": "narrow"}):
                body = {"model": "tiny", "messages": [USER], **fields}
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    uses = [asked.cache for asked in house.generator.asked]
    of_ann, narrow_ann, of_bob, narrow_bob, of_team, narrow_team, again, _ = uses
    assert len({of_ann.scope, narrow_ann.scope, of_bob.scope, narrow_bob.scope}) == 4
    assert of_ann == again
    assert (of_team.scope, of_team.owner) == (of_ann.scope, of_ann.owner)
    assert narrow_team.scope == narrow_ann.scope
    assert of_bob.owner == narrow_bob.owner != of_ann.owner
    assert (of_ann.disk_ttl_seconds, of_bob.disk_ttl_seconds) == (None, 3600.0)


async def test_k08_a_changing_billing_line_does_not_change_the_prompt(house: House) -> None:
    """K08: as a part of its own and as a first line, three random values give one prompt."""
    async with house.client() as client:
        for value in ("a1b2c", "00000", "fffff"):
            head = f"x-anthropic-billing-header: cc_version=2.1.0; cch={value};"
            content = [{"type": "text", "text": head}, {"type": "text", "text": "A long frame."}]
            for system in (content, f"{head}\nA long frame."):
                body = {"model": "tiny", "messages": [{"role": "system", "content": system}, USER]}
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    prompts = [asked.prompt for asked in house.generator.asked]
    assert prompts == [prompts[0]] * 6
    assert isinstance(prompts[0], ChatPrompt)
    assert prompts[0].messages[0].content == "A long frame."


async def test_a_warm_costs_its_key_the_days_tokens(house: House):
    """What a generation may not use, a warm may not either: 429 before a worker is asked, until midnight UTC."""
    ada = house.add_key("ada")
    change_key(house.settings.keys_path, "ada", lambda record: replace(record, tokens_per_day=300))
    async with house.client(authorization=f"Bearer {ada}") as client:
        body = {"model": "tiny", "messages": [USER]}
        assert (await client.post("/v1/cache/warm", json=body)).status_code == 200
        refused = await client.post("/v1/cache/warm", json=body)
        generation = await client.post("/v1/chat/completions", json=body)
    for answer in (refused, generation):
        assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
        assert "300 tokens today, of 300" in answer.json()["error"]["message"]
    assert len(house.generator.asked) == 1
