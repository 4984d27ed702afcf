# pyright: basic
"""One forward pass over a slice of a prompt and, behind it, one token of each decoding row.

A pass reads every weight once, however few tokens it has; a slice and a decode step apart read them twice. So the
inputs are packed along the sequence, `[1, tokens + rows]`: norms, projections and MLPs do not care whose token is
whose. What cares is told apart in three places:

- *positions*: each `rope` module of the model turns every token by a position of its own, as if each were a row;
- *attention*: the model's module binds `scaled_dot_product_attention` by name, and that name is bound to a function
  that answers for the slice from the prompt's cache and for the rows from the batch's, each with the mask it would
  have had alone;
- *the last layer* runs the two parts one after the other and hands on only the rows. Nothing waits for what the slice
  says there, so it is not computed, and neither is its output layer.

All three pass everything else on untouched. Whether a model can be run like this is seen from its structure
(`prepare`), and then proved by comparing logits (`fault`): a family that does arithmetic of its own on masks, positions
or fetched keys raises there or differs.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache, KVCache

from worker import mlx_cpu

_ATTENTION = "scaled_dot_product_attention"

_TOLERANCE = 0.02
"""Of the largest logit: the noise of bf16, and far below what a wrong position or a wrong row does."""

_TEST_PROMPT = 6
_TEST_SLICE = 9
_TEST_ROWS = (5, 3)
"""Tokens that a prompt holds, that its slice has, and that each row holds: unequal, so that a mix-up shows."""

CANNOT = (TypeError, ValueError, AttributeError, NotImplementedError, IndexError, KeyError)
"""What a model raises that does not take a packed pass."""


@dataclass(frozen=True)
class _Positions:
    """`[tokens + rows]`: where each token stands in its own sequence. Lazy."""

    of_each: mx.array


@dataclass(frozen=True)
class _Pair:
    """Something of the slice and the same of the rows: masks, or fetched keys or values."""

    tokens: int
    slice: Any
    rows: Any

    @property
    def dtype(self) -> Any:
        return self.slice.dtype


class PackedCache:
    """One layer's caches in one pass: the prompt's own for the first `tokens`, the batch's for the rows behind them."""

    def __init__(self, tokens: int, prompt: KVCache, rows: BatchKVCache, offset: _Positions) -> None:
        self.tokens = tokens
        self.prompt = prompt
        self.rows = rows
        self.offset = offset

    def make_mask(self, _length: int, **options: Any) -> Any:
        return _Pair(self.tokens, self.prompt.make_mask(self.tokens, **options), self.rows.make_mask(1, **options))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        slice_keys, row_keys = _split(keys, self.tokens)
        slice_values, row_values = _split(values, self.tokens)
        slice_keys, slice_values = self.prompt.update_and_fetch(slice_keys, slice_values)
        row_keys, row_values = self.rows.update_and_fetch(row_keys, row_values)
        return _Pair(self.tokens, slice_keys, row_keys), _Pair(self.tokens, slice_values, row_values)


def packed_pass(
    model: nn.Module, slice_ids: list[int], row_inputs: mx.array, prompt: list[Any], rows: list[Any]
) -> mx.array:
    """Run both through `model`; gives the logits of the rows, `[rows, vocabulary]`, lazy.

    `row_inputs` is `[rows]`; `prompt` and `rows` are the caches of all layers, which hold one token more of each row
    and the slice afterwards. Both must be evaluated by the caller.
    """
    inputs = mx.concatenate([mx.array(slice_ids, row_inputs.dtype), row_inputs])[None]
    start, tokens = prompt[0].offset, len(slice_ids)
    # All layers stand at the same token, so they share this.
    positions = _Positions(mx.concatenate([mx.arange(start, start + tokens), rows[0].offset]))
    mlx_cpu.stand_at(positions.of_each)
    caches = [PackedCache(tokens, one, batch, positions) for one, batch in zip(prompt, rows, strict=True)]
    return model(inputs, cache=caches)[0]


def prepare(model: nn.Module, caches: list[Any]) -> str:
    """Make `model` take packed passes. Empty, or why its structure does not allow that: then it is as it was.

    `caches` are a prompt's, as the model makes them.
    """
    if not all(type(cache) is KVCache for cache in caches):
        return "not every layer keeps plain keys and values"
    layers = getattr(model, "layers", None)
    if not layers or len(layers) != len(caches) or not all(isinstance(layer, nn.Module) for layer in layers):
        return "its layers are not where they are looked for"
    ropes = {id(rope): rope for _, module in model.named_modules() if isinstance(rope := _rope(module), nn.Module)}
    if not ropes:
        return "it has no rotary positions"
    names = {type(module).__module__ for _, module in model.named_modules()}
    binding = [module for name in names if hasattr(module := sys.modules.get(name), _ATTENTION)]
    if not binding:
        return "its attention is its own"
    for module in binding:
        attention = getattr(module, _ATTENTION)
        if not hasattr(attention, "splits"):
            setattr(module, _ATTENTION, _splitting(attention))
    for rope in ropes.values():
        _intercept(rope, _turn)
    _intercept(layers[-1], _rows_only)
    return ""


