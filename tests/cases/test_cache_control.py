"""Warm, pin, explain and forget through the running service, over HTTP and by command."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors import safe_open

from protocol.block_file import parse_metadata
from tests.cases.test_cache import MODEL, block_files, prompt_of
from tests.fakes.http_answers import COMPLETIONS, Answer, ask_whole
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.tiny_llama import make_tiny_llama

SYSTEM = "You are a careful assistant of this repository. " * 20


@pytest.fixture(scope="module")
def service(script_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A tiny llama with two keys that share nothing."""
    folder = make_tiny_llama(script_model, tmp_path_factory.mktemp("models") / "tiny")
    with live_service({MODEL: folder}) as live:
        live.add_key("ann")
        live.add_key("bob")
        yield live


@pytest.fixture
def ann(service: LiveService) -> Iterator[httpx.Client]:
    with service.client(key=service.keys["ann"]) as client:
        yield client


@pytest.fixture
def bob(service: LiveService) -> Iterator[httpx.Client]:
    with service.client(key=service.keys["bob"]) as client:
        yield client


def complete(client: httpx.Client, prompt: list[int], **fields: Any) -> Answer:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return ask_whole(client, asked, path=COMPLETIONS)


def test_a_warmed_prefix_is_found_by_its_own_key_alone(ann: httpx.Client, bob: httpx.Client) -> None:
    """K09, S04: the warm says what it kept, a request of that key reuses it, and one of another key computes all."""
    prompt = prompt_of(700, seed=1)
    body = {"model": MODEL, "prompt": prompt, "pin": {"name": "repo", "ttl_seconds": 600}}
    warmed = ann.post("/v1/cache/warm", json=body)
    assert warmed.status_code == 200, warmed.text
    answer = warmed.json()
    assert (answer["prompt_tokens"], answer["cached_tokens"]) == (700, 0)
    assert answer["blocks"] >= 2
    assert answer["bytes"] > 0
    assert complete(bob, prompt).cached_tokens == 0
    assert complete(ann, [*prompt, 40, 41]).cached_tokens >= 512
    assert ann.post("/v1/cache/warm", json=body).json()["cached_tokens"] >= 512


def test_a_pin_is_seen_by_its_owner_until_it_is_let_go(ann: httpx.Client, bob: httpx.Client) -> None:
    """With its size and its end; another key sees nothing and lets nothing go."""
    body = {"model": MODEL, "prompt": prompt_of(600, seed=2), "pin": {"name": "mine", "ttl_seconds": 600}}
    assert ann.post("/v1/cache/warm", json=body).status_code == 200

    def mine() -> list[dict[str, Any]]:
        return [pin for pin in ann.get("/v1/cache/pins").json()["data"] if pin["name"] == "mine"]

    (pin,) = until("the pin is in the books", mine)
    assert pin["models"] == [MODEL]
    assert pin["tokens"] >= 512
    assert pin["expires_unix"] is not None
    assert bob.get("/v1/cache/pins").json()["data"] == []
    assert bob.delete("/v1/cache/pins/mine").json()["deleted"] is False
    assert mine()
    assert ann.delete("/v1/cache/pins/mine").json()["deleted"] is True
    until("the pin is gone", lambda: not mine())


def test_a_request_is_explained(ann: httpx.Client, bob: httpx.Client) -> None:
    """Tiers, the request it is compared with and where the two part; to its own key only."""
    prompt = prompt_of(600, seed=3)
    first = ann.post(COMPLETIONS, json={"model": MODEL, "prompt": prompt, "max_tokens": 2}).json()
    changed = [*prompt[:400], *prompt_of(200, seed=4)]
    second = ann.post(COMPLETIONS, json={"model": MODEL, "prompt": changed, "max_tokens": 2}).json()
    answer = ann.get(f"/v1/requests/{second['id']}/explain").json()
    assert answer["compared_with"].removeprefix("req_") == first["id"].removeprefix("cmpl-")
    assert answer["common_tokens"] == 400
    assert answer["first_divergent_token"] == [400, 416]
    assert answer["tiers"][-1] == {"from_token": answer["cached_tokens"], "to_token": 600, "tier": "none"}
    assert answer["cached_tokens"] >= 256
    assert answer["reason_text"]
    assert bob.get(f"/v1/requests/{second['id']}/explain").status_code == 404


