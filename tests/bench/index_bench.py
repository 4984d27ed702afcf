"""How long the cachestore's index takes with many blocks: `python -m tests.bench.index_bench [BLOCKS]`.

Wanted, at 100,000 blocks: open under a second, a lookup's 99th percentile under a millisecond.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cachestore.eviction import plan_eviction
from cachestore.index import BlockIndex, NewBlock
from protocol.ids import BlockKey, Grain
from tests.cachestore.block_files import chain, slot

CHAIN_BLOCKS = 20
FILE_BYTES = 1_000_000


def main(blocks: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "index.sqlite3"
        index = BlockIndex(path, 1)
        head = chain("one system prompt for all", 24)
        chains = [
            chain(f"conversation {number}", CHAIN_BLOCKS * 16 - 29, after=head)
            for number in range(blocks // CHAIN_BLOCKS)
        ]
        started = time.perf_counter()
        for grains in chains:
            _insert(index, grains)
        print(f"insert          {(time.perf_counter() - started) / blocks * 1e6:8.0f} us a block")
        print(f"files           {sum(f.stat().st_size for f in path.parent.iterdir()) / 1e6:8.0f} MB")
        index.close()
        started = time.perf_counter()
        index = BlockIndex(path, 1)
        print(f"open            {(time.perf_counter() - started) * 1e3:8.1f} ms, {index.blocks} blocks")
        drawn = random.Random(1).sample(chains, min(2000, len(chains)))
        stranger = chain("stranger", 16 * CHAIN_BLOCKS)
        _measure("lookup hit", [lambda grains=grains: index.walk("f", grains, 0) for grains in drawn])
        _measure("lookup miss", [lambda: index.walk("f", stranger, 0)] * 2000)
        parted = [chain("other", 40, after=grains[:200]) for grains in drawn]
        _measure("lookup part", [lambda grains=grains: index.walk("f", grains, 0) for grains in parted])
        _measure("plan eviction", [lambda: plan_eviction(10 * FILE_BYTES, index, lambda _: False)] * 200)
        rows = [index.walk("f", grains, 0)[-1].row for grains in drawn[:200]]
        _measure("touch", [lambda row=row: index.touch([row.block], 1.0) for row in rows])
        _measure("delete", [lambda row=row: index.delete([row]) for row in rows])
        _measure("prefix rows", [lambda prefix=prefix: index.rows_in("f", prefix) for prefix in range(256)])
        index.close()


def _insert(index: BlockIndex, grains: tuple[Grain, ...]) -> None:
    for number in range(CHAIN_BLOCKS):
        parent, own = slot(grains, number)
        if index.find("f", BlockKey(own[-1])) is None:
            index.insert(
                NewBlock(
                    fingerprint="f",
                    key=BlockKey(own[-1]),
                    parent=parent,
                    grains=own,
                    file_bytes=FILE_BYTES,
                    checksum=bytes(16),
                )
            )


def _measure(name: str, calls: list[Callable[[], object]]) -> None:
    took: list[float] = []
    for call in calls:
        started = time.perf_counter()
        call()
        took.append(time.perf_counter() - started)
    took.sort()
    print(f"{name:15} {took[len(took) // 2] * 1e6:8.0f} us median, {took[len(took) * 99 // 100] * 1e6:8.0f} us p99")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