def fault(model: nn.Module, make_caches: Callable[[], list[Any]], vocabulary_size: int) -> str:
    """Compare a packed pass with the same work done apart. Empty when logits agree."""
    tokens = [(7 * i + 3) % min(vocabulary_size, 997) for i in range(_TEST_PROMPT + _TEST_SLICE)]
    whole = make_caches()
    model(mx.array([tokens[:_TEST_PROMPT]]), cache=whole)
    mx.eval([cache.state for cache in whole])

    def holding(count: int) -> list[Any]:
        caches = copy.deepcopy(whole)
        for cache in caches:
            cache.trim(_TEST_PROMPT - count)
        return caches

    inputs = mx.array([5, 11, 2], mx.uint32) % vocabulary_size
    seen: list[mx.array] = []
    for way in ("apart", "packed"):
        prompt, held = holding(_TEST_PROMPT), [holding(count) for count in _TEST_ROWS]
        rows = [type(layer[0]).merge(list(layer)) for layer in zip(*held, strict=True)]
        if way == "apart":
            model(mx.array([tokens[_TEST_PROMPT:]]), cache=prompt)
            logits = model(inputs[:-1, None], cache=rows)[:, -1]
        else:
            logits = packed_pass(model, tokens[_TEST_PROMPT:], inputs[:-1], prompt, rows)
        # What it left in the caches shows in the step after it, for which the prompt joins the rows.
        for cache, joining in zip(rows, prompt, strict=True):
            cache.extend(type(joining).merge([joining]))
        after = model(inputs[:, None], cache=rows)[:, -1]
        seen.append(mx.concatenate([logits, after]).astype(mx.float32))
    worst = float(mx.max(mx.abs(seen[0] - seen[1])).item())  # pyright: ignore[reportArgumentType]
    scale = float(mx.max(mx.abs(seen[0])).item())  # pyright: ignore[reportArgumentType]
    return "" if worst <= _TOLERANCE * scale else f"logits differ by {worst:.3g} of {scale:.3g}"


def _rope(module: nn.Module) -> Any:
    return module.get("rope")


def _split(x: mx.array, tokens: int) -> tuple[mx.array, mx.array]:
    """`[1, heads, tokens + rows, width]` → `[1, heads, tokens, width]` and, as a batch, `[rows, heads, 1, width]`."""
    return x[:, :, :tokens], x[:, :, tokens:].transpose(2, 1, 0, 3)


def _joined(of_slice: mx.array, of_rows: mx.array) -> mx.array:
    return mx.concatenate([of_slice, of_rows.transpose(2, 1, 0, 3)], axis=2)


def _splitting(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attend(queries: Any, keys: Any, values: Any, *args: Any, **options: Any) -> mx.array:
        if not isinstance(keys, _Pair):
            return attention(queries, keys, values, *args, **options)
        cache, mask = options.pop("cache"), options.pop("mask")
        if not isinstance(mask, _Pair):
            raise TypeError("a packed pass with a mask of the model's own")
        of_slice, of_rows = _split(queries, keys.tokens)
        return _joined(
            attention(of_slice, keys.slice, values.slice, cache=cache.prompt, mask=mask.slice, **options),
            attention(of_rows, keys.rows, values.rows, cache=cache.rows, mask=mask.rows, **options),
        )

    attend.splits = True  # pyright: ignore[reportFunctionMemberAccess]
    return attend


def _intercept(module: nn.Module, instead: Callable[..., mx.array]) -> None:
    """Let `instead(call, …)` answer calls of this one module, whose attributes and parameters stay where they are."""
    original = type(module)
    if getattr(original, "intercepted", None) is instead:
        return

    def call(self: Any, *args: Any, **options: Any) -> mx.array:
        return instead(lambda *a, **o: original.__call__(self, *a, **o), *args, **options)

    named = {"__module__": original.__module__, "__call__": call, "intercepted": staticmethod(instead)}
    module.__class__ = type(original.__name__, (original,), named)


def _turn(rope: Callable[..., mx.array], x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
    if not isinstance(offset, _Positions):
        return rope(x, offset=offset, **options)
    return rope(x.transpose(2, 1, 0, 3), offset=offset.of_each, **options).transpose(2, 1, 0, 3)


def _rows_only(layer: Callable[..., Any], x: mx.array, *args: Any, **options: Any) -> Any:
    caches = [each for each in (*args, *options.values()) if isinstance(each, PackedCache)]
    if not caches:
        return layer(x, *args, **options)
    tokens = caches[0].tokens

    def part(each: Any, name: str) -> Any:
        if isinstance(each, PackedCache):
            return each.prompt if name == "slice" else each.rows
        return getattr(each, name) if isinstance(each, _Pair) else each

    def run(hidden: mx.array, name: str) -> Any:
        return layer(hidden, *(part(a, name) for a in args), **{key: part(o, name) for key, o in options.items()})

    run(x[:, :tokens], "slice")
    return run(x[:, tokens:].transpose(1, 0, 2), "rows").transpose(1, 0, 2)
