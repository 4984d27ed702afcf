"""What a block file says about itself: what its writer (worker) and its keeper (cachestore) must agree on.

A block file is a safetensors file. Its name carries its checksum (see cachestore/layout.py); its header carries, in the
safetensors metadata, the fields below. Readers ignore fields they do not know.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from protocol.ids import GRAIN_TOKENS, BlockKey, Grain

DISK_FORMAT = 1
"""Rises when an older reader would misread a newer file. Outlives upgrades, unlike PROTOCOL_VERSION."""

DIGEST_BYTES = 16
"""The size of a BlockKey and of a Grain."""

FORMAT_FIELD = "mlxd_format"
FINGERPRINT_FIELD = "fingerprint"
KEY_FIELD = "key"
PARENT_FIELD = "parent"
GRAINS_FIELD = "grains"
TOKENS_FIELD = "tokens"
OWNER_FIELD = "owner"
TTL_FIELD = "ttl_seconds"


class BadMetadata(Exception):
    """This metadata is not that of a block. Says which field is wrong."""


class ForeignFormat(BadMetadata):
    """A block of another DISK_FORMAT: not damaged, but not ours to read."""


class BlockMetadata(Struct, frozen=True, kw_only=True):
    """Who a block is: of which model, after which parent (empty at the root), covering which grains.

    `owner` may have it forgotten; unused for `ttl_seconds` it is dropped (None: kept while there is room).
    """

    fingerprint: str
    key: BlockKey
    parent: BlockKey
    grains: tuple[Grain, ...]
    owner: str = ""
    ttl_seconds: float | None = None


def block_metadata(
    fingerprint: str,
    key: BlockKey,
    parent: BlockKey,
    grains: Sequence[Grain],
    tokens: int,
    *,
    owner: str = "",
    ttl_seconds: float | None = None,
) -> dict[str, str]:
    """The metadata a writer puts into a block file. The checksum is not in it: the keeper puts that into the name.

    `owner` and `ttl_seconds` are those of its Stage.
    """
    metadata = {
        FORMAT_FIELD: str(DISK_FORMAT),
        FINGERPRINT_FIELD: fingerprint,
        KEY_FIELD: key.hex(),
        PARENT_FIELD: parent.hex(),
        GRAINS_FIELD: ",".join(grain.hex() for grain in grains),
        TOKENS_FIELD: str(tokens),
    }
    if owner:
        metadata[OWNER_FIELD] = owner
    if ttl_seconds is not None:
        metadata[TTL_FIELD] = str(float(ttl_seconds))
    return metadata


def parse_metadata(metadata: Mapping[str, str]) -> BlockMetadata:
    """Read a block's metadata back. Raises ForeignFormat for another disk format, BadMetadata for nonsense."""
    disk_format = _field(metadata, FORMAT_FIELD)
    if disk_format != str(DISK_FORMAT):
        raise ForeignFormat(f"disk format {disk_format[:20]!r}, this mlxd reads {DISK_FORMAT}")
    grains = tuple(Grain(_digest(text, GRAINS_FIELD)) for text in _field(metadata, GRAINS_FIELD).split(","))
    key = BlockKey(_digest(_field(metadata, KEY_FIELD), KEY_FIELD))
    parent_text = _field(metadata, PARENT_FIELD)
    parent = BlockKey(_digest(parent_text, PARENT_FIELD) if parent_text else b"")
    if grains[-1] != key:
        raise BadMetadata("the last grain is not the key")
    if _field(metadata, TOKENS_FIELD) != str(len(grains) * GRAIN_TOKENS):
        raise BadMetadata(f"{TOKENS_FIELD} is not {len(grains)} grains of {GRAIN_TOKENS}")
    return BlockMetadata(
        fingerprint=_field(metadata, FINGERPRINT_FIELD),
        key=key,
        parent=parent,
        grains=grains,
        owner=metadata.get(OWNER_FIELD, ""),
        ttl_seconds=_ttl_seconds(metadata.get(TTL_FIELD)),
    )


def _field(metadata: Mapping[str, str], name: str) -> str:
    value = metadata.get(name)
    if value is None:
        raise BadMetadata(f"no field {name!r}")
    return value


def _ttl_seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        ttl_seconds = float(text)
    except ValueError:
        raise BadMetadata(f"{TTL_FIELD} is no number") from None
    if not 0 < ttl_seconds < math.inf:
        raise BadMetadata(f"{TTL_FIELD} is no length of time")
    return ttl_seconds


def _digest(text: str, field: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        raise BadMetadata(f"{field} is not hexadecimal") from None
    if len(digest) != DIGEST_BYTES:
        raise BadMetadata(f"{field} holds a digest of {len(digest)} bytes instead of {DIGEST_BYTES}")
    return digest
