"""The verbs of the cachestore: one request in, one reply out, whatever the disk does.

Trouble with the disk is an answer (a miss, a decline), told once in the log and tried again later; the daemon lives on.
"""

import sqlite3
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Literal, assert_never

import structlog

from cachestore import disk
from cachestore.audit import PurgeCriteria
from cachestore.database import IndexUnusable
from cachestore.pins import Lease, Pins, ReadLease, StageLease
from cachestore.reasons import is_damaged, loses_index, trouble_of
from cachestore.reconcile import reconcile
from cachestore.refusals import NO_LEASE, is_block, is_pin, is_stage, unserved
from cachestore.store import NotStored, Store
from cachestore.verification import NotSound
from cachestore.write_budget import utc_day, write_permission, write_state
from protocol.blocks import (
    BlockReply,
    BlockRequest,
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
    Pinned,
    Publish,
    Published,
    Release,
    Released,
    Stage,
    Staged,
    UnpinBlocks,
    Unpinned,
)
from protocol.ids import BlockKey, LeaseId
from protocol.launch import CachestoreLaunch

REOPEN_SECONDS = 5.0
TELL_AGAIN_SECONDS = 600.0

_OPENING_STEPS = 2000  # of reconciling, before the first request: enough for a small or an unchanged directory
_IDLE_STEPS = 4

_log = structlog.get_logger("cachestore")


