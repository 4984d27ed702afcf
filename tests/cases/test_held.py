"""Field cases B05 and B06 through the clients themselves: a worker that says nothing for long is no reason to hang up.

The clock is scaled: here a client's patience is a second, a keepalive comes every fifth of one, a worker that makes no
step is stuck after three, and it is held for three, or twelve. In the field it is 300 s (Codex) to 600 s (the SDKs),
every ten, a minute, and twenty.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import httpx
import openai
import psutil
import pytest

from tests.cases.conftest import MODEL
from tests.fakes.http_answers import assert_serves
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.script_model import said_by

PATIENCE_SECONDS = 1.0
HELD_SECONDS = 3.0
LONG_HELD_SECONDS = 12.0
"""Four times what makes a worker that runs a stuck one."""

SAID = "SC19"
TEXT = said_by(SAID)

Started = Callable[[], None]
"""To be called at the first piece of text."""

Client = Callable[[LiveService, Started], str]
"""Asks for `SAID`, as a stream, and gives its text. Raises when its patience ends."""


@pytest.fixture(scope="module")
def brisk(script_model: Path) -> Iterator[LiveService]:
    settings = "waiting.keepalive_seconds = 0.2\nwaiting.headers_seconds = 0.4\nworker.hang_seconds = 3\n"
    with live_service({MODEL: script_model}, settings_toml=settings) as live:
        assert_serves(live, MODEL)
        yield live
        assert_serves(live, MODEL)
        assert live.model(MODEL).restarts == 0


def openai_chat(service: LiveService, started: Started) -> str:
    """openai-python: no byte for a second is a timeout."""
    with openai.OpenAI(
        base_url=f"{service.base_url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_SECONDS
    ) as sdk:
        pieces: list[str] = []
        for chunk in sdk.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": SAID}], max_tokens=300, stream=True
        ):
            if text := chunk.choices[0].delta.content:
                started()
                pieces.append(text)
    return "".join(pieces)


def openai_responses(service: LiveService, started: Started) -> str:
    """The same for Responses."""
    with openai.OpenAI(
        base_url=f"{service.base_url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_SECONDS
    ) as sdk:
        pieces: list[str] = []
        for event in sdk.responses.create(model=MODEL, input=SAID, max_output_tokens=300, stream=True):
            if event.type == "response.output_text.delta":
                started()
                pieces.append(event.delta)
    return "".join(pieces)


def anthropic_messages(service: LiveService, started: Started) -> str:
    """anthropic-sdk-python, to which a stream begins with message_start."""
    pieces: list[str] = []
    with (
        anthropic.Anthropic(base_url=service.base_url, api_key="any", max_retries=0, timeout=PATIENCE_SECONDS) as sdk,
        sdk.messages.stream(model=MODEL, messages=[{"role": "user", "content": SAID}], max_tokens=300) as stream,
    ):
        for text in stream.text_stream:
            started()
            pieces.append(text)
        assert stream.get_final_message().stop_reason == "end_turn"
    return "".join(pieces)


def codex(service: LiveService, started: Started) -> str:
    """Codex's rule: only parsed events count, and without one for its patience it hangs up, whatever bytes come."""
    body = {"model": MODEL, "input": SAID, "stream": True, "store": False, "max_output_tokens": 300}
    pieces: list[str] = []
    with service.client() as client, client.stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200, response.read()
        last_event = time.monotonic()
        numbers: list[int] = []
        for line in response.iter_lines():
            if time.monotonic() - last_event > PATIENCE_SECONDS:
                raise httpx.ReadTimeout("idle timeout waiting for SSE")
            if line.startswith("data: "):
                last_event = time.monotonic()
                event = json.loads(line.removeprefix("data: "))
                numbers.append(event["sequence_number"])
                if event["type"] == "response.output_text.delta":
                    started()
                    pieces.append(event["delta"])
                if event["type"] == "response.completed":
                    assert numbers == list(range(len(numbers))), "keepalives are counted like any event"
                    return "".join(pieces)
    raise AssertionError("the stream ended without response.completed")