def test_a_date_in_front_is_named(ann: httpx.Client) -> None:
    """K08: the frame differs only in a date, and the explanation says so; a billing line is no difference at all."""

    def ask(system: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        answer = ann.post("/v1/chat/completions", json=body, headers={"x-mlxd-details": "1"}).json()
        assert answer["mlxd"]["cache"]["ram_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return ann.get(f"/v1/requests/{answer['mlxd']['request_id']}/explain").json()

    ask(f"Today is 2026-01-12. {SYSTEM}")
    answer = ask(f"Today is 2026-01-13. {SYSTEM}")
    assert answer["reason"] == "volatile", answer
    assert "a date" in answer["reason_text"]
    assert answer["first_divergent_message"] == {"index": 0, "role": "system"}
    ask(f"x-anthropic-billing-header: cch=11111;\n{SYSTEM}")
    answer = ask(f"x-anthropic-billing-header: cch=22222;\n{SYSTEM}")
    assert answer["reason"] == "reused", answer


def test_to_be_forgotten_is_to_start_cold(ann: httpx.Client, bob: httpx.Client) -> None:
    """Own blocks go, in memory and on disk; those of another key stay."""
    prompt = prompt_of(520, seed=5)
    for client in (ann, bob):
        complete(client, prompt)
        assert complete(client, prompt).cached_tokens >= 512
    forgotten = ann.post("/v1/cache/forget", json={})
    assert forgotten.status_code == 200, forgotten.text
    assert forgotten.json()["models"] == [MODEL]
    assert complete(ann, prompt).cached_tokens == 0
    assert complete(bob, prompt).cached_tokens >= 512


def test_what_was_on_its_way_to_the_disk_does_not_come_back(script_model: Path, tmp_path: Path) -> None:
    """Forgotten while its blocks wait to be written, a key has none on disk once all writing is done."""
    folder = make_tiny_llama(script_model, tmp_path / "tiny")
    with live_service({MODEL: folder}, settings_toml='cache.persist = "through"') as live:
        keys = {name: live.add_key(name) for name in ("ann", "bob")}
        with live.client(key=keys["ann"]) as ann, live.client(key=keys["bob"]) as bob:
            complete(bob, prompt_of(100, seed=1))
            before = until("the first block is on disk", lambda: owners_on_disk(live))
            for seed in (2, 3, 4):
                complete(ann, prompt_of(3000, seed=seed))
            assert ann.post("/v1/cache/forget", json={}).status_code == 200
            complete(bob, prompt_of(100, seed=5))
            # One queue: what comes behind it is written when all before it was.
            after = until("the last block is on disk", lambda: owners_on_disk(live).count(before[0]) > 1)
            assert after
            assert set(owners_on_disk(live)) == set(before)


def owners_on_disk(service: LiveService) -> list[str]:
    owners: list[str] = []
    for path in block_files(service):
        with contextlib.suppress(Exception), safe_open(path, "np") as file:  # it may be gone by now
            owners.append(parse_metadata(file.metadata()).owner)
    return owners


def test_a_recipes_tools_are_a_part_of_its_prefix(service: LiveService, ann: httpx.Client, tmp_path: Path) -> None:
    """A chat with the same tools finds all of it up to its question; one with others does not."""
    (tmp_path / "tools.json").write_text(json.dumps([tool("look"), tool("act")]))
    recipe = tmp_path / "r.toml"
    recipe.write_text(f"model = '{MODEL}'\nsystem = '{SYSTEM}'\ntools = 'tools.json'\n")
    key_file = tmp_path / "key"
    key_file.write_text(service.keys["ann"])
    key_file.chmod(0o600)
    warmed = service.command("warm", str(recipe), "--json", "--key-file", str(key_file))
    assert warmed.returncode == 0, warmed
    prefix_tokens = json.loads(warmed.stdout)["prompt_tokens"]
    same, other = (
        ask_chat(ann, SYSTEM, "hello", tools=tools)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for tools in ([tool("look"), tool("act")], [tool("listen"), tool("act")])
    )
    # What closes the prompt (the assistant's turn) comes at other places with a question.
    assert prefix_tokens - 64 <= same
    assert other < same - 32


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": f"to {name}", "parameters": parameters}}


def ask_chat(client: httpx.Client, system: str, user: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    answer = client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_operators_commands(service: LiveService, ann: httpx.Client, tmp_path: Path) -> None:
    """They say what there is, change it, and measure the disk; a key travels in the environment alone."""
    complete(ann, prompt_of(520, seed=6))
    books = service.command("cache", "status")
    assert (books.returncode, MODEL in books.stdout, "on disk: ready" in books.stdout) == (0, True, True), books
    budget = service.command("cache", "budget", MODEL, "64MiB")
    assert (budget.returncode, "now" in budget.stdout) == (0, True), budget
    assert "67.1 MB" in service.command("cache", "status").stdout
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(SYSTEM)
    key_file = tmp_path / "key"
    key_file.write_text(service.keys["ann"])
    key_file.chmod(0o600)
    warmed = service.command("warm", str(prompt), "--model", MODEL, "--pin", "frame", "--key-file", str(key_file))
    assert (warmed.returncode, "pinned as frame" in warmed.stdout) == (0, True), warmed
    pins = service.command("cache", "pins")
    assert (pins.returncode, "frame" in pins.stdout, "ann" in pins.stdout) == (0, True, True), pins
    assert service.command("cache", "unpin", "frame", "--key", "ann").returncode == 0
    purged = service.command("cache", "purge", "--yes", "--key", "ann")
    assert (purged.returncode, purged.stdout.startswith("deleted: ")) == (0, True), purged
    assert complete(ann, prompt_of(520, seed=6)).cached_tokens == 0
    assert service.keys["ann"] not in service.log
