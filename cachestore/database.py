"""The SQLite file: its schema, its settings, and what one transaction is. One thread owns the connection.

Commits are not synced one by one (WAL, synchronous=NORMAL): a power cut may lose the last of them, never corrupt it.
"""

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from cachestore.reasons import is_damaged

_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE models (id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL UNIQUE);
CREATE TABLE blocks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused, so that a lease on a deleted block names nothing
    model INTEGER NOT NULL,
    key BLOB NOT NULL,
    parent BLOB NOT NULL,
    file_bytes INTEGER NOT NULL,
    checksum BLOB NOT NULL,
    last_used INTEGER NOT NULL,            -- counts uses, for their order
    children INTEGER NOT NULL,
    condemned INTEGER NOT NULL DEFAULT 0,  -- to be deleted when its last reader is gone; no longer found
    owner TEXT NOT NULL,
    used_unix REAL NOT NULL,               -- the last use by the clock, for expiry and forgetting by age
    ttl_seconds REAL,
    expires_unix REAL,                     -- used_unix + ttl_seconds
    pins INTEGER NOT NULL DEFAULT 0,       -- how many pinned sets hold it
    grains BLOB NOT NULL
);
CREATE UNIQUE INDEX blocks_by_key ON blocks (model, key);
CREATE INDEX blocks_by_parent ON blocks (model, parent);
CREATE INDEX blocks_by_size ON blocks (model, file_bytes);
CREATE INDEX leaves_by_use ON blocks (last_used) WHERE children = 0 AND pins = 0;
CREATE INDEX leaves_by_expiry ON blocks (expires_unix)
    WHERE children = 0 AND pins = 0 AND condemned = 0 AND expires_unix IS NOT NULL;
CREATE TABLE grains (grain BLOB, block INTEGER, PRIMARY KEY (grain, block)) WITHOUT ROWID;
CREATE TABLE strays (
    path TEXT PRIMARY KEY, kind TEXT NOT NULL, file_bytes INTEGER NOT NULL, modified INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE pinned_sets (
    id INTEGER PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, expires_unix REAL, UNIQUE (owner, name)
);
CREATE TABLE pinned_blocks (block INTEGER, pinned_set INTEGER, PRIMARY KEY (block, pinned_set)) WITHOUT ROWID;
CREATE INDEX pinned_blocks_by_set ON pinned_blocks (pinned_set);
CREATE TABLE writes (day INTEGER PRIMARY KEY, written_bytes INTEGER NOT NULL);
"""
_CHECKPOINT_PAGES = 256  # a small log: it counts towards the quota
_REBUILDING_CHECKPOINT_PAGES = 8192  # every transaction of a rebuild touches hundreds of pages all over the file
_SETTINGS = (
    "auto_vacuum = FULL",  # deleted rows give their bytes back: they count towards the quota
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "checkpoint_fullfsync = 1",
    f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
    "journal_size_limit = 1048576",
    "cache_size = -65536",
    "temp_store = MEMORY",
    "busy_timeout = 2000",
)


class IndexUnusable(Exception):
    """The file is damaged or of another schema: delete it and rebuild it from the block files."""


def open_database(path: Path) -> sqlite3.Connection:
    """Open or create. Raises IndexUnusable when the file must be rebuilt, sqlite3.Error for other troubles."""
    database = sqlite3.connect(path, isolation_level=None, cached_statements=512)
    try:
        _prepare(database)
    except sqlite3.Error as why:
        database.close()
        if is_damaged(why):
            raise IndexUnusable(str(why)) from None
        raise
    except IndexUnusable:
        database.close()
        raise
    return database


@contextmanager
def transaction(database: sqlite3.Connection) -> Generator[None]:
    """All of it or nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # some errors have rolled back already
            database.execute("ROLLBACK")
        raise


def let_log_grow(database: sqlite3.Connection) -> None:
    """Many changes are to come: up to 32 MiB of them before the file itself is written and flushed."""
    database.execute(f"PRAGMA wal_autocheckpoint = {_REBUILDING_CHECKPOINT_PAGES}")


def shrink_log(database: sqlite3.Connection) -> None:
    """They have come: empty the log and keep it small again."""
    database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _prepare(database: sqlite3.Connection) -> None:
    for setting in _SETTINGS:
        database.execute(f"PRAGMA {setting}")
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    tables: int = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not tables:
        database.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {_SCHEMA_VERSION};COMMIT;")
    elif version != _SCHEMA_VERSION:
        raise IndexUnusable(f"schema {version}, this mlxd uses {_SCHEMA_VERSION}")
