# pyright: basic
"""What a row's KV takes, measured on caches that hold some tokens."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import ArraysCache

from worker.live_kv import KVFootprint, Window


def footprint_of(flat: Sequence[Any]) -> KVFootprint:
    """Read off the leaves of single-row caches that hold at least one token.

    A layer of a kind that is not known is taken to keep everything: rather too much than too little.
    """
    bytes_per_token = fixed_bytes = 0
    windows: dict[int, int] = {}
    for leaf in flat:
        if isinstance(leaf, ArraysCache):
            fixed_bytes += sum(array.nbytes for array in leaf.cache if array is not None)
            continue
        of_token = -(-leaf.nbytes // leaf.keys.shape[2])
        tokens = getattr(leaf, "max_size", None) or getattr(leaf, "chunk_size", None)
        if tokens is None:
            bytes_per_token += of_token
        else:
            windows[tokens] = windows.get(tokens, 0) + of_token
    return KVFootprint(
        bytes_per_token=bytes_per_token,
        windows=tuple(Window(tokens, of_token) for tokens, of_token in sorted(windows.items())),
        fixed_bytes=fixed_bytes,
    )
