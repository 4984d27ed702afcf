# pyright: basic
"""No mask for a decode step of rows that have nothing to hide.

mlx-lm's batch cache masks the padding of rows that are shorter than the longest, and makes that mask also when there is
no padding: of a row alone, or of rows of one length. It costs: MLX's CUDA build has no fused attention for a mask that
is an array, and a step without one took 19 to 25 % less there (one H200, 8B in bf16, 1 to 16 rows of one length).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache


class UnpaddedRows(BatchKVCache):
    """A batch cache of rows that all hold as many tokens: one token of each sees every key there is."""

    def make_mask(self, N: int, *args: Any, **options: Any) -> mx.array | None:
        """As mlx-lm's, which models call with `return_array` and `window_size` by name."""
        if N == 1 and not args and not options.get("return_array") and options.get("window_size") is None:
            return None
        return super().make_mask(N, *args, **options)


def mask_padding_only(caches: Sequence[Any], held: Sequence[int]) -> None:
    """Tell batch caches, whose rows hold so many tokens each, whether they need a mask. Call it whenever a row came or
    went; steps add as much to each row, so they change nothing. Other kinds of caches are left alone."""
    for cache in caches:
        if type(cache) in (BatchKVCache, UnpaddedRows):
            is_unpadded = all(tokens == cache._idx for tokens in held)  # noqa: SLF001 - it has no other name
            cache.__class__ = UnpaddedRows if is_unpadded else BatchKVCache
