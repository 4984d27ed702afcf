"""Field cases of the prefix cache that need several models or keys, or a changed model: K03, K04, K07, K09, S04."""
# pyright: basic

import random
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.http_answers import COMPLETIONS, Answer, ask_stream, ask_whole
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.tiny_llama import make_tiny_llama
from tests.worker.tiny_models import make_tiny_model

KINDS = ("gemma3_text", "gpt_oss", "qwen3_next", "lfm2", "mamba2", "deepseek_v3", "llama4", "falcon_h1")
"""A window, a window with sinks, a recurrent hybrid, short convolutions, nothing but state, a latent cache, chunks, and
lists of state beside keys and values."""


@pytest.fixture(scope="module")
def kinds(script_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model of each cache kind, with the script model's tokenizer."""
    folders = {}
    for family in KINDS:
        folder = make_tiny_model(family, tmp_path_factory.mktemp("models") / family)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / file).write_bytes((script_model / file).read_bytes())
        folders[family] = folder
    return folders


def tokens_of(count: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(33, 63), k=count)


def complete(client: httpx.Client, model: str, prompt: list[int], **more: Any) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    answer = ask_whole(client, body, path=COMPLETIONS)
    assert answer.status == 200, answer
    return answer


def test_k03_every_cache_kind_is_reused_and_never_wrong(kinds: dict[str, Path]) -> None:
    """K02, K03: prompts longer than any window, k·256 ± 1, another ending, cold, from RAM, from disk after a kill of
    everything: the same greedy text each time, and what was reused is said."""
    with live_service(kinds) as service:
        texts: dict[tuple[str, int, str], str] = {}
        for family in kinds:
            with service.client() as client:
                for length in (256, 513):
                    prompt = tokens_of(length, seed=length)
                    for name, asked in (("same", prompt), ("other", [*prompt[:-5], 40, 41, 42])):
                        cold = complete(client, family, asked, cache_salt=f"cold {name}")
                        assert cold.cached_tokens == 0
                        texts[family, length, name] = cold.text
                        complete(client, family, asked)
                        again = complete(client, family, asked)
                        assert again.text == cold.text, (family, length, name)
                        assert again.cached_tokens >= (len(asked) - 1) // 16 * 16, (family, length, name)
        durable = until("blocks are stored", lambda: service.stored_blocks(), seconds=20.0)
        assert durable > len(KINDS)
        service.stop()

        service.start()
        for family in kinds:
            with service.client() as client:
                for length in (256, 513):
                    prompt = tokens_of(length, seed=length)
                    for name, asked in (("same", prompt), ("other", [*prompt[:-5], 40, 41, 42])):
                        restored = complete(client, family, asked)
                        assert restored.text == texts[family, length, name], (family, length, name)
                        assert restored.cached_tokens >= (len(asked) - 6) // 16 * 16, (family, length, name)
                reuse = client.get(f"/v1/models/{family}").json()["mlxd"]["prefix_reuse"]
            assert reuse == {"available": True, "reason": ""}


def test_k03_a_kind_of_cache_that_nobody_knows(script_model: Path, tmp_path: Path) -> None:
    """K03: it is not reused, which is said once in the log and in the model's description; its answers are those of
    the model that keeps the same in a known one, and each is explained."""
    folder = make_tiny_llama(script_model, tmp_path / "a")
    command = [sys.executable, "-P", "-m", "tests.fakes.novel_cache_worker"]
    prompt = tokens_of(600, seed=5)
    with live_service({"tiny": folder}) as service, service.client() as client:
        known = complete(client, "tiny", prompt)
    with live_service({"tiny": folder}, settings_toml=f"worker_command = {command!r}") as service:
        with service.client() as client:
            for _ in range(3):
                answer = complete(client, "tiny", prompt)
                assert (answer.text, answer.cached_tokens) == (known.text, 0)
            last = client.post(COMPLETIONS, json={"model": "tiny", "prompt": prompt, "max_tokens": 1}).json()["id"]
            assert client.get(f"/v1/requests/{last}/explain").json()["reason"] == "off"
            reuse = client.get("/v1/models/tiny").json()["mlxd"]["prefix_reuse"]
        assert reuse["available"] is False
        assert "SpiralKVCache" in reuse["reason"]
        said = [line for line in service.log.splitlines() if "prefix_reuse_off" in line]
        assert len(said) == 1
        assert "SpiralKVCache" in said[0]
        assert service.stored_blocks() == 0


