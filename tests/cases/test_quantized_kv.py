"""Quantized keys and values behind the real service: K03 and K04 for them, and a real model."""
# pyright: basic

import os
from pathlib import Path

import pytest

from gateway.blas import worker_environment
from tests.cases.test_cache_kinds import complete, tokens_of
from tests.fakes.http_answers import CHAT, Answer, ask_whole, user
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.reference_generation import reference_texts
from tests.worker.tiny_models import QUANTIZED, make_tiny_model

KINDS = {"plain": "llama kv8", "window": "gemma3_text kv8", "hybrid": "lfm2 kv4", "sinks": "gpt_oss kv8"}
SETTINGS = """
[models]
plain = {kv_bits = 8, kv_group_size = 32}
window = {kv_bits = 8}
hybrid = {kv_bits = 4}
sinks = {kv_bits = 8}
narrow = {kv_bits = 8}
"""


@pytest.fixture(scope="module")
def kinds(script_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with heads of 32 numbers, and one of 8, and the script model's tokenizer."""
    families = {**{name: QUANTIZED[kind][0] for name, kind in KINDS.items()}, "narrow": "llama"}
    folders = {}
    for name, family in families.items():
        heads = "narrow" if name == "narrow" else "wide"
        folders[name] = make_tiny_model(family, tmp_path_factory.mktemp("models") / name, heads=heads)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folders[name] / file).write_bytes((script_model / file).read_bytes())
    return folders


def test_k03_quantized_prefixes_are_reused_and_never_wrong(kinds: dict[str, Path]) -> None:
    """K02, K03: cold, from RAM, and from disk after a kill of everything the same greedy text, at k·256 ± 1 and beyond
    a window; what came of the setting is said, and where nothing could, why, once in the log."""
    prompts = {length: tokens_of(length, seed=length) for length in (255, 257, 513)}
    texts = {}
    with live_service(kinds, settings_toml=SETTINGS) as service:
        for name in kinds:
            with service.client() as client:
                for length, prompt in prompts.items():
                    texts[name, length] = complete(client, name, prompt, cache_salt="cold").text
                    complete(client, name, prompt)
                    again = complete(client, name, prompt)
                    assert again.text == texts[name, length], (name, length)
                    assert again.cached_tokens >= (length - 1) // 16 * 16, (name, length)
                kv = client.get(f"/v1/models/{name}").json()["mlxd"]["kv"]
            if name == "narrow":
                assert (kv["bits"], kv["reading"]) == (None, None)
                assert "heads of 8 numbers" in kv["reason"]
            else:
                reading = "dequantized" if name == "sinks" else "quantized"
                assert (kv["bits"], kv["group_size"], kv["reading"]) == (QUANTIZED[KINDS[name]][1], 32, reading)
                assert ("sinks" in kv["reason"]) == bool(kv["reason"]) == (name == "sinks")
        for said in ("kv_not_quantized", "kv_is_dequantized_in_steps"):
            assert sum(said in line for line in service.log.splitlines()) == 1
        until("blocks are stored", lambda: service.stored_blocks() > len(kinds), seconds=20.0)
        service.stop()

        service.start()
        for name in kinds:
            with service.client() as client:
                for length, prompt in prompts.items():
                    restored = complete(client, name, prompt)
                    assert restored.text == texts[name, length], (name, length)
                    assert restored.cached_tokens >= (length - 1) // 16 * 16, (name, length)


def test_k04_other_bits_are_other_blocks(kinds: dict[str, Path]) -> None:
    """K04: blocks of another setting are a miss and no harm; those of this one are found when it comes back."""
    prompt = tokens_of(600, seed=1)

    def ask_twice(service: LiveService, bits: str) -> tuple[Answer, Answer]:
        (service.home / "mlxd.toml").write_text(f"[worker]\nkv_bits = {bits}\n", encoding="utf-8")
        service.start()
        with service.client() as client:
            answers = complete(client, "plain", prompt), complete(client, "plain", prompt)
        until("blocks are stored", lambda: service.stored_blocks() > 0, seconds=20.0)
        service.stop()
        return answers

    with live_service({"plain": kinds["plain"]}) as service:
        service.stop()
        seen = {bits: ask_twice(service, bits) for bits in ('"off"', "8", "4")}
        for cold, again in seen.values():
            assert (cold.cached_tokens, again.cached_tokens) == (0, 599)
            assert again.text == cold.text
        back, _ = ask_twice(service, "8")
        assert back.cached_tokens >= 592
        assert back.text == seen["8"][0].text


def test_a_real_model_says_what_mlx_lm_says_with_quantized_caches(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2 at 8 bits: the text of mlx-lm's own quantized generation, which knows one row only; ours in a batch and
    after a restart too. Each token takes a good quarter of what it takes in float32."""
    environment = worker_environment({**os.environ, "HF_HUB_OFFLINE": "1"}, tmp_path / "blas").environment
    questions = ["Name three colours.", "What do bees make?"]
    expected = reference_texts(smollm2, [(user(question), 10) for question in questions], environment, kv_bits=8)
    settings = '[models]\nsmollm2 = {kv_bits = 8}\n[cache]\npersist = "through"\n'
    with live_service({"smollm2": smollm2}, settings_toml=settings) as service:
        for _ in ("first", "restarted"):
            with service.client() as client:
                for question, text in zip(questions, expected, strict=True):
                    body = {"model": "smollm2", "messages": user(question), "max_tokens": 10, "temperature": 0}
                    assert ask_whole(client, body, path=CHAT).text == text
                kv = client.get("/v1/models/smollm2").json()["mlxd"]["kv"]
            assert (kv["bits"], kv["group_size"], kv["reading"], kv["reason"]) == (8, 64, "quantized", "")
            assert kv["bytes_per_token"] == 30 * 3 * 2 * (64 + 2 * 4)
            service.stop()
            service.start()
