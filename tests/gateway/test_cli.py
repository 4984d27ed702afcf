"""The command: it does what it says, and every error is one line without a traceback."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import structlog
import uvicorn

from gateway.cli import main
from gateway.config import load_settings, prepare_directories
from gateway.control import (
    ControlError,
    ServiceAddress,
    announce_service,
    fetch_status,
    make_admin_token,
    open_port,
    withdraw_service,
)
from gateway.keys import list_keys, match_key
from gateway.status import LastExit, ModelStatus
from protocol.ids import ModelName
from tests.gateway.http_parts import ADMIN_TOKEN, build_house, make_model

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(runtime_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXD_HOME", str(runtime_directory))
    return runtime_directory


@pytest.fixture
def mlxd(home: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command as the console script does: exit code, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), captured.out, captured.err

    return run


def assert_one_line(error: str, words: str) -> None:
    assert error.startswith("mlxd: ")
    assert error.count("\n") == 1
    assert words in error
    assert "Traceback" not in error


def test_keys_from_birth_to_death(mlxd: Command, home: Path):
    """`keys add` shows the key once, on standard output alone; `list` shows names only; `revoke` warns at the last."""
    code, key, remark = mlxd("keys", "add", "ann")
    assert code == 0
    key = key.strip()
    record = match_key(list_keys(home / "keys.toml"), key)
    assert record is not None
    assert record.name == "ann"
    assert key not in remark
    code, listed, _ = mlxd("keys", "list")
    assert (code, "ann" in listed, key in listed, record.sha256 in listed) == (0, True, False, False)
    code, _, error = mlxd("keys", "add", "ann")
    assert code == 1
    assert_one_line(error, "there is a key named 'ann'")
    code, _, remark = mlxd("keys", "revoke", "ann")
    assert (code, "last key" in remark) == (0, True)
    code, _, error = mlxd("keys", "revoke", "ann")
    assert code == 1
    assert_one_line(error, "no key of that name")


def test_a_keys_classes_and_limits(mlxd: Command, home: Path):
    """`add` and `change` set what is named and leave the rest; `none` takes a limit away; nonsense is one line."""
    assert mlxd("keys", "add", "ann", "--class", "batch", "--max-running", "2", "--max-queued", "0")[0] == 0
    code, shown, _ = mlxd("keys", "change", "ann", "--highest-class", "standard", "--tokens-per-day", "5000")
    assert (code, shown) == (0, "ann: batch, at most standard; 2 running, 0 queued, 5000 tokens a day\n")
    assert "5000 tokens a day" in mlxd("keys", "list")[1]
    code, shown, _ = mlxd("keys", "change", "ann", "--max-queued", "none", "--max-running", "none")
    assert (code, shown) == (0, "ann: batch, at most standard; 5000 tokens a day\n")
    code, shown, _ = mlxd("keys", "change", "ann", "--weight", "0.5")
    assert (code, shown) == (0, "ann: batch, at most standard; 5000 tokens a day, weight 0.5\n")
    for arguments, words in (
        (["--weight", "0"], "weight must be from 0.1 to 100"),
        (["--max-running", "many"], "--max-running: write a whole number"),
        (["--max-running", "0"], "max_running must be at least 1"),
        (["--class", "interactive"], "above highest_class standard"),
    ):
        code, _, error = mlxd("keys", "change", "ann", *arguments)
        assert code == 1
        assert_one_line(error, words)
    assert mlxd("keys", "change", "ann", "--class", "urgent")[0] == 2
    (ann,) = list_keys(home / "keys.toml")
    assert (ann.max_running, ann.max_queued, ann.tokens_per_day) == (None, None, 5000)


def test_models_lists_good_and_broken(mlxd: Command, home: Path):
    """E06: the broken one with its reason; no model at all says where to put one."""
    code, _, remark = mlxd("models")
    assert (code, "put a folder" in remark) == (0, True)
    make_model(home / "models" / "org" / "good[bold]")
    (make_model(home / "models" / "bad") / "model.safetensors").unlink()
    code, listed, _ = mlxd("models")
    assert code == 0
    assert "org/good[bold]" in listed
    assert "no weights" in listed


@pytest.mark.parametrize("command", [["status"], ["models"], ["serve"]])
def test_a_bad_settings_file_is_one_line(mlxd: Command, home: Path, command: list[str]):
    """File, key, what is allowed; exit code 1."""
    (home / "mlxd.toml").write_text("[cache]\nquota = 'lots'\n")
    code, out, error = mlxd(*command)
    assert (code, out) == (1, "")
    assert_one_line(error, "cache.quota: expected a size")
    code, _, error = mlxd(*command, "--config", str(home / "absent.toml"))
    assert code == 1
    assert_one_line(error, "no such file")


def test_bad_usage_has_no_traceback(mlxd: Command):
    """Unknown commands and options, and bad numbers: usage on standard error, code 2."""
    for arguments in (["nonsense"], ["status", "--nonsense"], ["serve", "--port", "x"]):
        code, _, error = mlxd(*arguments)
        assert code == 2
        assert "Traceback" not in error


def test_version(mlxd: Command):
    """`mlxd version` is one line."""
    code, out, _ = mlxd("version")
    assert (code, out.startswith("mlxd "), out.count("\n")) == (0, True, 1)


def test_status_without_a_service(mlxd: Command, home: Path):
    """Not running, ended without a goodbye, or a foreign file: one line that says what to do."""
    code, _, error = mlxd("status")
    assert code == 1
    assert_one_line(error, "mlxd is not running")
    settings = load_settings(None, home=home)
    gone = 2**22 - 3
    while psutil.pid_exists(gone):
        gone -= 1
    announce_service(settings, ServiceAddress(pid=gone, host="127.0.0.1", port=1))
    assert_one_line(mlxd("status")[2], f"it was process {gone}")
    settings.service_path.write_text("{")
    assert_one_line(mlxd("status")[2], "restart mlxd serve")


def test_status_of_a_service_that_does_not_listen(mlxd: Command, home: Path):
    """The process lives and its port is silent, or belongs to somebody else: one line with the port."""
    settings = load_settings(None, home=home)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    announce_service(settings, ServiceAddress(pid=os.getpid(), host="127.0.0.1", port=port))
    assert_one_line(mlxd("status")[2], "no admin token")
    make_admin_token(settings.admin_token_path)
    assert_one_line(mlxd("status")[2], f"port {port}")


def test_the_announcement_is_private_and_taken_back_by_its_owner(home: Path):
    """0600; a service that ends late does not withdraw its successor."""
    settings = load_settings(None, home=home)
    prepare_directories(settings)
    announce_service(settings, ServiceAddress(pid=os.getpid(), host="127.0.0.1", port=1))
    first = make_admin_token(settings.admin_token_path)
    assert first != make_admin_token(settings.admin_token_path)
    for path in (settings.service_path, settings.admin_token_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    withdraw_service(settings, pid=1)
    assert settings.service_path.exists()
    withdraw_service(settings, pid=os.getpid())
    assert not settings.service_path.exists()
    assert not settings.admin_token_path.exists()
    withdraw_service(settings, pid=os.getpid())


@pytest.mark.parametrize("hosts", [{}, {"host": "0.0.0.0", "allowed_hosts": ["studio.local"]}])  # noqa: S104
async def test_status_of_a_running_service(mlxd: Command, home: Path, hosts: dict[str, object]):
    """The table names each model with its state and last exit; --json is the whole answer. Also where only certain
    Host names are served."""
    (home / "mlxd.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in hosts.items()))
    make_model(home / "models" / "org" / "name")
    house = build_house(home, **hosts)
    died = LastExit(reason="killed by signal 9", at_unix=1.0, signal=9)
    house.status.models = [
        ModelStatus(name=ModelName("org/name"), state="ready", since_unix=0.0, pid=4711, restarts=1, last_exit=died)
    ]
    prepare_directories(house.settings)
    house.settings.admin_token_path.write_text(ADMIN_TOKEN)
    house.settings.admin_token_path.chmod(0o600)
    listener = open_port(house.settings.host, 0)
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(house.app, log_config=None, access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        announce_service(house.settings, ServiceAddress(pid=os.getpid(), host=house.settings.host, port=port))
        with structlog.testing.capture_logs():  # it shares its output with the command, and logs after it answered
            assert (await asyncio.to_thread(fetch_status, house.settings)).gateway.pid == os.getpid()
            code, table, _ = await asyncio.to_thread(mlxd, "status")
            assert code == 0
            for words in ("org/name", "ready", "4711", "killed by signal 9", f"process {os.getpid()}"):
                assert words in table
            code, text, _ = await asyncio.to_thread(mlxd, "status", "--json")
        report = json.loads(text)
        name = "studio.local" if hosts else "127.0.0.1"
        assert (report["pid"], report["url"]) == (os.getpid(), f"http://{name}:{port}")
        assert report["models"][0]["process"]["pid"] == 4711
        house.settings.admin_token_path.write_text("another")
        with pytest.raises(ControlError, match="answered 401"):
            await asyncio.to_thread(fetch_status, house.settings)
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 10)


def test_a_taken_port_names_its_holder():
    """E05: one line with port and process id."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ControlError) as caught:
            open_port("127.0.0.1", port)
    message = str(caught.value)
    assert f"port {port}" in message
    assert f"process {os.getpid()}" in message
    assert "\n" not in message


def test_a_port_that_cannot_be_had_says_why():
    """An address that is not this machine's, and one that is no address."""
    with pytest.raises(ControlError, match="has no address"):
        open_port("192.0.2.1", 0)
    with pytest.raises(ControlError, match="choose another with --host"):
        open_port("no such host", 0)


def test_a_port_is_free_again_at_once():
    """A restart does not wait for old connections to time out."""
    first = open_port("127.0.0.1", 0)
    port = first.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        accepted, _ = first.accept()
        accepted.close()
        first.close()
        open_port("127.0.0.1", port).close()
