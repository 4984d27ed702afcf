"""The command line as scripts use it: real commands against a real service."""

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cases.conftest import MODEL, TAGGED
from tests.fakes.http_answers import assert_serves, body, open_stream
from tests.fakes.live_service import ROOT, START_SECONDS, STOP_SECONDS, LiveService, live_service

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def mlxd(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gateway", *arguments],
        env={**{name: value for name, value in ENVIRONMENT.items() if name != "MLXD_HOME"}, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(process: "subprocess.Popen[str]") -> str:
    """Of its standard output. Kills it when none comes in time."""
    assert process.stdout is not None
    alarm = threading.Timer(START_SECONDS, process.kill)
    alarm.start()
    try:
        return process.stdout.readline()
    finally:
        alarm.cancel()


def test_serve_says_one_line_when_it_serves(runtime_directory: Path, script_model: Path) -> None:
    """`serve --home --model-dir --port`: one line on standard output when requests are accepted, the same URL in
    `status --json`, the files of the home where they are promised, systemd told; SIGTERM ends it with 0."""
    home, models = runtime_directory / "home", runtime_directory / "models"
    (models / "org").mkdir(parents=True)
    (models / "org" / "name").symlink_to(script_model)
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(str(runtime_directory / "notify"))
    notified.settimeout(5)
    log_file = home / "logs" / "mlxd.log"
    command = ["serve", "--home", str(home), "--model-dir", str(models), "--port", "0", "--log-file", str(log_file)]
    process = mlxd(*command, NOTIFY_SOCKET=str(runtime_directory / "notify"))
    try:
        line = first_line(process)
        assert line.startswith("mlxd ready at http://127.0.0.1:"), line
        url = line.removeprefix("mlxd ready at ").strip()
        assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["org/name"]
        assert notified.recv(100) == b"READY=1"

        status, _ = mlxd("status", "--json", "--home", str(home)).communicate(timeout=START_SECONDS)
        report = json.loads(status)
        assert (report["url"], report["pid"]) == (url, process.pid)
        assert [(model["id"], model["state"]) for model in report["models"]] == [("org/name", "absent")]
        assert {"pid", "state", "blocks", "bytes"} <= set(report["cachestore"])

        key, _ = mlxd("keys", "add", "ann", "--home", str(home)).communicate(timeout=START_SECONDS)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        bearer = {"authorization": f"Bearer {key.strip()}"}
        assert httpx.get(f"{url}/v1/models", headers=bearer).status_code == 200
        revoked = mlxd("keys", "revoke", "ann", "--home", str(home))
        revoked.communicate(timeout=START_SECONDS)
        assert revoked.returncode == 0
        assert httpx.get(f"{url}/v1/models").status_code == 200

        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=STOP_SECONDS)
        assert (process.returncode, rest, errors) == (0, "", "")
        assert notified.recv(100) == b"STOPPING=1"
    finally:
        process.kill()
        process.communicate()
        notified.close()
    assert {"keys.toml", "logs", "run", "cache"} <= {path.name for path in home.iterdir()}
    assert "event=serving" in log_file.read_text()
    assert log_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("arguments", [["status", "--json"], ["top", "--once"], ["cache", "status"]])
def test_home_is_taken_by_every_command_that_asks_the_service(
    service: LiveService, arguments: list[str], runtime_directory: Path
) -> None:
    """--home finds the service that MLXD_HOME does not name; without it there is none, in one line."""
    found = mlxd(*arguments, "--home", str(service.home), MLXD_HOME=str(runtime_directory))
    found.communicate(timeout=START_SECONDS)
    assert found.returncode == 0
    lost = mlxd(*arguments, MLXD_HOME=str(runtime_directory))
    _, error = lost.communicate(timeout=START_SECONDS)
    assert (lost.returncode, error.count("\n")) == (1, 1)


# --- load, unload, restart -------------------------------------------------------------------------------------------


def load_at_a_terminal(home: Path, model: str) -> str:
    """What a person sees on standard error while `mlxd load` waits."""
    master, slave = pty.openpty()
    try:
        loading = subprocess.Popen(
            [sys.executable, "-P", "-m", "gateway", "load", model, "--home", str(home)],
            env={**ENVIRONMENT, "TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=slave,
        )
        os.close(slave)
        seen = b""
        with contextlib.suppress(OSError):  # Linux's way to say that nobody holds the other end any more
            while piece := os.read(master, 65536):
                seen += piece
        assert loading.wait(START_SECONDS) == 0, seen
        return seen.decode(errors="replace")
    finally:
        os.close(master)


def test_load_unload_restart(script_model: Path) -> None:
    """Each returns when it is done: `load` with the model ready, `restart` with another process in its place, `unload`
    with no process left. A second `load` or `unload` is as good as one."""
    with live_service({TAGGED: script_model}) as service:
        assert f"load {TAGGED}" in load_at_a_terminal(service.home, TAGGED)
        assert service.model(TAGGED).state == "ready"
        loaded = service.command("load", TAGGED)
        assert (loaded.returncode, service.model(TAGGED).state) == (0, "ready"), loaded.stderr
        first = service.worker_pid(TAGGED)
        assert loaded.stdout.startswith(f"{TAGGED} is ready, process {first}, ")

        restarted = service.command("restart", TAGGED)
        assert restarted.returncode == 0, restarted.stderr
        second = service.worker_pid(TAGGED)
        assert f"process {second}" in restarted.stdout
        assert second != first
        assert not psutil.pid_exists(first)
        assert service.model(TAGGED).restarts == 0  # an order is no crash

        for _ in range(2):
            unloaded = service.command("unload", TAGGED)
            assert (unloaded.returncode, unloaded.stdout) == (0, f"{TAGGED} is unloaded\n"), unloaded.stderr
        assert service.model(TAGGED).state == "absent"
        assert not psutil.pid_exists(second)


def test_unload_lets_open_requests_end(script_model: Path) -> None:
    """E03: a stream in its middle runs to its end; the command waits for it and shows for what."""
    with live_service({MODEL: script_model}) as service, service.client() as client:
        with open_stream(client, body(MODEL, said="SC20", max_tokens=600)) as stream:
            chunks = stream.chunks_from_text()
            next(chunks)
            unloading = mlxd("unload", MODEL, "--home", str(service.home))
            *_, last = chunks
            assert last["choices"][0]["finish_reason"] == "length"
        _, remarks = unloading.communicate(timeout=START_SECONDS)
        assert (unloading.returncode, "draining" in remarks) == (0, True), remarks


def test_a_model_that_cannot_be_loaded(script_model: Path) -> None:
    """One line with the reason and what to do, non-zero: unknown, broken on disk, given up. `restart` ends a given-up
    state once the cause is mended, and leaves a running model alone when its folder could not be loaded again."""
    with live_service({MODEL: script_model}) as service:
        own = service.home / "models" / "own"
        own.mkdir()
        for file in script_model.iterdir():
            (own / file.name).symlink_to(file)
        unknown = service.command("load", "no/such")
        assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
        assert "no model 'no/such'" in unknown.stderr
        assert service.command("unload", "no/such").returncode == 1

        assert service.command("load", "own").returncode == 0
        pid = service.worker_pid("own")
        config = (script_model / "config.json").read_text()
        (own / "config.json").unlink()
        kept = service.command("restart", "own")
        assert (kept.returncode, service.worker_pid("own")) == (1, pid)
        assert kept.stderr.startswith("mlxd: own")

        foreign = {**json.loads(config), "model_type": "no_such_family"}
        (own / "config.json").write_text(json.dumps(foreign))
        assert service.command("unload", "own").returncode == 0
        refused = service.command("load", "own")
        assert refused.returncode == 1
        last = refused.stderr.splitlines()[-1]
        assert "no_such_family" in last
        assert "`mlxd restart own` tries again at once" in last
        assert service.model("own").state == "given_up"
        (own / "config.json").write_text(config)
        assert service.command("restart", "own").returncode == 0
        assert_serves(service, "own")


def test_orders_without_a_service(runtime_directory: Path) -> None:
    """One line that says how to start it."""
    for verb in ("load", "unload", "restart"):
        order = mlxd(verb, MODEL, "--home", str(runtime_directory))
        _, error = order.communicate(timeout=START_SECONDS)
        assert (order.returncode, error.count("\n")) == (1, 1)
        assert "mlxd is not running" in error
