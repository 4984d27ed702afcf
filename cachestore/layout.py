"""The names on disk, and what a sound block file looks like. Decides only: bytes and names in, values out.

    <directory>/<fingerprint>/<aa>/<key>-<checksum>.safetensors     a block; aa = the key's first two hex digits
    <directory>/<fingerprint>/staging/<random>.tmp.safetensors      a block being written, swept at start
    <directory>/quarantine/<anything>                               damaged files, only the newest few
    <directory>/index.sqlite3 (-wal, -shm), <directory>/lock        the store's own
    <directory>/audit.log, <directory>/audit.log.1                  a line for every purge

The checksum (xxh3-128 of the whole file) stands in the name, so the files alone can rebuild the index, and two files
swapped for one another do not match their names. All names are lower case: macOS volumes do not tell cases apart.
"""

import re
from typing import Literal

from protocol import block_header
from protocol.block_file import DIGEST_BYTES, BadMetadata, BlockMetadata, ForeignFormat, parse_metadata
from protocol.block_header import BadHeader
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey, Grain

QUARANTINE_DIRECTORY = "quarantine"
STAGING_DIRECTORY = "staging"
INDEX_NAME = "index.sqlite3"
LOCK_NAME = "lock"
AUDIT_NAME = "audit.log"
OLD_AUDIT_NAME = "audit.log.1"
INDEX_NAMES = (INDEX_NAME, INDEX_NAME + "-wal", INDEX_NAME + "-shm", INDEX_NAME + "-journal")
"""What SQLite makes of the index; all of it can be rebuilt."""
OWN_NAMES = (*INDEX_NAMES, LOCK_NAME, AUDIT_NAME, OLD_AUDIT_NAME)
"""Files at the top of the directory that the store writes for itself; they count towards the quota."""

BLOCK_SUFFIX = ".safetensors"
STAGED_SUFFIX = ".tmp.safetensors"
"""mx.save_safetensors appends `.safetensors` to any other name, so a staged file must already end in it."""

PREFIXES = tuple(f"{byte:02x}" for byte in range(256))
"""The directories below a fingerprint that hold its blocks."""

GRAINS_PER_BLOCK = BLOCK_TOKENS // GRAIN_TOKENS

_FINGERPRINT = re.compile(r"[0-9a-z][0-9a-z._-]{0,127}")
_BLOCK_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.safetensors")
_RESERVED = frozenset((QUARANTINE_DIRECTORY, *OWN_NAMES))


class BadBlock(Exception):
    """A file that is not the block it should be. Says why in words that hold no content."""


class ForeignBlock(BadBlock):
    """A block of another disk format: not damaged, never read, first to be evicted."""


def is_fingerprint(text: str) -> bool:
    """Whether this can name a model's directory: one plain lower-case path component, none of the store's own names."""
    return _FINGERPRINT.fullmatch(text) is not None and text not in _RESERVED


def is_digest(value: bytes) -> bool:
    """Whether this can be a BlockKey or Grain."""
    return len(value) == DIGEST_BYTES


def staging_directory(fingerprint: str) -> str:
    return f"{fingerprint}/{STAGING_DIRECTORY}"


def prefix_directory(fingerprint: str, key: bytes) -> str:
    return f"{fingerprint}/{key[:1].hex()}"


def block_name(key: bytes, checksum: bytes) -> str:
    return f"{key.hex()}-{checksum.hex()}{BLOCK_SUFFIX}"


def block_path(fingerprint: str, key: bytes, checksum: bytes) -> str:
    """Where a block lies, relative to the store's directory."""
    return f"{prefix_directory(fingerprint, key)}/{block_name(key, checksum)}"


def parse_block_name(name: str) -> tuple[BlockKey, bytes] | None:
    """The key and checksum that a block's file name carries, or None for another kind of name."""
    match = _BLOCK_NAME.fullmatch(name)
    return None if match is None else (BlockKey(bytes.fromhex(match[1])), bytes.fromhex(match[2]))


def stray_kind(name: str) -> Literal["foreign", "other"]:
    """What a file in a block's place is that is not indexed: an old block may be evicted, anything else is not ours."""
    return "foreign" if name.endswith(BLOCK_SUFFIX) else "other"


def header_bytes(start: bytes) -> int:
    """How many bytes of a file its header takes, length field included. `start` is its first 8 bytes."""
    try:
        return block_header.header_bytes(start)
    except BadHeader as why:
        raise BadBlock(str(why)) from None


def check_header(header: bytes, file_bytes: int) -> BlockMetadata:
    """Read a whole header (length field included) and check that its tensors fill the rest of the file exactly."""
    try:
        found = block_header.read_header(header)
        identity = parse_metadata(found.metadata)
    except BadHeader as why:
        raise BadBlock(str(why)) from None
    except ForeignFormat as why:
        raise ForeignBlock(str(why)) from None
    except BadMetadata as why:
        raise BadBlock(f"its metadata is wrong: {why}") from None
    if len(identity.grains) > GRAINS_PER_BLOCK:
        raise BadBlock(f"it claims {len(identity.grains)} grains, a block has at most {GRAINS_PER_BLOCK}")
    try:
        block_header.check_extents(found, file_bytes - len(header))
    except BadHeader as why:
        raise BadBlock(str(why)) from None
    return identity


def join_digests(digests: tuple[Grain, ...]) -> bytes:
    return b"".join(digests)


def split_digests(joined: bytes) -> tuple[Grain, ...]:
    return tuple(Grain(joined[at : at + DIGEST_BYTES]) for at in range(0, len(joined), DIGEST_BYTES))
