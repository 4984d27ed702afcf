"""How a model's keys and values are kept: as they are computed, or quantized to fewer bits."""

from typing import Literal

from msgspec import Struct

KVBits = Literal[4, 6, 8]
"""Of each key's and value's number. Fewer than 4 lose too much to be of use."""

KVGroupSize = Literal[32, 64, 128]
"""How many neighbouring numbers of one token share a scale and a bias."""


class KVQuantization(Struct, frozen=True, kw_only=True):
    """Affine, along the width of a head: what a token becomes depends on no other token."""

    bits: KVBits
    group_size: KVGroupSize = 64


KVReading = Literal["quantized", "dequantized"]
"""What the attention of a decode step reads: the quantized numbers, or plain ones made of them, layer by layer."""


class KVStorage(Struct, frozen=True, kw_only=True):
    """What a loaded model does. `quantization` None: its own type. `reason` says why that is so where another was asked
    for, or why steps have to read it dequantized.

    `bytes_per_token` is what one row takes for each of its tokens, in the layers that keep all of them.
    """

    quantization: KVQuantization | None = None
    reading: KVReading = "quantized"
    reason: str = ""
    bytes_per_token: int = 0
