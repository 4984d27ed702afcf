"""Field cases of processes that come and go (E): crashes, stops, second starts, broken folders."""

import concurrent.futures
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.cases.conftest import MODEL
from tests.fakes.http_answers import Answer, ask, ask_whole, assert_serves, body, open_stream
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.ordinary_rights import files_can_be_forbidden
from tests.fakes.script_model import said_by

ENDLESS: dict[str, Any] = {"said": "SC20", "max_tokens": 1_000_000}
SC04 = said_by("SC04")


# --- E01 -------------------------------------------------------------------------------------------------------------


def test_e01_a_crash_takes_nothing_else_down(script_model: Path) -> None:
    """E01: the dead worker's stream gets an error event within two seconds, the other model's stream goes on, one
    process is started in its place, and twenty requests at once are all served by it or told when to come back.
    Then: crash after crash ends in a clear 503, not in a spin, and the other model never notices."""
    with live_service({"a": script_model, "b": script_model}) as service, service.client() as client:
        assert ask(client, body("a", said="SC04")).text == ask(client, body("b", said="SC04")).text == SC04
        with (
            open_stream(client, body("a", **ENDLESS)) as victim,
            open_stream(client, body("b", **ENDLESS)) as other,
        ):
            victims, others = victim.chunks(), other.texts()
            next(victims)
            next(others)
            first = service.model("a")
            assert first.pid is not None
            killed = time.monotonic()
            os.kill(first.pid, signal.SIGKILL)
            *_, last = victims
            assert time.monotonic() - killed < 2.0
            assert last["error"]["code"] == "worker_died"
            assert "choices" not in last
            assert [next(others) for _ in range(20)]

            crowd = _crowd(service, "a", 20)
            assert {answer.status for answer in crowd} <= {200, 429, 503}
            assert all("retry-after" in answer.headers for answer in crowd if answer.status != 200)
            assert [answer for answer in crowd if answer.status == 200 and answer.text != SC04] == []
            assert any(answer.status == 200 for answer in crowd)
            second = service.model("a")
            assert (second.restarts, second.incarnation) != (0, first.incarnation)
            assert second.restarts == 1
            assert second.last_exit is not None
            assert second.last_exit.signal == signal.SIGKILL
            assert [next(others) for _ in range(20)]

        steady = service.worker_pid("b")
        refused = _crash_until_refused(service, client, "a")
        assert refused.status == 503
        assert refused.error is not None
        assert refused.error["code"] == "model_unavailable"
        assert "signal 9" in refused.error["message"]
        assert int(refused.headers["retry-after"]) > 1
        spawned = service.log.count("event=worker_started model=a")
        assert all(ask(client, body("a", said="SC04")).status == 503 for _ in range(5))
        assert service.log.count("event=worker_started model=a") == spawned <= 5
        assert service.worker_pid("b") == steady
        assert_serves(service, "b")


def _crowd(service: LiveService, model: str, count: int) -> list[Answer]:
    def one(_: int) -> Answer:
        with service.client() as client:
            return ask_whole(client, body(model, said="SC04"))

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def _crash_until_refused(service: LiveService, client: httpx.Client, model: str) -> Answer:
    """Kill whatever process the model has, up to five times, asking after each."""
    answer = ask_whole(client, body(model, said="SC04"))
    for _ in range(5):
        if answer.status != 200:
            break
        os.kill(service.worker_pid(model), signal.SIGKILL)
        answer = ask_whole(client, body(model, said="SC04"))
    return answer


def test_e01_a_request_without_output_is_replayed(script_model: Path) -> None:
    """E01: who has got nothing yet waits for the next process and never knows; what began is never replayed."""
    with live_service({MODEL: script_model}) as service, service.client() as client:
        ask(client, body(MODEL, said="SC04"))
        os.kill(service.worker_pid(MODEL), signal.SIGSTOP)  # so that it cannot have answered
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(ask_whole, client, body(MODEL, said="SC04"))
            until("the request is with the worker", lambda: service.model(MODEL).open_requests == 1)
            os.kill(service.worker_pid(MODEL), signal.SIGKILL)
            assert waiting.result(30).text == SC04
        assert service.model(MODEL).restarts == 1


# --- E04 -------------------------------------------------------------------------------------------------------------

DRAIN_SECONDS = 2.0


