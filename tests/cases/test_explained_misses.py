"""Each reason for which a prefix was computed again, brought about in the running service and told by `explain`."""
# pyright: basic

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.test_cache import block_files, prompt_of
from tests.cases.test_cache_kinds import tokens_of
from tests.fakes.http_answers import COMPLETIONS
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.tiny_llama import make_tiny_llama
from tests.worker.tiny_models import make_tiny_model

LLAMA, HYBRID = "tiny", "hybrid"
BYTES_PER_TOKEN = 3 * 2 * 2 * 32 * 4
"""Of the tiny llama: layers, keys and values, heads, their width, float32."""


@pytest.fixture(scope="module")
def folders(script_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that can be taken up again anywhere, and one with recurrent layers."""
    home = tmp_path_factory.mktemp("models")
    hybrid = make_tiny_model("qwen3_next", home / HYBRID)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (hybrid / file).write_bytes((script_model / file).read_bytes())
    return {LLAMA: make_tiny_llama(script_model, home / LLAMA), HYBRID: hybrid}


@pytest.fixture(scope="module")
def service(folders: dict[str, Path]) -> Iterator[LiveService]:
    with live_service(folders) as live:
        yield live


@pytest.fixture
def client(service: LiveService) -> Iterator[httpx.Client]:
    with service.client() as client:
        yield client


def ask(client: httpx.Client, prompt: list[int], *, model: str = LLAMA, **fields: Any) -> str:
    """The answer's id."""
    answer = client.post(COMPLETIONS, json={"model": model, "prompt": prompt, "max_tokens": 4, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def explained(client: httpx.Client, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """What is said of one more request with this prompt."""
    answer = client.get(f"/v1/requests/{ask(client, prompt, **fields)}/explain")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["reason_text"]
    assert told["tiers"][-1]["to_token"] == told["prompt_tokens"] == len(prompt)
    return told


def set_hot_bytes(service: LiveService, size_bytes: int) -> None:
    """Now, and seen in the model's books: what does not fit was evicted."""
    assert service.command("cache", "budget", LLAMA, str(size_bytes)).returncode == 0
    until("the budget holds", lambda: service.books(LLAMA).hot_cache_budget_bytes == size_bytes)


def test_evicted(service: LiveService, client: httpx.Client) -> None:
    """It was dropped from RAM to make room, and nobody had used it twice, so it was not on disk."""
    prompt = prompt_of(700, seed=1)
    ask(client, prompt)
    set_hot_bytes(service, 0)
    set_hot_bytes(service, 10**9)
    told = explained(client, prompt)
    assert (told["reason"], told["cached_tokens"]) == ("evicted", 0)
    assert told["common_tokens"] == 688
    assert "mlxd cache budget" in told["reason_text"]


def test_below_block(service: LiveService, client: httpx.Client) -> None:
    """There was room for its whole block and not for its tail."""
    set_hot_bytes(service, 0)
    set_hot_bytes(service, 10**9)
    prompt = prompt_of(400, seed=2)
    ask(client, prompt)
    set_hot_bytes(service, 300 * BYTES_PER_TOKEN)
    told = explained(client, prompt)
    set_hot_bytes(service, 10**9)
    assert (told["reason"], told["cached_tokens"]) == ("below_block", 256)
    assert [part["tier"] for part in told["tiers"]] == ["ram", "none"]


def test_scope(client: httpx.Client) -> None:
    """The same messages under another salt."""

    def say(salt: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": "Be kind. " * 40}, {"role": "user", "content": "hello"}]
        body = {"model": LLAMA, "messages": messages, "max_tokens": 2, "cache_salt": salt}
        answer = client.post("/v1/chat/completions", json=body).json()
        return client.get(f"/v1/requests/{answer['id']}/explain").json()

    say("one")
    told = say("other")
    assert (told["reason"], told["cached_tokens"]) == ("scope", 0)
    assert "cache_salt" in told["reason_text"]


def test_hybrid_boundary(client: httpx.Client) -> None:
    """Recurrent state cannot be cut where two prompts part; reuse ends at the last place where it was kept."""
    prompt = tokens_of(600, seed=3)
    ask(client, prompt, model=HYBRID)
    told = explained(client, [*prompt[:500], *tokens_of(50, seed=4)], model=HYBRID)
    assert (told["reason"], told["common_tokens"]) == ("hybrid_boundary", 496)
    assert told["cached_tokens"] < 496
    on_a_boundary = explained(client, [*prompt, 40, 41], model=HYBRID)
    assert (on_a_boundary["reason"], on_a_boundary["cached_tokens"] >= 592) == ("reused", True)


def test_restarted(service: LiveService, client: httpx.Client) -> None:
    """The model's process died, and the prefix was in its memory only."""
    prompt = prompt_of(700, seed=5)
    ask(client, prompt, prompt_cache_retention="in_memory")
    os.kill(service.worker_pid(LLAMA), signal.SIGKILL)
    told = explained(client, prompt)
    assert (told["reason"], told["cached_tokens"]) == ("restarted", 0)


def test_integrity(folders: dict[str, Path]) -> None:
    """A bit of a block on disk is another one than was written."""
    prompt = prompt_of(300, seed=6)
    with live_service({LLAMA: folders[LLAMA]}, settings_toml='cache.persist = "through"') as live:
        with live.client() as client:
            ask(client, prompt)
        until("it is on disk", lambda: block_files(live))
        live.stop()
        for path in block_files(live):
            data = bytearray(path.read_bytes())
            data[-100] ^= 1
            path.write_bytes(data)

        live.start()
        with live.client() as client:
            told = explained(client, prompt)
        assert (told["reason"], told["cached_tokens"]) == ("integrity", 0)


def test_budget(folders: dict[str, Path]) -> None:
    """What the disk may take in a day was spent, so a prefix that was used twice is not there when RAM lets it go."""
    prompt = prompt_of(600, seed=7)
    settings = '[cache]\npersist = "through"\ndaily_write = 1000\n'
    with live_service({LLAMA: folders[LLAMA]}, settings_toml=settings) as live, live.client() as client:
        ask(client, prompt_of(300, seed=8))
        until("the budget is spent", lambda: live.stored_blocks())
        ask(client, prompt)
        until("its blocks were refused", lambda: "reason=write_budget" in live.log)
        set_hot_bytes(live, 0)
        set_hot_bytes(live, 10**9)
        told = explained(client, prompt)
        assert (told["reason"], told["cached_tokens"]) == ("budget", 0)
        assert "daily_write" in told["reason_text"]
        assert live.books(LLAMA).misses["budget"] == 1


def test_disk_slower(folders: dict[str, Path]) -> None:
    """It is on a disk from which it would come later than from the model; both expectations are told."""
    prompt = prompt_of(600, seed=9)
    command = [sys.executable, "-P", "-m", "tests.fakes.weighty_cachestore"]
    settings = f"cachestore_command = {command!r}\n[cache]\npersist = 'through'\n"
    with live_service({LLAMA: folders[LLAMA]}, settings_toml=settings) as live, live.client() as client:
        ask(client, prompt)
        until("it is on disk", lambda: live.stored_blocks() >= 3)
        set_hot_bytes(live, 0)
        set_hot_bytes(live, 10**9)
        told = explained(client, prompt)
        assert (told["reason"], told["cached_tokens"], told["restored_bytes"]) == ("disk_slower", 0, 0)
        assert told["expected_restore_seconds"] > told["expected_compute_seconds"] > 0
