"""One open cache directory: its lock, its files, its index and the byte books that tie them together.

The order of every change is chosen for `kill -9` between any two system calls: a file is whole and durable before it
has a block's name, and named before it is indexed; it is unlinked before its row is dropped. What a kill leaves behind
is a file without a row (adopted by the next reconcile) or a row without a file (a miss, dropped), never a wrong block.
"""

import os
import secrets
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import structlog

from cachestore import audit, disk
from cachestore.database import IndexUnusable
from cachestore.eviction import Candidate, plan_eviction
from cachestore.index import BlockIndex
from cachestore.index_rows import EVERY_BLOCK, BlockRow, Criteria, NewBlock, StrayRow
from cachestore.layout import (
    INDEX_NAME,
    INDEX_NAMES,
    LOCK_NAME,
    OWN_NAMES,
    QUARANTINE_DIRECTORY,
    STAGED_SUFFIX,
    STAGING_DIRECTORY,
    BadBlock,
    block_path,
    is_fingerprint,
    staging_directory,
)
from cachestore.pinned_sets import PinnedSets
from cachestore.pins import Pins, StageLease
from cachestore.reasons import is_damaged
from cachestore.verification import NotSound, Seen, Verification, is_announced
from cachestore.write_ledger import WriteLedger
from protocol.block_file import BlockMetadata
from protocol.ids import BlockKey, Grain

QUARANTINE_KEPT = 4
"""Damaged files worth a look; older ones go."""

EVICTION_SLACK_BYTES = 64 * 1024
"""Freed on top of what is needed, since deleting rows makes the index's log grow before it shrinks."""

STAGED_SLACK_BYTES = 64 * 1024
"""How far a finished file may exceed what was asked for: a writer knows its tensors, not its header to the byte."""

NEWEST_BLOCK = 1 << 62
"""Above every block id: where a walk from the newest block starts."""

_FORGET_ROWS = 1000
_EXPIRED_ROWS = 32

_log = structlog.get_logger("cachestore")