def test_e04_sigterm_with_work_in_every_state(script_model: Path) -> None:
    """E04: new requests get 503; what runs has the drain's time and then an error event, no finish_reason; what waits
    or loads is told as well; children, sockets and announcement are gone, and the exit code is 0."""
    settings = f"drain_seconds = {DRAIN_SECONDS}\nworker.max_rows = 1\n"
    models = {"a": script_model, "b": script_model}
    with live_service(models, settings_toml=settings) as service, service.client() as client:
        with (
            concurrent.futures.ThreadPoolExecutor(2) as threads,
            open_stream(client, body("a", **ENDLESS)) as running,
            open_stream(client, body("a", said="SC04")) as queued,
        ):
            texts = running.chunks()
            next(texts)
            loading = threads.submit(_ask_alone, service, "b")
            until("b loads", lambda: service.model_or_none("b") is not None)
            assert service.model("b").state == "starting"
            assert service.process is not None
            process = service.process
            children = service.children()
            told = time.monotonic()
            process.send_signal(signal.SIGTERM)
            answer = loading.result(10)
            assert (answer.status, (answer.error or {})["code"]) == (503, "shutting_down")
            late = ask_whole(client, body("a", said="SC04"))
            assert (late.status, (late.error or {})["code"]) == (503, "shutting_down")
            assert "retry-after" in late.headers
            *_, last = texts
            assert last["error"]["code"] == "shutting_down", last
            assert DRAIN_SECONDS * 0.8 < time.monotonic() - told < DRAIN_SECONDS + 3
            *_, last = queued.chunks()
            assert last["error"]["code"] == "shutting_down", last
        assert process.wait(15) == 0
        service.wait_killed()
        assert [child for child in children if child.is_running()] == []
        assert sorted(path.name for path in service.settings_run.iterdir()) == ["gateway.lock"]


def _ask_alone(service: LiveService, model: str) -> Answer:
    with service.client() as client:
        return ask_whole(client, body(model, said="SC04"))


def test_e04_what_can_finish_finishes(script_model: Path) -> None:
    """E04: a request that ends within the drain's time ends as if nothing was."""
    with live_service({MODEL: script_model}) as service, service.client() as client:
        with open_stream(client, body(MODEL, said="SC19")) as stream:
            chunks = stream.chunks_from_text()
            next(chunks)
            assert service.process is not None
            service.process.send_signal(signal.SIGTERM)
            *_, last = chunks
            assert last["choices"][0]["finish_reason"] == "stop"
        assert service.process.wait(15) == 0
        service.wait_killed()


# --- E05 -------------------------------------------------------------------------------------------------------------


def test_e05_a_second_start_says_who_is_there(service: LiveService, script_model: Path) -> None:
    """E05: one line that names the holder, a non-zero exit, at once: for the home and for the port."""
    started = time.monotonic()
    again = service.command("serve", "--port", "0")
    assert again.returncode == 1
    assert again.stderr.count("\n") == 1, again.stderr
    assert f"process {service.pid}" in again.stderr

    port = service.base_url.rpartition(":")[2]
    other = LiveService({MODEL: script_model}, "")
    try:
        taken = other.command("serve", "--port", port)
    finally:
        other.end()
    assert taken.returncode == 1
    lines = [line for line in taken.stderr.splitlines() if line.startswith("mlxd:")]
    assert len(lines) == 1, taken.stderr
    assert f"port {port}" in lines[0]
    assert f"process {service.pid}" in lines[0]
    assert time.monotonic() - started < 15
    assert_serves(service, MODEL)


def test_e05_after_the_gateways_death(script_model: Path) -> None:
    """E05: the children of a killed gateway end themselves; what it left (sockets, lock, announcement) hinders nobody,
    even while they are still ending."""
    with live_service({MODEL: script_model}) as service:
        assert_serves(service, MODEL)
        orphans = service.children()
        assert len(orphans) == 2
        os.kill(service.pid, signal.SIGKILL)
        service.wait_killed()
        assert (service.settings_run / "service.json").exists()
        status = service.command("status")
        assert (status.returncode, status.stderr.count("\n")) == (1, 1)
        assert "ended without a goodbye" in status.stderr

        service.start()
        assert_serves(service, MODEL)
        _, alive = psutil.wait_procs(orphans, timeout=15)
        assert alive == []
        until("the cachestore serves", lambda: _has_books(service), seconds=20)
        assert_serves(service, MODEL)


def _has_books(service: LiveService) -> bool:
    store = service.status().cachestore
    return store is not None and store.books is not None


def test_e05_a_killed_cachestore_is_started_again(script_model: Path) -> None:
    """E05, of the third process: requests go on without it, and it comes back by itself."""
    with live_service({MODEL: script_model}) as service:
        assert_serves(service, MODEL)
        until("the cachestore serves", lambda: _has_books(service))
        store = service.status().cachestore
        assert store is not None
        assert store.pid is not None
        os.kill(store.pid, signal.SIGKILL)
        assert_serves(service, MODEL)
        until("it is back", lambda: _is_another(service, store.pid), seconds=20)
        assert_serves(service, MODEL)


def _is_another(service: LiveService, pid: int | None) -> bool:
    store = service.status().cachestore
    return store is not None and store.state == "ready" and store.pid not in (None, pid)


