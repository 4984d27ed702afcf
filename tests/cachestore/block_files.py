"""Block files as a worker writes them, and a worker's side of the conversation, for tests."""

import hashlib
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy
import xxhash
from safetensors.numpy import save

from cachestore.service import Service
from protocol.block_file import block_metadata
from protocol.blocks import (
    BlockReply,
    Declined,
    Describe,
    Described,
    Fetch,
    Leased,
    LeasedBlock,
    PinBlocks,
    Pinned,
    Publish,
    Published,
    Release,
    Stage,
    Staged,
    UnpinBlocks,
    Unpinned,
)
from protocol.ids import GRAIN_TOKENS, BlockKey, Grain, LeaseId
from protocol.launch import CachestoreLaunch

FINGERPRINT = "0123abcd"
PER_BLOCK = 16
PEER = b"worker:1"


def chain(text: str, grains: int, *, after: tuple[Grain, ...] = ()) -> tuple[Grain, ...]:
    """A chain of digests; two chains share what their texts and counts share. `after` is the chain it goes on from."""
    digests = list(after)
    for number in range(grains):
        previous = digests[-1] if digests else b""
        digests.append(Grain(hashlib.blake2b(previous + f"{text}{number}".encode(), digest_size=16).digest()))
    return tuple(digests)


def slot(grains: tuple[Grain, ...], number: int) -> tuple[BlockKey, tuple[Grain, ...]]:
    """The parent and the grains of one block of a chain; the last may be a tail."""
    start = number * PER_BLOCK
    if start > len(grains):
        return BlockKey(b""), ()
    return BlockKey(grains[start - 1] if start else b""), grains[start : start + PER_BLOCK]


def block_bytes(
    parent: BlockKey,
    grains: tuple[Grain, ...],
    *,
    fingerprint: str = FINGERPRINT,
    data_bytes: int = 256,
    owner: str = "",
    ttl_seconds: float | None = None,
) -> bytes:
    """A sound block file whose tensors depend on its key; the same bytes for the same block."""
    return _block_bytes(parent, grains, fingerprint, data_bytes, owner, ttl_seconds)


