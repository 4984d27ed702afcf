"""The whole service as its users meet it: `mlxd serve` as a process, with real workers and a real cachestore."""

import contextlib
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import IO, Literal, TypeVar

import httpx
import msgspec
import psutil

from gateway.cache_terms import AdminCache
from gateway.config import Settings, load_settings
from gateway.control import ControlError, ask_service, fetch_status, read_admin_token
from gateway.status import AdminStatus, ModelStatus
from protocol.generation import Pong
from tests.fakes.ordinary_rights import drop_roots_rights

ROOT = Path(__file__).parents[2]
START_SECONDS = 30.0
STOP_SECONDS = 40.0
_POLL_SECONDS = 0.02

Seen = TypeVar("Seen")


def until(what: str, look: Callable[[], Seen], *, seconds: float = 10.0) -> Seen:
    """The first true thing that `look` sees. Fails with `what` when the time is over."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(_POLL_SECONDS)
    return seen


class LiveService:
    """One home with its models; `start`, end and start it again as often as a test wants. Its log is one file."""

    def __init__(
        self, models: Mapping[str, Path], settings_toml: str, *, rights: Literal["ours", "ordinary"] = "ours"
    ) -> None:
        self.rights = rights
        self.home = Path(tempfile.mkdtemp(prefix="mlxd"))
        for name, folder in models.items():
            self.add_model(name, folder)
        (self.home / "mlxd.toml").write_text(settings_toml, encoding="utf-8")
        self.process: subprocess.Popen[bytes] | None = None
        self.keys: dict[str, str] = {}
        self.base_url = ""
        self._log: IO[bytes] | None = None
        self._ours: set[psutil.Process] = set()

    # --- its life ----------------------------------------------------------------------------------------------------

    def add_model(self, name: str, folder: Path) -> Path:
        """Serve `folder` as `name`, which may hold slashes."""
        link = self.home / "models" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder, target_is_directory=True)
        return link

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `mlxd` with this home, to its end."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "gateway", *arguments],
            env=self._environment(),
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
            timeout=START_SECONDS,
        )

    def add_key(self, name: str) -> str:
        made = self.command("keys", "add", name)
        assert made.returncode == 0, made.stderr
        self.keys[name] = made.stdout.strip()
        return self.keys[name]

    def start(self) -> None:
        """Until it has announced where it listens."""
        assert self.process is None
        self._log = self.log_path.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gateway", "serve", "--port", "0"],
            env=self._environment(),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            preexec_fn=drop_roots_rights if self.rights == "ordinary" else None,
        )
        until("the service listens", self._announced, seconds=START_SECONDS)

    def stop(self) -> None:
        """SIGTERM; it must end well: exit code 0, no child left, no socket left."""
        process = self._running()
        children = self.children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_SECONDS) == 0, self.log[-3000:]
        self._ended()
        assert [child for child in children if _lives(child)] == []
        left = sorted(path.name for path in self.settings_run.iterdir())
        assert left == ["gateway.lock"], left

    def kill_everything(self) -> None:
        """SIGKILL to the gateway and to all that it started, as when the power goes."""
        process = self._running()
        children = self.children()
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait(STOP_SECONDS)
        psutil.wait_procs(children, STOP_SECONDS)
        self._ended()

    def wait_killed(self) -> None:
        """The gateway alone was killed by the test: collect it."""
        self._running().wait(STOP_SECONDS)
        self._ended()

    def end(self) -> None:
        """Leave nothing, whatever state the test left it in."""
        if self.process is not None:
            self.kill_everything()
        for process in self._ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._log is not None:
            self._log.close()
        shutil.rmtree(self.home)

    # --- what it says ------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return load_settings(None, home=self.home)

    @property
    def settings_run(self) -> Path:
        return Path(self.settings.runtime_directory)

    @property
    def log_path(self) -> Path:
        return self.home / "service.log"

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        return self._running().pid

    def status(self) -> AdminStatus:
        return fetch_status(self.settings)

    def model(self, name: str) -> ModelStatus:
        """What the service knows of one model's process. It must have had one."""
        status = self.model_or_none(name)
        assert status is not None, f"{name} never had a process"
        return status

    def model_or_none(self, name: str) -> ModelStatus | None:
        return next(model.process for model in self.status().models if model.name == name)

    def books(self, name: str) -> Pong:
        """What the process of a model says of itself now. It must be ready."""
        token = read_admin_token(self.settings)
        answer = ask_service(self.settings, "GET", "/admin/cache", token=token)
        assert answer.status == 200, answer.body
        told = msgspec.json.decode(answer.body, type=AdminCache)
        books = next(model.books for model in told.models if model.model == name)
        assert books is not None, f"{name} has no books"
        return books

    def stored_blocks(self) -> int:
        """How many KV blocks are durable."""
        store = self.status().cachestore
        return store.books.blocks if store is not None and store.books is not None else 0

    def children(self) -> list[psutil.Process]:
        try:
            children = psutil.Process(self._running().pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._ours.update(children)
        return children

    def worker_pid(self, name: str) -> int:
        pid = self.model(name).pid
        assert pid is not None
        return pid

    def client(self, *, key: str | None = None) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # An empty context, for plain HTTP needs none and reading the system's certificates takes longer than a test.
        no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=120.0, trust_env=False, verify=no_tls)

    def until_idle(self, name: str, *, seconds: float = 2.0) -> None:
        """The worker has answered for every request that it had."""

        def idle() -> bool:
            model = self.model(name)
            return model.open_requests == 0 and model.waiting_requests == 0

        until(f"{name} has nothing to do", idle, seconds=seconds)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "MLXD_HOME": str(self.home), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self.process is not None, "the service does not run"
        return self.process

    def _announced(self) -> bool:
        process = self._running()
        assert process.poll() is None, f"the service ended at its start: {self.log[-2000:]}"
        try:
            status = self.status()
        except ControlError:
            return False
        assert status.gateway.pid == process.pid
        self.base_url = f"http://127.0.0.1:{_port_of(process.pid)}"
        return True

    def _ended(self) -> None:
        self.process = None
        if self._log is not None:
            self._log.close()
            self._log = None


@contextlib.contextmanager
def live_service(
    models: Mapping[str, Path], *, settings_toml: str = "", rights: Literal["ours", "ordinary"] = "ours"
) -> Generator[LiveService]:
    """A started service. At the end it is stopped, unless the test did that; its log must hold no traceback."""
    service = LiveService(models, settings_toml, rights=rights)
    try:
        service.start()
        yield service
        if service.process is not None:
            service.stop()
        assert "Traceback" not in service.log, service.log[-5000:]
    finally:
        service.end()


def _port_of(pid: int) -> int:
    listening = [c for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    (connection,) = listening
    return int(connection.laddr[1])


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
