"""Chains are written whole or not at all, by what the whole of them costs to read."""

from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import BLOCK_TOKENS, BlockKey
from worker.chain_worth import is_read_sooner, worth_writing
from worker.cost_model import PrefillCost
from worker.prefix_index import Block

Kv = tuple[()]
ROOT = BlockKey(b"root")


def block(number: int, parent: int | None, size_bytes: int) -> Block[Kv]:
    above = ROOT if parent is None else BlockKey(b"%d" % parent)
    return Block(BlockKey(b"%d" % number), above, 0, (number,), (), (), size_bytes)


@st.composite
def trees(draw: st.DrawFn) -> dict[BlockKey, Block[Kv]]:
    """Blocks by their keys, each below an earlier one or below the root."""
    made: dict[BlockKey, Block[Kv]] = {}
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        one = block(number, parent, draw(st.integers(0, 50)))
        made[one.key] = one
    return made


@given(tree=trees(), data=st.data())
def test_a_chain_is_written_if_some_end_of_it_is_worth_it(tree: dict[BlockKey, Block[Kv]], data: st.DataObject) -> None:
    """What comes out is each wanted block with all that is above it, parents first and nothing twice; each was asked
    for with the size of its whole chain."""
    given_blocks = data.draw(st.lists(st.sampled_from(list(tree.values())), unique_by=lambda one: one.key))
    most_bytes = data.draw(st.integers(0, 200))

    def chain(one: Block[Kv]) -> list[BlockKey]:
        above = tree.get(one.parent)
        return [*(chain(above) if above is not None else ()), one.key]

    def is_wanted(one: Block[Kv], size_bytes: int) -> bool:
        assert size_bytes == sum(tree[key].size_bytes for key in chain(one))
        return size_bytes <= most_bytes

    worth = [one.key for one in worth_writing(given_blocks, lambda one: tree.get(one.parent), is_wanted)]

    sizes = {one.key: sum(tree[key].size_bytes for key in chain(one)) for one in given_blocks}
    assert set(worth) == {key for one in given_blocks if sizes[one.key] <= most_bytes for key in chain(one)}
    assert len(worth) == len(set(worth))
    for key in worth:
        assert all(worth.index(above) < worth.index(below) for above, below in pairwise(chain(tree[key])))


@pytest.mark.parametrize(
    ("file_bytes", "context", "attention", "faster"),
    [
        (256, 0, 0.0, "reading"),
        (257, 0, 0.0, "computing"),
        (280, 0, 1e-5, "reading"),
        (300, 0, 1e-5, "computing"),
        (300, 256, 1e-5, "reading"),
    ],
)
def test_reading_is_weighed_against_computing(
    file_bytes: int, context: int, attention: float, faster: Literal["reading", "computing"]
) -> None:
    """A block of 256 tokens at a hundred of them a second, more slowly behind a context, from a disk that gives a
    hundred bytes a second. A draw is read: the device has other things to do."""
    prefill = PrefillCost(fixed=0.0, token=0.01, attention=attention)
    assert is_read_sooner(file_bytes, BLOCK_TOKENS, context, 100.0, prefill) is (faster == "reading")
