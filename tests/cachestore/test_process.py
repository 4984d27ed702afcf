"""The real process: started, talked to, killed, started again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.addresses import cachestore_socket
from protocol.blocks import (
    BlockReply,
    BlockRequest,
    Declined,
    Describe,
    Described,
    Fetch,
    Leased,
    Publish,
    Published,
    Stage,
    Staged,
    StillHeld,
)
from protocol.framing import MalformedMessage
from protocol.ids import BlockKey, Grain
from protocol.sockets import Peer
from tests.cachestore.block_files import FINGERPRINT, block_bytes, chain, slot

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 20.0


class Daemon:
    """One cachestore process and one peer of it."""

    def __init__(self, directory: Path, runtime_directory: Path) -> None:
        self.directory = directory
        self.runtime_directory = runtime_directory
        self.process = spawn(directory, runtime_directory)
        self.looks = 0
        self.peer: Peer[BlockReply, BlockRequest] = Peer(
            cachestore_socket(runtime_directory),
            b"worker:1",
            BlockReply,  # type: ignore[arg-type]
        )

    def ask(self, request: BlockRequest) -> BlockReply | MalformedMessage:
        self.peer.send(request)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            for reply in self.peer.receive(0.5):
                if isinstance(reply, StillHeld):
                    self.looks += 1
                else:
                    return reply
        raise AssertionError("no reply")

    def store(self, grains: tuple[Grain, ...], number: int) -> BlockReply | MalformedMessage:
        parent, own = slot(grains, number)
        data = block_bytes(parent, own)
        staged = self.ask(Stage(call_id=1, fingerprint=FINGERPRINT, key=BlockKey(own[-1]), file_bytes=len(data)))
        assert isinstance(staged, Staged), staged
        Path(staged.path).write_bytes(data)
        return self.ask(Publish(call_id=2, lease=staged.lease, parent=parent, grains=own))

    def found(self, grains: tuple[Grain, ...]) -> list[int]:
        leased = self.ask(Fetch(call_id=3, fingerprint=FINGERPRINT, grains=grains))
        assert isinstance(leased, Leased)
        return [block.grains for block in leased.blocks]

    def wait(self) -> tuple[int, str]:
        """Exit status and log."""
        _, log = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, log.decode()

    def close(self) -> None:
        self.peer.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=DEADLINE_SECONDS)


def spawn(directory: Path, runtime_directory: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cachestore"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    launch = {"directory": str(directory), "runtime_directory": str(runtime_directory), "incarnation": 1}
    assert process.stdin is not None
    process.stdin.write(json.dumps({**launch, "free_floor_bytes": 0}).encode() + b"\n")
    process.stdin.flush()
    return process


@pytest.fixture
def daemon(tmp_path: Path, runtime_directory: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path / "cache", runtime_directory)
    yield running
    running.close()


def test_what_was_published_survives_sigkill(daemon, tmp_path, runtime_directory):
    """Killed in the middle of another write, started again: every published block is found, the half one is gone."""
    grains = chain("a", 40)
    for number in range(3):
        assert isinstance(daemon.store(grains, number), Published)
    staged = daemon.ask(Stage(call_id=1, fingerprint=FINGERPRINT, key=BlockKey(b"k" * 16), file_bytes=1000))
    assert isinstance(staged, Staged)
    Path(staged.path).write_bytes(b"half")
    daemon.process.send_signal(signal.SIGKILL)
    daemon.wait()
    again = Daemon(tmp_path / "cache", runtime_directory)
    try:
        assert again.found(grains) == [16, 16, 8]
        assert not Path(staged.path).exists()
        stale = again.ask(Publish(call_id=2, lease=staged.lease, parent=BlockKey(b""), grains=grains[:16]))
        assert stale == Declined(call_id=2, reason="lease")
    finally:
        again.close()


def test_leases_end_with_their_peer_and_not_before(daemon, runtime_directory):
    """A peer that is gone without a word holds nothing a moment later; one that lives and is silent keeps its lease."""
    grains = chain("a", 16)
    assert isinstance(daemon.store(grains, 0), Published)
    assert daemon.found(grains) == [16]  # and not given back
    stranger: Peer[BlockReply, BlockRequest] = Peer(
        cachestore_socket(runtime_directory),
        b"worker:2",
        BlockReply,  # type: ignore[arg-type]
    )
    stranger.send(Stage(call_id=1, fingerprint=FINGERPRINT, key=BlockKey(b"k" * 16), file_bytes=1000))
    [staged] = stranger.receive(DEADLINE_SECONDS)
    assert isinstance(staged, Staged)
    assert leases(daemon) == 2
    stranger.close()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while leases(daemon) > 1 or not daemon.looks:
        assert time.monotonic() < deadline
        time.sleep(0.1)  # between two looks at a process
    assert leases(daemon) == 1
    assert not Path(staged.path).exists()


def leases(daemon: Daemon) -> int:
    described = daemon.ask(Describe(call_id=1))
    assert isinstance(described, Described)
    return described.leases


def test_it_ends_cleanly_when_its_parent_does(daemon):
    """End of file on standard input: status 0, nothing else said than what the log says."""
    assert isinstance(daemon.ask(Describe(call_id=1)), Described)
    daemon.process.stdin.close()
    daemon.process.stdin = None
    status, log = daemon.wait()
    assert status == 0
    assert "Traceback" not in log
    assert not Path(f"{daemon.directory}/index.sqlite3-wal").exists()


def test_it_ends_cleanly_on_sigterm_and_ignores_the_terminals_interrupt(daemon):
    """SIGTERM is finished and status 0; Ctrl-C is the gateway's to answer."""
    daemon.ask(Describe(call_id=1))
    daemon.process.send_signal(signal.SIGINT)
    assert isinstance(daemon.ask(Describe(call_id=2)), Described)
    daemon.process.send_signal(signal.SIGTERM)
    status, log = daemon.wait()
    assert status == 0
    assert "Traceback" not in log


def test_a_second_process_on_the_directory_ends_with_one_clear_line(daemon, tmp_path):
    """It names the holder and the way out, and leaves the first one serving."""
    daemon.ask(Describe(call_id=1))
    second = spawn(daemon.directory, tmp_path)
    _, log = second.communicate(timeout=DEADLINE_SECONDS)
    assert second.returncode == 3
    assert log.decode().count("\n") == 1
    assert f"in use by process {daemon.process.pid}" in log.decode()
    assert isinstance(daemon.ask(Describe(call_id=2)), Described)


def test_unusable_settings_end_it_with_one_clear_line():
    """Not JSON, a missing field, no line at all."""
    for line in (b"nonsense\n", b"{}\n", b""):
        process = subprocess.run(
            [sys.executable, "-P", "-m", "cachestore"],
            input=line,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        assert process.returncode == 2
        assert process.stderr.count(b"\n") == 1


def test_bytes_that_are_no_request_end_nobodys_service(daemon):
    """A peer that talks nonsense is logged; it and the others are served on, and the log quotes nothing of it."""
    daemon.peer.send({"secret": "prompt text"})
    assert isinstance(daemon.ask(Describe(call_id=1)), Described)
    daemon.process.send_signal(signal.SIGTERM)
    _, log = daemon.wait()
    assert "malformed_message" in log
    assert "prompt text" not in log
