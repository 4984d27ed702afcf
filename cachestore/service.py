"""The verbs of the cachestore: one request in, one reply out, whatever the disk does.

Trouble with the disk is an answer (a miss, a decline), told once in the log and tried again later; the daemon lives on.
"""

import sqlite3
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Literal, assert_never

import structlog

from cachestore import disk
from cachestore.index import IndexUnusable
from cachestore.layout import GRAINS_PER_BLOCK, is_digest, is_fingerprint
from cachestore.pins import Lease, Pins, ReadLease, StageLease
from cachestore.reasons import is_damaged, loses_index, trouble_of
from cachestore.reconcile import reconcile
from cachestore.store import NotStored, Store
from protocol.blocks import (
    BlockReply,
    BlockRequest,
    CacheFailed,
    Declined,
    Describe,
    Described,
    Fetch,
    Forget,
    Forgotten,
    Found,
    FoundBlock,
    Leased,
    LeasedBlock,
    Lookup,
    PinBlocks,
    Publish,
    Published,
    Release,
    Released,
    Stage,
    Staged,
    UnpinBlocks,
)
from protocol.failures import Failure, FailureKind
from protocol.ids import LeaseId
from protocol.launch import CachestoreLaunch

REOPEN_SECONDS = 5.0
TELL_AGAIN_SECONDS = 600.0
NO_LEASE = LeaseId(0)
"""In the answer to a Fetch that found nothing. Releasing it is allowed and does nothing."""

_OPENING_STEPS = 2000  # of reconciling, before the first request: enough for a small or an unchanged directory
_IDLE_STEPS = 16

_log = structlog.get_logger("cachestore")


