# pyright: basic
"""How fast a prefix comes back from disk: `python -m tests.bench.restore_bench [--repeats N] [--picture]`.

Restored bytes a second by the worker's own way (lookup, lease, map, evaluate, release; a real cachestore process)
against `mx.load` and `mx.eval` of the very same files. Wanted: at least 70 %.

Cases: files in the page cache or dropped from it; files that were verified in this run of the cachestore or are
verified while they are read, as every file is once after each start; memory that is fresh from the system, as while a
cache grows, or (files in the page cache) left from the last read, as when blocks were evicted for these.
"""

import argparse
import ctypes
import itertools
import os
import queue
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

from protocol.blocks import Fetch, Leased, Release
from protocol.ids import BLOCK_TOKENS, BlockKey
from tests.bench.measuring import print_head, print_table, save_bars, spread, versions
from tests.bench.running_cachestore import RunningCachestore, running_cachestore
from tests.worker import parts
from tests.worker.parts import FINGERPRINT
from worker import hashing
from worker.cold_cache import ColdCache
from worker.cost_model import PrefillCost
from worker.messages import BlocksFetched, BlockStored
from worker.mlx_block_files import BlockFile, write_block
from worker.mlx_blocks import KVArrays, block_bytes
from worker.prefix_cache import Fetch as PrefixFetch
from worker.prefix_index import Block
from worker.sequence import Prepared

WANTED_SHARE = 0.7
PICTURE = Path(__file__).parent / "pictures" / "restore.png"
_ALWAYS_RESTORE = PrefillCost(fixed=0.0, token=1e6, attention=0.0)
"""A prefill rate, in tokens a second, that no disk is slower than."""
_STORE_SECONDS = 60.0

Pages = Literal["cached", "dropped"]
Memory = Literal["fresh", "kept"]
Verification = Literal["verified", "first read"]


@dataclass(frozen=True)
class Shape:
    """The KV of a model: what its blocks look like, and how many of them make the prefix."""

    name: str
    layers: int
    heads: int
    head_width: int
    dtype: mx.Dtype
    blocks: int


SHAPES = (
    Shape("135 M, float32", layers=30, heads=3, head_width=64, dtype=mx.float32, blocks=16),
    Shape("8 B, bfloat16", layers=32, heads=8, head_width=128, dtype=mx.bfloat16, blocks=8),
)


class Restoring:
    """One prefix on disk, and two ways to read it."""

    def __init__(self, store: RunningCachestore, shape: Shape, seed: int) -> None:
        self._store = store
        self._answers: queue.SimpleQueue[BlocksFetched[KVArrays] | BlockStored] = queue.SimpleQueue()
        self._cold: ColdCache[KVArrays] = ColdCache(
            connect=store.connect,
            fingerprint=FINGERPRINT,
            begin=BlockFile,
            write=write_block,
            deliver=self._answers.put,
            clock=time.monotonic,
        )
        self._cold.start()
        self._plain_thread = ThreadPoolExecutor(1)
        self._prepared = _prepared(seed, shape.blocks)
        self._unknown = _prepared(seed + len(SHAPES), 1)
        self._store_blocks(shape)
        self.paths = self._leased_paths()

    def leased_bytes_per_second(self) -> float:
        """From asking to arrays that are evaluated, as a request waits for it."""
        started = time.perf_counter()
        self._cold.fetch(PrefixFetch(self._prepared, 0, 0, _ALWAYS_RESTORE))
        answer = self._answers.get(timeout=_STORE_SECONDS)
        seconds = time.perf_counter() - started
        assert isinstance(answer, BlocksFetched), answer
        assert len(answer.blocks) == len(self.paths), answer.outcome
        return sum(block_bytes(block.payload) for block in answer.blocks) / seconds

    def connect_again(self) -> None:
        """After a new start of the cachestore: until the worker's socket has found it. Reads no file."""
        deadline = time.monotonic() + _STORE_SECONDS
        while time.monotonic() < deadline:
            self._cold.fetch(PrefixFetch(self._unknown, 0, 0, _ALWAYS_RESTORE))
            answer = self._answers.get(timeout=_STORE_SECONDS)
            assert isinstance(answer, BlocksFetched), answer
            if answer.outcome.miss_reason == "absent":
                return
        raise AssertionError("the worker's side does not reach the cachestore: see its log above")

    def plain_bytes_per_second(self) -> float:
        """The same files, one after the other, without anybody's leave.

        On a thread that stays, as the cold cache's does.
        """
        return self._plain_thread.submit(self._read_plainly).result()

    def _read_plainly(self) -> float:
        loaded: list[KVArrays] = []
        started = time.perf_counter()
        for path in self.paths:
            loaded.append(mx.load(str(path)))  # pyright: ignore[reportArgumentType] - safetensors give a dict
            mx.eval(loaded[-1])
        seconds = time.perf_counter() - started
        return sum(block_bytes(arrays) for arrays in loaded) / seconds

    def close(self) -> None:
        self._cold.stop(10.0)
        self._plain_thread.shutdown()

    def _store_blocks(self, shape: Shape) -> None:
        prepared = self._prepared
        parent = prepared.root.digest
        for start in range(0, len(prepared.token_ids) - 1, BLOCK_TOKENS):
            token_ids = prepared.token_ids[start : start + BLOCK_TOKENS]
            chain = hashing.grains(prepared.root.secret, parent, token_ids)
            payload = _kv(shape)
            block: Block[KVArrays] = Block(
                key=BlockKey(chain[-1]),
                parent=parent,
                start=start,
                token_ids=token_ids,
                grains=chain,
                payload=payload,
                kv_bytes=block_bytes(payload),
            )
            assert self._cold.store(block)
            answer = self._answers.get(timeout=_STORE_SECONDS)
            assert isinstance(answer, BlockStored)
            assert answer.outcome == "durable", "the cachestore refused a block: see its log above"
            parent = block.key

    def _leased_paths(self) -> list[Path]:
        request = Fetch(call_id=1, fingerprint=FINGERPRINT, grains=self._prepared.grains)
        leased = self._store.ask(request)
        assert isinstance(leased, Leased), leased
        self._store.ask(Release(call_id=2, lease=leased.lease))
        return [Path(block.path) for block in leased.blocks]


