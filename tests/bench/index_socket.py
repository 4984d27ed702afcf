"""The half of `index_bench` that asks a cachestore process over its socket, as a worker does.

Files are there for all blocks, sparse ones: a lookup reads none, and what is compared with the index after a start is
their names and sizes. As a program of its own this is a worker that publishes until it is killed.
"""

import itertools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy
from safetensors.numpy import save

from cachestore.index import BlockIndex
from cachestore.index_rows import EVERY_BLOCK
from cachestore.layout import INDEX_NAME, block_path
from cachestore.store import NEWEST_BLOCK
from protocol.addresses import cachestore_socket
from protocol.block_file import block_metadata
from protocol.blocks import BlockReply, BlockRequest, Declined, Found, Lookup, Publish, Published, Stage, Staged
from protocol.flushing import flush_file
from protocol.framing import MalformedMessage
from protocol.ids import BLOCK_TOKENS, BlockKey, Grain
from protocol.sockets import Peer
from tests.bench.measuring import percentile
from tests.bench.running_cachestore import RunningCachestore
from tests.cachestore.block_files import chain

ROOT = Path(__file__).parents[2]
STARTS = 5
LOOKUPS = 2000
ROUNDS = 5
PUBLISHED_BYTES = 12_000_000
"""A block of 256 tokens of SmolLM2-135M in float32."""
PAUSES_SECONDS = (0.0, 0.1)
"""Between two publishes: none, as when a model leaves memory, and as when requests end now and then."""
START_LIMIT_SECONDS = 1.0
LOOKUP_LIMIT_SECONDS = 0.001
_ANSWER_SECONDS = 30.0


def measure_process(directory: Path, chains: Sequence[tuple[Grain, ...]], fingerprint: str) -> list[str]:
    """Print what a process takes, whose cache in `directory` has an index of these chains. What was missed."""
    _make_files(directory / "cache")
    store = RunningCachestore(directory, quota_bytes=1 << 50)
    drawn = random.Random(2).sample(list(chains), min(LOOKUPS, len(chains)))
    lookups = [Lookup(call_id=number, fingerprint=fingerprint, grains=grains) for number, grains in enumerate(drawn, 1)]
    missed: list[str] = []
    starts: list[float] = []
    for _ in range(STARTS):
        store.stop()
        started = time.perf_counter()
        store.spawn()
        peer = store.connect()
        found = _ask(peer, lookups[0])
        starts.append(time.perf_counter() - started)
        assert isinstance(found, Found)
        assert found.blocks
        peer.close()
    _print("process, first answer", starts, unit="ms")
    if statistics.median(starts) > START_LIMIT_SECONDS:
        missed.append(f"the first answer after a start takes over {START_LIMIT_SECONDS:.0f} s")
    peer = store.connect()
    try:
        _measure("socket, files compared", peer, lookups, rounds=1)
        _await_reconciled(store, directory / "cache")
        if _measure("socket, quiet", peer, lookups) > LOOKUP_LIMIT_SECONDS:
            missed.append(f"lookup over the socket: p99 is over {LOOKUP_LIMIT_SECONDS * 1e3:.0f} ms")
        for number, pause_seconds in enumerate(PAUSES_SECONDS):
            with _Publisher(store, number, pause_seconds) as publisher:
                name = f"socket, {1 / pause_seconds:.0f} writes/s" if pause_seconds else "socket, writes on end"
                _measure(name, peer, lookups)
            publisher.report()
    finally:
        peer.close()
        store.stop()
    return missed


class _Publisher:
    """A process that stages, writes and publishes, while it is wanted."""

    def __init__(self, store: RunningCachestore, number: int, pause_seconds: float) -> None:
        self._started = time.perf_counter()
        self._store = store
        self._before = store.books()
        command = [sys.executable, "-m", "tests.bench.index_socket", store.runtime_directory, str(number)]
        self._process = subprocess.Popen(
            [*command, str(pause_seconds)], cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )

    def __enter__(self) -> "_Publisher":
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"published\n"
        self._started = time.perf_counter()
        self._before = self._store.books()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._store.books()
        self._seconds = time.perf_counter() - self._started
        self._published = after.published - self._before.published
        self._process.kill()
        self._process.communicate()

    def report(self) -> None:
        rate = self._published / self._seconds
        print(f"    beside {rate:.1f} blocks of {PUBLISHED_BYTES / 1e6:.0f} MB published a second")