class Service:
    """All the state there is, owned by one thread. `now` counts seconds and never goes back.

    `first_number` must be larger in every run: lease ids and uses count up from it.
    """

    def __init__(self, settings: CachestoreLaunch, *, first_number: int) -> None:
        self._settings = settings
        self._first_number = first_number
        self._pins = Pins(first_number)
        self._store: Store | None = None
        self._reconciling: Generator[None] | None = None
        self._retry_at = 0.0
        self._told: dict[str, float] = {}
        self._published = 0
        self._written_bytes = 0
        self._evicted = 0
        self._quarantined = 0

    @property
    def store(self) -> Store | None:
        """The open directory, or None while it cannot be used. For reading."""
        return self._store

    def open(self, now: float) -> None:
        """Try to open the directory; misses are served until that works. Raises disk.DirectoryTaken only."""
        self._retry_at = now + REOPEN_SECONDS
        self._pins = Pins(self._first_number + (1 << 32))  # leases of a directory that was lost name nothing
        self._first_number += 1 << 32
        try:
            self._store = Store(
                Path(self._settings.directory),
                quota_bytes=self._settings.quota_bytes,
                free_floor_bytes=self._settings.free_floor_bytes,
                pins=self._pins,
                first_use=self._first_number,
            )
        except (OSError, sqlite3.Error, IndexUnusable) as why:
            self._tell_once("unavailable", now, why=_in_words(why), then="misses are served and it is tried again")
            return
        self._told.clear()
        _log.info("opened", blocks=self._store.index.blocks, usage_bytes=self._store.usage_bytes)
        self._reconciling = reconcile(self._store)
        self._reconcile_some(self._store, _OPENING_STEPS, now)

    def close(self) -> None:
        """Close the directory; files still being written are swept at the next start."""
        if self._store is not None:
            self._lose_store(self._store)

    def handle(self, peer: bytes, request: BlockRequest, now: float) -> BlockReply:
        """Answer one request. Raises only for a fault of ours, which the loop answers."""
        store = self._store
        if store is None:
            return unserved(request, "unavailable")
        try:
            match request:
                case Lookup():
                    return self._lookup(store, request)
                case Fetch():
                    return self._fetch(store, peer, request, now)
                case Stage():
                    return self._stage(store, peer, request, now)
                case Publish():
                    return self._publish(store, peer, request)
                case Release():
                    self._end(store, [self._pins.release(peer, request.lease)])
                    return Released(call_id=request.call_id)
                case Forget():
                    blocks, file_bytes = store.forget(request.fingerprint)
                    _log.info("forgotten", fingerprint=request.fingerprint, blocks=blocks, file_bytes=file_bytes)
                    return Forgotten(call_id=request.call_id, blocks=blocks, file_bytes=file_bytes)
                case PinBlocks() | UnpinBlocks():
                    return Declined(call_id=request.call_id, reason="invalid")
                case Describe():
                    return self._describe(store, request)
                case _:
                    assert_never(request)
        except (OSError, sqlite3.Error) as why:
            return unserved(request, self._in_trouble(store, why, now))

    def idle(self, now: float) -> Literal["busy", "quiet"]:
        """A few milliseconds of housekeeping. "busy" means that there is more to do at once."""
        store = self._store
        if store is None:
            if now >= self._retry_at:
                self.open(now)
            return "quiet"
        try:
            ended = self._pins.expire(now)
            if ended:
                _log.warning("leases_ran_out", leases=len(ended))
                self._end(store, ended)
        except (OSError, sqlite3.Error) as why:
            self._in_trouble(store, why, now)
            return "quiet"
        if self._reconciling is None and store.reconcile_wanted:
            self._reconciling = reconcile(store)
        return self._reconcile_some(store, _IDLE_STEPS, now)

    def drop_peer(self, peer: bytes, now: float) -> None:
        """A peer is gone: end its leases."""
        if self._store is None:
            return
        try:
            self._end(self._store, self._pins.release_peer(peer))
        except (OSError, sqlite3.Error) as why:
            self._in_trouble(self._store, why, now)

    # --- the verbs --------------------------------------------------------------------------------------------------

    def _lookup(self, store: Store, request: Lookup) -> Found:
        matches = store.index.walk(request.fingerprint, request.grains, request.skip_blocks)
        blocks = tuple(FoundBlock(key=match.row.key, grains=match.grains) for match in matches)
        return Found(call_id=request.call_id, blocks=blocks)

    def _fetch(self, store: Store, peer: bytes, request: Fetch, now: float) -> Leased:
        if self._pins.is_full:
            return Leased(call_id=request.call_id, lease=NO_LEASE, blocks=(), miss_reason="busy")
        reason = "absent" if store.is_reconciled else "reconciling"
        sound: list[LeasedBlock] = []
        pinned: list[int] = []
        for match in store.index.walk(request.fingerprint, request.grains, request.skip_blocks):
            verdict = store.verify(match)
            if verdict != "sound":
                reason = verdict
                break
            sound.append(LeasedBlock(key=match.row.key, grains=match.grains, path=str(store.path_of(match.row))))
            pinned.append(match.row.block)
        if not sound:
            return Leased(call_id=request.call_id, lease=NO_LEASE, blocks=(), miss_reason=reason)
        self._touch(store, pinned, now)
        lease = self._pins.lease_blocks(peer, pinned, now)
        return Leased(call_id=request.call_id, lease=lease, blocks=tuple(sound), miss_reason=reason)

    def _stage(self, store: Store, peer: bytes, request: Stage, now: float) -> Staged | Declined:
        reason = self._why_not_stage(store, request)
        if reason is not None:
            return Declined(call_id=request.call_id, reason=reason)
        path = str(store.new_staged_file(request.fingerprint))
        lease = self._pins.lease_stage(
            peer,
            fingerprint=request.fingerprint,
            key=request.key,
            path=path,
            reserved_bytes=request.file_bytes,
            now=now,
        )
        return Staged(call_id=request.call_id, lease=lease, path=path)

    def _why_not_stage(self, store: Store, request: Stage) -> str | None:
        if not is_fingerprint(request.fingerprint) or not is_digest(request.key) or request.file_bytes <= 0:
            return "invalid"
        if not store.is_reconciled:
            return "reconciling"  # until every file is counted, no write can be known to keep the quota
        if self._pins.is_full:
            return "busy"
        if store.index.find(request.fingerprint, request.key) is not None:
            return "present"
        if not store.has_free_space(request.file_bytes):
            return "no_space"
        if not store.make_room(request.file_bytes):
            return "quota"
        return None

    def _publish(self, store: Store, peer: bytes, request: Publish) -> Published | Declined:
        stage = self._pins.stage(peer, request.lease)
        if stage is None:
            return Declined(call_id=request.call_id, reason="lease")
        try:
            if not _is_block(request, stage):
                raise NotStored("invalid")
            row = store.publish(stage, request.parent, request.grains)
        except NotStored as why:
            return Declined(call_id=request.call_id, reason=why.reason)
        finally:
            self._end(store, [self._pins.release(peer, request.lease)])
        self._published += 1
        self._written_bytes += row.file_bytes
        if request.supersedes is not None:
            store.supersede(row, request.supersedes)
        store.make_room(0)
        return Published(call_id=request.call_id, file_bytes=row.file_bytes)

    def _describe(self, store: Store, request: Describe) -> Described:
        return Described(
            call_id=request.call_id,
            blocks=store.index.blocks,
            file_bytes=store.usage_bytes,
            quota_bytes=self._settings.quota_bytes,
            leases=self._pins.count,
            published=self._published,
            written_bytes=self._written_bytes,
            evicted=self._evicted + store.evicted,
            quarantined=self._quarantined + store.quarantined,
        )

    # --- inside -----------------------------------------------------------------------------------------------------

    def _end(self, store: Store, ended: Iterable[Lease | None]) -> None:
        for lease in ended:
            match lease:
                case ReadLease():
                    store.given_back(lease.blocks)
                case StageLease():
                    disk.remove_file(Path(lease.path))  # gone already when it was published
                case None:
                    pass
                case _:
                    assert_never(lease)

    def _touch(self, store: Store, blocks: list[int], now: float) -> None:
        try:
            store.index.touch(blocks)
        except sqlite3.Error as why:
            if loses_index(why):
                raise
            self._tell_once("no_space", now, why=_in_words(why), then="hits are served, writes are declined")

    def _reconcile_some(self, store: Store, steps: int, now: float) -> Literal["busy", "quiet"]:
        if self._reconciling is None:
            return "quiet"
        try:
            for _ in range(steps):
                next(self._reconciling)
        except StopIteration:
            self._reconciling = None
            return "quiet"
        except (OSError, sqlite3.Error) as why:
            self._reconciling = None
            self._in_trouble(store, why, now)
            store.reconcile_wanted = True
            return "quiet"
        return "busy"

    def _in_trouble(self, store: Store, why: OSError | sqlite3.Error, now: float) -> str:
        trouble = trouble_of(why)
        if loses_index(why) or not store.is_there:
            self._tell_once(trouble, now, why=_in_words(why), then="the directory is closed and opened again")
            if is_damaged(why):
                store.discard_index()
            self._lose_store(store)
            self._retry_at = now
        else:
            self._tell_once(trouble, now, why=_in_words(why), then="the request was declined, the next is tried")
        return trouble

    def _lose_store(self, store: Store) -> None:
        self._store = None
        self._reconciling = None
        self._evicted += store.evicted
        self._quarantined += store.quarantined
        try:
            store.close()
        except sqlite3.Error as why:
            _log.warning("close_failed", why=_in_words(why), then="the index is mended at the next start")

    def _tell_once(self, trouble: str, now: float, *, why: str, then: str) -> None:
        told_at = self._told.get(trouble)
        if told_at is None or now - told_at >= TELL_AGAIN_SECONDS:
            self._told[trouble] = now
            _log.error("trouble", trouble=trouble, directory=self._settings.directory, why=why, then=then)