# --- E06 -------------------------------------------------------------------------------------------------------------


def _copy(model: Path, to: Path, **config: Any) -> Path:
    """The model's files as links, its config with changes."""
    to.mkdir(parents=True)
    for file in model.iterdir():
        (to / file.name).symlink_to(file)
    if config:
        merged = {**json.loads((model / "config.json").read_text()), **config}
        (to / "config.json").unlink()
        (to / "config.json").write_text(json.dumps(merged))
    return to


def _missing_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _cut_weights(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _bad_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").write_text("{")


def _dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "gone.safetensors")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _unreadable(folder: Path) -> None:
    _bad_config(folder)
    (folder / "config.json").chmod(0)


BREAKS = {
    "shard": (_missing_shard, "model-00002-of-00002.safetensors"),
    "config": (_bad_config, "config.json"),
    "dangling": (_dangling, "model.safetensors"),
    "cut": (_cut_weights, "model.safetensors"),
    "weightless": (_no_weights, "safetensors"),
    **({"unreadable": (_unreadable, "config.json")} if files_can_be_forbidden() else {}),
}


@pytest.fixture(scope="module")
def mixed(script_model: Path) -> Iterator[LiveService]:
    """Good, broken, and good-looking models side by side."""
    with live_service({MODEL: script_model}, rights="ordinary") as service:
        folders = service.home / "models"
        for name, (break_it, _) in BREAKS.items():
            break_it(_copy(script_model, folders / name))
        (folders / "empty").mkdir()
        (folders / "nowhere").symlink_to(folders / "gone")
        _copy(script_model, folders / "foreign", model_type="no_such_family")
        _copy(script_model, folders / "shapes", num_hidden_layers=5)
        yield service


@pytest.mark.parametrize("name", BREAKS)
def test_e06_a_broken_folder_is_flagged_and_refused(mixed: LiveService, name: str) -> None:
    """E06: the list says what is wrong, the request is refused with the file's name, and no process is ever started."""
    with mixed.client() as client:
        listed = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
        assert BREAKS[name][1] in listed[name]["mlxd"]["problem"]
        assert listed[MODEL]["mlxd"]["problem"] is None
        answer = ask(client, body(name, said="SC04"))
    assert answer.status == 503
    assert answer.error is not None
    assert BREAKS[name][1] in answer.error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert mixed.model_or_none(name) is None
    assert_serves(mixed, MODEL)


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_e06_no_model_is_no_model(mixed: LiveService, name: str) -> None:
    """E06: an empty folder and a link to nothing are not listed, and asking for them is a plain 404."""
    with mixed.client() as client:
        assert name not in [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert ask(client, body(name, said="SC04")).status == 404
    assert_serves(mixed, MODEL)


@pytest.mark.parametrize(("name", "words"), [("foreign", "no_such_family"), ("shapes", "model.layers")])
def test_e06_what_only_the_load_can_know(mixed: LiveService, name: str, words: str) -> None:
    """E06: a folder that looks right and cannot be loaded is tried once, not in a loop; the answer says why."""
    with mixed.client() as client:
        answer = ask(client, body(name, said="SC04"))
        assert answer.status == 503
        assert answer.error is not None
        assert answer.error["code"] == "model_unavailable"
        assert words in answer.error["message"]
    assert mixed.log.count(f"event=worker_started model={name} ") == 1
    assert_serves(mixed, MODEL)


def test_e06_a_mended_folder_is_served(mixed: LiveService, script_model: Path) -> None:
    """E06: what was mended is served without a restart."""
    config = mixed.home / "models" / "config" / "config.json"
    config.unlink()
    config.symlink_to(script_model / "config.json")
    with mixed.client() as client:
        assert ask(client, body("config", said="SC04")).text == SC04


# --- the SDK in front of it all --------------------------------------------------------------------------------------


def test_the_sdk_raises_on_a_stream_that_breaks(script_model: Path) -> None:
    """B08, E01: a failure in mid-stream raises in openai-python; it is never a silently cut answer."""
    with live_service({MODEL: script_model}) as service:
        with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="any", max_retries=0) as sdk:
            stream = sdk.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "SC20"}], max_tokens=100_000, stream=True
            )
            with pytest.raises(openai.APIError, match="signal 9"):
                for number, _ in enumerate(stream):
                    if number == 3:
                        os.kill(service.worker_pid(MODEL), signal.SIGKILL)
        assert_serves(service, MODEL)


def test_a_port_in_use_by_another_program(script_model: Path) -> None:
    """E05: the line names the process that holds the port, whoever it is."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        service = LiveService({MODEL: script_model}, "")
        try:
            ended = service.command("serve", "--port", str(port))
        finally:
            service.end()
    assert ended.returncode == 1
    assert f"process {os.getpid()}" in ended.stderr
