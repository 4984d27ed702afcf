"""How long the cachestore's index takes with many blocks: `python -m tests.bench.index_bench [BLOCKS]`.

First the index alone, then a cachestore process with as many files, over its socket (`index_socket`). Wanted, at
100,000 blocks: open, and the first answer after a start, under a second; a lookup's 99th percentile under a
millisecond. Each figure is the median of several rounds, and the lowest and highest of them, since the machine does
other things too.
"""

import platform
import random
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cachestore.database import let_log_grow, shrink_log
from cachestore.eviction import plan_eviction
from cachestore.index import BlockIndex
from cachestore.index_rows import NewBlock
from cachestore.layout import INDEX_NAME
from protocol.ids import BlockKey, Grain
from tests.bench.index_socket import measure_process
from tests.cachestore.block_files import chain, slot

FINGERPRINT = "f"
CHAIN_BLOCKS = 20
FILE_BYTES = 1_000_000
ROUNDS = 5
ADOPTED_AT_ONCE = 16
OPEN_LIMIT_SECONDS = 1.0
LOOKUP_LIMIT_SECONDS = 0.001


def main(blocks: int) -> int:
    """The exit status: 1 when a wanted figure is missed."""
    print(
        f"mlxd {_version()}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, "
        f"{platform.system()} {platform.machine()}, {ROUNDS} rounds: median (lowest to highest)"
    )
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cache"
        cache.mkdir(mode=0o700)
        path = cache / INDEX_NAME
        chains = _fill(path, blocks)
        size_bytes = sum(file.stat().st_size for file in path.parent.iterdir())
        opens = [_timed(lambda: BlockIndex(path, 1).close()) for _ in range(ROUNDS)]
        _print("open", opens, unit="ms")
        index = BlockIndex(path, 1)
        print(f"{'files':24}{size_bytes / 1e6:9.0f} MB for {index.blocks} blocks")
        drawn = random.Random(1).sample(chains, min(2000, len(chains)))
        parted = [chain("other", 40, after=grains[:200]) for grains in drawn]
        stranger = chain("stranger", 16 * CHAIN_BLOCKS)
        lookups = {
            "lookup hit": [lambda grains=grains: index.walk(FINGERPRINT, grains, 0) for grains in drawn],
            "lookup part of a block": [lambda grains=grains: index.walk(FINGERPRINT, grains, 0) for grains in parted],
            "lookup miss": [lambda: index.walk(FINGERPRINT, stranger, 0)] * 2000,
        }
        for name, calls in lookups.items():
            if _measure(name, calls) > LOOKUP_LIMIT_SECONDS:
                missed.append(f"{name}: p99 is over {LOOKUP_LIMIT_SECONDS * 1e3:.0f} ms")
        if statistics.median(opens) > OPEN_LIMIT_SECONDS:
            missed.append(f"open takes over {OPEN_LIMIT_SECONDS:.0f} s")
        rows = [index.walk(FINGERPRINT, grains, 0)[-1].row for grains in drawn[:200]]
        _measure("touch", [lambda row=row: index.touch([row.block], 1.0) for row in rows])
        _measure("plan eviction", [lambda: plan_eviction(10 * FILE_BYTES, index, lambda _: False)] * 200)
        _measure(
            "rows of a prefix", [lambda prefix=prefix: index.rows_in(FINGERPRINT, prefix) for prefix in range(256)]
        )
        index.close()
        missed += measure_process(Path(directory), chains, FINGERPRINT)
    for fault in missed:
        print(f"MISSED: {fault}", file=sys.stderr)
    return 1 if missed else 0


def _version() -> str:
    try:
        return version("mlxd")
    except PackageNotFoundError:
        return "of this checkout"


def _fill(path: Path, blocks: int) -> list[tuple[Grain, ...]]:
    """As a lost index is rebuilt: many blocks in one transaction, in the order of their random keys."""
    head = chain("one system prompt for all", 24)
    chains = [
        chain(f"conversation {number}", CHAIN_BLOCKS * 16 - 29, after=head) for number in range(blocks // CHAIN_BLOCKS)
    ]
    added = sorted({new.key: new for grains in chains for new in _blocks_of(grains)}.values(), key=lambda new: new.key)
    index = BlockIndex(path, 1)
    let_log_grow(index.database)
    took = [
        _timed(lambda start=start: index.insert_all(added[start : start + ADOPTED_AT_ONCE]))
        for start in range(0, len(added), ADOPTED_AT_ONCE)
    ]
    _print("empty the log", [_timed(lambda: shrink_log(index.database))], unit="ms")
    index.close()
    part = len(took) // ROUNDS
    _print("adopt a block", [statistics.mean(took[n * part : (n + 1) * part]) / ADOPTED_AT_ONCE for n in range(ROUNDS)])
    return chains


def _blocks_of(grains: tuple[Grain, ...]) -> Iterator[NewBlock]:
    for number in range(CHAIN_BLOCKS):
        parent, own = slot(grains, number)
        yield NewBlock(
            fingerprint=FINGERPRINT,
            key=BlockKey(own[-1]),
            parent=parent,
            grains=own,
            file_bytes=FILE_BYTES,
            checksum=bytes(16),
            owner="0011223344556677",
            ttl_seconds=86400.0,
            used_unix=time.time(),
        )


def _measure(name: str, calls: Sequence[Callable[[], object]]) -> float:
    """Print both percentiles; the median round's 99th in seconds.

    A call during which the kernel gave the processor to somebody else says nothing of the index: left out, and counted.
    """
    rounds: list[list[float]] = []
    interrupted = 0
    for _ in range(ROUNDS):
        took: list[float] = []
        for call in calls:
            switches = _involuntary_switches()
            seconds = _timed(call)
            if _involuntary_switches() == switches:
                took.append(seconds)
        interrupted += len(calls) - len(took)
        rounds.append(sorted(took))
    if interrupted:
        print(f"{name}: {interrupted} of {ROUNDS * len(calls)} calls were interrupted and are left out")
    _print(f"{name}, p50", [took[len(took) // 2] for took in rounds])
    p99s = [took[len(took) * 99 // 100] for took in rounds]
    _print(f"{name}, p99", p99s)
    return statistics.median(p99s)


def _involuntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _print(name: str, seconds: Sequence[float], *, unit: str = "us") -> None:
    low, middle, high = (
        value * (1e3 if unit == "ms" else 1e6) for value in (min(seconds), statistics.median(seconds), max(seconds))
    )
    print(f"{name:28}{middle:9.1f} {unit} ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
