"""Worker → cachestore requests and their replies.

Control travels here, bytes do not: a lease hands out paths and the worker reads or writes those files itself.
Every request carries a `call_id` of the caller's choosing and gets exactly one reply with the same one.
"""

from typing import Literal

from msgspec import Struct

from protocol.failures import Failure
from protocol.ids import BlockKey, Grain, LeaseId


class Lookup(Struct, frozen=True, kw_only=True, tag=True):
    """How much of a chain is on disk, without reading it.

    `grains` are the chain digests of the prompt, one per GRAIN_TOKENS tokens from the root; `skip_blocks` whole
    blocks at its start are not needed (they are in RAM). `parts` is how many blocks may be named that hold a part of
    the slot after the last whole one: more than one for a model that can be taken up again only where a state is,
    since which of them has one there is known to their readers alone.
    """

    call_id: int
    fingerprint: str
    grains: tuple[Grain, ...]
    skip_blocks: int = 0
    parts: int = 1


class Fetch(Struct, frozen=True, kw_only=True, tag=True):
    """Lookup, then pin what was found, and answer with a lease on the files.

    At most `most_blocks` of them: a reader of many asks for the next ones while it reads the last ones. A lease names
    files that are there and have the right header; whether their bytes are right, its reader sees (`LeasedBlock`).
    """

    call_id: int
    fingerprint: str
    grains: tuple[Grain, ...]
    skip_blocks: int = 0
    parts: int = 1
    most_blocks: int = 2**31 - 1


class Stage(Struct, frozen=True, kw_only=True, tag=True):
    """Ask for a private file to write one block into. `file_bytes` is what it will take at most.

    `owner` may have it forgotten; unused for `ttl_seconds` (None: no limit but the quota) it is dropped.
    """

    call_id: int
    fingerprint: str
    key: BlockKey
    file_bytes: int
    owner: str = ""
    ttl_seconds: float | None = None


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
    """Give back a lease, or abandon a staged file. Idempotent.

    Of the leased blocks, `verified` are those whose bytes had their checksum, `suspect` those whose had not or could
    not be read: the cachestore believes the former, and reads the latter itself before it drops any.
    """

    call_id: int
    lease: LeaseId
    verified: tuple[BlockKey, ...] = ()
    suspect: tuple[BlockKey, ...] = ()


class Forget(Struct, frozen=True, kw_only=True, tag=True):
    """Delete the blocks that match every criterion given; with none given, all. Leased ones go when given back.

    Pinned blocks go too. `asked_by` stands in the audit line that every purge leaves.
    """

    call_id: int
    fingerprint: str | None = None
    owner: str | None = None
    unused_for_seconds: float | None = None
    asked_by: str = ""


class PinBlocks(Struct, frozen=True, kw_only=True, tag=True):
    """Keep these blocks (and their parents) from eviction for `ttl_seconds`. Same owner and name: replaced."""

    call_id: int
    fingerprint: str
    keys: tuple[BlockKey, ...]
    owner: str
    name: str
    ttl_seconds: float | None = None


class UnpinBlocks(Struct, frozen=True, kw_only=True, tag=True):
    """Let a pinned set age like any other. An unknown name is fine."""

    call_id: int
    owner: str
    name: str


class Describe(Struct, frozen=True, kw_only=True, tag=True):
    """Ask for the books."""

    call_id: int


BlockRequest = Lookup | Fetch | Stage | Publish | Release | Forget | PinBlocks | UnpinBlocks | Describe


class FoundBlock(Struct, frozen=True, kw_only=True):
    """A block on disk of which the first `grains` grains match the chain asked for.

    All of a whole block's do. Blocks that match in part are all of the slot after the last whole one.
    """

    key: BlockKey
    grains: int
    file_bytes: int = 0


class LeasedBlock(Struct, frozen=True, kw_only=True):
    """A block file that stays in place until the lease is given back.

    `checksum` is the xxh3-128 of the whole file where nobody has compared it in this run of the cachestore: the reader
    does, over the bytes that it uses, and uses none of another checksum. Empty: the file was verified.
    """

    key: BlockKey
    grains: int
    path: str
    checksum: bytes = b""


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


class Pinned(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to PinBlocks: how many of them are there and pinned now."""

    call_id: int
    blocks: int


class Unpinned(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to UnpinBlocks."""

    call_id: int
    blocks: int


class PinBooks(Struct, frozen=True, kw_only=True):
    """One pinned set on disk. `expires_unix` None is never."""

    owner: str
    name: str
    blocks: int
    file_bytes: int
    expires_unix: float | None = None


WriteState = Literal["green", "yellow", "red"]
"""How much of the day's write budget is gone: under half, more than half, all (nothing more is written today)."""


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
    written_today_bytes: int = 0
    daily_write_bytes: int | None = None
    write_state: WriteState = "green"
    expired: int = 0
    pins: tuple[PinBooks, ...] = ()


class CacheFailed(Struct, frozen=True, kw_only=True, tag=True):
    """The request raised; the daemon lives on. The caller counts a miss."""

    call_id: int
    failure: Failure


class StillHeld(Struct, frozen=True, kw_only=True, tag=True):
    """Answer to nothing: it goes now and then to a peer that has held a lease for a while, and needs no reply.

    That it can be sent says that the peer is there; the leases of one that is gone end at once.
    """

    call_id: int = 0


BlockReply = (
    Found
    | Leased
    | Staged
    | Declined
    | Published
    | Released
    | Forgotten
    | Pinned
    | Unpinned
    | Described
    | CacheFailed
    | StillHeld
)
