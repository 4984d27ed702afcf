"""What this run knows of its files' bytes: which were read whole, here or by a worker, and had their checksum.

A file counts as verified while its inode, size and time of change stay what they were when it was read.
"""

from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from cachestore import disk
from cachestore.index_rows import BlockRow
from cachestore.layout import BadBlock
from cachestore.reasons import is_unreadable
from protocol.block_file import BlockMetadata


class NotSound(Exception):
    """A block that may not be served, and why: its file is damaged, or gone."""

    def __init__(self, verdict: Literal["integrity", "missing"], why: str) -> None:
        super().__init__(why)
        self.verdict: Literal["integrity", "missing"] = verdict


class Seen(Struct, frozen=True, kw_only=True):
    """A file with the right size and header, as it was when somebody looked."""

    identity: disk.FileIdentity
    bytes_are: Literal["verified", "unread"]


class Verification:
    """Which blocks' files were read whole and found sound. One thread owns it. OSErrors of a sick disk pass."""

    def __init__(self) -> None:
        self._verified: dict[int, disk.FileIdentity] = {}

    def look(self, row: BlockRow, path: Path) -> Seen:
        """All that can be seen of a block's file without reading its tensors. Raises NotSound."""
        try:
            identity = disk.identity(path)
            if identity is not None and self._verified.get(row.block) == identity:
                return Seen(identity=identity, bytes_are="verified")
            metadata, identity = disk.read_metadata(path)
        except (OSError, BadBlock) as why:
            raise _not_sound(why) from None
        _compare(row, metadata, identity)
        return Seen(identity=identity, bytes_are="unread")

    def read(self, row: BlockRow, path: Path) -> None:
        """Read all of a block's file, whatever is known of it. Raises NotSound."""
        try:
            inspected = disk.inspect(path)
        except (OSError, BadBlock) as why:
            raise _not_sound(why) from None
        if inspected.checksum != row.checksum:
            raise NotSound("integrity", "its bytes do not match its checksum")
        _compare(row, inspected.metadata, inspected.identity)
        self._verified[row.block] = inspected.identity

    def believe(self, block: int, identity: disk.FileIdentity) -> None:
        """Somebody read all of the file that was this one, and it was sound."""
        self._verified[block] = identity

    def forget(self, block: int) -> None:
        """A block is gone."""
        self._verified.pop(block, None)


def is_announced(metadata: BlockMetadata, expected: BlockMetadata) -> bool:
    """Whether a header says what it should. A time to live is no part of who a block is: the index has it too."""
    return replace(metadata, ttl_seconds=None) == expected


def _compare(row: BlockRow, metadata: BlockMetadata, identity: disk.FileIdentity) -> None:
    expected = BlockMetadata(
        fingerprint=row.fingerprint, key=row.key, parent=row.parent, grains=row.grains, owner=row.owner
    )
    if not is_announced(metadata, expected) or identity.file_bytes != row.file_bytes:
        raise NotSound("integrity", "its header does not match the index")


def _not_sound(why: OSError | BadBlock) -> NotSound:
    match why:
        case FileNotFoundError():
            return NotSound("missing", "its file is gone")
        case BadBlock():
            return NotSound("integrity", str(why))
        case _ if is_unreadable(why):
            return NotSound("integrity", f"it cannot be read ({why.strerror})")
        case _:
            raise why
