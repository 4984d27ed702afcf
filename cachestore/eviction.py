"""Which blocks leave when bytes are needed. Decides only.

Least recently used leaf first; a parent only after all its children, since a child without its parent cannot be found;
never a pinned block. All or nothing: blocks are not thrown away for a write that would be declined all the same.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from msgspec import Struct


class Candidate(Struct, frozen=True, kw_only=True):
    """What the decision needs to know of a block. `parent` is None when the parent is not in the index."""

    block: int
    parent: int | None
    children: int
    file_bytes: int
    last_used: int


class Forest(Protocol):
    """The blocks, as trees."""

    def leaves(self) -> Iterator[Candidate]:
        """Blocks without children, least recently used first."""
        ...

    def candidate(self, block: int) -> Candidate:
        """One block of the forest."""
        ...


def plan_eviction(needed_bytes: int, forest: Forest, is_pinned: Callable[[int], bool]) -> list[Candidate] | None:
    """Blocks to delete, in that order, to free at least `needed_bytes`; None if that many cannot be freed."""
    chosen: list[Candidate] = []
    if needed_bytes <= 0:
        return chosen
    leaves = forest.leaves()
    next_leaf = next(leaves, None)
    bared: list[tuple[int, int, Candidate]] = []  # parents whose last child was chosen, as a heap by last use
    chosen_children: Counter[int] = Counter()
    freed_bytes = 0
    while freed_bytes < needed_bytes:
        if next_leaf is not None and (not bared or next_leaf.last_used <= bared[0][0]):
            victim, next_leaf = next_leaf, next(leaves, None)
        elif bared:
            victim = heapq.heappop(bared)[2]
        else:
            return None
        if is_pinned(victim.block):
            continue
        chosen.append(victim)
        freed_bytes += victim.file_bytes
        if victim.parent is None:
            continue
        chosen_children[victim.parent] += 1
        parent = forest.candidate(victim.parent)
        if chosen_children[victim.parent] == parent.children:
            heapq.heappush(bared, (parent.last_used, parent.block, parent))
    return chosen
