"""Dies before each step of a write that changes the disk, one after the other, each time in a fresh directory.

    python -m tests.cachestore.crash_points WORK

makes WORK/000, WORK/001, …: what the store leaves behind when it is killed before its n-th step, from its start to the
end of a write that evicts and supersedes. The last one was not killed. A process of its own, since it forks.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from protocol.blocks import Publish, Published, Staged
from protocol.ids import BlockKey
from tests.cachestore.block_files import block_bytes, chain, open_service, slot

QUOTA_BYTES = 1_000_000
DATA_BYTES = 200_000
KEPT = chain("kept", 32)
EVICTABLE = chain("evictable", 16)
LONG = chain("tail", 9)
SHORT = LONG[:5]
KILLED_STATUS = 9
_PATCHED = ("open", "fchmod", "fsync", "rename", "mkdir", "unlink", "rmdir", "ftruncate", "pwrite")


def main(work: Path) -> None:
    template = work / "template"
    worker = open_service(template, quota_bytes=QUOTA_BYTES)
    worker.store_all(EVICTABLE, data_bytes=DATA_BYTES)
    worker.store_all(SHORT, data_bytes=DATA_BYTES)
    worker.store_all(KEPT, data_bytes=DATA_BYTES)
    worker.service.close()
    block_bytes(*slot(LONG, 0), data_bytes=DATA_BYTES)
    for step in range(10_000):
        directory = work / f"{step:03d}"
        shutil.copytree(template, directory)
        child = os.fork()
        if not child:
            _die_before(step)
            _write(directory)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        if status != KILLED_STATUS:
            raise SystemExit(f"step {step}: the write failed with status {status}")
    raise SystemExit("the write never ends")


def _write(directory: Path) -> None:
    worker = open_service(directory, quota_bytes=QUOTA_BYTES)
    worker.settle()
    worker.read(SHORT)  # so that the other one is evicted
    worker.read(KEPT)
    parent, own = slot(LONG, 0)
    data = block_bytes(parent, own, data_bytes=DATA_BYTES)
    staged = worker.stage(BlockKey(own[-1]), len(data))
    assert isinstance(staged, Staged), staged
    Path(staged.path).write_bytes(data)
    publish = Publish(call_id=1, lease=staged.lease, parent=parent, grains=own, supersedes=BlockKey(SHORT[-1]))
    assert isinstance(worker.ask(publish), Published)
    worker.settle()
    worker.service.close()


def _die_before(step: int) -> None:
    steps_left = step

    def count() -> None:
        nonlocal steps_left
        if not steps_left:
            os._exit(KILLED_STATUS)
        steps_left -= 1

    def count_statement(sql: str) -> None:
        if not sql.startswith(("SELECT", "WITH")):
            count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*arguments: Any, **named: Any) -> Any:
            count()
            return call(*arguments, **named)

        return replacement

    import sqlite3

    from cachestore.index import BlockIndex

    real_prepare = BlockIndex._prepare

    def prepare(index: BlockIndex) -> None:
        database: sqlite3.Connection = index._database
        database.set_trace_callback(count_statement)  # called before each statement
        real_prepare(index)

    BlockIndex._prepare = prepare  # type: ignore[method-assign]
    for name in _PATCHED:
        setattr(os, name, counted(getattr(os, name)))


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    main(Path(sys.argv[1]))
