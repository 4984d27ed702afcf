"""What the operator may set for one model, and what it comes to beside that of every model. Pure."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from protocol.ids import ModelName
from protocol.kv_storage import KVGroupSize, KVQuantization

KVBitsSetting = Literal["off", 4, 6, 8]
"""Bits of each number of a key or value; off: as the model computes them."""


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one model folder. What is not said is as for every model."""

    kv_bits: KVBitsSetting | None = None
    kv_group_size: KVGroupSize | None = None


class KVSettings(Struct, frozen=True, kw_only=True):
    """How keys and values are to be kept: by every model, and by those with settings of their own."""

    bits: KVBitsSetting = "off"
    group_size: KVGroupSize = 64
    models: Mapping[str, ModelSettings] = {}

    def of(self, model: ModelName) -> KVQuantization | None:
        """None: as they are computed."""
        own = self.models.get(model, ModelSettings())
        bits = own.kv_bits or self.bits
        return None if bits == "off" else KVQuantization(bits=bits, group_size=own.kv_group_size or self.group_size)
