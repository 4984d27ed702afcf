# pyright: basic
"""Which parts of a model's cache can be cut at a token, and how to keep and take up again the parts that cannot.

A plain KV cache (and the latent one of MLA) can be cut anywhere. A sliding window, a chunk window and recurrent state
cannot: what they hold after one token is kept whole, as a *state*, and only from there can they go on.
Decided from the cache objects that mlx-lm makes, not from the model's name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

StateArrays = dict[str, mx.array]
"""A state: `<leaf>.<part>` to array, detached and evaluated. Plain numbers travel as one int64 array `numbers`."""


@dataclass(frozen=True)
class CacheShape:
    """Indices into `leaves(caches)`: those that can be cut, and those whose whole state must be kept.

    `reason` is not empty when neither works for some leaf; then nothing of the model can be reused.
    """

    cut: tuple[int, ...]
    stateful: tuple[int, ...]
    reason: str = ""


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches themselves, in order, with lists of them opened. Works for single-row and for batch caches."""
    flat: list[Any] = []
    for cache in caches:
        flat += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return flat


def shape_of(caches: Sequence[Any]) -> CacheShape:
    """Read off a fresh set of single-row caches."""
    cut: list[int] = []
    stateful: list[int] = []
    unknown: set[str] = set()
    for index, leaf in enumerate(leaves(caches)):
        kind = type(leaf)
        if kind is KVCache:
            cut.append(index)
        elif kind in (ArraysCache, ChunkedKVCache) or (kind is RotatingKVCache and leaf.keep == 0):
            stateful.append(index)
        else:
            unknown.add(kind.__name__)
    reason = (
        f"layers keep their state in {', '.join(sorted(unknown))}, which cannot be taken up again" if unknown else ""
    )
    return CacheShape(tuple(cut), tuple(stateful), reason)


def snapshot(flat: Sequence[Any], shape: CacheShape) -> StateArrays:
    """What the stateful leaves of one row hold now."""
    arrays: StateArrays = {}
    for index in shape.stateful:
        for name, array in _parts(flat[index]).items():
            arrays[f"{index}.{name}"] = mx.contiguous(array)
    mx.eval(arrays)
    return arrays


def row_snapshot(flat: Sequence[Any], shape: CacheShape, row: int) -> StateArrays:
    """The same for one row of a decode batch."""
    singles = {index: flat[index].extract(row) for index in shape.stateful}
    return snapshot([singles.get(index, leaf) for index, leaf in enumerate(flat)], shape)


def resume(flat: Sequence[Any], shape: CacheShape, arrays: StateArrays) -> None:
    """Put a state into fresh single-row caches."""
    for index in shape.stateful:
        prefix = f"{index}."
        # New array objects: caches write into theirs in place, and the state must stay what it is.
        parts = {name[len(prefix) :]: mx.contiguous(a) for name, a in arrays.items() if name.startswith(prefix)}
        _put(flat[index], parts)


def state_bytes(arrays: StateArrays) -> int:
    """What a state weighs."""
    return sum(array.nbytes for array in arrays.values())


def _parts(leaf: Any) -> dict[str, mx.array]:
    if isinstance(leaf, ArraysCache):
        return {str(slot): array for slot, array in enumerate(leaf.cache) if array is not None}
    if leaf.keys is None:
        return {}
    if isinstance(leaf, RotatingKVCache):
        held = min(leaf.offset, leaf.max_size)
        keys = leaf._temporal_order(leaf.keys)[..., -held:, :]  # noqa: SLF001 - the ring's order is known to it alone
        values = leaf._temporal_order(leaf.values)[..., -held:, :]  # noqa: SLF001
        return {"keys": keys, "values": values, "numbers": mx.array([leaf.offset], mx.int64)}
    keys, values = leaf.keys_and_values()
    return {"keys": keys, "values": values, "numbers": mx.array([leaf.offset, leaf.start_position], mx.int64)}


def _put(leaf: Any, parts: dict[str, mx.array]) -> None:
    if isinstance(leaf, ArraysCache):
        leaf.cache = [parts.get(str(slot)) for slot in range(len(leaf.cache))]
        return
    if not parts:
        return
    numbers: Any = parts["numbers"].tolist()
    leaf.keys, leaf.values, leaf.offset = parts["keys"], parts["values"], numbers[0]
    if isinstance(leaf, RotatingKVCache):
        leaf._idx = leaf.keys.shape[2]  # noqa: SLF001 - in temporal order the next slot is the end
    else:
        leaf.start_position = numbers[1]
