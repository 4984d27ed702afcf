"""Block files as the cachestore leases them, for the worker's tests."""

from pathlib import Path
from typing import Any

import xxhash

from protocol.block_file import block_metadata
from protocol.blocks import LeasedBlock
from protocol.ids import GRAIN_TOKENS, BlockKey, Grain
from tests.worker.parts import FINGERPRINT
from worker.mlx_block_files import BlockFile, write_block
from worker.prefix_index import Block, BlockParts


def leased_file(path: Path, block: Block[Any], tokens: int) -> LeasedBlock:
    """Write the first `tokens` tokens (whole grains) of a block, whatever its name, and lease the file unread."""
    grains = block.grains[: tokens // GRAIN_TOKENS] or tuple(
        Grain(number.to_bytes(16, "big")) for number in range(1, tokens // GRAIN_TOKENS + 1)
    )
    key = BlockKey(grains[-1])
    write_block(str(path), block, tokens, block_metadata(FINGERPRINT, key, BlockKey(b""), grains, tokens))
    checksum = xxhash.xxh3_128_digest(path.read_bytes())
    return LeasedBlock(key=key, grains=len(grains), path=str(path), checksum=checksum)


def read_whole(leased: LeasedBlock) -> BlockParts[Any]:
    """Read a sound file as the cold cache does: what was used has the file's checksum."""
    reading = BlockFile(leased)
    parts = reading.finish()
    assert reading.checksum() == leased.checksum
    return parts
