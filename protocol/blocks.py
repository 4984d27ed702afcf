"""Worker → cachestore requests and their replies.

Control travels here, bytes do not: a lease hands out paths and the worker reads or writes those files itself.
Every request carries a `call_id` of the caller's choosing and gets exactly one reply with the same one.
"""

from msgspec import Struct

from protocol.failures import Failure
from protocol.ids import BlockKey, Grain, LeaseId


class Lookup(Struct, frozen=True, kw_only=True, tag=True):
    """How much of a chain is on disk, without reading it.

    `grains` are the chain digests of the prompt, one per GRAIN_TOKENS tokens from the root; `skip_blocks` whole
    blocks at its start are not needed (they are in RAM).
    """

    call_id: int
    fingerprint: str
    grains: tuple[Grain, ...]
    skip_blocks: int = 0


class Fetch(Struct, frozen=True, kw_only=True, tag=True):
    """Lookup, then verify and pin what was found, and answer with a lease on the files."""

    call_id: int
    fingerprint: str
    grains: tuple[Grain, ...]
    skip_blocks: int = 0


class Stage(Struct, frozen=True, kw_only=True, tag=True):
    """Ask for a private file to write one block into. `file_bytes` is what it will take at most."""

    call_id: int
    fingerprint: str
    key: BlockKey
    file_bytes: int


class Publish(Struct, frozen=True, kw_only=True, tag=True):
    """The staged file is complete: verify it, make it durable, rename it into place, index it.

    `grains` are the block's own digests, first to last (the last is its key); `parent` is the key of the block
    before it, empty at the root. `supersedes` names a shorter tail that this block contains.
    """

    call_id: int
    lease: LeaseId
    parent: BlockKey
    grains: tuple[Grain, ...]
    supersedes: BlockKey | None = None


class Release(Struct, frozen=True, kw_only=True, tag=True):
    """Give back a lease, or abandon a staged file. Idempotent."""

    call_id: int
    lease: LeaseId


class Forget(Struct, frozen=True, kw_only=True, tag=True):
    """Delete every block of one model fingerprint, or of all when it is None. Leased ones go when given back."""

    call_id: int
    fingerprint: str | None


class Describe(Struct, frozen=True, kw_only=True, tag=True):
    """Ask for the books."""

    call_id: int


BlockRequest = Lookup | Fetch | Stage | Publish | Release | Forget | Describe


class FoundBlock(Struct, frozen=True, kw_only=True):
    """A block on disk of which the first `grains` grains match the chain asked for (all, except for the last block)."""

    key: BlockKey
    grains: int


class LeasedBlock(Struct, frozen=True, kw_only=True):
    """A verified block file that stays in place until the lease is given back."""

    key: BlockKey
    grains: int
    path: str


class Found(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Lookup: an unbroken run of blocks that starts after `skip_blocks`; empty is a miss."""

    call_id: int
    blocks: tuple[FoundBlock, ...]


class Leased(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Fetch. Empty `blocks` is a miss, and `miss_reason` says why when it is not plainly absent."""

    call_id: int
    lease: LeaseId
    blocks: tuple[LeasedBlock, ...]
    miss_reason: str = "absent"


class Staged(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Stage: write here, mode 0600, then Publish."""

    call_id: int
    lease: LeaseId
    path: str


class Declined(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Stage or Publish: not stored, and why (`present`, `quota`, `no_space`, `off`, `integrity`…)."""

    call_id: int
    reason: str


class Published(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Publish: durable."""

    call_id: int
    file_bytes: int


class Released(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Release."""

    call_id: int


class Forgotten(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Forget."""

    call_id: int
    blocks: int
    file_bytes: int


class Described(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Describe."""

    call_id: int
    blocks: int
    file_bytes: int
    quota_bytes: int
    leases: int
    published: int
    written_bytes: int
    evicted: int
    quarantined: int


class CacheFailed(Struct, frozen=True, kw_only=True, tag=True):
    """The request raised; the daemon lives on. The caller counts a miss."""

    call_id: int
    failure: Failure


BlockReply = Found | Leased | Staged | Declined | Published | Released | Forgotten | Described | CacheFailed
