"""Field case E07: the machine sleeps, and wakes. Here every process of the service is stopped and continued."""

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.http_answers import Stream, ask_whole, assert_serves, body, open_stream
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.script_model import make_script_model, said_by

SLEEP_SECONDS = float(os.environ.get("MLXD_SLEEP_SECONDS", "8"))
"""Far longer than every limit below; the field case has sixty seconds."""

FIRST_AWAKE = ("gateway", "children") if "MLXD_SLEEP_SECONDS" in os.environ else ("gateway",)
"""Whoever is late has missed what the other one asked meanwhile; for the suite one order must do."""

UNLOAD_SECONDS = 4.0
SETTINGS = f"""\
[worker]
max_rows = 1
hang_seconds = 3
[memory]
unload_after_seconds = {UNLOAD_SECONDS}
[waiting]
keepalive_seconds = 0.5
headers_seconds = 1
"""
ENDLESS: dict[str, Any] = {"said": "SC20", "max_tokens": 1_000_000}


@pytest.fixture(scope="module")
def patient_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So much context that its endless answer does not end within the test."""
    return make_script_model(tmp_path_factory.mktemp("models") / "patient", context_tokens=200_000)


@contextlib.contextmanager
def asleep(service: LiveService, *, wakes_first: str) -> Generator[None]:
    """All of the service is stopped while the block runs."""
    everything = [psutil.Process(service.pid), *service.children()]
    for process in everything:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in everything if wakes_first == "gateway" else reversed(everything):
            process.send_signal(signal.SIGCONT)
            time.sleep(0.2)  # so that the one is really first


@pytest.mark.parametrize("wakes_first", FIRST_AWAKE)
def test_e07_a_sleep_is_no_hang_and_no_rest(script_model: Path, patient_model: Path, wakes_first: str) -> None:
    """E07: after a sleep longer than every limit a stream goes on where it was, the queue is served, no process is
    restarted for a heartbeat that it missed, and a model that rested leaves only when it has rested awake."""
    with (
        live_service({"busy": patient_model, "idle": script_model}, settings_toml=SETTINGS) as service,
        service.client() as client,
        concurrent.futures.ThreadPoolExecutor(2) as threads,
        contextlib.ExitStack() as open_streams,
    ):
        stream: Stream = open_streams.enter_context(open_stream(client, body("busy", **ENDLESS)))
        texts = stream.texts()
        next(texts)
        queued = threads.submit(_ask, service, "busy")
        until("one is queued", lambda: service.model("busy").open_requests == 2)
        assert _ask(service, "idle").text == said_by("SC04")
        before = {name: service.worker_pid(name) for name in ("busy", "idle")}
        store = service.status().cachestore
        assert store is not None

        with asleep(service, wakes_first=wakes_first):
            time.sleep(SLEEP_SECONDS)  # the sleep itself

        woke = time.monotonic()
        assert [next(texts) for _ in range(20)]
        assert service.worker_pid("idle") == before["idle"]
        assert service.model("idle").state == "ready", "it was unloaded for a time in which nobody was awake"
        open_streams.close()
        assert queued.result(20).text == said_by("SC04")
        until("the idle one has rested", lambda: service.model("idle").state == "absent", seconds=UNLOAD_SECONDS + 5)
        assert time.monotonic() - woke > UNLOAD_SECONDS / 4

        # What follows a missed heartbeat would have followed by now.
        assert service.model("busy").pid == before["busy"]
        assert [service.model(name).restarts for name in before] == [0, 0]
        after = service.status().cachestore
        assert after is not None
        assert (after.pid, after.restarts) == (store.pid, store.restarts)
        assert "worker_stuck" not in service.log
        assert "cachestore_silent" not in service.log
        assert_serves(service, "idle")


def test_e07_a_client_that_left_in_the_sleep_is_noticed(patient_model: Path) -> None:
    """E07: whoever hung up while the service slept holds no row when it is awake again."""
    with live_service({"busy": patient_model}, settings_toml=SETTINGS) as service:
        with service.client() as client, open_stream(client, body("busy", **ENDLESS)) as stream:
            next(stream.texts())
            with asleep(service, wakes_first="gateway"):
                stream.response.close()
                time.sleep(0.5)  # so that the closed connection is there before it wakes
        service.until_idle("busy", seconds=2.5)
        assert_serves(service, "busy")
        assert service.model("busy").restarts == 0


def _ask(service: LiveService, model: str) -> Any:
    with service.client() as client:
        return ask_whole(client, body(model, said="SC04"))