class NotStored(Exception):
    """A block that will not be stored, and the reason for the worker."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Store:
    """The directory, from open to close. One thread owns it. Raises OSError and sqlite3.Error as they come."""

    def __init__(self, directory: Path, *, quota_bytes: int, free_floor_bytes: int, pins: Pins, first_use: int) -> None:
        """Take the lock, sweep what an earlier run was writing, open the index (rebuilt later if it is damaged).

        Raises disk.DirectoryTaken when another process holds the directory. `pins` is read here, never changed.
        """
        self.directory = directory
        self.quota_bytes = quota_bytes
        self.free_floor_bytes = free_floor_bytes
        self.is_reconciled = False
        self.reconcile_wanted = True
        self.evicted = 0
        self.expired = 0
        self.quarantined = 0
        self._pins = pins
        self._verification = Verification()
        self._condemned: set[int] = set()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = disk.hold_lock(directory / LOCK_NAME)
        try:
            disk.make_directory(directory / QUARANTINE_DIRECTORY)
            self.swept_bytes = self._sweep_staging()
            self.index = self._open_index(first_use)
            try:
                self.pinned_sets = PinnedSets(self.index.database)
                self.ledger = WriteLedger(self.index.database)
                self._remove(self.index.condemned())
                if not self.make_room(0):
                    _log.warning(
                        "over_quota",
                        usage_bytes=self.usage_bytes,
                        quota_bytes=quota_bytes,
                        pinned_bytes=self.pinned_sets.held_bytes(),
                        then="nothing is written until there is room: unpin blocks, raise the quota in mlxd.toml, or "
                        "move other files out of the cache directory",
                    )
            except BaseException as why:
                self.index.close()
                if isinstance(why, sqlite3.Error) and is_damaged(why):
                    delete_index(directory)
                raise
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Close the index and give the directory back."""
        try:
            self.index.close()
        finally:
            os.close(self._lock)

    def discard_index(self) -> None:
        """Delete a damaged index, as the last thing before `close`; the next run rebuilds it from the files."""
        self.index.close()
        delete_index(self.directory)

    @property
    def is_there(self) -> bool:
        """Whether the directory still is where it was opened (not unmounted, not removed)."""
        return (self.directory / INDEX_NAME).exists()

    # --- books ------------------------------------------------------------------------------------------------------

    @property
    def usage_bytes(self) -> int:
        """What counts towards the quota: every file in the directory, staged ones at what they may take."""
        own_bytes = sum(disk.tree_bytes(self.directory / name) for name in OWN_NAMES)
        return self.index.block_bytes + self.index.stray_bytes + self._pins.reserved_bytes + own_bytes

    def has_free_space(self, file_bytes: int) -> bool:
        """Whether the volume keeps its free floor when this and all staged files are written."""
        free_bytes = disk.free_bytes(self.directory)
        return free_bytes - self._pins.reserved_bytes - file_bytes >= self.free_floor_bytes

    def make_room(self, more_bytes: int) -> bool:
        """Bring usage plus `more_bytes` under the quota. Deletes nothing and says False when that cannot be done."""
        needed_bytes = self.usage_bytes + more_bytes - self.quota_bytes
        if needed_bytes <= 0:
            return True
        strays: list[StrayRow] = []
        stray_bytes = 0
        for stray in self.index.stray_rows():
            if stray.kind != "other" and stray_bytes < needed_bytes:
                strays.append(stray)
                stray_bytes += stray.file_bytes
        plan: list[Candidate] | None = []
        if stray_bytes < needed_bytes:
            still_needed_bytes = needed_bytes - stray_bytes
            plan = plan_eviction(still_needed_bytes + EVICTION_SLACK_BYTES, self.index, self._pins.is_pinned)
            if plan is None:
                plan = plan_eviction(still_needed_bytes, self.index, self._pins.is_pinned)
        if plan is None:
            return False
        self._remove_strays(strays)
        rows = [row for victim in plan if (row := self.index.row(victim.block)) is not None]
        self._remove(rows)
        self.evicted += len(rows)
        _log.info(
            "evicted",
            blocks=len(rows),
            strays=len(strays),
            freed_bytes=stray_bytes + sum(row.file_bytes for row in rows),
            quota_bytes=self.quota_bytes,
        )
        return True

    # --- reading ----------------------------------------------------------------------------------------------------

    def path_of(self, row: BlockRow) -> Path:
        return self.directory / block_path(row.fingerprint, row.key, row.checksum)

    def look(self, row: BlockRow) -> Seen:
        """Whether a block's file may be leased, and whether its bytes were verified. NotSound: it is lost."""
        try:
            return self._verification.look(row, self.path_of(row))
        except NotSound as why:
            self._lose(row, why.verdict, str(why))
            raise

    def was_read(self, block: int, identity: disk.FileIdentity) -> None:
        """A reader compared the checksum of a leased block: it is verified, as long as its file is this one."""
        if self.index.row(block) is not None:
            self._verification.believe(block, identity)

    def read_suspect(self, row: BlockRow) -> None:
        """A reader could not use a leased block: read its file here, and lose it if it is damaged or gone."""
        if row.condemned:
            return
        try:
            self._verification.read(row, self.path_of(row))
        except NotSound as why:
            self._lose(row, why.verdict, str(why))
        else:
            _log.warning(
                "suspect_is_sound",
                fingerprint=row.fingerprint,
                key=row.key.hex(),
                why="a worker could not use this block, but its file is whole: see that worker's log",
            )

    def quarantine_impostor(self, path: Path) -> None:
        """Take away what has a block's name and is no file, or the block of that name could never be stored."""
        _log.warning("impostor", path=path.name, why="a directory has a block's name")
        self._move_to_quarantine(path)

    def quarantine(self, row: BlockRow, reason: str) -> None:
        """Take a bad block, and all below it, out of service; keep its file for a look."""
        self._lose(row, "integrity", reason)

    # --- writing ----------------------------------------------------------------------------------------------------

    def new_staged_file(self, fingerprint: str) -> Path:
        """A private, empty file on the same volume for a worker to write."""
        directory = self.directory / staging_directory(fingerprint)
        disk.make_directory(self.directory / fingerprint)
        disk.make_directory(directory)
        path = directory / (secrets.token_hex(16) + STAGED_SUFFIX)
        disk.create_private_file(path)
        return path

    def publish(self, stage: StageLease, parent: BlockKey, grains: tuple[Grain, ...], now_unix: float) -> BlockRow:
        """Turn a finished staged file into an indexed block. Raises NotStored; the staged file is then the caller's."""
        if self.index.find(stage.fingerprint, stage.key) is not None:
            raise NotStored("present")
        expected = BlockMetadata(
            fingerprint=stage.fingerprint, key=stage.key, parent=parent, grains=grains, owner=stage.owner
        )
        staged = Path(stage.path)
        try:
            sealed = disk.seal(staged)
        except (BadBlock, FileNotFoundError) as why:
            reason = str(why) if isinstance(why, BadBlock) else "the staged file is gone"
            _log.warning("staged_block_refused", key=stage.key.hex(), why=reason)
            raise NotStored("integrity") from None
        file_bytes = sealed.identity.file_bytes
        if not is_announced(sealed.metadata, expected):
            _log.warning("staged_block_refused", key=stage.key.hex(), why="its header is not what was announced")
            raise NotStored("integrity")
        if file_bytes > stage.reserved_bytes + STAGED_SLACK_BYTES:
            _log.warning("staged_block_refused", key=stage.key.hex(), why="it is larger than announced")
            raise NotStored("quota")
        path = self.directory / block_path(stage.fingerprint, stage.key, sealed.checksum)
        disk.make_directory(path.parent)
        disk.put_in_place(staged, path)
        try:
            self.index.drop_strays([str(path.relative_to(self.directory))])
            block = self.index.insert(
                NewBlock(
                    fingerprint=stage.fingerprint,
                    key=stage.key,
                    parent=parent,
                    grains=grains,
                    file_bytes=file_bytes,
                    checksum=sealed.checksum,
                    owner=stage.owner,
                    ttl_seconds=stage.ttl_seconds,
                    used_unix=now_unix,
                )
            )
        except BaseException:
            disk.remove_file(path)  # a file that is not in the books must not stay
            raise
        self._verification.believe(block, sealed.identity)
        row = self.index.row(block)
        if row is None:  # pragma: no cover
            raise NotStored("unavailable")
        return row

    def supersede(self, new: BlockRow, old_key: BlockKey) -> None:
        """Drop a shorter tail that a new block contains. One that it does not contain, or has children, stays.

        So does a pinned one: a model whose state cannot be cut is served by it alone.
        """
        old = self.index.find(new.fingerprint, old_key)
        if old is None or old.block == new.block or old.condemned or old.pins:
            return
        if old.parent != new.parent or old.key not in new.grains or old.children:
            _log.warning("not_superseded", key=old_key.hex(), why="the new block does not contain it")
            return
        self.drop([old])

    # --- deleting ---------------------------------------------------------------------------------------------------

    def drop(self, rows: Sequence[BlockRow]) -> None:
        """Delete blocks, children before parents; those being read are hidden now and deleted when given back."""
        pinned = [row for row in rows if self._pins.is_pinned(row.block)]
        self._remove([row for row in rows if not self._pins.is_pinned(row.block)])
        if pinned:
            self.index.condemn(pinned)
            self._condemned.update(row.block for row in pinned)

    def given_back(self, blocks: Iterable[int]) -> None:
        """These blocks have one reader less: delete the condemned ones nobody reads any more."""
        done = [block for block in blocks if block in self._condemned and not self._pins.is_pinned(block)]
        self._remove([row for block in done if (row := self.index.row(block)) is not None])
        self._condemned.difference_update(done)

    def expire(self, now_unix: float) -> int:
        """Drop some blocks that lay unused for as long as they may, children before parents. How many."""
        self.pinned_sets.expire(now_unix)
        rows = self.index.expired_leaves(now_unix, _EXPIRED_ROWS)
        self.drop(rows)
        self.expired += len(rows)
        return len(rows)

    def forget(self, criteria: audit.PurgeCriteria, *, asked_by: str, now_unix: float) -> tuple[int, int]:
        """Delete all blocks that match, and what lies in quarantine. How many blocks, and their bytes.

        The audit line comes first, so that no purge is without one. A disk that refuses it is asked again afterwards.
        """
        fingerprint, unused_for_seconds = criteria.fingerprint, criteria.unused_for_seconds
        unused_since_unix = None if unused_for_seconds is None else now_unix - unused_for_seconds
        wanted = Criteria(fingerprint=fingerprint, owner=criteria.owner, unused_since_unix=unused_since_unix)
        blocks, file_bytes = self.index.totals_of(wanted)
        line = audit.PurgeLine(
            unix=now_unix,
            asked_by=asked_by[: audit.MAX_ASKED_BY_LETTERS],
            criteria=criteria,
            blocks=blocks,
            file_bytes=file_bytes,
        )
        try:
            audit.append(self.directory, line)
        except OSError:
            forgotten = self._forget(wanted)  # a full disk, most likely: now there is room for it
            try:
                audit.append(self.directory, line)
            except OSError as why:
                _log.error("audit_line_lost", line=str(line), why=why.strerror, then="this log is its only trace")
            return forgotten
        return self._forget(wanted)

    def _forget(self, criteria: Criteria) -> tuple[int, int]:
        fingerprint = criteria.fingerprint
        since_unix = criteria.unused_since_unix
        blocks = forgotten_bytes = 0
        before = NEWEST_BLOCK
        while rows := self.index.rows_of(criteria, before, _FORGET_ROWS):
            self.drop(rows)
            blocks += len(rows)
            forgotten_bytes += sum(row.file_bytes for row in rows)
            before = rows[-1].block
        self._remove_strays(
            stray
            for stray in self.index.stray_rows()
            if stray.kind == "quarantine"  # its files may be of any model
            or (
                stray.kind == "foreign"  # its owner cannot be read
                and (fingerprint is None or stray.path.startswith(f"{fingerprint}/"))
                and (since_unix is None or stray.modified <= since_unix * 1_000_000)
            )
        )
        for name in self.index.fingerprints() if fingerprint is None else [fingerprint]:
            if is_fingerprint(name):
                for entry in disk.list_directory(self.directory / name):
                    disk.remove_if_empty(Path(entry.path))
                disk.remove_if_empty(self.directory / name)
        return blocks, forgotten_bytes

    # --- checks -----------------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Where books, index and files disagree; empty when all is well. Exact only once reconciled. For tests."""
        counted = {stray.path: stray.file_bytes for stray in self.index.stray_rows()}
        for row in self.index.rows_of(EVERY_BLOCK, NEWEST_BLOCK, self.index.blocks) + self.index.condemned():
            counted[str(self.path_of(row).relative_to(self.directory))] = row.file_bytes
        found = {
            path: disk.tree_bytes(self.directory / path)
            for path in disk.walk_files(self.directory)
            if path not in OWN_NAMES and path.split("/")[1:2] != [STAGING_DIRECTORY]
        }
        return [
            *self.index.faults(),
            *(f"{path} is counted and not there" for path in counted.keys() - found.keys()),
            *(f"{path} is there and not counted" for path in found.keys() - counted.keys()),
            *(
                f"{path} is counted with {counted[path]} bytes and has {found[path]}"
                for path in counted.keys() & found.keys()
                if counted[path] != found[path]
            ),
        ]

    # --- inside -----------------------------------------------------------------------------------------------------

    def _open_index(self, first_use: int) -> BlockIndex:
        path = self.directory / INDEX_NAME
        if not path.exists():
            disk.create_private_file(path)  # SQLite gives its log the same mode
        try:
            return BlockIndex(path, first_use)
        except IndexUnusable as why:
            _log.warning(
                "index_unusable",
                why=str(why),
                then="it is rebuilt from the block files; pins and today's written bytes are lost",
            )
            delete_index(self.directory)
            disk.create_private_file(path)
            return BlockIndex(path, first_use)

    def _sweep_staging(self) -> int:
        swept_bytes = 0
        for model in disk.list_directory(self.directory):
            if is_fingerprint(model.name) and model.is_dir(follow_symlinks=False):
                for entry in disk.list_directory(self.directory / staging_directory(model.name)):
                    swept_bytes += disk.tree_bytes(Path(entry.path))
                    disk.remove_tree(Path(entry.path))
        return swept_bytes

    def _lose(self, row: BlockRow, verdict: Literal["integrity", "missing"], why: str) -> None:
        below = self.index.descendants(row)
        _log.warning(
            "block_lost", fingerprint=row.fingerprint, key=row.key.hex(), why=why, descendants_dropped=len(below)
        )
        self.drop(below)
        if verdict == "integrity":
            self._move_to_quarantine(self.path_of(row))
            self.quarantined += 1
        else:
            self.reconcile_wanted = True  # somebody else deletes files here
        self.index.delete([row])
        self._verification.forget(row.block)

    def _move_to_quarantine(self, path: Path) -> None:
        relative = f"{QUARANTINE_DIRECTORY}/{path.name}.{secrets.token_hex(4)}"
        target = self.directory / relative
        disk.make_directory(target.parent)
        try:
            disk.move(path, target)
        except FileNotFoundError:
            return
        self.index.put_stray(
            StrayRow(
                path=relative,
                kind="quarantine",
                file_bytes=disk.tree_bytes(target),
                modified=self.index.next_use(),
            )
        )
        kept = [stray for stray in self.index.stray_rows() if stray.kind == "quarantine"]
        self._remove_strays(kept[:-QUARANTINE_KEPT])

    def _remove(self, rows: Sequence[BlockRow]) -> None:
        gone: list[BlockRow] = []
        try:
            for row in rows:
                disk.remove_file(self.path_of(row))
                gone.append(row)
        finally:
            self.index.delete(gone)
            for row in gone:
                self._verification.forget(row.block)

    def _remove_strays(self, strays: Iterable[StrayRow]) -> None:
        gone: list[str] = []
        try:
            for stray in strays:
                if stray.kind == "quarantine":
                    disk.remove_tree(self.directory / stray.path)
                else:
                    disk.remove_file(self.directory / stray.path)
                gone.append(stray.path)
        finally:
            if gone:
                self.index.drop_strays(gone)


def delete_index(directory: Path) -> None:
    """Delete a damaged index. Only while it is closed."""
    for name in INDEX_NAMES:
        disk.remove_file(directory / name)