def publish(runtime_directory: Path, number: int, pause_seconds: float) -> None:
    """Publish blocks of their own chains until killed; a line when the first is durable."""
    peer: Peer[BlockReply, BlockRequest] = Peer(
        cachestore_socket(runtime_directory),
        f"publisher:{number}".encode(),
        BlockReply,  # pyright: ignore[reportArgumentType]
    )
    values = numpy.zeros(PUBLISHED_BYTES // 2, numpy.uint8)
    for count in itertools.count():
        grains = chain(f"published {number} {count}", 16)
        metadata = block_metadata("e", BlockKey(grains[-1]), BlockKey(b""), grains, BLOCK_TOKENS)
        data = save({"keys0": values, "values0": values}, metadata)
        staged = _ask(peer, Stage(call_id=1, fingerprint="e", key=BlockKey(grains[-1]), file_bytes=len(data)))
        assert isinstance(staged, Staged), staged
        with Path(staged.path).open("wb") as file:
            file.write(data)
            file.flush()
            flush_file(file.fileno())
        published = _ask(peer, Publish(call_id=2, lease=staged.lease, parent=BlockKey(b""), grains=grains))
        assert isinstance(published, Published), published
        if not count:
            print("published", flush=True)
        time.sleep(pause_seconds)


def _make_files(cache: Path) -> None:
    index = BlockIndex(cache / INDEX_NAME, 1)
    for row in index.rows_of(EVERY_BLOCK, NEWEST_BLOCK, index.blocks):
        path = cache / block_path(row.fingerprint, row.key, row.checksum)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(row.file_bytes)
    index.close()


def _await_reconciled(store: RunningCachestore, cache: Path) -> None:
    """Nothing may be staged before that."""
    deadline = time.monotonic() + 2 * _ANSWER_SECONDS
    wanted = Stage(call_id=1, fingerprint="e", key=BlockKey(bytes(16)), file_bytes=1)
    while isinstance(reply := store.ask(wanted), Declined):
        assert reply.reason == "reconciling", reply
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _measure(name: str, peer: Peer[BlockReply, BlockRequest], lookups: Sequence[Lookup], rounds: int = ROUNDS) -> float:
    """Print both percentiles and the longest; the median round's 99th in seconds."""
    took: list[list[float]] = []
    for _ in range(rounds):
        seconds: list[float] = []
        for lookup in lookups:
            started = time.perf_counter()
            found = _ask(peer, lookup)
            seconds.append(time.perf_counter() - started)
            assert isinstance(found, Found)
            assert found.blocks
        took.append(seconds)
    _print(f"{name}, p50", [percentile(seconds, 50) for seconds in took])
    p99s = [percentile(seconds, 99) for seconds in took]
    _print(f"{name}, p99", p99s)
    _print(f"{name}, most", [max(seconds) for seconds in took])
    return statistics.median(p99s)


def _ask(peer: Peer[BlockReply, BlockRequest], request: BlockRequest) -> BlockReply:
    peer.send(request)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        for reply in peer.receive(1.0):
            assert not isinstance(reply, MalformedMessage)
            if reply.call_id == request.call_id:
                return reply
    raise AssertionError("the cachestore does not answer: see its log above")


def _print(name: str, seconds: Sequence[float], *, unit: str = "us") -> None:
    factor = 1e3 if unit == "ms" else 1e6
    low, middle, high = (value * factor for value in (min(seconds), statistics.median(seconds), max(seconds)))
    print(f"{name:28}{middle:9.1f} {unit} ({low:.1f} to {high:.1f})", flush=True)


if __name__ == "__main__":
    publish(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
