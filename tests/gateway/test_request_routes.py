"""Open requests as their owners and the operator see them: through the whole HTTP side, and by `mlxd top`."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import uvicorn
from msgspec.structs import replace

from gateway.cli import main
from gateway.config import prepare_directories
from gateway.control import ServiceAddress, announce_service, open_port
from gateway.keys import change_key
from gateway.replies import Reply
from protocol.generation import Prefilling, Queued, Timings, Waiting, Warmed, Work
from protocol.ids import ModelName
from tests.fakes.openai_app import until
from tests.gateway.http_parts import ADMIN_TOKEN, House, build_house, make_model

MODEL = "org/name"


class HoldingGenerator:
    """Accepts every request and says no more, until the test does."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def submit(self, model: ModelName, work: Work) -> Reply:
        reply = Reply(work.request_id, lambda _: None)
        reply.put(Queued(request_id=work.request_id, prompt_tokens=9))
        self.replies.append(reply)
        return reply


@pytest.fixture
def house(runtime_directory: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    make_model(runtime_directory / "models" / "org" / "name")
    house = build_house(runtime_directory)
    holding = HoldingGenerator()
    monkeypatch.setattr(house.generator, "submit", holding.submit)
    monkeypatch.setattr(house.generator, "replies", holding.replies)
    return house


@asynccontextmanager
async def asking(house: House, *keys: str) -> AsyncIterator[None]:
    """One open request of each key."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "the secret words"}]}
    clients = [house.client(authorization=f"Bearer {key}") for key in keys]
    exchanges = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for client in clients]
    try:
        await until(lambda: len(house.generator.replies) == len(keys))
        yield
    finally:
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)
        for client in clients:
            await client.aclose()


async def fetch(house: House, path: str, token: str) -> httpx.Response:
    async with house.client(authorization=f"Bearer {token}") as client:
        return await client.get(path)


async def test_everybody_sees_their_own_and_the_operator_all(house: House):
    """Phase, class, position and who holds it up; no prompt; another key's request is not there at all,
    also when the two share their prefixes."""
    ada, bob = house.add_key("ada"), house.add_key("bob", share_cache_with="ada")
    async with asking(house, ada, bob):
        first = house.generator.replies[0]
        first.put(Waiting(request_id=first.request_id, ahead=3, eta_seconds=12.0, held_by="rows"))
        (seen,) = (await fetch(house, "/v1/requests", ada)).json()["data"]
        assert seen["seconds"] >= 0
        assert {name: seen[name] for name in ("id", "key", "model", "class", "phase", "ahead", "eta_seconds")} == {
            "id": first.request_id,
            "key": "ada",
            "model": MODEL,
            "class": "standard",
            "phase": "queued",
            "ahead": 3,
            "eta_seconds": 12.0,
        }
        assert (seen["held_by"], seen["prompt_tokens"], seen["progress"]) == ("rows", 9, None)
        bare = first.request_id.removeprefix("req_")
        for asked in (first.request_id, f"chatcmpl-{bare}", f"cmpl-{bare}"):
            assert (await fetch(house, f"/v1/requests/{asked}", ada)).json()["id"] == first.request_id
            answer = await fetch(house, f"/v1/requests/{asked}", bob)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        everything = await fetch(house, "/admin/requests", ADMIN_TOKEN)
        assert [view["key"] for view in everything.json()["data"]] == ["ada", "bob"]
        assert "secret" not in everything.text
        assert (await fetch(house, "/admin/requests", ada)).status_code == 401
        by_the_operator = (await fetch(house, "/v1/requests", ADMIN_TOKEN)).json()["data"]
        assert [view["key"] for view in by_the_operator] == ["ada", "bob"]
        of_bob = house.generator.replies[1].request_id
        assert (await fetch(house, f"/v1/requests/{of_bob}", ADMIN_TOKEN)).json()["key"] == "bob"
        for elsewhere in ("/v1/models", f"/v1/requests/{of_bob}/explain"):
            assert (await fetch(house, elsewhere, ADMIN_TOKEN)).status_code == 401
    assert (await fetch(house, "/v1/requests", ada)).json() == {"data": [], "object": "list"}


async def test_a_warm_is_seen_as_one(house: House):
    """Class `warm`, in everybody's books, beside its key's answers and though the key may have one of these only. Two
    equal ones share a run and are two requests; who leaves takes only his own away."""
    ada = house.add_key("ada")
    change_key(house.settings.keys_path, "ada", lambda record: replace(record, max_running=1, max_queued=0))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "the secret words"}]}
    async with asking(house, ada), house.client(authorization=f"Bearer {ada}") as client:
        warming = [asyncio.create_task(client.post("/v1/cache/warm", json=body)) for _ in range(2)]
        await until(lambda: len(house.generator.replies) == 2)
        run = house.generator.replies[1]
        run.put(Prefilling(request_id=run.request_id, done_tokens=4, total_tokens=9, cached_tokens=0))
        shown = [("standard", "queued"), ("warm", "prefilling"), ("warm", "prefilling")]
        for path, token in (("/v1/requests", ada), ("/admin/requests", ADMIN_TOKEN)):
            seen: list[dict[str, Any]] = []
            async with asyncio.timeout(10):
                while [(view["class"], view["phase"]) for view in seen] != shown:
                    await asyncio.sleep(0)  # an exchange in process does not wait for anything by itself
                    seen = (await fetch(house, path, token)).json()["data"]
            assert seen[1]["id"] != seen[2]["id"]
            assert seen[2]["progress"]["done_tokens"] == 4
        warming[0].cancel()
        await asyncio.gather(warming[0], return_exceptions=True)
        timings = Timings(queue_seconds=0.0, prefill_seconds=1.0, decode_seconds=0.0, prefill_slices=1)
        run.put(
            Warmed(
                request_id=run.request_id,
                prompt_tokens=9,
                cached_tokens=0,
                blocks=0,
                size_bytes=0,
                durable_blocks=0,
                timings=timings,
            )
        )
        answer = await warming[1]
        assert (answer.status_code, answer.headers["x-mlxd-class"]) == (200, "warm")
        assert len((await fetch(house, "/v1/requests", ada)).json()["data"]) == 1
    assert house.tokens.used_by_class("warm", unix_now=time.time()) == 18  # worked on for both


async def test_explain_is_still_another_route(house: House):
    """`/v1/requests/{id}/explain` is about ended requests and keeps its own answer."""
    ada = house.add_key("ada")
    answer = await fetch(house, "/v1/requests/req_1/explain", ada)
    assert answer.status_code == 404
    assert "remembered" in answer.json()["error"]["message"]


async def test_the_log_line_says_how_far_it_came(house: House):
    """Class and phase of one that ended early, in the one line that every request leaves; no prompt."""
    ada = house.add_key("ada")
    with structlog.testing.capture_logs() as logs:
        async with asking(house, ada):
            reply = house.generator.replies[0]
            reply.put(Prefilling(request_id=reply.request_id, done_tokens=4, total_tokens=9, cached_tokens=0))
    (line,) = [line for line in logs if line["event"] == "request"]
    assert (line["key"], line["class"], line["phase"], line["prompt_tokens"]) == ("ada", "standard", "prefilling", 9)
    assert "secret" not in repr(logs)


async def test_a_finished_requests_line_has_its_times(runtime_directory: Path):
    """Queue, prefill, slices, holds, decode, tokens a second."""
    make_model(runtime_directory / "models" / "org" / "name")
    house = build_house(runtime_directory)
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    with structlog.testing.capture_logs() as logs:
        async with house.client() as client:
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    (line,) = [line for line in logs if line["event"] == "request"]
    assert line["phase"] == "finished"
    assert {
        "queue_seconds",
        "prefill_seconds",
        "prefill_slices",
        "held_seconds",
        "preemptions",
        "held_by",
        "decode_seconds",
        "tokens_per_second",
    } <= line.keys()


async def test_top_shows_them(house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """`mlxd top --once` is a table; without a service it is one line that says what to do."""
    monkeypatch.setenv("MLXD_HOME", str(house.home))

    def top() -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["top", "--once"])
        captured = capsys.readouterr()
        return (ended.value.code if isinstance(ended.value.code, int) else 0), captured.out, captured.err

    code, _, error = await asyncio.to_thread(top)
    assert (code, error.count("\n"), "mlxd serve" in error) == (1, 1, True)
    prepare_directories(house.settings)
    house.settings.admin_token_path.write_text(ADMIN_TOKEN)
    house.settings.admin_token_path.chmod(0o600)
    listener = open_port(house.settings.host, 0)
    server = uvicorn.Server(uvicorn.Config(house.app, log_config=None, access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    address = ServiceAddress(pid=os.getpid(), host=house.settings.host, port=listener.getsockname()[1])
    announce_service(house.settings, address)
    ada = house.add_key("ada")
    try:
        with structlog.testing.capture_logs():
            assert "no open requests" in (await asyncio.to_thread(top))[1]
            async with asking(house, ada):
                reply = house.generator.replies[0]
                progress = Prefilling(request_id=reply.request_id, done_tokens=4, total_tokens=9, cached_tokens=2)
                reply.put(progress)
                code, shown, _ = await asyncio.to_thread(top)
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 10)
    assert code == 0
    for words in (reply.request_id, "ada", MODEL, "standard", "prefilling", "4/9 of the prompt, 2 cached"):
        assert words in shown
