"""Dies before each step of a scenario that changes the disk, one after the other, each time in a fresh directory.

    python -m tests.cachestore.crash_points SCENARIO WORK

makes WORK/000, WORK/001, …: what the store leaves behind when it is killed before its n-th step, from its start to its
end. The last one was not killed. Steps are the system calls that change something, and SQLite's commits: a kill inside
a transaction is a kill before its commit. A process of its own, since it forks.
"""

import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from cachestore import database
from protocol.blocks import Forget, Forgotten, Publish, Published, Staged
from protocol.ids import BlockKey
from tests.cachestore.block_files import Clock, WorkerSide, block_bytes, chain, open_service, slot

QUOTA_BYTES = 1_100_000
DATA_BYTES = 200_000
KEPT = chain("kept", 32)
EVICTABLE = chain("evictable", 16)
LONG = chain("tail", 9)
SHORT = LONG[:5]
BRANCH = chain("branch", 16, after=KEPT[:16])
MANY = [chain(f"n{number}", 20) for number in range(6)]
TTL_SECONDS = 100.0
KILLED_STATUS = 9
_PATCHED = ("open", "write", "fchmod", "fsync", "rename", "mkdir", "unlink", "rmdir", "ftruncate", "pwrite")


def prepare_write(worker: WorkerSide) -> None:
    worker.store_all(EVICTABLE, data_bytes=DATA_BYTES)
    worker.store_all(SHORT, data_bytes=DATA_BYTES)
    worker.store_all(KEPT, data_bytes=DATA_BYTES)
    block_bytes(*slot(LONG, 0), data_bytes=DATA_BYTES)


def write(directory: Path) -> None:
    """A write that evicts and supersedes."""
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


def prepare_pins(worker: WorkerSide) -> None:
    worker.store_all(KEPT)
    worker.store_all(EVICTABLE)
    assert worker.pin(KEPT, name="first") == 1


def pin(directory: Path) -> None:
    """A set is replaced by another, a second one is made and let go."""
    worker = open_service(directory)
    assert worker.pin(EVICTABLE, name="first") == 1
    assert worker.pin(KEPT, name="second") == 1
    assert worker.unpin(name="second") == 2
    worker.settle()
    worker.service.close()


def prepare_forget(worker: WorkerSide) -> None:
    worker.store_all(KEPT, owner="mine")
    worker.store_all(EVICTABLE, owner="theirs")
    worker.store_all(LONG, owner="mine")
    assert worker.pin(LONG) == 1


def forget(directory: Path) -> None:
    """One owner's blocks, of which one is pinned and two are being read."""
    worker = open_service(directory)
    reading = worker.fetch(KEPT)
    forgotten = worker.ask(Forget(call_id=1, owner="mine", asked_by="test"))
    assert isinstance(forgotten, Forgotten)
    worker.release(reading.lease)
    worker.settle()
    worker.service.close()


def prepare_expiry(worker: WorkerSide) -> None:
    worker.store_all(EVICTABLE)
    worker.store_all(KEPT, ttl_seconds=TTL_SECONDS)
    assert isinstance(worker.store(BRANCH, 1, ttl_seconds=TTL_SECONDS), Published)


def expire(directory: Path) -> None:
    """A fork of three blocks runs out."""
    clock = Clock()
    worker = open_service(directory, clock=clock)
    worker.pass_time(clock, TTL_SECONDS)
    assert worker.read(KEPT) == ()
    worker.service.close()


def prepare_rebuild(worker: WorkerSide) -> None:
    for grains in MANY:
        worker.store_all(grains, owner="mine")


def rebuild(directory: Path) -> None:
    """The index is lost."""
    for path in sorted(directory.glob("index.sqlite3*")):
        path.unlink()
    worker = open_service(directory)
    worker.settle()
    worker.service.close()


SCENARIOS: dict[str, tuple[Callable[[WorkerSide], object], Callable[[Path], None]]] = {
    "write": (prepare_write, write),
    "pin": (prepare_pins, pin),
    "forget": (prepare_forget, forget),
    "expire": (prepare_expiry, expire),
    "rebuild": (prepare_rebuild, rebuild),
}


def main(scenario: str, work: Path) -> None:
    prepare, act = SCENARIOS[scenario]
    template = work / "template"
    worker = open_service(template, quota_bytes=QUOTA_BYTES)
    prepare(worker)
    worker.service.close()
    for step in range(10_000):
        directory = work / f"{step:03d}"
        shutil.copytree(template, directory)
        child = os.fork()
        if not child:
            _die_before(step)
            act(directory)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        if status != KILLED_STATUS:
            raise SystemExit(f"step {step}: the scenario failed with status {status}")
    raise SystemExit("the scenario never ends")


def _die_before(step: int) -> None:
    steps_left = step

    def count() -> None:
        nonlocal steps_left
        if not steps_left:
            os._exit(KILLED_STATUS)
        steps_left -= 1

    def count_statement(sql: str) -> None:
        if sql.startswith("COMMIT"):
            count()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*arguments: Any, **named: Any) -> Any:
            if name != "open" or arguments[1] & os.O_CREAT:
                count()
            return call(*arguments, **named)

        return replacement

    real_prepare = database._prepare

    def prepare(opened: sqlite3.Connection) -> None:
        opened.set_trace_callback(count_statement)  # called before each statement
        real_prepare(opened)

    database._prepare = prepare
    for name in _PATCHED:
        setattr(os, name, counted(name, getattr(os, name)))


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    main(sys.argv[1], Path(sys.argv[2]))
