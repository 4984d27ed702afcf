"""Field cases of waiting (B06) and of limits, with real processes: who waits hears why; a quota outlives a restart."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.conftest import MODEL
from tests.fakes.http_answers import CHAT, Stream, ask_whole, assert_serves, body, open_stream
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.script_model import said_by

ENDLESS: dict[str, Any] = {"said": "SC20", "max_tokens": 1_000_000}


@pytest.fixture(scope="module")
def brisk(script_model: Path) -> Iterator[LiveService]:
    """One row at a time, and the gateway's timers fifty times as fast."""
    settings = "worker.max_rows = 1\nwaiting.keepalive_seconds = 0.2\nwaiting.headers_seconds = 0.6\n"
    with live_service({MODEL: script_model}, settings_toml=settings) as live:
        with live.client() as client:
            assert ask_whole(client, body(MODEL, said="SC04")).status == 200
        yield live
        assert_serves(live, MODEL)


def comments(stream: Stream, *, count: int) -> list[str]:
    """The next comments of a stream."""
    found: list[str] = []
    for line in stream.lines:
        if line.startswith(":"):
            found.append(line)
            if len(found) == count:
                return found
    raise AssertionError(f"the stream ended after {found}")


def test_b06_a_stopped_worker_is_no_silence(brisk: LiveService) -> None:
    """B06: while the worker's process is stopped, keepalives come from the gateway's own timer; then the stream goes
    on where it was."""
    with brisk.client() as client, open_stream(client, body(MODEL, **ENDLESS)) as stream:
        texts = stream.texts()
        next(texts)
        pid = brisk.worker_pid(MODEL)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert len(comments(stream, count=4)) == 4
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [next(texts) for _ in range(3)]
    brisk.until_idle(MODEL)


def test_b06_a_worker_that_is_gone_is_an_error(brisk: LiveService) -> None:
    """B06, E01: stopped, then killed under a stream that has text: keepalives, then an error event and no [DONE]."""
    with brisk.client() as client, open_stream(client, body(MODEL, **ENDLESS)) as stream:
        next(stream.texts())
        pid = brisk.worker_pid(MODEL)
        os.kill(pid, signal.SIGSTOP)
        comments(stream, count=2)
        os.kill(pid, signal.SIGKILL)
        *_, last = stream.events()
    assert json.loads(last)["error"]["code"] == "worker_died"


def test_b06_headers_come_before_a_worker_that_says_nothing(brisk: LiveService) -> None:
    """B06: a worker that is stopped before it has seen the request: headers after the patience, keepalives, and when it
    is killed the request is served by the next process, in the same stream."""
    with brisk.client() as client:
        assert ask_whole(client, body(MODEL, said="SC04")).status == 200
        pid = brisk.worker_pid(MODEL)
        os.kill(pid, signal.SIGSTOP)
        try:
            with open_stream(client, body(MODEL, said="SC04")) as stream:
                comments(stream, count=3)
                os.kill(pid, signal.SIGKILL)
                assert "".join(stream.texts()) == said_by("SC04")
        finally:
            until("another process serves", lambda: brisk.model(MODEL).pid not in (None, pid), seconds=20.0)


def test_a_waiting_request_says_whom_it_waits_for(brisk: LiveService) -> None:
    """Two requests, one row: `/v1/requests` and `mlxd top` show one that runs and one that is queued; then neither."""
    with brisk.client() as first, open_stream(first, body(MODEL, **ENDLESS)) as running:
        next(running.texts())
        with brisk.client() as second:
            waiting = threading.Thread(
                target=_ask_quietly, args=(second, body(MODEL, said="SC04", service_tier="flex"))
            )
            waiting.start()
            # Before that it is queued as well, and then it has a prompt to read.
            until("the second one waits for a row", lambda: [r["held_by"] for r in _requests(brisk)] == ["", "rows"])
            (_, view) = _requests(brisk)
            assert (view["class"], view["key"], view["model"]) == ("batch", "local", MODEL)
            shown = brisk.command("top", "--once").stdout
            assert "decoding" in shown
            assert "queued" in shown
            running.response.close()
            waiting.join(20)
            assert not waiting.is_alive()
    until("nothing is open", lambda: _requests(brisk) == [])


def test_a_quota_outlives_a_restart(script_model: Path) -> None:
    """A key's tokens of the day are refused before any byte once they are used, also by the next start's service; its
    class is clamped; another key is served."""
    with live_service({MODEL: script_model}) as live:
        made = live.command("keys", "add", "ada", "--tokens-per-day", "20", "--highest-class", "batch")
        ada, bob = made.stdout.strip(), live.add_key("bob")
        with live.client(key=ada) as client:
            answer = ask_whole(client, body(MODEL, said="SC19", max_tokens=60, service_tier="priority"))
            assert (answer.status, answer.headers["x-mlxd-class"]) == (200, "batch")
            assert answer.headers["x-ratelimit-limit-tokens"] == "20"
            assert answer.usage is not None
            assert answer.usage["total_tokens"] >= 20
            assert _is_refused(client)
        live.stop()
        assert (live.home / "tokens_today.json").stat().st_mode & 0o777 == 0o600
        live.start()
        with live.client(key=ada) as client:
            assert _is_refused(client)
        with live.client(key=bob) as client:
            assert ask_whole(client, body(MODEL, said="SC04")).status == 200
        finished = next(line for line in live.log.splitlines() if "phase=finished" in line)
        for field in ("queue_seconds=", "prefill_slices=", "held_seconds=", "decode_seconds=", "tokens_per_second="):
            assert field in finished


def _is_refused(client: httpx.Client) -> bool:
    answer = ask_whole(client, body(MODEL, said="SC04"))
    return answer.status == 429 and answer.headers["x-should-retry"] == "false"


def _requests(service: LiveService) -> list[dict[str, Any]]:
    with service.client() as client:
        listed: list[dict[str, Any]] = client.get("/v1/requests").json()["data"]
        return listed


def _phases(service: LiveService) -> list[str]:
    return [view["phase"] for view in _requests(service)]


def _ask_quietly(client: httpx.Client, request: dict[str, Any]) -> None:
    client.post(CHAT, json=request)