def test_k04_other_weights_under_one_name(script_model: Path, tmp_path: Path) -> None:
    """K04: the name is not identity; nothing of the old weights' cache is used, nothing crashes."""
    folder = make_tiny_llama(script_model, tmp_path / "a", seed=1)
    other = make_tiny_llama(script_model, tmp_path / "b", seed=2)
    prompt = tokens_of(600, seed=1)
    with live_service({"tiny": folder}) as service:
        with service.client() as client:
            before = complete(client, "tiny", prompt)
            assert complete(client, "tiny", prompt).cached_tokens == 599
        service.stop()
        (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())

        service.start()
        with service.client() as client:
            after = complete(client, "tiny", prompt)
            assert after.cached_tokens == 0
            assert after.text != before.text
            assert complete(client, "tiny", prompt, cache_salt="cold").text == after.text
            assert complete(client, "tiny", prompt).cached_tokens == 599


def test_k07_the_quota_holds_over_two_models(script_model: Path, tmp_path: Path) -> None:
    """K07: every file counts, the oldest go first wherever they came from, and serving goes on."""
    folders = {name: make_tiny_llama(script_model, tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    quota = 6_000_000
    settings = f'[cache]\nquota = {quota}\nfree_floor = 0\npersist = "through"\n'
    with live_service(folders, settings_toml=settings) as service, service.client() as client:
        for turn in range(8):
            for name in folders:
                complete(client, name, tokens_of(700, seed=turn))
                assert directory_bytes(service) <= quota
        until("something was evicted", lambda: books(service).evicted > 0)
        assert directory_bytes(service) <= quota


def directory_bytes(service: LiveService) -> int:
    total = 0
    for path in Path(service.settings.cache.directory).rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def books(service: LiveService) -> Any:
    store = service.status().cachestore
    assert store is not None and store.books is not None
    return store.books


def test_k09_the_numbers_are_what_was_skipped(script_model: Path, tmp_path: Path) -> None:
    """K09: `prompt_tokens` is the total, `cached_tokens` a part of it, the same in both modes."""
    folder = make_tiny_llama(script_model, tmp_path / "a")
    prompt = tokens_of(400, seed=3)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    with live_service({"tiny": folder}) as service, service.client() as client:
        seen = [ask_whole(client, body, path=COMPLETIONS), ask_whole(client, body, path=COMPLETIONS)]
        seen.append(ask_stream(client, {**body, "stream_options": {"include_usage": True}}, path=COMPLETIONS))
    assert [(answer.prompt_tokens, answer.cached_tokens) for answer in seen] == [(400, 0), (400, 399), (400, 399)]


def test_s04_no_key_sees_anothers_prefix(script_model: Path, tmp_path: Path) -> None:
    """S04: neither in RAM nor on disk, nor after a restart; the same key's hit does occur; a salt only narrows."""
    folder = make_tiny_llama(script_model, tmp_path / "a")
    prompt = tokens_of(600, seed=4)
    with live_service({"tiny": folder}) as service:
        ada, bob = service.add_key("ada"), service.add_key("bob")
        for start in ("first", "restarted"):
            with service.client(key=ada) as of_ada, service.client(key=bob) as of_bob:
                complete(of_ada, "tiny", prompt)
                assert complete(of_ada, "tiny", prompt).cached_tokens >= 592
                salted = complete(of_ada, "tiny", prompt, cache_salt="mine")
                assert (salted.cached_tokens >= 592) == (start == "restarted")
                first_of_bob = complete(of_bob, "tiny", prompt, cache_salt=start)
                assert first_of_bob.cached_tokens == 0
            service.stop()
            if start == "first":
                service.start()
