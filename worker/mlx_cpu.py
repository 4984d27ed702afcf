# pyright: basic
"""What MLX's CPU build is slow at, done otherwise; on a GPU none of it.

That build computes `exp` one number at a time, at some 10 ns each, and softmax and sigmoid rest on it: at a context of
2,000 tokens softmax alone took half of a pass of SmolLM2. `power(2, x)` goes to the C library and takes 4 ns (mlx
0.32.4). So in float32 `exp(x)` is written as `2 ** (x log2 e)` here, which is the same function to the last bits.

What is not float32, or asks for more, is handed on to MLX.

Attention goes over a few queries at a time, so that their scores stay in the processor's cache, and a causal one does
not look at keys that its queries may not see.

Every layer's `rope` works out the same angles anew, twice: a third of the 4,300 operations of a decode step of SmolLM2,
at some 10 us each. So sines and cosines of a pass are made once (`stand_at`); a step takes 10 % less. What a norm does
number by number is one operation instead of four: 3 % less.

It also gives every array's memory back to the system, and what the system hands out anew has to be cleared, page by
page: 60 ms for the 165 MB of five rows' KV, which are copied when a row joins. Kept, they take 6 ms; the step after a
row joined one of 1,000 tokens takes 65 instead of 92 ms, and a row is parked in 10 instead of 16 ms.
"""

import contextlib
import ctypes
import math
from functools import partial
from typing import Any

import mlx.core as mx

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As glibc's malloc.h has them."""

_KEPT_BYTES = 256 << 20
_KEPT_BYTES_AT_ONCE = 32 << 20
"""The most that glibc takes. An array that is larger goes back to the system; each thread keeps as much."""

_LOG2_E = math.log2(math.e)
_QUERIES_AT_ONCE = 64

_attention = mx.fast.scaled_dot_product_attention
_sigmoid = mx.sigmoid
_rms_norm = mx.fast.rms_norm
_rope = mx.fast.rope


def is_used() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device().type == mx.DeviceType.cpu


def install() -> bool:
    """Replace functions if MLX computes on the CPU; says whether. Call it before a model is loaded or compiled."""
    if not is_used():
        return False
    _keep_freed_memory()
    mx.fast.scaled_dot_product_attention = scaled_dot_product_attention
    mx.fast.rms_norm = rms_norm
    mx.fast.rope = rope
    mx.sigmoid = sigmoid
    return True


def _keep_freed_memory() -> None:
    """Where the C library can be told (glibc)."""
    with contextlib.suppress(AttributeError, OSError):
        tune = ctypes.CDLL(None).mallopt
        tune(_M_MMAP_THRESHOLD, _KEPT_BYTES_AT_ONCE)
        tune(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def sigmoid(a: Any, **others: Any) -> mx.array:
    """As `mx.sigmoid`."""
    if others or not isinstance(a, mx.array) or a.dtype != mx.float32:
        return _sigmoid(a, **others)
    return 1 / (1 + mx.power(mx.array(2.0), a * -_LOG2_E))


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **others: Any) -> mx.array:
    """As `mx.fast.rms_norm`."""
    if others or weight is None or x.dtype != mx.float32 or weight.dtype != mx.float32:
        return _rms_norm(x, weight, eps, **others)
    return _scaled(x, mx.square(x).mean(axis=-1, keepdims=True), weight, mx.array(eps))


@partial(mx.compile, shapeless=True)
def _scaled(x: mx.array, mean_square: mx.array, weight: mx.array, eps: mx.array) -> mx.array:
    return x * mx.rsqrt(mean_square + eps) * weight


def stand_at(offset: mx.array) -> None:
    """Say where the tokens of the next pass stand: one of each row, at `offset [rows]`. `rope` knows this array by its
    identity, so the pass must hand on the array itself, and nobody may write into it meanwhile."""
    global _angles  # `mx.fast.rope` has no argument to hand it in by
    _angles = _Angles(offset)


