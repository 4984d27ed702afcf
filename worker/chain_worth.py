"""Which blocks are worth writing: those of chains that are read sooner than they are computed. Pure.

Decided for a chain and never for one of its blocks. A block is useless without those above it; and a state, which
stands in one block, saves all the tokens before it.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from protocol.ids import GRAIN_TOKENS, BlockKey
from worker.cost_model import PrefillCost
from worker.prefix_index import Block, Boundary

Payload = TypeVar("Payload")


def is_read_sooner(file_bytes: int, tokens: int, context: int, bytes_per_second: float, prefill: PrefillCost) -> bool:
    """Whether to read so much takes no longer than to compute the `tokens` behind `context` for which it stands."""
    return file_bytes / bytes_per_second <= prefill.seconds(tokens, context)


def tokens_saved(block: Block[Payload], boundary: Boundary) -> int:
    """How many tokens of a prompt need not be computed when the chain is read up to this block. 0: it is of no use
    there, though perhaps to what is below it."""
    if boundary == "any_token":
        return block.start + len(block.grains) * GRAIN_TOKENS
    last = max(_states_on_disk(block), default=0)
    return block.start + last if last else 0


def file_bytes(block: Block[Payload]) -> int:
    """About how large its file is."""
    return block.kv_bytes + sum(block.states[after].size_bytes for after in _states_on_disk(block))


def worth_writing(
    blocks: Sequence[Block[Payload]],
    parent_of: Callable[[Block[Payload]], Block[Payload] | None],
    is_wanted: Callable[[Block[Payload], int], bool],
) -> list[Block[Payload]]:
    """Those blocks, and what is above them, that some wanted chain is made of; parents first, else in this order.

    `is_wanted(block, size_bytes)` is asked of each block with the size of the files of the chain that ends with it.
    """
    sizes: dict[BlockKey, int] = {}
    wanted: set[BlockKey] = set()
    for block in blocks:
        unknown = _up_to(block, sizes, parent_of)
        above = parent_of(unknown[-1]) if unknown else None
        size_bytes = sizes[above.key] if above is not None else 0
        for one in reversed(unknown):
            size_bytes += file_bytes(one)
            sizes[one.key] = size_bytes
        if is_wanted(block, sizes[block.key]):
            wanted.update(one.key for one in _up_to(block, wanted, parent_of))
    listed: dict[BlockKey, Block[Payload]] = {}
    for block in blocks:
        if block.key in wanted:
            listed |= {one.key: one for one in reversed(_up_to(block, listed, parent_of))}
    return list(listed.values())


def _states_on_disk(block: Block[Payload]) -> list[int]:
    """After which of its tokens there is a state that can be found on disk: those on the grain grid."""
    return [after for after in block.states if after % GRAIN_TOKENS == 0]


def _up_to(
    block: Block[Payload],
    known: "dict[BlockKey, int] | dict[BlockKey, Block[Payload]] | set[BlockKey]",
    parent_of: Callable[[Block[Payload]], Block[Payload] | None],
) -> list[Block[Payload]]:
    """The block and what is above it, up to the first that is known."""
    path: list[Block[Payload]] = []
    at: Block[Payload] | None = block
    while at is not None and at.key not in known:
        path.append(at)
        at = parent_of(at)
    return path
