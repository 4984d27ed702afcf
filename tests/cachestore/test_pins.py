"""Leases: pins and reservations, for any order of events."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from cachestore.pins import LOOK_AFTER_SECONDS, READ_LEASE_SECONDS, STAGE_LEASE_SECONDS, Pins, ReadLease, StageLease
from protocol.ids import BlockKey, LeaseId

PEERS = st.sampled_from([b"a", b"b", b"c"])


class PinsMachine(RuleBasedStateMachine):
    """A block is pinned exactly while a live lease names it; reservations are the sum of the live ones."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pins = Pins(1)
        self.now = 0.0
        self.live: dict[int, ReadLease | StageLease] = {}

    @rule(target=leases, peer=PEERS, blocks=st.lists(st.integers(1, 6), max_size=4))
    def read(self, peer: bytes, blocks: list[int]) -> LeaseId:
        lease = self.pins.lease_blocks(peer, blocks, self.now)
        assert lease not in self.live
        self.live[lease] = ReadLease(
            lease=lease,
            peer=peer,
            blocks=tuple(blocks),
            taken_at=self.now,
            expires_at=self.now + READ_LEASE_SECONDS,
        )
        return lease

    @rule(target=leases, peer=PEERS, reserved_bytes=st.integers(1, 100))
    def stage(self, peer: bytes, reserved_bytes: int) -> LeaseId:
        lease = self.pins.lease_stage(
            peer, fingerprint="f", key=BlockKey(b"k"), path="p", reserved_bytes=reserved_bytes, now=self.now
        )
        self.live[lease] = StageLease(
            lease=lease,
            peer=peer,
            fingerprint="f",
            key=BlockKey(b"k"),
            path="p",
            reserved_bytes=reserved_bytes,
            taken_at=self.now,
            expires_at=self.now + STAGE_LEASE_SECONDS,
        )
        assert self.pins.stage(peer, lease) == self.live[lease]
        assert self.pins.stage(b"stranger", lease) is None
        return lease

    @rule(lease=leases, peer=PEERS)
    def release(self, lease: LeaseId, peer: bytes) -> None:
        held = self.live.get(lease)
        expected = held if held is not None and held.peer == peer else None
        assert self.pins.release(peer, lease) == expected
        if expected is not None:
            del self.live[lease]

    @rule(peer=PEERS)
    def peer_goes(self, peer: bytes) -> None:
        ended = {held.lease for held in self.pins.release_peer(peer)}
        assert ended == {lease for lease, held in self.live.items() if held.peer == peer}
        self.live = {lease: held for lease, held in self.live.items() if held.peer != peer}

    @rule(seconds=st.sampled_from([1.0, 59.0, 61.0, 121.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        ended = {held.lease for held in self.pins.expire(self.now)}
        assert ended == {lease for lease, held in self.live.items() if held.expires_at <= self.now}
        self.live = {lease: held for lease, held in self.live.items() if held.expires_at > self.now}

    @invariant()
    def books_are_exact(self) -> None:
        readers = Counter(
            block for held in self.live.values() if isinstance(held, ReadLease) for block in set(held.blocks)
        )
        assert {block for block in range(8) if self.pins.is_pinned(block)} == set(readers)
        assert self.pins.count == len(self.live)
        old_enough = {held.peer for held in self.live.values() if self.now - held.taken_at >= LOOK_AFTER_SECONDS}
        assert self.pins.holders(self.now) == old_enough
        assert self.pins.reserved_bytes == sum(
            held.reserved_bytes for held in self.live.values() if isinstance(held, StageLease)
        )


TestPins = PinsMachine.TestCase
