# pyright: basic, reportOptionalMemberAccess=false
"""Whether a model can have its keys and values quantized, found by trying and not by its name.

It is run twice on the same tokens: with quantized caches, and with plain ones that hold what the quantized numbers
stand for. Both must say the same, in slices, alone and in a batch of unequal rows. So what is compared is not what
quantization loses, which was asked for, but what the model does with it. Attention sinks, arithmetic of its own on
fetched keys, layers that read another layer's cache, and MLX's CUDA build, whose quantized product takes few shapes,
raise or differ: then its steps read what was dequantized, which takes time and no memory that stays. Only if that
differs, too, or heads have no groups, keys and values are kept plain.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from protocol.kv_storage import KVGroupSize, KVQuantization, KVReading, KVStorage
from worker.mlx_quantized_kv import quantized, rounded
from worker.mlx_state import leaves

_TOLERANCE = {8: 0.15, 6: 0.2, 4: 0.35}
"""By bits: of the logits' own spread, root mean square. A number near the middle of two steps may be rounded to either,
and the fewer the bits the more that is. Measured on SmolLM2 in bf16: 0.03 to 0.05 at 8 bits, 0.04 to 0.18 at 4 (in
float32 below 0.013); without a mask 0.59 and more."""

_SLICES = (9, 4)
"""Tokens of the prompt; the second slice sees keys of the first."""

_SHORT_ROW = 5
"""Tokens of the row beside it: unequal, so that padding shows."""

_CANNOT = (TypeError, ValueError, AttributeError, NotImplementedError, IndexError, KeyError, RuntimeError)
"""What a model raises that does not take quantized keys and values."""


def choose_kv(model: Any, asked: KVQuantization, *, rows: Literal["padded", "apart"]) -> KVStorage:
    """How this model's keys and values will be kept. `rows` "padded": they decode in batches."""
    plain = make_prompt_cache(model)
    logits = model(mx.zeros((1, 2), mx.int32), cache=plain)
    widths = {array.shape[3] for leaf in leaves(plain) if type(leaf) is KVCache for array in (leaf.keys, leaf.values)}
    if not widths:
        return KVStorage(reason="no layer keeps all its keys and values")
    sizes = [size for size in get_args(KVGroupSize) if size <= asked.group_size and not any(w % size for w in widths)]
    if not sizes:
        wide = ", ".join(map(str, sorted(widths)))
        return KVStorage(reason=f"heads of {wide} numbers cannot be put into groups of {asked.group_size} or fewer")
    quantization = KVQuantization(bits=asked.bits, group_size=max(sizes))
    try_it = partial(_fault, model, quantization, vocabulary_size=logits.shape[-1], rows=rows)
    if not (fault := try_it("quantized")):
        return KVStorage(quantization=quantization)
    if try_it("dequantized"):
        return KVStorage(reason=fault)
    return KVStorage(quantization=quantization, reading="dequantized", reason=fault)


def _fault(
    model: Any,
    quantization: KVQuantization,
    reading: KVReading,
    *,
    vocabulary_size: int,
    rows: Literal["padded", "apart"],
) -> str:
    """Why it cannot be; empty when it can."""

    def make() -> list[Any]:
        return quantized(make_prompt_cache(model), quantization, reading)

    try:
        expected = _says(model, lambda: rounded(make_prompt_cache(model), quantization), vocabulary_size)
        seen = _says(model, make, vocabulary_size)
        if rows == "padded":
            seen += _says_batched(model, make, vocabulary_size)
            expected = [*expected, mx.concatenate(expected[-2:])]
    except _CANNOT as why:
        return f"its attention does not take them ({type(why).__name__}: {str(why)[:200]})"
    for one, other in zip(expected, seen, strict=True):
        if not (off := _difference(one, other)) <= _TOLERANCE[quantization.bits]:
            return f"logits differ by {off:.2g} of their spread from what they stand for"
    return ""


def _says(model: Any, make_caches: Callable[[], list[Any]], vocabulary_size: int) -> list[mx.array]:
    """Last logits `[1, vocabulary]` of each slice, of the token behind them, and of the one behind a shorter prompt."""
    caches, said = make_caches(), []
    ids = _token_ids(sum(_SLICES) + 1, vocabulary_size)
    for start, end in ((0, _SLICES[0]), (_SLICES[0], sum(_SLICES)), (sum(_SLICES), sum(_SLICES) + 1)):
        said.append(_step(model, [ids[start:end]], caches))
    caches = make_caches()
    _step(model, [ids[:_SHORT_ROW]], caches)
    return [*said, _step(model, [ids[-1:]], caches)]


def _says_batched(model: Any, make_caches: Callable[[], list[Any]], vocabulary_size: int) -> list[mx.array]:
    """The last two of the above, `[2, vocabulary]`, in one step."""
    ids = _token_ids(sum(_SLICES) + 1, vocabulary_size)
    prompts = [make_caches(), make_caches()]
    for caches, count in zip(prompts, (sum(_SLICES), _SHORT_ROW), strict=True):
        _step(model, [ids[:count]], caches)
    batch = [type(pair[0]).merge(list(pair)) for pair in zip(*prompts, strict=True)]
    return [_step(model, [ids[-1:], ids[-1:]], batch)]


def _step(model: Any, token_ids: list[list[int]], caches: Sequence[Any]) -> mx.array:
    logits = model(mx.array(token_ids), cache=caches)[:, -1].astype(mx.float32)
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def _token_ids(count: int, vocabulary_size: int) -> list[int]:
    return [(7 * i + 3) % min(vocabulary_size, 997) for i in range(count)]


def _difference(logits: mx.array, others: mx.array) -> float:
    """The worst row's. What all logits of a row have in common says nothing."""
    spread, other = (each - mx.mean(each, axis=-1, keepdims=True) for each in (logits, others))
    squares = mx.sum((spread - other) ** 2, axis=-1) / mx.sum(spread**2, axis=-1)
    return float(mx.sqrt(mx.max(squares)).item())  # pyright: ignore[reportArgumentType]
