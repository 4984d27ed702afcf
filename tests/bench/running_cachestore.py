"""A real cachestore process with a directory of its own, for benchmarks that need no gateway."""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import msgspec

from protocol.addresses import cachestore_socket
from protocol.blocks import BlockReply, BlockRequest, Describe, Described
from protocol.framing import MalformedMessage
from protocol.ids import Incarnation
from protocol.launch import CachestoreLaunch
from protocol.sockets import Peer

ROOT = Path(__file__).parents[2]
_ANSWER_SECONDS = 30.0
_STOP_SECONDS = 30.0


class CachestoreSilent(Exception):
    """The daemon did not answer in time. Its log is on standard error."""


class RunningCachestore:
    """`start` and `stop` it as often as needed; the directory stays."""

    def __init__(self, directory: Path, quota_bytes: int = 20 * 1024**3) -> None:
        self._runtime_directory = directory / "run"
        self._runtime_directory.mkdir(mode=0o700)
        self._launch = CachestoreLaunch(
            directory=str(directory / "cache"),
            runtime_directory=str(self._runtime_directory),
            incarnation=Incarnation(1),
            quota_bytes=quota_bytes,
            daily_write_bytes=None,
            free_floor_bytes=1024**3,
            log_level="error",
        )
        self._call_ids = itertools.count(1)
        self._peer_numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runtime_directory(self) -> Path:
        return self._runtime_directory

    def connect(self) -> Peer[BlockReply, BlockRequest]:
        """A new peer; whoever asked for it closes it."""
        name = f"bench:{next(self._peer_numbers)}".encode()
        return Peer(cachestore_socket(self._runtime_directory), name, BlockReply)

    def start(self) -> None:
        """Until it answers. Raises CachestoreSilent."""
        self.spawn()
        self.books()

    def spawn(self) -> None:
        """Does not wait for it."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cachestore"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._process = process
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._launch) + b"\n")
        process.stdin.flush()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.communicate(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def books(self) -> Described:
        described = self.ask(Describe(call_id=next(self._call_ids)))
        assert isinstance(described, Described), described
        return described

    def ask(self, request: BlockRequest) -> BlockReply:
        """One request of a peer of its own. Raises CachestoreSilent."""
        with contextlib.closing(self.connect()) as peer:
            peer.send(request)
            deadline = time.monotonic() + _ANSWER_SECONDS
            while time.monotonic() < deadline:
                for reply in peer.receive(0.2):
                    assert not isinstance(reply, MalformedMessage)
                    return reply
        raise CachestoreSilent(f"the cachestore did not answer within {_ANSWER_SECONDS:.0f} s: see its log above")


@contextlib.contextmanager
def running_cachestore() -> Generator[RunningCachestore]:
    """Started, in a temporary directory that goes with it."""
    parent = "/tmp" if Path("/tmp").is_dir() else None  # a socket's path must be short
    directory = Path(tempfile.mkdtemp(prefix="mlxdb", dir=parent))
    store = RunningCachestore(directory)
    try:
        store.start()
        yield store
    finally:
        store.stop()
        shutil.rmtree(directory)
