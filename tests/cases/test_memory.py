"""Field cases of memory (E02, E03): loads that race for it, models that leave it, and those that never fit."""

import concurrent.futures
import json
import random
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.http_answers import COMPLETIONS, ask, ask_whole, body, open_stream
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.script_model import said_by
from tests.fakes.tiny_llama import make_tiny_llama

SC04 = said_by("SC04")
ENDLESS: dict[str, Any] = {"said": "SC20", "max_tokens": 1_000_000}
ONE_FITS = '[worker]\nhot_cache = "32MiB"\n[memory]\nworking = "16MiB"\nlimit = "100MiB"\n'


def test_e02_two_loads_never_hold_the_same_memory(script_model: Path) -> None:
    """E02: with room for one model, first requests for two are all answered, one model after the other: a load is
    reserved before it starts, and whoever lost waits until the winner has nothing to do."""
    with (
        live_service({"a": script_model, "b": script_model}, settings_toml=ONE_FITS) as service,
        service.client() as client,
        concurrent.futures.ThreadPoolExecutor(10) as crowd,
    ):
        asked = [crowd.submit(ask_whole, client, body("ab"[at % 2], said="SC04")) for at in range(10)]
        most = 0
        while not all(one.done() for one in asked):
            alive = [model for model in service.status().models if model.process and model.process.pid]
            most = max(most, len(alive))
        assert [(one.result().status, one.result().text) for one in asked] == [(200, SC04)] * 10
        assert most == 1
        assert {model.process.restarts for model in service.status().models if model.process} == {0}


def test_e02_a_serving_model_is_not_disturbed(script_model: Path) -> None:
    """E02: while one model streams, a request for another waits, and the status says for what; the stream goes on. As
    soon as it ends, the other is loaded."""
    with (
        live_service({"a": script_model, "b": script_model}, settings_toml=ONE_FITS) as service,
        service.client() as client,
        concurrent.futures.ThreadPoolExecutor(1) as other,
    ):
        with open_stream(client, body("a", **ENDLESS)) as stream:
            texts = stream.texts()
            next(texts)
            waiting = other.submit(ask_whole, client, body("b", said="SC04"))
            until("b waits", lambda: (status := service.model_or_none("b")) and status.state == "waiting_for_memory")
            assert len([next(texts) for _ in range(50)]) == 50
            assert not waiting.done()
            plan = service.command("plan", "--json")
            assert plan.returncode == 0, plan.stderr
            models = {model["id"]: model for model in json.loads(plan.stdout)["models"]}
            assert (models["a"]["verdict"], models["a"]["idle_seconds"]) == ("has_memory", None)
            assert (models["b"]["verdict"], models["b"]["after"]) == ("fits_after", ["a"])
            assert "fits when a has left" in " ".join(service.command("plan").stdout.split())
            assert service.model("a").state == "ready"
        assert waiting.result(timeout=30).text == SC04
        assert service.model("a").state == "absent"


def test_what_never_fits_is_refused_at_once(script_model: Path) -> None:
    """A model over the machine's limit is a 400 that says how much it needs, in both modes; others are served."""
    settings = ONE_FITS.replace("100MiB", "40MiB")
    with live_service({"a": script_model}, settings_toml=settings) as service, service.client() as client:
        for stream in (False, True):
            answer = ask_whole(client, body("a", said="SC04", stream=stream))
            assert answer.status == 400
            assert answer.error is not None
            assert answer.error["param"] == "model"
            assert "never fits" in answer.error["message"]


def test_e03_an_idle_model_leaves_and_a_busy_one_does_not(script_model: Path) -> None:
    """E03: the time without work counts from the end of the last request, so a long stream is never cut; the next
    request loads the model again, and none of it is a crash."""
    settings = "[memory]\nunload_after_seconds = 0.5\n"
    with live_service({"a": script_model}, settings_toml=settings) as service, service.client() as client:
        with open_stream(client, body("a", **ENDLESS)) as stream:
            texts = stream.texts()
            for _ in range(300):  # seconds of work, many times the limit
                next(texts)
            assert service.model("a").state == "ready"
        until("the idle model left", lambda: service.model("a").state == "absent")
        assert ask(client, body("a", said="SC04")).text == SC04
        assert service.model("a").restarts == 0


