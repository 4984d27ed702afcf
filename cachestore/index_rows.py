"""What the index holds, row by row, and how a row of its table of blocks is read."""

from typing import Literal

from msgspec import Struct

from cachestore.layout import split_digests
from protocol.ids import BlockKey, Grain

COLUMNS = (
    "b.id, m.fingerprint, b.key, b.parent, b.grains, b.file_bytes, b.checksum, b.last_used, b.children, b.condemned,"
    " b.owner, b.pins"
)
FROM = "FROM blocks b JOIN models m ON m.id = b.model"
"""A block as `block_row` reads it: `SELECT {COLUMNS} {FROM} WHERE …`, with `b` for blocks and `m` for models."""

StrayKind = Literal["foreign", "quarantine", "other"]
"""Foreign: a block of another format, evicted first. Quarantine: damaged, kept a while. Other: not ours to delete."""


class BlockRow(Struct, frozen=True, kw_only=True):
    """One indexed block."""

    block: int
    fingerprint: str
    key: BlockKey
    parent: BlockKey
    digests: bytes
    file_bytes: int
    checksum: bytes
    last_used: int
    children: int
    condemned: int
    owner: str
    pins: int

    @property
    def grains(self) -> tuple[Grain, ...]:
        """The block's own digests, first to last. Split only when asked: a lookup reads many rows and needs none."""
        return split_digests(self.digests)


class NewBlock(Struct, frozen=True, kw_only=True):
    """A block to index; its file is in place. `last_used` None is now; `used_unix` is its last use by the clock."""

    fingerprint: str
    key: BlockKey
    parent: BlockKey
    grains: tuple[Grain, ...]
    file_bytes: int
    checksum: bytes
    owner: str = ""
    ttl_seconds: float | None = None
    used_unix: float = 0.0
    last_used: int | None = None


class Criteria(Struct, frozen=True, kw_only=True):
    """Which blocks: those that match every one that is given; with none given, all."""

    fingerprint: str | None = None
    owner: str | None = None
    unused_since_unix: float | None = None


EVERY_BLOCK = Criteria()


class Match(Struct, frozen=True, kw_only=True):
    """A block of which the first `grains` grains lie on the chain asked for."""

    row: BlockRow
    grains: int


class StrayRow(Struct, frozen=True, kw_only=True):
    """A file in the directory that is no indexed block, by its path relative to the directory."""

    path: str
    kind: StrayKind
    file_bytes: int
    modified: int


Values = tuple[int, str, bytes, bytes, bytes, int, bytes, int, int, int, str, int]


def block_row(values: Values) -> BlockRow:
    """One row of `COLUMNS`."""
    block, fingerprint, key, parent, digests, file_bytes, checksum, last_used, children, condemned, owner, pins = values
    return BlockRow(
        block=block,
        fingerprint=fingerprint,
        key=BlockKey(key),
        parent=BlockKey(parent),
        digests=digests,
        file_bytes=file_bytes,
        checksum=checksum,
        last_used=last_used,
        children=children,
        condemned=condemned,
        owner=owner,
        pins=pins,
    )
