"""The demo's own service: a home beside the user's, `mlxd serve` as a child, and how to start, watch and stop it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil

from gateway.config import Settings, load_settings
from gateway.control import ControlError, ServiceAddress, announced_service, fetch_status
from gateway.status import AdminStatus, ModelStatus

START_SECONDS = 60.0
STOP_SECONDS = 60.0
_POLL_SECONDS = 0.05


class DemoFailed(Exception):
    """A step did not do what it claims. Says what was seen."""


class DemoService:
    """One `mlxd serve` under its own MLXD_HOME, which the user's own service never sees."""

    def __init__(self, home: Path, port: int) -> None:
        self.home = home
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = {**os.environ, "MLXD_HOME": str(home)}
        self.settings: Settings = load_settings(None, home=home)

    @property
    def log_path(self) -> Path:
        return self.home / "service.log"

    @property
    def address(self) -> ServiceAddress:
        return announced_service(self.settings)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.address.port}/v1"

    def start(self) -> Self:
        """Until it listens. Raises DemoFailed with its last lines."""
        command = [sys.executable, "-P", "-m", "gateway", "serve", "--port", str(self._port)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process = self._process
        wait_until(lambda: self._is_listening(process.pid), START_SECONDS, "the service did not start", self)
        self._port = self.address.port  # the next start takes the same one
        return self

    def stop(self) -> None:
        """As launchd would: SIGTERM, and wait. Raises DemoFailed when it does not end well."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise DemoFailed(f"the service did not stop within {STOP_SECONDS:.0f} s; see {self.log_path}") from None
        if code != 0:
            raise DemoFailed(f"the service stopped with exit code {code}; see {self.log_path}")

    def status(self) -> AdminStatus:
        return fetch_status(self.settings)

    def model(self, name: str) -> ModelStatus | None:
        """The model's process, if it ever had one."""
        return next((model.process for model in self.status().models if model.name == name), None)

    def last_lines(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-8:])

    def _is_listening(self, pid: int) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise DemoFailed(f"the service ended at its start:\n{self.last_lines()}")
        try:
            return self.address.pid == pid and bool(self.status())
        except ControlError:
            return False


def end_leftover(settings: Settings) -> None:
    """A service that an earlier `mlxd demo --keep` left running."""
    try:
        left = psutil.Process(announced_service(settings).pid)
    except (ControlError, psutil.NoSuchProcess):
        return
    left.terminate()
    try:
        left.wait(STOP_SECONDS)
    except psutil.TimeoutExpired:
        left.kill()


def wait_until(condition: Callable[[], bool], seconds: float, otherwise: str, service: DemoService) -> None:
    """Poll until it holds. Raises DemoFailed with the service's last lines."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise DemoFailed(f"{otherwise} within {seconds:.0f} s; its last lines:\n{service.last_lines()}")
        time.sleep(_POLL_SECONDS)