@cache  # safetensors writes its metadata in any order, so a second call would give other bytes
def _block_bytes(
    parent: BlockKey,
    grains: tuple[Grain, ...],
    fingerprint: str,
    data_bytes: int,
    owner: str,
    ttl_seconds: float | None,
) -> bytes:
    seed = int.from_bytes(grains[-1][:8], "little")
    values = numpy.random.default_rng(seed).integers(0, 255, data_bytes // 2, dtype=numpy.uint8)
    tokens = len(grains) * GRAIN_TOKENS
    key = BlockKey(grains[-1])
    metadata = block_metadata(fingerprint, key, parent, grains, tokens, owner=owner, ttl_seconds=ttl_seconds)
    return save({"layers.0.keys": values, "layers.0.values": values[::-1].copy()}, metadata)


def _has_its_checksum(block: LeasedBlock) -> bool:
    data = Path(block.path).read_bytes()
    return not block.checksum or xxhash.xxh3_128_digest(data) == block.checksum


class WorkerSide:
    """What a worker does with a service, without sockets. Time stands still unless a test moves it."""

    def __init__(self, service: Service, peer: bytes = PEER) -> None:
        self.service = service
        self.peer = peer
        self.now = 0.0

    def pass_time(self, clock: "Clock", seconds: float) -> None:
        """Both clocks go on, and the service does what is due."""
        self.now += seconds
        clock.unix += seconds
        self.settle()

    def ask(self, request: object) -> BlockReply:
        return self.service.handle(self.peer, request, self.now)  # type: ignore[arg-type]

    def stage(
        self,
        key: BlockKey,
        file_bytes: int,
        fingerprint: str = FINGERPRINT,
        *,
        owner: str = "",
        ttl_seconds: float | None = None,
    ) -> Staged | Declined:
        request = Stage(
            call_id=1, fingerprint=fingerprint, key=key, file_bytes=file_bytes, owner=owner, ttl_seconds=ttl_seconds
        )
        reply = self.ask(request)
        assert isinstance(reply, Staged | Declined)
        return reply

    def store(
        self,
        grains: tuple[Grain, ...],
        number: int,
        *,
        fingerprint: str = FINGERPRINT,
        data_bytes: int = 256,
        supersedes: BlockKey | None = None,
        owner: str = "",
        ttl_seconds: float | None = None,
    ) -> Published | Declined:
        """Stage, write and publish one block of a chain."""
        parent, own = slot(grains, number)
        data = block_bytes(
            parent, own, fingerprint=fingerprint, data_bytes=data_bytes, owner=owner, ttl_seconds=ttl_seconds
        )
        staged = self.stage(BlockKey(own[-1]), len(data), fingerprint, owner=owner, ttl_seconds=ttl_seconds)
        if isinstance(staged, Declined):
            return staged
        Path(staged.path).write_bytes(data)
        reply = self.ask(Publish(call_id=2, lease=staged.lease, parent=parent, grains=own, supersedes=supersedes))
        assert isinstance(reply, Published | Declined)
        return reply

    def store_all(
        self,
        grains: tuple[Grain, ...],
        *,
        data_bytes: int = 256,
        owner: str = "",
        ttl_seconds: float | None = None,
    ) -> None:
        for number in range(-(-len(grains) // PER_BLOCK)):
            reply = self.store(grains, number, data_bytes=data_bytes, owner=owner, ttl_seconds=ttl_seconds)
            assert isinstance(reply, Published), reply

    def fetch(
        self, grains: tuple[Grain, ...], *, fingerprint: str = FINGERPRINT, skip_blocks: int = 0, parts: int = 1
    ) -> Leased:
        request = Fetch(call_id=3, fingerprint=fingerprint, grains=grains, skip_blocks=skip_blocks, parts=parts)
        reply = self.ask(request)
        assert isinstance(reply, Leased)
        return reply

    def read(
        self, grains: tuple[Grain, ...], *, fingerprint: str = FINGERPRINT, skip_blocks: int = 0, parts: int = 1
    ) -> tuple[LeasedBlock, ...]:
        """Fetch, read, give back. The blocks that a worker would use: up to the first without its checksum."""
        return self.read_leased(self.fetch(grains, fingerprint=fingerprint, skip_blocks=skip_blocks, parts=parts))

    def read_leased(self, leased: Leased) -> tuple[LeasedBlock, ...]:
        """Read what was leased and give it back with what was seen."""
        sound = list(itertools.takewhile(_has_its_checksum, leased.blocks))
        suspect = tuple(block.key for block in leased.blocks[len(sound) :][:1])
        verified = tuple(block.key for block in sound if block.checksum)
        self.release(leased.lease, verified=verified, suspect=suspect)
        return tuple(sound)

    def release(self, lease: LeaseId, *, verified: Sequence[BlockKey] = (), suspect: Sequence[BlockKey] = ()) -> None:
        self.ask(Release(call_id=4, lease=lease, verified=tuple(verified), suspect=tuple(suspect)))

    def pin(
        self, grains: tuple[Grain, ...], *, name: str = "p", owner: str = "o", ttl_seconds: float | None = None
    ) -> int:
        """Pin the last block of a chain. How many blocks of it are there: one or none."""
        reply = self.ask(
            PinBlocks(
                call_id=6,
                fingerprint=FINGERPRINT,
                keys=(BlockKey(grains[-1]),),
                owner=owner,
                name=name,
                ttl_seconds=ttl_seconds,
            )
        )
        assert isinstance(reply, Pinned)
        return reply.blocks

    def unpin(self, *, name: str = "p", owner: str = "o") -> int:
        reply = self.ask(UnpinBlocks(call_id=7, owner=owner, name=name))
        assert isinstance(reply, Unpinned)
        return reply.blocks

    def books(self) -> Described:
        reply = self.ask(Describe(call_id=5))
        assert isinstance(reply, Described)
        return reply

    def settle(self) -> None:
        """Let the service do all its housekeeping."""
        for _ in range(100_000):
            store = self.service.store
            if self.service.idle(self.now) == "quiet" and (store is None or not store.reconcile_wanted):
                return
        raise AssertionError("housekeeping never ends")

    def check(self) -> None:
        """Books, index and files agree, and the quota holds."""
        self.settle()
        store = self.service.store
        assert store is not None
        assert store.faults() == []
        assert store.usage_bytes <= store.quota_bytes


class Clock:
    """The time of day, moved by the test."""

    def __init__(self, unix: float = 1_800_000_000.0) -> None:
        self.unix = unix

    def __call__(self) -> float:
        return self.unix


_numbers = iter(range(1_000_000, 1 << 60, 1 << 40))


def open_service(
    directory: Path,
    *,
    quota_bytes: int = 64 * 1024 * 1024,
    free_floor_bytes: int = 0,
    daily_write_bytes: int | None = None,
    clock: Clock | None = None,
) -> WorkerSide:
    """A service on a directory, as a fresh process would open it."""
    settings = CachestoreLaunch(
        directory=str(directory),
        runtime_directory=str(directory),
        incarnation=1,  # type: ignore[arg-type]
        quota_bytes=quota_bytes,
        free_floor_bytes=free_floor_bytes,
        daily_write_bytes=daily_write_bytes,
    )
    service = Service(settings, first_number=next(_numbers), unix_clock=clock or Clock())
    service.open(0.0)
    return WorkerSide(service)


def block_paths(directory: Path) -> list[Path]:
    """Every block file in place."""
    return sorted(directory.glob("*/[0-9a-f][0-9a-f]/*.safetensors"))
