"""Mends the index from the files, in small steps between requests.

Never reads a header it does not have to: a file whose name is in the index costs one stat. Unknown blocks are adopted
by their header, rows without a file are dropped, everything else in the directory is counted.
"""

import os
import stat
from collections.abc import Generator, Sequence
from pathlib import Path

import structlog

from cachestore import disk
from cachestore.database import let_log_grow, shrink_log
from cachestore.index_rows import NewBlock, StrayKind, StrayRow
from cachestore.layout import (
    OWN_NAMES,
    PREFIXES,
    QUARANTINE_DIRECTORY,
    STAGING_DIRECTORY,
    BadBlock,
    block_path,
    is_fingerprint,
    parse_block_name,
    stray_kind,
)
from cachestore.reasons import is_unreadable
from cachestore.store import Store
from protocol.ids import BlockKey

_FILES_PER_STEP = 32
_ADOPTED_PER_STEP = 16  # each costs a read of its header; all are indexed in one transaction

_log = structlog.get_logger("cachestore")


def reconcile(store: Store) -> Generator[None]:
    """Compare everything once. Each `next` is a step of well under a millisecond; requests may be served in between."""
    store.reconcile_wanted = False
    adopted = dropped = 0
    if not store.is_reconciled:  # nothing is written meanwhile, so that a large log takes no room from blocks
        let_log_grow(store.index.database)
    models = {
        entry.name
        for entry in disk.list_directory(store.directory)
        if is_fingerprint(entry.name) and entry.is_dir(follow_symlinks=False)
    }
    for fingerprint in sorted(models | set(store.index.fingerprints())):
        for number, prefix in enumerate(PREFIXES):
            directory = store.directory / fingerprint / prefix
            rows = store.index.rows_in(fingerprint, number)
            unknown: list[Path] = []
            for count, entry in enumerate(disk.list_directory(directory)):
                if entry.name in rows:
                    _check_size(store, entry, *rows.pop(entry.name))
                elif entry.is_dir(follow_symlinks=False):
                    if parse_block_name(entry.name) is None:
                        yield from _count_below(store, Path(entry.path))
                    else:
                        store.quarantine_impostor(Path(entry.path))
                else:
                    unknown.append(Path(entry.path))
                if count % _FILES_PER_STEP == 0:
                    yield
            for start in range(0, len(unknown), _ADOPTED_PER_STEP):
                adopted += _adopt(store, fingerprint, unknown[start : start + _ADOPTED_PER_STEP])
                yield
            for block, _ in rows.values():  # these had no file when the directory was read
                dropped += _drop_if_gone(store, block)
                yield
            yield
    yield from _count_strays(store, models)
    shrink_log(store.index.database)
    store.make_room(0)
    store.is_reconciled = True
    _log.info(
        "reconciled",
        blocks=store.index.blocks,
        adopted=adopted,
        dropped=dropped,
        strays=store.index.strays,
        usage_bytes=store.usage_bytes,
    )


def _check_size(store: Store, entry: os.DirEntry[str], block: int, file_bytes: int) -> None:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return  # deleted since the directory was read, and its row with it
    if stat.S_ISREG(status.st_mode) and status.st_size == file_bytes:
        return
    row = store.index.row(block)
    if row is not None:
        store.quarantine(row, "its size is not what it was")


def _adopt(store: Store, fingerprint: str, paths: Sequence[Path]) -> int:
    """Index the blocks among these files that are not in the index, all at once; count anything else as strays."""
    found: dict[BlockKey, NewBlock] = {}
    for path in paths:
        new = _unknown_block(store, fingerprint, path)
        if new is None:
            continue
        if new.key in found:
            _count(store, path, stray_kind(path.name))  # a second copy
        else:
            found[new.key] = new
    if found:
        names = (block_path(fingerprint, new.key, new.checksum) for new in found.values())
        store.index.drop_strays(names)
        store.index.insert_all(list(found.values()))
    return len(found)


def _unknown_block(store: Store, fingerprint: str, path: Path) -> NewBlock | None:
    name = parse_block_name(path.name)
    try:
        if name is None:
            raise BadBlock("its name is not a block's")
        known = store.index.find(fingerprint, name[0])
        if known is not None and known.checksum == name[1]:
            return None  # published since the directory was read
        if known is not None:
            raise BadBlock("a second copy")
        metadata, identity = disk.read_metadata(path)
        if metadata.key != name[0] or metadata.fingerprint != fingerprint:
            raise BadBlock("its header does not match its name")
    except FileNotFoundError:
        return None  # evicted since the directory was read
    except (BadBlock, OSError) as why:
        if isinstance(why, OSError) and not is_unreadable(why):
            raise
        _count(store, path, stray_kind(path.name))
        return None
    return NewBlock(
        fingerprint=fingerprint,
        key=metadata.key,
        parent=metadata.parent,
        grains=metadata.grains,
        file_bytes=identity.file_bytes,
        checksum=name[1],
        owner=metadata.owner,
        ttl_seconds=metadata.ttl_seconds,
        used_unix=identity.modified_nanoseconds / 1e9,
        last_used=identity.modified_nanoseconds // 1000,
    )


def _drop_if_gone(store: Store, block: int) -> int:
    row = store.index.row(block)
    if row is None:
        return 0
    try:
        disk.identity(store.path_of(row))
    except FileNotFoundError:
        below = store.index.descendants(row)
        store.drop([*below, row])
        return 1 + len(below)
    return 0


def _count_strays(store: Store, models: set[str]) -> Generator[None]:
    """Count the files that are in no block's place, and forget the strays that are gone."""
    for entry in disk.list_directory(store.directory):
        if entry.name == QUARANTINE_DIRECTORY:
            for damaged in disk.list_directory(Path(entry.path)):
                _count(store, Path(damaged.path), "quarantine")
                yield
        elif entry.name in models:
            for below in disk.list_directory(Path(entry.path)):
                if below.name not in PREFIXES and below.name != STAGING_DIRECTORY:
                    yield from _count_below(store, Path(below.path))
                elif not below.is_dir(follow_symlinks=False):
                    _count(store, Path(below.path), "other")
        elif entry.name not in OWN_NAMES:
            yield from _count_below(store, Path(entry.path))
    for stray in store.index.stray_rows():
        if not _is_there(store.directory / stray.path):
            store.index.drop_strays([stray.path])
            yield


def _count_below(store: Store, path: Path) -> Generator[None]:
    if path.is_symlink() or not path.is_dir():
        _count(store, path, "other")
        return
    for entry in disk.list_directory(path):
        yield from _count_below(store, Path(entry.path))
        yield


def _count(store: Store, path: Path, kind: StrayKind) -> None:
    if not _is_there(path):
        return
    relative = str(path.relative_to(store.directory))
    file_bytes = disk.tree_bytes(path)
    known = store.index.stray(relative)
    if known is None or known.file_bytes != file_bytes:
        modified = int(path.lstat().st_mtime * 1_000_000)
        store.index.put_stray(StrayRow(path=relative, kind=kind, file_bytes=file_bytes, modified=modified))


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
