# pyright: basic, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""Cut the KV of token runs out of a cache, and build a cache from such cuts.

A block holds, for each group of layers with equal shapes, two arrays `[layers, heads, tokens, head_dim]`: few large
arrays instead of two small ones per layer (Metal bounds the number of buffers). Blocks are detached copies: a view
would keep the whole row alive, and make the next decode step copy it.

A block file holds these arrays and, for models whose layers cannot all be cut, the states kept inside the block, named
`state<tokens>.<leaf>.<part>`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from protocol.ids import GRAIN_TOKENS
from worker.prefix_index import Block, BlockParts, BlockUse, State

KVArrays = dict[str, mx.array]
"""A block's payload: `keys0`, `values0`, `keys1`, … one pair per group of layers."""

_CAPACITY_STEP = 256
_STATE_NAME = re.compile(r"state(\d+)\.(.+)")


@dataclass(frozen=True)
class KVLayout:
    """Which layers share a shape, in the order their arrays are stacked."""

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, flat: Sequence[KVCache], cut: Sequence[int]) -> "KVLayout":
        """Read off the leaves `cut` of caches that hold at least one token."""
        groups: dict[object, list[int]] = {}
        for index in cut:
            keys, values = flat[index].keys_and_values()
            shape = (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype, values.dtype)
            groups.setdefault(shape, []).append(index)
        return cls(tuple(tuple(layers) for layers in groups.values()))

    def cut(self, caches: Sequence[KVCache], row: int, start: int, end: int) -> KVArrays:
        """The KV at slots [start, end) of one row, evaluated."""
        arrays: KVArrays = {}
        for group, layers in enumerate(self.groups):
            # A stack of one layer is a view; `contiguous` copies whatever lies in a larger buffer.
            arrays[f"keys{group}"] = mx.contiguous(mx.stack([caches[i].keys[row, :, start:end] for i in layers]))
            arrays[f"values{group}"] = mx.contiguous(mx.stack([caches[i].values[row, :, start:end] for i in layers]))
        mx.eval(arrays)
        return arrays

    def fill(self, caches: Sequence[KVCache], uses: Sequence[BlockUse[KVArrays]], capacity_tokens: int) -> None:
        """Put the tokens of `uses` into empty single-row caches, with room for `capacity_tokens`."""
        held = sum(use.tokens for use in uses)
        if not held:
            return
        capacity = -(-max(capacity_tokens, held) // _CAPACITY_STEP) * _CAPACITY_STEP
        for group, layers in enumerate(self.groups):
            for position, layer in enumerate(layers):
                caches[layer].keys = _joined(uses, f"keys{group}", position, capacity - held)
                caches[layer].values = _joined(uses, f"values{group}", position, capacity - held)
                caches[layer].offset = held
        mx.eval([caches[layer].state for layers in self.groups for layer in layers])


def block_bytes(arrays: KVArrays) -> int:
    """What a block weighs."""
    return sum(array.nbytes for array in arrays.values())


def _joined(uses: Sequence[BlockUse[KVArrays]], name: str, position: int, spare: int) -> mx.array:
    parts = [use.block.payload[name][position, :, : use.tokens] for use in uses]
    heads, _, width = parts[0].shape
    return mx.concatenate([*parts, mx.zeros((heads, spare, width), parts[0].dtype)], axis=1)[None]


def write_block(path: str, block: Block[KVArrays], tokens: int, metadata: dict[str, str]) -> None:
    """Write the first `tokens` tokens of a block as safetensors. Any thread: the arrays are evaluated already."""
    arrays = {name: _first_tokens(array, tokens) for name, array in block.payload.items()}
    for after, state in block.states.items():
        # Only what ends on the grain grid can be found on disk.
        if after <= tokens and after % GRAIN_TOKENS == 0:
            arrays |= {f"state{after}.{name}": array for name, array in state.payload.items()}
    if not arrays:
        arrays = {"empty": mx.zeros(1)}  # a file must hold something; such a block only says that its tokens are known
    mx.save_safetensors(path, arrays, metadata)


def read_block(path: str, tokens: int) -> BlockParts[KVArrays]:
    """The first `tokens` tokens of a block file, evaluated here, so that any thread may use them.

    Raises ValueError or RuntimeError for a file that is no such block.
    """
    loaded: KVArrays = mx.load(path)  # pyright: ignore[reportAssignmentType] - safetensors give a dict
    kv: KVArrays = {}
    states: dict[int, KVArrays] = {}
    if not loaded:
        raise ValueError("a block file without arrays")
    for name, array in loaded.items():
        if match := _STATE_NAME.fullmatch(name):
            if int(match[1]) <= tokens:
                states.setdefault(int(match[1]), {})[match[2]] = array
        elif name != "empty":
            kv[name] = _first_tokens(array, tokens)
    mx.eval(kv, states)
    return BlockParts(
        payload=kv,
        kv_bytes=block_bytes(kv),
        states={after: State(arrays, block_bytes(arrays)) for after, arrays in states.items()},
    )


def _first_tokens(array: mx.array, tokens: int) -> mx.array:
    held = array.shape[2]
    if held < tokens:
        raise ValueError(f"a block of {held} tokens instead of {tokens}")
    return array if held == tokens else mx.contiguous(array[:, :, :tokens])
