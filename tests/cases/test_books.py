"""Field cases H: a service that has served much holds no more than before, and no request changes another.

On a random model whose every word depends on the KV it holds.
"""

import concurrent.futures
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from gateway.control import ask_service, read_admin_token
from tests.fakes.dialect_calls import CHAT_DIALECTS, PATHS, request_body
from tests.fakes.http_answers import COMPLETIONS
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.tiny_llama import make_tiny_llama

MODEL = "tiny"
REQUESTS = int(os.environ.get("MLXD_GROWTH_REQUESTS", "24"))
"""Distinct prompts; the field case has three hundred."""

BUDGET_BYTES = 16 * 2**20
"""Far less than what the prompts' KV takes: most of it must have been given back."""

SLACK_BYTES = 2 * 2**20
"""Arrays of a few rows' size that the engine keeps for the next step."""


@pytest.fixture(scope="module")
def tiny(script_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(script_model, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def service(tiny: Path) -> Iterator[LiveService]:
    with live_service({MODEL: tiny}, settings_toml=f"worker.hot_cache = {BUDGET_BYTES}\n") as live:
        yield live


def prompt_of(length: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(33, 93), k=length)


# --- H01 -------------------------------------------------------------------------------------------------------------


def test_h01_nothing_grows(service: LiveService) -> None:
    """H01: after many distinct prompts of some two thousand tokens, a third of them left at random moments, the model
    takes what it took before, and its prefix cache no more than its budget; once that is forgotten, nothing more."""
    with service.client() as client:
        assert _complete(client, prompt_of(64, seed=0)).status_code == 200
    _forget_all(service)
    base = service.books(MODEL)
    assert (base.hot_cache_bytes, base.running_rows) == (0, 0)
    worker = psutil.Process(service.worker_pid(MODEL))
    resident: list[int] = []

    def one(number: int) -> str:
        dice = random.Random(number)
        prompt = prompt_of(dice.randint(1500, 2300), seed=1000 + number)
        patience = dice.uniform(0.0, 1.0) if number % 3 == 0 else None
        if number == REQUESTS // 2:
            resident.append(worker.memory_info().rss)
        with service.client() as own:
            return _ask_and_perhaps_leave(own, prompt, patience, mode=dice.choice(("stream", "whole")))

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(one, range(REQUESTS)))
    assert ends.count("answered") >= REQUESTS // 2, ends
    assert "left" in ends

    service.until_idle(MODEL, seconds=5.0)
    books = service.books(MODEL)
    assert (books.running_rows, books.waiting_requests) == (0, 0)
    assert 0 < books.hot_cache_bytes <= BUDGET_BYTES
    assert books.active_bytes <= base.active_bytes + books.hot_cache_bytes + SLACK_BYTES, (base, books)
    assert worker.memory_info().rss - resident[0] < 64 * 2**20
    assert service.worker_pid(MODEL) == worker.pid

    _forget_all(service)
    after = service.books(MODEL)
    assert (after.hot_cache_bytes, after.hot_cache_blocks) == (0, 0)
    assert after.active_bytes <= base.active_bytes + SLACK_BYTES, (base, after)
    with service.client() as client:
        assert client.get("/v1/requests").json()["data"] == []


def _forget_all(service: LiveService) -> None:
    token = read_admin_token(service.settings)
    body = msgspec.json.encode({"all": True})
    answer = ask_service(service.settings, "POST", "/admin/cache/forget", token=token, body=body)
    assert answer.status == 200, answer.body
    until("the cache is empty", lambda: service.books(MODEL).hot_cache_bytes == 0)


def _complete(client: httpx.Client, prompt: list[int], **fields: Any) -> httpx.Response:
    request = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    return client.post(COMPLETIONS, json=request)


def _ask_and_perhaps_leave(client: httpx.Client, prompt: list[int], patience: float | None, *, mode: str) -> str:
    request = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": mode == "stream"}
    timeout = httpx.Timeout(60.0, read=60.0 if patience is None else max(0.01, patience))
    left_at = None if patience is None else time.monotonic() + patience
    try:
        with client.stream("POST", COMPLETIONS, json=request, timeout=timeout) as response:
            assert response.status_code == 200, response.read()
            for _ in response.iter_raw():
                if left_at is not None and time.monotonic() > left_at:
                    return "left"
    except httpx.ReadTimeout:
        return "left"
    return "answered"


# --- H02 -------------------------------------------------------------------------------------------------------------

PAIR: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y", "z"]}, "b": {"type": "string", "maxLength": 6}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "pair", "parameters": PAIR}}


def mixed_requests() -> list[tuple[str, dict[str, Any]]]:
    """Eight that have nothing in common: how they draw, what bounds them, how long they are, which route they take."""

    def plain(length: int, **fields: Any) -> tuple[str, dict[str, Any]]:
        return COMPLETIONS, {"model": MODEL, "prompt": prompt_of(length, seed=length), "temperature": 0, **fields}

    def chat(said: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        return PATHS["chat"], request_body("chat", MODEL, said, max_tokens=60, temperature=0, **fields)

    return [
        plain(40, max_tokens=50),
        plain(700, max_tokens=12, logprobs=3),
        plain(90, max_tokens=40, temperature=0.9, seed=7, top_p=0.9),
        plain(90, max_tokens=30, temperature=0.9, seed=8),
        plain(300, max_tokens=60, stop=["a", "B"], frequency_penalty=0.8),
        chat("one", response_format={"type": "json_schema", "json_schema": {"name": "pair", "schema": PAIR}}),
        chat("two", tools=[TOOL], tool_choice="required"),
        plain(25, max_tokens=25, logit_bias={"40": 6, "41": -100}, top_k=4, temperature=0.7, seed=9),
    ]


def test_h02_each_says_what_it_says_alone(service: LiveService) -> None:
    """H02: eight at once, joined at different steps beside others that come and leave, three times over: every one gets
    the text, the calls, the logprobs and the usage that it gets alone."""
    with service.client() as client:
        alone = [_essence(client, path, {**request, "cache_salt": "alone"}) for path, request in mixed_requests()]
        assert len({str(answer) for answer in alone}) == len(alone), "two say the same: a mix-up would not be seen"
        over = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(9) as threads:
            disturbing = threads.submit(_come_and_leave, service, over)
            try:
                for turn in range(3):
                    together = [
                        threads.submit(_essence_later, service, 0.03 * (at * 5 % 8), path, request, salt=f"{turn} {at}")
                        for at, (path, request) in enumerate(mixed_requests())
                    ]
                    for at, one in enumerate(together):
                        _assert_same(one.result(60), alone[at], f"turn {turn}, request {at}")
            finally:
                over.set()
            assert disturbing.result(30) > 0


def _come_and_leave(service: LiveService, over: threading.Event) -> int:
    """Rows that join and are cancelled in the midst of it. Gives how many."""
    count = 0
    while not over.is_set():
        dialect = CHAT_DIALECTS[count % len(CHAT_DIALECTS)]
        body = request_body(dialect, MODEL, f"guest {count}", max_tokens=400, temperature=1, stream=True)
        with service.client() as client, client.stream("POST", PATHS[dialect], json=body) as response:
            assert response.status_code == 200, response.read()
            for number, _ in enumerate(response.iter_lines()):
                if number > 12 or over.is_set():
                    break
        count += 1
    return count


def _essence_later(service: LiveService, seconds: float, path: str, request: dict[str, Any], *, salt: str) -> Any:
    time.sleep(seconds)  # so that they join at different steps
    with service.client() as client:
        return _essence(client, path, {**request, "cache_salt": salt})


def _essence(client: httpx.Client, path: str, request: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=request)
    assert response.status_code == 200, response.text
    document = response.json()
    (choice,) = document["choices"]
    message = choice.get("message", {})
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return {
        "text": choice.get("text", message.get("content")),
        "calls": calls,
        "finish": choice["finish_reason"],
        "tokens": (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]),
        "logprobs": choice.get("logprobs"),
    }


def _assert_same(one: dict[str, Any], other: dict[str, Any], which: str) -> None:
    mine, theirs = one.pop("logprobs"), {**other}.pop("logprobs")
    assert one == {name: value for name, value in other.items() if name != "logprobs"}, which
    assert (mine is None) == (theirs is None), which
    if mine is not None and theirs is not None:
        assert mine["tokens"] == theirs["tokens"], which
        # A batch adds in another order than a row alone.
        assert mine["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-3), which
