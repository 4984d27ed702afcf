# pyright: basic
"""What encoders of several families share: activations, and the mask over padding."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
    "tanh": mx.tanh,
}


def activation(name: Any) -> Callable[[mx.array], mx.array]:
    """By the name that `config.json` gives it. Raises ValueError for an unknown one."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"the activation {name!r} is not known")
    return _ACTIVATIONS[name]


def is_text(lengths: mx.array, longest: int) -> mx.array:
    """(rows, longest) booleans: False is padding, which follows each row's `lengths` tokens."""
    return mx.arange(longest)[None, :] < lengths[:, None]


def attend(queries: mx.array, keys: mx.array, values: mx.array, heads: int, mask: mx.array) -> mx.array:
    """Attention in both directions. (rows, tokens, width) in and out; `mask` is True where a key may be seen, or
    what is added to its score."""
    rows, tokens, width = queries.shape

    def split(x: mx.array) -> mx.array:
        return x.reshape(rows, tokens, heads, width // heads).transpose(0, 2, 1, 3)

    scale = (width // heads) ** -0.5
    seen = mx.fast.scaled_dot_product_attention(split(queries), split(keys), split(values), scale=scale, mask=mask)
    return seen.transpose(0, 2, 1, 3).reshape(rows, tokens, width)
