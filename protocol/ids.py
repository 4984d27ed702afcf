"""Names that must not be mixed up."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Made by the gateway, one per HTTP request; stands in every event and log line of every process."""

ModelName = NewType("ModelName", str)
"""The id a model is served under, as `/v1/models` lists it. May contain slashes."""

Incarnation = NewType("Incarnation", int)
"""Counts the spawns of one child since the gateway started; events of an older one are dropped."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes: the keyed BLAKE2b chain digest at a block's end, so it names the tokens *and* all before them."""

Grain = NewType("Grain", bytes)
"""16 bytes: the same chain digest, at every `GRAIN_TOKENS` tokens. A block's key is its last grain."""

LeaseId = NewType("LeaseId", int)
"""Names one lease of block files, or one staged file, handed out by the cachestore."""

BLOCK_TOKENS = 256
"""Tokens in a whole KV block. A tail block holds fewer, a multiple of GRAIN_TOKENS on disk."""

GRAIN_TOKENS = 16
"""How finely a block can be found and used in part on disk. Divides BLOCK_TOKENS."""
