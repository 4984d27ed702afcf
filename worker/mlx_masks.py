# pyright: basic
"""What the grammars of some rows allow next, as one array for the draw of all."""

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from worker.sequence import Matcher


def allowed_tokens(matchers: Mapping[int, Matcher], shape: tuple[int, ...]) -> mx.array:
    """`shape [rows, vocabulary]` of bool: whether a row may draw a token. Rows without a matcher may draw any.

    Bits are unpacked here and not on the device: it computes the logits meanwhile, and an array of bool is one select.
    """
    allowed = np.ones(shape, np.bool_)
    for row, matcher in matchers.items():
        mask = matcher.next_mask()
        if mask is None:
            continue
        bits = np.frombuffer(mask, np.uint8)
        allowed[row] = np.unpackbits(bits, count=shape[1], bitorder="little")
    return mx.array(allowed)  # pyright: ignore[reportArgumentType] - numpy arrays are taken