def unserved(request: BlockRequest, reason: str) -> BlockReply:
    """The answer to a request that the disk does not allow: a miss or a decline wherever there is one."""
    match request:
        case Lookup():
            return Found(call_id=request.call_id, blocks=())
        case Fetch():
            return Leased(call_id=request.call_id, lease=NO_LEASE, blocks=(), miss_reason=reason)
        case Stage() | Publish():
            return Declined(call_id=request.call_id, reason=reason)
        case Release():
            return Released(call_id=request.call_id)
        case Forget() | PinBlocks() | UnpinBlocks() | Describe():
            message = f"the cache directory cannot be used ({reason}): see the cachestore's log, then try again"
            failure = Failure(kind=FailureKind.INTERNAL, message=message)
            return CacheFailed(call_id=request.call_id, failure=failure)
        case _:
            assert_never(request)


def _is_block(request: Publish, stage: StageLease) -> bool:
    return (
        1 <= len(request.grains) <= GRAINS_PER_BLOCK
        and all(is_digest(grain) for grain in request.grains)
        and len(set(request.grains)) == len(request.grains)
        and request.grains[-1] == stage.key
        and (not request.parent or is_digest(request.parent))
        and request.parent not in request.grains
    )


def _in_words(why: OSError | sqlite3.Error | IndexUnusable) -> str:
    return (why.strerror or type(why).__name__) if isinstance(why, OSError) else str(why)