CLIENTS: tuple[Client, ...] = (openai_chat, openai_responses, anthropic_messages, codex)


def hold(service: LiveService, pid: int, seconds: float = HELD_SECONDS) -> None:
    """The worker's process makes no step for some patiences."""
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)  # it is the time that is tested
    finally:
        os.kill(pid, signal.SIGCONT)


def test_b06_clients_wait_as_long_as_a_worker_is_held(brisk: LiveService) -> None:
    """B05, B06: all four clients have begun to read when the worker is held, and all four ask anew while it is, for far
    longer than makes a process that runs a stuck one; each gets the whole text, and the process is the same."""
    begun = [threading.Event() for _ in CLIENTS]
    pid = brisk.worker_pid(MODEL)
    log_length = len(brisk.log)
    with ThreadPoolExecutor(2 * len(CLIENTS) + 1) as threads:
        answers = [threads.submit(client, brisk, started.set) for client, started in zip(CLIENTS, begun, strict=True)]
        assert all(started.wait(10) for started in begun)
        holding = threads.submit(hold, brisk, pid, LONG_HELD_SECONDS)
        until("it is held", lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        answers += [threads.submit(client, brisk, lambda: None) for client in CLIENTS]
        holding.result(LONG_HELD_SECONDS + 5)
        assert [answer.result(20) for answer in answers] == [TEXT] * len(answers)
    assert brisk.model(MODEL).pid == pid
    until("it is seen to go on", lambda: "worker_continued" in brisk.log[log_length:])
    said = brisk.log[log_length:]
    assert (said.count("worker_suspended"), said.count("worker_continued")) == (1, 1)


def test_b06_clients_wait_for_a_worker_that_has_not_seen_them(brisk: LiveService) -> None:
    """B05, B06: the same before anything came: the status line comes by the gateway's own timer, and keepalives that
    neither SDK takes for an event of the answer."""
    pid = brisk.worker_pid(MODEL)
    with ThreadPoolExecutor(len(CLIENTS) + 1) as threads:
        holding = threads.submit(hold, brisk, pid)
        answers = [threads.submit(client, brisk, lambda: None) for client in CLIENTS]
        assert [answer.result(20) for answer in answers] == [TEXT] * len(CLIENTS)
        holding.result(10)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_b05_what_a_waiting_stream_consists_of(brisk: LiveService, path: str) -> None:
    """B05: comments and whole events, no `id:` line, no empty data; a Messages stream begins with message_start."""
    field = {"input": SAID} if path.endswith("responses") else {"messages": [{"role": "user", "content": SAID}]}
    body = {"model": MODEL, "stream": True, **({} if "input" in field else {"max_tokens": 300}), **field}
    pid = brisk.worker_pid(MODEL)
    with ThreadPoolExecutor(1) as threads, brisk.client() as client:
        holding = threads.submit(hold, brisk, pid)
        with client.stream("POST", path, json=body) as response:
            raw = b"".join(response.iter_raw()).decode()
        holding.result(10)
    blocks = raw.removesuffix("\n\n").split("\n\n")
    kept_alive = 0
    names: list[str] = []
    for block in blocks:
        lines = block.split("\n")
        comments = [line for line in lines if line.startswith(":")]
        if comments:
            assert comments == lines, block
            kept_alive += 1
            continue
        *named, data = lines
        assert data.startswith("data: "), block
        assert len(data) > len("data: {}"), block
        assert all(line.startswith("event: ") for line in named), block
        assert len(named) == (0 if path.endswith("completions") else 1), block
        names += [line.removeprefix("event: ") for line in named]
    waiting = {"ping", "response.queued", "response.in_progress"}
    kept_alive += sum(name in waiting for name in names)
    assert kept_alive >= HELD_SECONDS / 0.2 / 3, raw[:2000]
    if path == "/v1/messages":
        assert names[0] == "message_start"
