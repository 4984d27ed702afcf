"""Who leaves: laws over any forest."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from cachestore.eviction import Candidate, plan_eviction


class ListedForest:
    """A forest of plain values. `parents[n]` is an earlier block or None."""

    def __init__(self, parents: list[int | None], sizes: list[int], uses: list[int]) -> None:
        self.blocks = [
            Candidate(
                block=number,
                parent=parent,
                children=parents.count(number),
                file_bytes=sizes[number],
                last_used=uses[number],
            )
            for number, parent in enumerate(parents)
        ]

    def leaves(self) -> Iterator[Candidate]:
        return iter(sorted((b for b in self.blocks if not b.children), key=lambda block: block.last_used))

    def candidate(self, block: int) -> Candidate:
        return self.blocks[block]


@st.composite
def forests(draw: st.DrawFn) -> ListedForest:
    count = draw(st.integers(0, 12))
    parents = [draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None for number in range(count)]
    sizes = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    uses = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return ListedForest(parents, sizes, uses)


@given(forests(), st.sets(st.integers(0, 11)), st.integers(0, 150))
def test_eviction_frees_enough_or_nothing_never_a_pinned_block_never_a_parent_before_its_child(forest, pinned, needed):
    """Also: it names no block twice, stops as soon as it has enough, and declines only what cannot be done."""
    plan = plan_eviction(needed, forest, pinned.__contains__)
    held = set(pinned)  # what cannot go: the pinned and all above them
    for block in reversed(forest.blocks):
        if block.block in held and block.parent is not None:
            held.add(block.parent)
    possible_bytes = sum(block.file_bytes for block in forest.blocks if block.block not in held)
    if plan is None:
        assert possible_bytes < needed
        return
    names = [victim.block for victim in plan]
    assert len(set(names)) == len(names)
    assert not set(names) & held
    assert sum(victim.file_bytes for victim in plan) >= needed
    assert sum(victim.file_bytes for victim in plan[:-1]) < needed or not plan
    for at, victim in enumerate(plan):
        children = {block.block for block in forest.blocks if block.parent == victim.block}
        assert children <= set(names[:at])


@given(forests())
def test_the_least_recently_used_leaf_goes_first(forest):
    """At each step no block that could go was used earlier than the one that goes."""
    plan = plan_eviction(sum(block.file_bytes for block in forest.blocks), forest, lambda _: False)
    assert plan is not None
    gone: set[int] = set()
    for victim in plan:
        bare = [
            block
            for block in forest.blocks
            if block.block not in gone
            and not [b for b in forest.blocks if b.parent == block.block and b.block not in gone]
        ]
        assert victim.last_used == min(block.last_used for block in bare)
        gone.add(victim.block)
