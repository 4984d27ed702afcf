# pyright: basic
"""The servers that benchmarks compare: mlxd, mlx-lm's own, and any other that a command line can start.

One at a time, the same model folder, the same BLAS for all of them.
"""

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

import httpx
import psutil

from gateway.blas import worker_environment
from tests.fakes.live_service import LiveService, until

MODEL_NAME = "bench"
START_SECONDS = 180.0
SETTLE_SECONDS = 30.0


class BenchFailed(Exception):
    """A server did not do what the benchmark needs. Says what, and where its log is."""


class Server(Protocol):
    """A server that can be started, stopped and killed, again and again, with all that it keeps."""

    @property
    def name(self) -> str: ...

    @property
    def base_url(self) -> str: ...

    @property
    def model(self) -> str: ...

    @abstractmethod
    def start(self) -> None:
        """Until it listens."""
        ...

    @abstractmethod
    def settle(self) -> None:
        """Until it writes nothing more."""
        ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL to every process of it, as when the power goes."""
        ...


class Mlxd:
    """`mlxd serve` with a home of its own, and its default settings unless others are given."""

    model = MODEL_NAME

    def __init__(self, folder: Path, *, name: str = "mlxd", settings_toml: str = "") -> None:
        self.name = name
        self._service = LiveService({MODEL_NAME: folder}, settings_toml)

    @property
    def base_url(self) -> str:
        return f"{self._service.base_url}/v1"

    def start(self) -> None:
        self._service.start()

    def settle(self) -> None:
        """Until the number of durable blocks stays the same for a second."""
        last, since = -1, time.monotonic()

        def stays() -> bool:
            nonlocal last, since
            stored = self._service.stored_blocks()
            if stored != last:
                last, since = stored, time.monotonic()
            return time.monotonic() - since > 1.0

        until("mlxd writes nothing more", stays, seconds=SETTLE_SECONDS)

    def stop(self) -> None:
        self._service.stop()

    def kill(self) -> None:
        self._service.kill_everything()

    def close(self) -> None:
        self._service.end()


class CommandServer:
    """A server of OpenAI's API that a command starts, with the environment of mlxd's workers."""

    def __init__(self, name: str, command: Sequence[str], directory: Path, *, model: str = "") -> None:
        """In `command` `{port}` stands for the port. `model` empty: the first one that it lists."""
        self.name = name
        self.model = model
        self._directory = directory
        found = worker_environment({**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(directory)}, directory / "blas")
        self._environment = found.environment
        self.blas = found.description
        self._log_path = directory / f"{name}.log"
        self._port = _free_port()
        self._command = [part.replace("{port}", str(self._port)) for part in command]
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        self._log = self._log_path.open("ab")
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        until(f"{self.name} listens", self._is_serving, seconds=START_SECONDS)

    def settle(self) -> None:
        """Whatever it writes, it has a moment for it."""
        time.sleep(3.0)  # nothing tells from outside when a peer has written what it wants to write

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
        self._ended()

    def kill(self) -> None:
        for process in self._processes():
            process.kill()
        self._ended()

    def close(self) -> None:
        self.kill()

    def _is_serving(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            last = self._log_path.read_text(errors="replace")[-1000:]
            raise BenchFailed(f"{self.name} ended at its start; its last lines:\n{last}")
        if self.model:  # some servers cannot list what they were told to serve
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
                return True
            return False
        with contextlib.suppress(httpx.HTTPError, ValueError, LookupError):
            self.model = httpx.get(f"{self.base_url}/models", timeout=5.0).json()["data"][0]["id"]
        return bool(self.model)

    def _processes(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _ended(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(SETTLE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(SETTLE_SECONDS)
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None


def mlx_lm_server(folder: Path, directory: Path) -> CommandServer:
    """`python -m mlx_lm server` with its default settings."""
    command = [sys.executable, "-P", "-m", "mlx_lm", "server", "--model", str(folder), "--port", "{port}"]
    return CommandServer("mlx-lm", command, directory, model=str(folder))


def peer_server(asked: str, folder: Path, directory: Path) -> CommandServer:
    """Of `NAME=COMMAND`, in which `{model}` is the model folder and `{port}` the port."""
    name, _, command = asked.partition("=")
    if not command:
        raise BenchFailed(f"--peer {asked}: write it as NAME=COMMAND, with {{model}} and {{port}} in the command")
    return CommandServer(name, [part.replace("{model}", str(folder)) for part in shlex.split(command)], directory)


def models_cache() -> Path:
    """Where the tests keep the models they build."""
    if configured := os.environ.get("XDG_CACHE_HOME"):
        return Path(configured) / "mlxd-tests"
    is_mac = sys.platform == "darwin"
    return Path.home() / ("Library/Caches" if is_mac else ".cache") / "mlxd-tests"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