def rope(a: mx.array, dims: int, **options: Any) -> mx.array:
    """As `mx.fast.rope`, with the angles of the pass where that has been told."""
    is_plain = not options["traditional"] and options.get("stream") is None
    is_one_each = a.dtype == mx.float32 and a.ndim == 4 and a.shape[2] == 1
    if _angles is None or options["offset"] is not _angles.offset or not (is_plain and is_one_each):
        return _rope(a, dims, **options)
    cosines, sines = _angles.of(dims, options["base"], options["scale"], options.get("freqs"))
    half = dims // 2
    turned = _turned(a[..., :dims], mx.concatenate([a[..., half:dims], a[..., :half]], axis=-1), cosines, sines)
    return turned if dims == a.shape[-1] else mx.concatenate([turned, a[..., dims:]], axis=-1)


class _Angles:
    """Of one pass: cosines and sines for each kind of rotation that the model has."""

    def __init__(self, offset: mx.array) -> None:
        self.offset = offset
        self._made: dict[tuple[Any, ...], tuple[mx.array, mx.array, Any]] = {}

    def of(self, dims: int, base: float | None, scale: float, freqs: mx.array | None) -> tuple[mx.array, mx.array]:
        """Each `[rows, 1, 1, dims]`, for both halves of a head; the sines of the first half are negative."""
        key = (dims, base, scale, id(freqs))
        if key not in self._made:
            half = dims // 2
            # Written as MLX does it, so that angles far into a text are the same to the last bit.
            if freqs is not None:
                turns = 1 / freqs
            else:
                turns = mx.exp(mx.arange(0, -half, -1, mx.float32) * (math.log(base or 1.0) / half))
            positions = self.offset.astype(mx.float32) * scale
            angles = positions[:, None, None, None] * turns
            cosines, sines = mx.cos(angles), mx.sin(angles)
            self._made[key] = (
                mx.concatenate([cosines, cosines], axis=-1),
                mx.concatenate([-sines, sines], axis=-1),
                freqs,  # as long as this lives its id is nobody else's
            )
        return self._made[key][:2]


_angles: _Angles | None = None


@partial(mx.compile, shapeless=True)
def _turned(a: mx.array, swapped: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    return a * cosines + swapped * sines


def scaled_dot_product_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any = None, **others: Any
) -> mx.array:
    """As `mx.fast.scaled_dot_product_attention`: `[batch, heads, length, width]`, fewer heads of keys and values."""
    is_plain = all(other is None for other in others.values())
    if not is_plain or any(array.dtype != mx.float32 for array in (queries, keys, values)):
        return _attention(queries, keys, values, scale=scale, mask=mask, **others)
    length, context = queries.shape[2], keys.shape[2]
    queries = queries * (scale * _LOG2_E)
    parts: list[mx.array] = []
    for start in range(0, length, _QUERIES_AT_ONCE):
        end = min(length, start + _QUERIES_AT_ONCE)
        seen: int = context
        rows: Any = mask
        if isinstance(mask, str):
            seen = context - length + end
            rows = None if length == 1 else mx.arange(seen - end + start, seen)[:, None] >= mx.arange(seen)[None]
        elif mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
            rows = mask[..., start:end, :]
        parts.append(_attend(queries[:, :, start:end], keys[:, :, :seen], values[:, :, :seen], rows))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    """`queries` are scaled, to powers of 2."""
    batch, heads, length, width = queries.shape
    kv_heads, context = keys.shape[1:3]
    # Heads that share keys are one product with them; apart, each would read the keys anew.
    exponents = queries.reshape(batch, kv_heads, -1, width) @ keys.swapaxes(-1, -2)
    if mask is not None:
        exponents = _masked(exponents.reshape(batch, heads, length, context), mask)
        exponents = exponents.reshape(batch, kv_heads, -1, context)
    weights = mx.power(mx.array(2.0), exponents - exponents.max(axis=-1, keepdims=True))
    # A product with ones, since MLX sums a row one number at a time as well.
    sums = weights @ mx.ones((context, 1))
    return ((weights @ values) / sums).reshape(batch, heads, length, values.shape[-1])


def _masked(exponents: mx.array, mask: mx.array) -> mx.array:
    if mask.dtype == mx.bool_:
        return mx.where(mask, exponents, mx.finfo(mx.float32).min)
    return exponents + mask * _LOG2_E
