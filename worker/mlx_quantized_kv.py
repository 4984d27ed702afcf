# pyright: basic
"""Keys and values of one layer, quantized from the first token on, of one row or of a batch of rows.

A quantized array is three: packed numbers, scales, biases, each with its tokens at axis 2. Tokens are quantized one by
one, along the width of a head, so each of the three can be cut, padded, merged and joined at any token like a plain
one. So a layer is a list of three plain caches of mlx-lm, which keep them: the row's own, or those of its batches. What
cuts blocks, takes rows out or counts bytes opens the list and finds three plain caches.

Attention: one token of each row is answered from the packed numbers (mlx-lm's own quantized attention, which it takes
where a cache has `bits`): that reads the fewest bytes, which is what such a step costs. Where that cannot be (attention
sinks, arithmetic on fetched keys, MLX on CUDA) a step gets what a slice does. A slice of a prompt gets keys
and values dequantized, for the time of one layer, and the fused attention: the other would keep the scores of every
query with every key of every head, and the last query in its products costs as much as the first. Measured at 2,048
tokens of context on two cores, in float32: dequantized, 4 queries take a quarter of the time, 16 to 64 a sixth to an
eighth, and one takes 0.8 to 0.9 of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from protocol.kv_storage import KVQuantization, KVReading

Packed = tuple[mx.array, mx.array, mx.array]
"""Numbers `[rows, heads, tokens, width * bits / 32]`, scales and biases `[rows, heads, tokens, width / group]`."""

_PARTS = 3


class QuantizedKV(CacheList):
    """A layer's cache as models use it. `caches` are three, of packed numbers, scales and biases, in step.

    They are single rows' until `merge` gives one of batches. `reading`: what is fetched for one token of each row.
    `bits` is not there while what was fetched last is plain: mlx-lm takes its presence for the type of what it was
    handed.
    """

    def __init__(
        self, quantization: KVQuantization, reading: KVReading = "quantized", caches: Sequence[Any] | None = None
    ) -> None:
        super().__init__(*(caches or (KVCache() for _ in range(_PARTS))))
        self.quantization = quantization
        self.reading: KVReading = reading
        self._is_packed = reading == "quantized"

    @property
    def bits(self) -> int:
        """Of what was fetched last. Raises AttributeError where that was plain."""
        if not self._is_packed:
            raise AttributeError("what was fetched last is not quantized")
        return self.quantization.bits

    @property
    def group_size(self) -> int:
        return self.quantization.group_size

    @property
    def offset(self) -> Any:
        """Tokens held; of a batch an array, one number for each row."""
        return self.caches[0].offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Keep `[rows, heads, tokens, width]` and give all that is held: `Packed` twice if that was one token, else
        arrays."""
        terms = self.quantization
        new = zip(packed(keys, terms), packed(values, terms), strict=True)
        held = [cache.update_and_fetch(*part) for cache, part in zip(self.caches, new, strict=True)]
        self._is_packed = self.reading == "quantized" and keys.shape[2] == 1
        return self._fetched(held)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What was fetched last, for layers that have no cache of their own."""
        return self._fetched([cache.keys_and_values() for cache in self.caches])

    def _fetched(self, held: Sequence[Any]) -> tuple[Any, Any]:
        keys, values = tuple(part[0] for part in held), tuple(part[1] for part in held)
        if self._is_packed:
            return keys, values
        return unpacked(keys, self.quantization), unpacked(values, self.quantization)

    def make_mask(self, *args: Any, **options: Any) -> Any:
        return self.caches[0].make_mask(*args, **options)

    def extract(self, idx: int) -> "QuantizedKV":
        return QuantizedKV(self.quantization, self.reading, [cache.extract(idx) for cache in self.caches])

    @classmethod
    def merge(cls, caches: "Sequence[QuantizedKV]") -> "QuantizedKV":
        parts = zip(*(cache.caches for cache in caches), strict=True)
        first = caches[0]
        return cls(first.quantization, first.reading, [type(part[0]).merge(list(part)) for part in parts])


class RoundedKV(KVCache):
    """A plain cache of what quantized keys and values stand for. What a model says with it, it must say with them."""

    def __init__(self, quantization: KVQuantization) -> None:
        super().__init__()
        self._terms = quantization

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = (unpacked(packed(plain, self._terms), self._terms) for plain in (keys, values))
        return super().update_and_fetch(keys, values)  # pyright: ignore[reportReturnType]


def packed(plain: mx.array, terms: KVQuantization) -> Packed:
    """`[rows, heads, tokens, width]`, each token by itself."""
    return mx.quantize(plain, group_size=terms.group_size, bits=terms.bits)


def unpacked(parts: Packed, terms: KVQuantization) -> mx.array:
    """What they stand for, in the type that was packed."""
    return mx.dequantize(*parts, group_size=terms.group_size, bits=terms.bits)


def quantized(caches: Sequence[Any], quantization: KVQuantization, reading: KVReading) -> list[Any]:
    """Fresh caches of a row, with those that keep all keys and values plain replaced; the others are as they were."""
    return _replaced(caches, lambda: QuantizedKV(quantization, reading))


def rounded(caches: Sequence[Any], quantization: KVQuantization) -> list[Any]:
    """The same with `RoundedKV`."""
    return _replaced(caches, lambda: RoundedKV(quantization))


def _replaced(caches: Sequence[Any], make: Callable[[], Any]) -> list[Any]:
    replaced: list[Any] = []
    for cache in caches:
        if type(cache) is CacheList:
            replaced.append(CacheList(*_replaced(cache.caches, make)))
        else:
            replaced.append(make() if type(cache) is KVCache else cache)
    return replaced