def give_memory_back() -> None:
    """All that is free, to the system, so that either way gets fresh pages.

    Emptying MLX's cache alone is not enough: what a read costs would depend on how much the C library happens to have
    kept of the last one, for which thread. Page faults are half of the time when the files are in the page cache.
    """
    mx.clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def drop_pages(paths: Sequence[Path]) -> None:
    """Ask the system to forget what it holds of these files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure(
    store: RunningCachestore,
    restoring: Restoring,
    memory: Memory,
    pages: Pages,
    verification: Verification,
    repeats: int,
) -> tuple[list[float], list[float]]:
    """Bytes a second, plain and leased, taken in turn."""
    plain: list[float] = []
    leased: list[float] = []

    def prepare() -> None:
        if pages == "dropped":
            drop_pages(restoring.paths)
        if memory == "fresh":
            give_memory_back()

    def read_plainly() -> None:
        prepare()
        plain.append(restoring.plain_bytes_per_second())

    def read_leased() -> None:
        if verification == "first read":
            store.stop()
            store.start()
            restoring.connect_again()
        prepare()
        leased.append(restoring.leased_bytes_per_second())

    restoring.leased_bytes_per_second()
    restoring.plain_bytes_per_second()
    both: list[Callable[[], None]] = [read_plainly, read_leased]
    for _ in range(repeats):
        for read in both:
            read()
        both.reverse()
    return plain, leased


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} beside this file")
    arguments = parser.parse_args()
    print_head("restored bytes a second through the cachestore, against mx.load of the same files")
    cases: list[tuple[Memory, Pages]] = [("kept", "cached"), ("fresh", "cached")]
    if hasattr(os, "posix_fadvise"):
        cases.append(("fresh", "dropped"))
    verifications: tuple[Verification, ...] = ("verified", "first read")
    rows: list[list[str]] = []
    groups: list[str] = []
    bars: dict[str, list[float]] = {"mlxd": [], "mx.load": []}
    with running_cachestore() as store:
        for seed, shape in enumerate(SHAPES):
            restoring = Restoring(store, shape, seed)
            size_mb = sum(path.stat().st_size for path in restoring.paths) / 1e6
            for (memory, held), verification in itertools.product(cases, verifications):
                plain, leased = measure(store, restoring, memory, held, verification, arguments.repeats)
                plain_gb, leased_gb = (spread([rate / 1e9 for rate in rates]) for rates in (plain, leased))
                share = leased_gb.median / plain_gb.median
                case = f"{shape.name}, {size_mb:.0f} MB; {held}, {verification}, {memory} memory"
                verdict = "yes" if share >= WANTED_SHARE else "no"
                rows.append([case, plain_gb.text(), leased_gb.text(), f"{share:.0%}", verdict])
                groups.append(f"{shape.name}\n{held}, {verification}\n{memory} memory")
                bars["mx.load"].append(plain_gb.median)
                bars["mlxd"].append(leased_gb.median)
            restoring.close()
    columns = ["case", "mx.load GB/s", "mlxd GB/s", "share", f">= {WANTED_SHARE:.0%}"]
    print_table(f"median (least-most) of {arguments.repeats}", columns, rows)
    print("cached: in the page cache; dropped: not there. first read: the first one after a start of the cachestore,")
    print("which checksums what it reads; verified: any later one, which need not.")
    if arguments.picture:
        save_bars(PICTURE, "Restoring a prefix from disk", "GB/s (more is better)", groups, bars, versions())


def _prepared(seed: int, blocks: int) -> Prepared:
    # One token more than the blocks hold: the last one of a prompt is always computed.
    token_ids = tuple(number * 7 + seed for number in range(blocks * BLOCK_TOKENS + 1))
    return parts.prepared(f"restore-{seed}", token_ids, max_tokens=1)


def _kv(shape: Shape) -> KVArrays:
    size = (shape.layers, shape.heads, BLOCK_TOKENS, shape.head_width)
    arrays = {name: mx.random.normal(size).astype(shape.dtype) for name in ("keys0", "values0")}
    mx.eval(arrays)
    return arrays


if __name__ == "__main__":
    main()
