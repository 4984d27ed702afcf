"""Who reads which block and who writes which staged file. Decides only; one thread owns it.

A lease belongs to the peer that took it and ends by release, by its time, or with its peer. A block is pinned while any
lease names it; a pinned block's file is never unlinked.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from protocol.ids import BlockKey, LeaseId

READ_LEASE_SECONDS = 60.0
STAGE_LEASE_SECONDS = 120.0
LOOK_AFTER_SECONDS = 1.0
"""A peer that holds a lease longer than that is looked after: it may be dead."""
MAX_LEASES = 4096


class ReadLease(Struct, frozen=True, kw_only=True):
    """A peer may read these blocks' files."""

    lease: LeaseId
    peer: bytes
    blocks: tuple[int, ...]
    taken_at: float
    expires_at: float


class StageLease(Struct, frozen=True, kw_only=True):
    """A peer may write one file of at most `reserved_bytes`. A forgotten one may be written, and not published."""

    lease: LeaseId
    peer: bytes
    fingerprint: str
    key: BlockKey
    path: str
    reserved_bytes: int
    taken_at: float
    expires_at: float
    owner: str = ""
    ttl_seconds: float | None = None
    fate: Literal["wanted", "forgotten"] = "wanted"


Lease = ReadLease | StageLease


class Pins:
    """Every lease there is. Lease ids start at `first_lease`, which must differ from run to run.

    Otherwise a worker could give back, or publish into, a lease that an earlier run of the store gave it.
    """

    def __init__(self, first_lease: int) -> None:
        self._next_lease = first_lease
        self._leases: dict[LeaseId, Lease] = {}
        self._readers: Counter[int] = Counter()
        self._reserved_bytes = 0

    @property
    def count(self) -> int:
        return len(self._leases)

    @property
    def is_full(self) -> bool:
        """Whether no further lease may be handed out."""
        return len(self._leases) >= MAX_LEASES

    @property
    def reserved_bytes(self) -> int:
        """What all staged files may take together."""
        return self._reserved_bytes

    def is_pinned(self, block: int) -> bool:
        return block in self._readers

    def lease_blocks(self, peer: bytes, blocks: Iterable[int], now: float) -> LeaseId:
        """Pin blocks for a peer."""
        lease = self._new_id()
        pinned = tuple(blocks)
        self._readers.update(set(pinned))
        self._leases[lease] = ReadLease(
            lease=lease, peer=peer, blocks=pinned, taken_at=now, expires_at=now + READ_LEASE_SECONDS
        )
        return lease

    def lease_stage(
        self,
        peer: bytes,
        *,
        fingerprint: str,
        key: BlockKey,
        path: str,
        reserved_bytes: int,
        now: float,
        owner: str = "",
        ttl_seconds: float | None = None,
    ) -> LeaseId:
        """Reserve bytes for a file that a peer will write."""
        lease = self._new_id()
        self._reserved_bytes += reserved_bytes
        self._leases[lease] = StageLease(
            lease=lease,
            peer=peer,
            fingerprint=fingerprint,
            key=key,
            path=path,
            reserved_bytes=reserved_bytes,
            taken_at=now,
            expires_at=now + STAGE_LEASE_SECONDS,
            owner=owner,
            ttl_seconds=ttl_seconds,
        )
        return lease

    def stage(self, peer: bytes, lease: LeaseId) -> StageLease | None:
        """The staged file that this peer holds under this lease, if it does."""
        held = self._leases.get(lease)
        return held if isinstance(held, StageLease) and held.peer == peer else None

    def forget_stages(self, *, fingerprint: str | None, owner: str | None) -> None:
        """What is being written of this model and owner (None: of any) is not to be published."""
        forgotten = [
            held
            for held in self._leases.values()
            if isinstance(held, StageLease) and fingerprint in (None, held.fingerprint) and owner in (None, held.owner)
        ]
        for held in forgotten:
            self._leases[held.lease] = replace(held, fate="forgotten")

    def release(self, peer: bytes, lease: LeaseId) -> Lease | None:
        """End one lease of a peer. None when it has no such lease (given back before, or run out)."""
        held = self._leases.get(lease)
        if held is None or held.peer != peer:
            return None
        self._end(held)
        return held

    def release_peer(self, peer: bytes) -> list[Lease]:
        """End all leases of a peer that is gone."""
        ended = [held for held in self._leases.values() if held.peer == peer]
        for held in ended:
            self._end(held)
        return ended

    def holders(self, now: float) -> set[bytes]:
        """The peers with a lease that is old enough to ask whether they are there."""
        return {held.peer for held in self._leases.values() if held.taken_at + LOOK_AFTER_SECONDS <= now}

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose time is over."""
        ended = [held for held in self._leases.values() if held.expires_at <= now]
        for held in ended:
            self._end(held)
        return ended

    def _new_id(self) -> LeaseId:
        lease = LeaseId(self._next_lease)
        self._next_lease += 1
        return lease

    def _end(self, held: Lease) -> None:
        del self._leases[held.lease]
        match held:
            case StageLease():
                self._reserved_bytes -= held.reserved_bytes
            case ReadLease():
                for block in set(held.blocks):
                    self._readers[block] -= 1
                    if not self._readers[block]:
                        del self._readers[block]
