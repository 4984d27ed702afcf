"""`mlxd service` as its users run it, with a stand-in for launchctl that starts what it is told to start."""

import json
import os
import plistlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.live_service import ROOT

HERE = Path(__file__).parent
TARGET = f"user/{os.getuid()}/studio.mlxd"


class Desk:
    """A user's directory, mlxd's home in it, and a launchctl on the path that keeps its state beside them."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.state.mkdir()
        self.home = directory / "mlxd"
        self.user = directory / "user"
        self.user.mkdir()
        programs = directory / "bin"
        programs.mkdir()
        stand_in = HERE.parent / "fakes" / "stand_in_launchctl.py"
        (programs / "launchctl").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{stand_in}" "$@"\n')
        (programs / "launchctl").chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.user),
            "STAND_IN_LAUNCHCTL": str(self.state),
            "MLXD_KEY": "the-installers-own-secret",
            "COLUMNS": "200",
        }

    def service(self, verb: str, *options: str, manager: str = "launchd") -> subprocess.CompletedProcess[str]:
        command = ["service", verb, "--home", str(self.home), "--manager", manager, *options]
        return self.mlxd(*command)

    def mlxd(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "gateway", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )

    @property
    def calls(self) -> list[str]:
        calls = (self.state / "calls").read_text().splitlines() if (self.state / "calls").exists() else []
        return [call for call in calls if not call.startswith("print")]

    @property
    def file(self) -> Path:
        return self.user / "Library" / "LaunchAgents" / "studio.mlxd.plist"

    def pid(self) -> int:
        return int((self.state / "pid").read_text())

    def end(self) -> None:
        """Whatever the test left."""
        if (self.state / "pid").exists() and psutil.pid_exists(self.pid()):
            process = psutil.Process(self.pid())
            if "gateway" in process.cmdline():
                process.send_signal(signal.SIGKILL)
                process.wait(10)


@pytest.fixture
def desk(runtime_directory: Path) -> Iterator[Desk]:
    made = Desk(runtime_directory)
    yield made
    made.end()


def test_install_status_upgrade_uninstall(desk: Desk) -> None:
    """The whole life: installed it serves, and says what to do next; status agrees with launchd and with the service;
    installed again it drained first and is another process; uninstalled nothing is left but its home."""
    (desk.state / "busy").write_text("1")
    desk.home.mkdir(mode=0o700)
    (desk.home / "mlxd.toml").write_text("port = 0\n")
    installed = desk.service("install")
    assert installed.returncode == 0, installed.stderr
    assert desk.calls == [f"enable {TARGET}", *[f"bootstrap user/{os.getuid()} {desk.file}"] * 2]
    assert "mlxd ready at http://127.0.0.1:" in installed.stdout
    for words in ("mlxd keys add NAME", str(desk.home / "logs" / "mlxd.log"), "mlxd service uninstall"):
        assert words in installed.stdout
    assert "installers-own-secret" not in desk.file.read_text()
    assert plistlib.loads(desk.file.read_bytes())["ExitTimeOut"] >= 120

    told = desk.service("status", "--json")
    assert told.returncode == 0, told.stdout
    report = json.loads(told.stdout)
    first = desk.pid()
    assert (report["pid"], report["service"]["domain"]) == (first, TARGET.rpartition("/")[0])
    assert httpx.get(f"{report['url']}/health").status_code == 200
    assert "event=serving" in (desk.home / "logs" / "mlxd.log").read_text()
    assert (desk.home / "logs" / "launchd.out.log").read_text() == f"mlxd ready at {report['url']}\n"
    assert (desk.home / "logs" / "launchd.out.log").stat().st_mode & 0o077 == 0

    again = desk.service("install")
    assert again.returncode == 0, again.stderr
    assert desk.calls[3:] == [
        f"kill SIGTERM {TARGET}",
        f"bootout {TARGET}",
        f"enable {TARGET}",
        f"bootstrap user/{os.getuid()} {desk.file}",
    ]
    assert desk.pid() != first
    assert not psutil.pid_exists(first)
    assert "event=stopped" in (desk.home / "logs" / "mlxd.log").read_text()

    removed = desk.service("uninstall")
    assert (removed.returncode, "the service is removed" in removed.stdout) == (0, True), removed.stderr
    assert not psutil.pid_exists(desk.pid())
    assert not desk.file.exists()
    assert desk.home.is_dir()
    assert desk.service("status").returncode == 3
    nothing = desk.service("uninstall")
    assert (nothing.returncode, "no service was installed" in nothing.stdout) == (0, True)


def test_a_service_that_does_not_come_up_is_told(desk: Desk) -> None:
    """A bad settings file: the command says in one line where to look, and ends with 1."""
    installed = desk.service("install", "--config", str(desk.user / "none.toml"))
    assert (installed.returncode, installed.stderr.count("\n")) == (1, 1)
    assert "no such file" in installed.stderr
    assert desk.calls == []
    desk.home.mkdir()
    (desk.home / "mlxd.toml").write_text('host = "0.0.0.0"\nport = 0\n')
    refused = desk.service("install", "--wait", "2")
    assert refused.returncode == 1
    assert str(desk.home / "logs") in refused.stderr.splitlines()[-1]
    assert "there is no API key" in (desk.home / "logs" / "launchd.err.log").read_text()
    assert desk.service("uninstall").returncode == 0


def test_what_is_printed_is_what_would_be_installed(desk: Desk) -> None:
    """And nothing is touched for it, for either manager, as a user or as the system."""
    assert plistlib.loads(desk.service("print").stdout.encode())["Label"] == "studio.mlxd"
    unit = desk.service("print", manager="systemd").stdout
    assert "KillMode=mixed" in unit
    daemon = plistlib.loads(desk.service("print", "--daemon", "--user", "daemon").stdout.encode())
    assert daemon["UserName"] == "daemon"
    for options, words in (
        (["--user", "daemon"], "--user is for a --daemon"),
        (["--daemon", "--user", "root"], "does not run as root"),
        (["--daemon", "--user", "nobody-of-that-name"], "there is no account"),
    ):
        refused = desk.service("print", *options)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert words in refused.stderr
    assert not desk.home.exists()
    assert desk.calls == []
