"""What survives a kill at any moment: see crash_points, which makes the directories that are judged here."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cachestore import disk
from cachestore.layout import parse_block_name
from protocol.ids import BlockKey
from tests.cachestore.block_files import FINGERPRINT, WorkerSide, block_paths, open_service
from tests.cachestore.crash_points import BRANCH, EVICTABLE, KEPT, LONG, MANY, QUOTA_BYTES, SHORT

ROOT = Path(__file__).parents[2]


def outcomes(scenario: str, work: Path, *, at_least: int) -> Iterator[tuple[Path, WorkerSide]]:
    """Every directory a kill leaves, and a fresh service on it; all blocks sound, books exact, quota kept."""
    subprocess.run([sys.executable, "-m", "tests.cachestore.crash_points", scenario, work], cwd=ROOT, check=True)
    left = sorted(path for path in work.iterdir() if path.name.isdigit())
    assert len(left) >= at_least, "it has too few steps to prove anything"
    for directory in left:
        worker = open_service(directory, quota_bytes=QUOTA_BYTES)
        worker.check()
        for path in block_paths(directory):
            inspected = disk.inspect(path)
            assert parse_block_name(path.name) == (inspected.metadata.key, inspected.checksum), directory.name
        assert not list(directory.glob("*/staging/*"))
        yield directory, worker
        worker.check()
        worker.service.close()


def found(worker: WorkerSide, grains) -> list[int]:
    return [block.grains for block in worker.read(grains)]


def test_a_kill_before_any_step_of_a_write_loses_no_block_but_the_one_in_flight(tmp_path):
    """For every step of opening, evicting, publishing, superseding: the old tail stays until the new one is there."""
    lengths: list[int] = []
    evicted: list[bool] = []
    for directory, worker in outcomes("write", tmp_path, at_least=20):
        assert found(worker, KEPT) == [16, 16], directory.name
        [tail] = worker.read(LONG)
        lengths.append(tail.grains)
        evicted.append(worker.read(EVICTABLE) == ())
    assert set(lengths) == {len(SHORT), len(LONG)}
    assert lengths == sorted(lengths), "once the new block was there, a later kill lost it"
    assert evicted[-1], "the write did not evict, so the test proves nothing about eviction"


def test_a_kill_before_any_step_of_pinning_leaves_a_set_as_it_was_or_as_it_should_be(tmp_path):
    """A set names one prefix or the other, never none, never both; no block is held by a set that is not there."""
    seen: list[tuple[tuple[str, int], ...]] = []
    for _, worker in outcomes("pin", tmp_path, at_least=5):
        seen.append(tuple((pins.name, pins.blocks) for pins in worker.books().pins))
        assert found(worker, KEPT) == [16, 16]
        assert found(worker, EVICTABLE) == [16]
    assert list(dict.fromkeys(seen)) == [(("first", 2),), (("first", 1),), (("first", 1), ("second", 2))]
    assert seen[-1] == (("first", 1),)


def test_a_kill_before_any_step_of_forgetting_deletes_nothing_of_others_and_nothing_without_its_line(tmp_path):
    """What is gone stands in the audit log; what was hidden while it was read is gone after the restart."""
    lines: list[int] = []
    for directory, worker in outcomes("forget", tmp_path, at_least=10):
        assert found(worker, EVICTABLE) == [16]
        mine = [*found(worker, KEPT), *found(worker, LONG)]
        log = directory / "audit.log"
        whole = [line for line in log.read_text().splitlines() if line] if log.exists() else []
        lines.append(len(whole))
        if mine != [16, 16, 9]:
            assert json.loads(whole[0])["blocks"] == 3
    assert (lines[0], lines[-1]) == (0, 1)
    assert mine == []


def test_a_kill_before_any_step_of_expiry_never_takes_a_parent_before_its_child(tmp_path):
    """Every block on disk has its parent there; what has no end stays."""
    counts: list[int] = []
    for directory, worker in outcomes("expire", tmp_path, at_least=6):
        assert found(worker, EVICTABLE) == [16]
        paths = {parsed[0] for path in block_paths(directory) if (parsed := parse_block_name(path.name))}
        for prefix in (KEPT, BRANCH):
            assert prefix[31] not in paths or prefix[15] in paths, directory.name
        counts.append(worker.books().blocks)
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (4, 1)


def test_a_kill_before_any_step_of_rebuilding_a_lost_index_costs_nothing(tmp_path):
    """However far it came, the next start finishes it: every block, its owner and its time."""
    for directory, worker in outcomes("rebuild", tmp_path, at_least=10):
        store = worker.service.store
        assert store is not None
        for grains in MANY:
            assert found(worker, grains) == [16, 4], directory.name
            row = store.index.find(FINGERPRINT, BlockKey(grains[-1]))
            assert row is not None
            assert row.owner == "mine"
