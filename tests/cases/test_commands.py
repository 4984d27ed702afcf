"""The command line as scripts use it: real commands against a real service."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.fakes.live_service import ROOT, START_SECONDS, STOP_SECONDS, LiveService

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
