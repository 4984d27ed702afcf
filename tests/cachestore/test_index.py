"""The index against a model that is a plain dict, for any order of changes."""

import itertools
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachestore.eviction import plan_eviction
from cachestore.index import BlockIndex
from cachestore.index_rows import NewBlock, StrayRow
from protocol.ids import BlockKey, Grain
from tests.cachestore.block_files import FINGERPRINT, PER_BLOCK, chain, slot

_A = chain("a", 48)
CHAINS = [
    _A,
    chain("b", 30, after=_A[:20]),
    chain("c", 12, after=_A[:16]),
    chain("d", 20, after=_A[:32]),
    chain("e", 40),
    _A[:5],
    _A[:37],
]
FINGERPRINTS = [FINGERPRINT, "other"]


class IndexMachine(RuleBasedStateMachine):
    """What is found is what was inserted and not deleted; all counts are exact; a reopen changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "index.sqlite3"
        self.index = BlockIndex(self.path, 1)
        self.model: dict[tuple[str, bytes], tuple[bytes, tuple[Grain, ...], int]] = {}
        self.sizes = itertools.cycle([3, 5, 8])

    def teardown(self) -> None:
        self.index.close()
        self.directory.cleanup()

    @rule(fingerprint=st.sampled_from(FINGERPRINTS), grains=st.sampled_from(CHAINS), number=st.integers(0, 2))
    def insert(self, fingerprint: str, grains: tuple[Grain, ...], number: int) -> None:
        parent, own = slot(grains, number)
        if not own or (fingerprint, own[-1]) in self.model:
            return
        file_bytes = next(self.sizes)
        self.index.insert(
            NewBlock(
                fingerprint=fingerprint,
                key=BlockKey(own[-1]),
                parent=parent,
                grains=own,
                file_bytes=file_bytes,
                checksum=bytes(16),
            )
        )
        self.model[fingerprint, own[-1]] = (parent, own, file_bytes)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_with_all_below(self, data: st.DataObject) -> None:
        fingerprint, key = data.draw(st.sampled_from(sorted(self.model)))
        row = self.index.find(fingerprint, BlockKey(key))
        assert row is not None
        below = self.index.descendants(row)
        wanted = {key}
        while more := {
            k
            for (f, k), (parent, _, _) in self.model.items()
            if f == fingerprint and parent in wanted and k not in wanted
        }:
            wanted |= more
        assert {r.key for r in below} | {key} == wanted
        for at, r in enumerate(below):
            assert r.key not in {later.parent for later in below[at + 1 :]}
        self.index.delete([*below, row])
        for gone in wanted:
            del self.model[fingerprint, gone]

    @rule(needed_bytes=st.integers(1, 30), pinned=st.sets(st.integers(1, 20)))
    def evict(self, needed_bytes: int, pinned: set[int]) -> None:
        before_bytes = self.index.block_bytes
        plan = plan_eviction(needed_bytes, self.index, pinned.__contains__)
        if plan is None:
            return
        rows = [self.index.row(victim.block) for victim in plan]
        for row in rows:
            assert row is not None
            assert row.block not in pinned
            current = self.index.row(row.block)
            assert current is not None
            assert current.children == 0
            self.index.delete([current])
            del self.model[row.fingerprint, row.key]
        assert self.index.block_bytes <= before_bytes - needed_bytes

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        fingerprint, key = data.draw(st.sampled_from(sorted(self.model)))
        row = self.index.find(fingerprint, BlockKey(key))
        assert row is not None
        self.index.touch([row.block], 1.0)
        touched = self.index.row(row.block)
        assert touched is not None
        assert touched.last_used > row.last_used

    @rule(path=st.sampled_from("xyz"), file_bytes=st.integers(0, 9))
    def stray(self, path: str, file_bytes: int) -> None:
        self.index.put_stray(StrayRow(path=path, kind="foreign", file_bytes=file_bytes, modified=1))
        if file_bytes == 0:
            self.index.drop_strays([path, path, "never seen"])

    @rule()
    def reopen(self) -> None:
        totals = (self.index.blocks, self.index.block_bytes, self.index.strays, self.index.stray_bytes)
        self.index.close()
        self.index = BlockIndex(self.path, 1)
        assert totals == (self.index.blocks, self.index.block_bytes, self.index.strays, self.index.stray_bytes)

    @rule(
        fingerprint=st.sampled_from(FINGERPRINTS),
        grains=st.sampled_from(CHAINS),
        length=st.integers(0, 48),
        skip_blocks=st.integers(0, 4),
    )
    def walk(self, fingerprint: str, grains: tuple[Grain, ...], length: int, skip_blocks: int) -> None:
        asked = grains[:length]
        found = [(match.row.parent, match.grains) for match in self.index.walk(fingerprint, asked, skip_blocks)]
        assert found == self._expected(fingerprint, asked, skip_blocks)

    def _expected(self, fingerprint: str, asked: tuple[Grain, ...], number: int) -> list[tuple[bytes, int]]:
        expected: list[tuple[bytes, int]] = []
        while True:
            parent, own = slot(asked, number)
            shared = [
                sum(mine == theirs for mine, theirs in zip(own, grains, strict=False))
                for (f, _), (p, grains, _) in self.model.items()
                if f == fingerprint and p == parent
            ]
            deepest = max(shared, default=0)
            if not deepest:
                return expected
            expected.append((parent, deepest))
            if deepest < PER_BLOCK:
                return expected
            number += 1

    @invariant()
    def books_are_exact(self) -> None:
        assert self.index.faults() == []
        assert self.index.blocks == len(self.model)
        assert self.index.block_bytes == sum(file_bytes for _, _, file_bytes in self.model.values())


IndexMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase


def test_a_long_chain_is_walked_to_its_end(tmp_path):
    """A walk asks for keys in chunks, and a chain may end before, at or after any chunk's end."""
    index = BlockIndex(tmp_path / "index.sqlite3", 1)
    grains = chain("long", 16 * 300)
    for number in range(300):
        parent, own = slot(grains, number)
        index.insert(
            NewBlock(
                fingerprint=FINGERPRINT,
                key=BlockKey(own[-1]),
                parent=parent,
                grains=own,
                file_bytes=1,
                checksum=bytes(16),
            )
        )
    for blocks in (1, 15, 16, 17, 143, 144, 145, 299, 300):
        assert len(index.walk(FINGERPRINT, grains[: blocks * 16], 0)) == blocks
        assert len(index.walk(FINGERPRINT, grains, blocks)) == 300 - blocks
    index.close()