def test_e03_an_unload_under_an_endless_stream(script_model: Path) -> None:
    """E03: the stream has the drain's time and then an error event that says what happened, no silence and no [DONE];
    two who unload at once both hear that it is done; who asks meanwhile is served by the process that follows; and
    nothing of it is a crash."""
    settings = "drain_seconds = 1.0\n"
    with (
        live_service({"a": script_model}, settings_toml=settings) as service,
        service.client() as client,
        concurrent.futures.ThreadPoolExecutor(3) as threads,
    ):
        with open_stream(client, body("a", **ENDLESS)) as stream:
            chunks = stream.chunks_from_text()
            next(chunks)
            first = service.model("a")
            unloads = [threads.submit(service.command, "unload", "a") for _ in range(2)]
            until("it drains", lambda: service.model("a").state == "draining")
            arrives = threads.submit(_ask_alone, service)
            *_, last = chunks
        assert last["error"]["code"] == "model_unavailable", last
        assert "unloaded" in last["error"]["message"]
        assert arrives.result(30) == (200, SC04)
        assert [unload.result(30).returncode for unload in unloads] == [0, 0]
        after = service.model("a")
        assert (after.restarts, after.incarnation != first.incarnation) == (0, True)


def _ask_alone(service: LiveService) -> tuple[int, str]:
    with service.client() as client:
        answer = ask_whole(client, body("a", said="SC04"))
        return answer.status, answer.text


# --- live KV ---------------------------------------------------------------------------------------------------------


def test_eight_long_requests_of_two_classes_share_little_memory(script_model: Path, tmp_path: Path) -> None:
    """With room for the KV of three, four batch requests run when four interactive ones come: all eight finish with the
    text that each has alone; batch ones gave way, and somebody was told that he waits for memory; at no time is more
    taken than allowed, and nothing at the end."""
    tiny = make_tiny_llama(script_model, tmp_path / "tiny")
    prompts = [random.Random(seed).choices(range(33, 93), k=600) for seed in range(8)]

    def asked(seed: int, tier: str) -> dict[str, Any]:
        return {"model": "tiny", "prompt": prompts[seed], "max_tokens": 200, "temperature": 0, "service_tier": tier}

    def ask_one(client: httpx.Client, seed: int, tier: str) -> str:
        answer = client.post(COMPLETIONS, json=asked(seed, tier), headers={"x-mlxd-details": "1"}).json()
        usage = answer["usage"]
        assert (usage["completion_tokens"], usage["prompt_tokens"]) == (200, 600), answer
        held_for.update(answer["mlxd"]["timings"]["held"])
        return str(answer["choices"][0]["text"])

    held_for: set[str] = set()
    row_bytes = (600 + 200 + 256) * 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their width, float32
    with (
        live_service({"tiny": tiny}, settings_toml=f"[worker]\nlive_kv = {3 * row_bytes}\n") as service,
        service.client() as client,
        concurrent.futures.ThreadPoolExecutor(8) as crowd,
    ):
        assert ask_whole(client, body("tiny", said="SC04", max_tokens=1)).status == 200
        batch = [crowd.submit(ask_one, client, seed, "flex") for seed in range(4)]
        until("batch rows decode", lambda: service.books("tiny").live_kv_bytes > row_bytes)
        interactive = [crowd.submit(ask_one, client, seed, "priority") for seed in range(4, 8)]
        most_bytes = 0
        while not all(one.done() for one in (*batch, *interactive)):
            books = service.books("tiny")
            most_bytes = max(most_bytes, books.live_kv_bytes)
        texts = [one.result() for one in (*batch, *interactive)]
        books = service.books("tiny")
        assert books.live_kv_budget_bytes == 3 * row_bytes
        assert row_bytes < most_bytes <= 3 * row_bytes
        assert books.live_kv_bytes == 0
        assert books.preemptions > 0
        assert "memory" in held_for
        assert texts == [ask_one(client, seed, "default") for seed in range(8)]
        assert service.books("tiny").preemptions == books.preemptions


def test_a_prompt_that_never_fits_is_refused(script_model: Path) -> None:
    """One that memory for live KV can never hold is a 400 with the numbers, and says whom to ask; a shorter one is
    answered, as long as there is room; and the plan counts this memory as a part of its own."""
    with live_service({"a": script_model}, settings_toml='[worker]\nlive_kv = "12MiB"\n') as service:
        with service.client() as client:
            refused = ask_whole(client, body("a", said="word " * 300))
            assert refused.status == 400
            assert refused.error is not None
            assert refused.error["code"] == "context_length_exceeded"
            assert "there is memory for" in refused.error["message"]
            assert "live_kv" in refused.error["message"]
            cut = ask_whole(client, body("a", said="SC20", max_tokens=1_000_000))
            assert (cut.status, cut.finish) == (200, "length")
            assert 0 < cut.completion_tokens < 1500
        plan = json.loads(service.command("plan", "--json").stdout)["models"][0]
        assert plan["live_kv_bytes"] == 12 * 2**20
        parts = ("weight_bytes", "hot_cache_bytes", "live_kv_bytes", "working_bytes")
        assert plan["need_bytes"] == sum(plan[part] for part in parts)