class Service:
    """All the state there is, owned by one thread. `now` counts seconds and never goes back.

    `first_number` must be larger in every run: lease ids and uses count up from it. `unix_clock` is for what outlives
    a run: expiry, the day of a write, the audit line.
    """

    def __init__(
        self, settings: CachestoreLaunch, *, first_number: int, unix_clock: Callable[[], float] = time.time
    ) -> None:
        self._unix_clock = unix_clock
        self._settings = settings
        self._first_number = first_number
        self._pins = Pins(first_number)
        self._store: Store | None = None
        self._reconciling: Generator[None] | None = None
        self._unread: dict[LeaseId, dict[BlockKey, tuple[int, disk.FileIdentity]]] = {}
        self._retry_at = 0.0
        self._told: dict[str, float] = {}
        self._published = 0
        self._written_bytes = 0
        self._evicted = 0
        self._expired = 0
        self._quarantined = 0
        self._written_before = (0, 0)  # the day, and its bytes, of a directory that was lost

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
            store = Store(
                Path(self._settings.directory),
                quota_bytes=self._settings.quota_bytes,
                free_floor_bytes=self._settings.free_floor_bytes,
                pins=self._pins,
                first_use=self._first_number,
            )
        except (OSError, sqlite3.Error, IndexUnusable) as why:
            self._tell_once("unavailable", now, why=_in_words(why), then="misses are served and it is tried again")
            return
        self._store = store
        try:
            store.ledger.at_least(*self._written_before)
            self._note_written(store, store.swept_bytes, now)
        except sqlite3.Error as why:
            self._in_trouble(store, why, now)
            if self._store is not store:
                return
        self._told.clear()
        _log.info("opened", blocks=store.index.blocks, usage_bytes=store.usage_bytes)
        self._reconciling = reconcile(store)
        self._reconcile_some(store, _OPENING_STEPS, now)

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
                    return self._publish(store, peer, request, now)
                case Release():
                    return self._release(store, peer, request, now)
                case Forget():
                    return self._forget(store, request)
                case PinBlocks():
                    return self._pin(store, request)
                case UnpinBlocks():
                    blocks = store.pinned_sets.unpin(request.owner, request.name)
                    return Unpinned(call_id=request.call_id, blocks=blocks)
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
                self._end(store, ended, now)
            expired = store.expire(self._unix_clock())
        except (OSError, sqlite3.Error) as why:
            self._in_trouble(store, why, now)
            return "quiet"
        if self._reconciling is None and store.reconcile_wanted:
            self._reconciling = reconcile(store)
        reconciling = self._reconcile_some(store, _IDLE_STEPS, now)
        return "busy" if expired else reconciling

    def lease_holders(self, now: float) -> set[bytes]:
        """The peers that have held a lease for a while; one that is gone cannot be sent anything, see `drop_peer`."""
        return self._pins.holders(now)

    def drop_peer(self, peer: bytes, now: float) -> None:
        """A peer is gone: end its leases."""
        if self._store is None:
            return
        try:
            self._end(self._store, self._pins.release_peer(peer), now)
        except (OSError, sqlite3.Error) as why:
            self._in_trouble(self._store, why, now)

    # --- the verbs --------------------------------------------------------------------------------------------------

    def _lookup(self, store: Store, request: Lookup) -> Found:
        matches = store.index.walk(request.fingerprint, request.grains, request.skip_blocks, request.parts)
        blocks = tuple(
            FoundBlock(key=match.row.key, grains=match.grains, file_bytes=match.row.file_bytes) for match in matches
        )
        return Found(call_id=request.call_id, blocks=blocks)

    def _fetch(self, store: Store, peer: bytes, request: Fetch, now: float) -> Leased:
        if self._pins.is_full:
            return Leased(call_id=request.call_id, lease=NO_LEASE, blocks=(), miss_reason="busy")
        reason = "absent" if store.is_reconciled else "reconciling"
        sound: list[LeasedBlock] = []
        pinned: list[int] = []
        unread: dict[BlockKey, tuple[int, disk.FileIdentity]] = {}
        found = store.index.walk(request.fingerprint, request.grains, request.skip_blocks, request.parts)
        for match in found[: max(0, request.most_blocks)]:
            row = match.row
            try:
                seen = store.look(row)
            except NotSound as why:
                reason = why.verdict
                break
            checksum = b""
            if seen.bytes_are == "unread":
                checksum = row.checksum
                unread[row.key] = (row.block, seen.identity)
            path = str(store.path_of(row))
            sound.append(LeasedBlock(key=row.key, grains=match.grains, path=path, checksum=checksum))
            pinned.append(row.block)
        if not sound:
            return Leased(call_id=request.call_id, lease=NO_LEASE, blocks=(), miss_reason=reason)
        self._touch(store, pinned, now)
        lease = self._pins.lease_blocks(peer, pinned, now)
        if unread:
            self._unread[lease] = unread
        return Leased(call_id=request.call_id, lease=lease, blocks=tuple(sound), miss_reason=reason)

    def _release(self, store: Store, peer: bytes, request: Release, now: float) -> Released:
        ended = self._pins.release(peer, request.lease)
        try:
            if isinstance(ended, ReadLease):
                for key, (block, identity) in self._unread.get(ended.lease, {}).items():
                    if key in request.verified:
                        store.was_read(block, identity)
                for block in ended.blocks if request.suspect else ():
                    row = store.index.row(block)
                    if row is not None and row.key in request.suspect:
                        store.read_suspect(row)
        finally:
            self._end(store, [ended], now)
        return Released(call_id=request.call_id)

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
            owner=request.owner,
            ttl_seconds=request.ttl_seconds,
        )
        return Staged(call_id=request.call_id, lease=lease, path=path)

    def _why_not_stage(self, store: Store, request: Stage) -> str | None:
        if not is_stage(request):
            return "invalid"
        if not store.is_reconciled:
            return "reconciling"  # until every file is counted, no write can be known to keep the quota
        if self._pins.is_full:
            return "busy"
        if store.index.find(request.fingerprint, request.key) is not None:
            return "present"
        written_bytes = store.ledger.written_bytes(utc_day(self._unix_clock()))
        permission = write_permission(written_bytes, self._pins.reserved_bytes, self._settings.daily_write_bytes)
        if permission != "allowed":
            return permission
        if not store.has_free_space(request.file_bytes):
            return "no_space"
        if not store.make_room(request.file_bytes):
            return "quota"
        return None

    def _publish(self, store: Store, peer: bytes, request: Publish, now: float) -> Published | Declined:
        stage = self._pins.stage(peer, request.lease)
        if stage is None:
            return Declined(call_id=request.call_id, reason="lease")
        try:
            if not is_block(request, stage):
                raise NotStored("invalid")
            if stage.fate == "forgotten":
                raise NotStored("forgotten")
            row = store.publish(stage, request.parent, request.grains, self._unix_clock())
        except NotStored as why:
            return Declined(call_id=request.call_id, reason=why.reason)
        finally:
            self._end(store, [self._pins.release(peer, request.lease)], now)
        self._published += 1
        self._written_bytes += row.file_bytes
        self._note_written(store, row.file_bytes, now)
        if request.supersedes is not None:
            store.supersede(row, request.supersedes)
        store.make_room(0)
        return Published(call_id=request.call_id, file_bytes=row.file_bytes)

    def _forget(self, store: Store, request: Forget) -> Forgotten:
        criteria = PurgeCriteria(
            fingerprint=request.fingerprint, owner=request.owner, unused_for_seconds=request.unused_for_seconds
        )
        if request.unused_for_seconds is None:  # what is being written was used just now
            self._pins.forget_stages(fingerprint=request.fingerprint, owner=request.owner)
        blocks, file_bytes = store.forget(criteria, asked_by=request.asked_by, now_unix=self._unix_clock())
        store.make_room(0)  # the audit line counts too
        _log.info("forgotten", criteria=str(criteria), blocks=blocks, file_bytes=file_bytes)
        return Forgotten(call_id=request.call_id, blocks=blocks, file_bytes=file_bytes)

    def _pin(self, store: Store, request: PinBlocks) -> Pinned | Declined:
        if not is_pin(request):
            return Declined(call_id=request.call_id, reason="invalid")
        if not store.pinned_sets.has_room_for(request.owner, request.name):
            return Declined(call_id=request.call_id, reason="busy")
        expires_unix = None if request.ttl_seconds is None else self._unix_clock() + request.ttl_seconds
        blocks = store.pinned_sets.pin(
            fingerprint=request.fingerprint,
            keys=request.keys,
            owner=request.owner,
            name=request.name,
            expires_unix=expires_unix,
        )
        return Pinned(call_id=request.call_id, blocks=blocks)

    def _describe(self, store: Store, request: Describe) -> Described:
        written_today_bytes = store.ledger.written_bytes(utc_day(self._unix_clock()))
        daily_write_bytes = self._settings.daily_write_bytes
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
            written_today_bytes=written_today_bytes,
            daily_write_bytes=daily_write_bytes,
            write_state=write_state(written_today_bytes, daily_write_bytes),
            expired=self._expired + store.expired,
            pins=store.pinned_sets.books(),
        )

    # --- inside -----------------------------------------------------------------------------------------------------

    def _end(self, store: Store, ended: Iterable[Lease | None], now: float) -> None:
        for lease in ended:
            match lease:
                case ReadLease():
                    self._unread.pop(lease.lease, None)
                    store.given_back(lease.blocks)
                case StageLease():
                    wasted_bytes = disk.tree_bytes(Path(lease.path))
                    disk.remove_file(Path(lease.path))  # gone already when it was published
                    self._note_written(store, wasted_bytes, now)
                case None:
                    pass
                case _:
                    assert_never(lease)

    def _touch(self, store: Store, blocks: list[int], now: float) -> None:
        try:
            store.index.touch(blocks, self._unix_clock())
        except sqlite3.Error as why:
            if loses_index(why):
                raise
            self._tell_once("no_space", now, why=_in_words(why), then="hits are served, writes are declined")

    def _note_written(self, store: Store, written_bytes: int, now: float) -> None:
        if not written_bytes:
            return
        try:
            store.ledger.add(utc_day(self._unix_clock()), written_bytes)
        except sqlite3.Error as why:
            if loses_index(why):
                raise
            self._tell_once("no_space", now, why=_in_words(why), then="what was written today is counted in memory")

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
        self._unread.clear()
        self._evicted += store.evicted
        self._expired += store.expired
        self._quarantined += store.quarantined
        today = utc_day(self._unix_clock())
        self._written_before = (today, store.ledger.written_bytes(today))
        try:
            store.close()
        except sqlite3.Error as why:
            _log.warning("close_failed", why=_in_words(why), then="the index is mended at the next start")

    def _tell_once(self, trouble: str, now: float, *, why: str, then: str) -> None:
        told_at = self._told.get(trouble)
        if told_at is None or now - told_at >= TELL_AGAIN_SECONDS:
            self._told[trouble] = now
            _log.error("trouble", trouble=trouble, directory=self._settings.directory, why=why, then=then)


def _in_words(why: OSError | sqlite3.Error | IndexUnusable) -> str:
    return (why.strerror or type(why).__name__) if isinstance(why, OSError) else str(why)
