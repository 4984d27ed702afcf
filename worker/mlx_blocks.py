# pyright: basic, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""Cut the KV of token runs out of a cache, and build a cache from such cuts.

A block holds, for each group of layers with equal shapes, two arrays `[layers, heads, tokens, head_dim]`: few large
arrays instead of two small ones per layer (Metal bounds the number of buffers). Blocks are detached copies: a view
would keep the whole row alive, and make the next decode step copy it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from worker.prefix_index import BlockUse

if TYPE_CHECKING:  # mlx-lm takes more than a second to import, and block files do without it
    from mlx_lm.models.cache import KVCache

KVArrays = dict[str, mx.array]
"""A block's payload: `keys0`, `values0`, `keys1`, … one pair per group of layers."""

_CAPACITY_STEP = 256


@dataclass(frozen=True)
class KVLayout:
    """Which layers share a shape, in the order their arrays are stacked."""

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, flat: "Sequence[KVCache]", cut: Sequence[int]) -> "KVLayout":
        """Read off the leaves `cut` of caches that hold at least one token."""
        groups: dict[object, list[int]] = {}
        for index in cut:
            keys, values = flat[index].keys_and_values()
            shape = (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype, values.dtype)
            groups.setdefault(shape, []).append(index)
        return cls(tuple(tuple(layers) for layers in groups.values()))

    def cut(self, caches: "Sequence[KVCache]", row: int, start: int, end: int) -> KVArrays:
        """The KV at slots [start, end) of one row, evaluated."""
        arrays: KVArrays = {}
        for group, layers in enumerate(self.groups):
            # A stack of one layer is a view; `contiguous` copies whatever lies in a larger buffer.
            arrays[f"keys{group}"] = mx.contiguous(mx.stack([caches[i].keys[row, :, start:end] for i in layers]))
            arrays[f"values{group}"] = mx.contiguous(mx.stack([caches[i].values[row, :, start:end] for i in layers]))
        mx.eval(arrays)
        return arrays

    def fill(self, caches: "Sequence[KVCache]", uses: Sequence[BlockUse[KVArrays]], capacity_tokens: int) -> None:
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
