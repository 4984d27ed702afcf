"""Which blocks are on disk, found by any digest of their chain: one SQLite file, owned by one thread.

The files are the truth and this is their index: it may be lost or stale, and is then mended from the files.
Every mutation is one transaction. `last_used` counts uses, it is no clock; it starts above every earlier value.
"""

# ruff: noqa: S608 -- only this module's own constants are put into SQL; every value is bound

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cachestore.chain_walk import walk
from cachestore.database import IndexUnusable, open_database, transaction
from cachestore.eviction import Candidate
from cachestore.index_rows import (
    COLUMNS,
    FROM,
    BlockRow,
    Criteria,
    Match,
    NewBlock,
    StrayKind,
    StrayRow,
    block_row,
)
from cachestore.layout import block_name, join_digests
from cachestore.reasons import is_damaged
from protocol.ids import BlockKey, Grain


class BlockIndex:
    """The open index. Its totals are exact at all times. Raises sqlite3.Error when the disk fails it."""

    def __init__(self, path: Path, first_use: int) -> None:
        """Open or create. Raises IndexUnusable when the file must be rebuilt."""
        self._database = open_database(path)
        try:
            self._models: dict[str, int] = dict(self._database.execute("SELECT fingerprint, id FROM models"))
            self.blocks, self.block_bytes = self._sum("SELECT count(*), total(file_bytes) FROM blocks")
            self.strays, self.stray_bytes = self._sum("SELECT count(*), total(file_bytes) FROM strays")
            newest: int | None = self._database.execute("SELECT max(last_used) FROM blocks").fetchone()[0]
        except sqlite3.Error as why:
            self._database.close()
            if is_damaged(why):
                raise IndexUnusable(str(why)) from None
            raise
        self._last_use = max(first_use, (newest or 0) + 1)

    def close(self) -> None:
        """Checkpoint the log and close."""
        self._database.close()

    @property
    def database(self) -> sqlite3.Connection:
        """The connection, for the other tables of the same file."""
        return self._database

    # --- questions --------------------------------------------------------------------------------------------------

    def walk(self, fingerprint: str, grains: Sequence[Grain], skip_blocks: int, parts: int = 1) -> list[Match]:
        """The unbroken run of blocks on this chain after `skip_blocks`: whole ones, and then at most `parts` blocks
        that hold the start of the next one, best first."""
        model = self._models.get(fingerprint)
        return [] if model is None or skip_blocks < 0 else walk(self._database, model, grains, skip_blocks, parts)

    def find(self, fingerprint: str, key: BlockKey) -> BlockRow | None:
        """The block of that key, condemned or not."""
        return self._one(f"SELECT {COLUMNS} {FROM} WHERE m.fingerprint = ? AND b.key = ?", fingerprint, key)

    def row(self, block: int) -> BlockRow | None:
        return self._one(f"SELECT {COLUMNS} {FROM} WHERE b.id = ?", block)

    def descendants(self, row: BlockRow) -> list[BlockRow]:
        """All indexed blocks below this one, children before their parents."""
        rows = self._database.execute(
            "WITH RECURSIVE below (id, model, key) AS ("
            " SELECT id, model, key FROM blocks WHERE id = ?"
            " UNION SELECT c.id, c.model, c.key FROM blocks c"
            " JOIN below ON c.model = below.model AND c.parent = below.key"
            f") SELECT {COLUMNS} FROM below JOIN blocks b ON b.id = below.id JOIN models m ON m.id = b.model"
            " WHERE b.id != ?",
            (row.block, row.block),
        )
        return [block_row(values) for values in rows][::-1]

    def rows_in(self, fingerprint: str, prefix: int) -> dict[str, tuple[int, int]]:
        """Of one prefix directory: file name → (block, bytes), for comparing with the files there."""
        model = self._models.get(fingerprint)
        low = bytes((prefix,))
        high = bytes((prefix + 1,)) if prefix < 255 else b"\xff" * 64
        rows: Iterator[tuple[bytes, bytes, int, int]] = self._database.execute(
            "SELECT key, checksum, id, file_bytes FROM blocks WHERE model = ? AND key >= ? AND key < ?",
            (model, low, high),
        )
        return {block_name(key, checksum): (block, file_bytes) for key, checksum, block, file_bytes in rows}

    def rows_of(self, criteria: Criteria, before: int, limit: int) -> list[BlockRow]:
        """Blocks that match, newest first, with ids below `before`; condemned ones left out."""
        where, values = self._matching(criteria)
        rows = self._database.execute(
            f"SELECT {COLUMNS} {FROM} WHERE {where} AND b.id < ? ORDER BY b.id DESC LIMIT ?", (*values, before, limit)
        )
        return [block_row(row) for row in rows]

    def totals_of(self, criteria: Criteria) -> tuple[int, int]:
        """How many blocks match, condemned ones left out, and their bytes."""
        where, values = self._matching(criteria)
        return self._sum(f"SELECT count(*), total(b.file_bytes) {FROM} WHERE {where}", *values)

    def expired_leaves(self, now_unix: float, limit: int) -> list[BlockRow]:
        """Blocks without children that were not used for as long as they may be kept; pinned ones left out."""
        rows = self._database.execute(
            f"SELECT {COLUMNS} {FROM} WHERE b.children = 0 AND b.pins = 0 AND b.condemned = 0 AND b.expires_unix <= ?"
            " ORDER BY b.expires_unix LIMIT ?",
            (now_unix, limit),
        )
        return [block_row(row) for row in rows]

    def condemned(self) -> list[BlockRow]:
        """Blocks that wait for their last reader."""
        return [block_row(row) for row in self._database.execute(f"SELECT {COLUMNS} {FROM} WHERE b.condemned")]

    def fingerprints(self) -> list[str]:
        """Every model that ever had a block here."""
        return list(self._models)

    def stray_rows(self) -> list[StrayRow]:
        """Every file that is no indexed block, oldest first, foreign blocks before the quarantined."""
        return self._strays_where("1")

    def stray(self, path: str) -> StrayRow | None:
        return next((stray for stray in self._strays_where("path = ?", path)), None)

    def leaves(self) -> Iterator[Candidate]:
        """For eviction: pinned blocks are none, and so hold their parents. Do not change the index while iterating."""
        return map(
            _candidate,
            self._database.execute(
                "SELECT b.id, p.id, b.children, b.file_bytes, b.last_used FROM blocks b"
                " LEFT JOIN blocks p ON p.model = b.model AND p.key = b.parent"
                " WHERE b.children = 0 AND b.pins = 0 ORDER BY b.last_used"
            ),
        )

    def candidate(self, block: int) -> Candidate:
        """For eviction."""
        return _candidate(
            self._database.execute(
                "SELECT b.id, p.id, b.children, b.file_bytes, b.last_used FROM blocks b"
                " LEFT JOIN blocks p ON p.model = b.model AND p.key = b.parent WHERE b.id = ?",
                (block,),
            ).fetchone()
        )

    def next_use(self) -> int:
        """A number above all earlier ones, for ordering by use."""
        self._last_use += 1
        return self._last_use

    # --- changes ----------------------------------------------------------------------------------------------------

    def insert(self, new: NewBlock) -> int:
        """Index one block; its id. The key must be new."""
        return self.insert_all([new])[0]

    def insert_all(self, added: Sequence[NewBlock]) -> list[int]:
        """Index blocks in one transaction; their ids. All or none; the keys must be new, and parents may come later."""
        models = dict(self._models)
        with transaction(self._database):
            blocks = [self._insert_block(models, new) for new in added]
        self._models = models
        self.blocks += len(added)
        self.block_bytes += sum(new.file_bytes for new in added)
        return blocks

    def delete(self, rows: Sequence[BlockRow]) -> None:
        """Drop blocks whose files are gone."""
        if not rows:
            return
        with transaction(self._database):
            for row in rows:
                model = self._models[row.fingerprint]
                self._database.execute("DELETE FROM blocks WHERE id = ?", (row.block,))
                self._database.execute("DELETE FROM pinned_blocks WHERE block = ?", (row.block,))
                self._database.execute(
                    "UPDATE blocks SET children = children - 1 WHERE model = ? AND key = ?", (model, row.parent)
                )
                self._database.executemany(
                    "DELETE FROM grains WHERE grain = ? AND block = ?", [(grain, row.block) for grain in row.grains]
                )
        self.blocks -= len(rows)
        self.block_bytes -= sum(row.file_bytes for row in rows)

    def condemn(self, rows: Sequence[BlockRow]) -> None:
        """Hide blocks that must stay on disk until their readers are done, and let go of their pins."""
        blocks = [(row.block,) for row in rows]
        with transaction(self._database):
            self._database.executemany("UPDATE blocks SET condemned = 1, pins = 0 WHERE id = ?", blocks)
            self._database.executemany("DELETE FROM pinned_blocks WHERE block = ?", blocks)

    def touch(self, blocks: Iterable[int], used_unix: float) -> None:
        """These blocks were used just now, all at the same moment."""
        use = self.next_use()
        with transaction(self._database):
            self._database.executemany(
                "UPDATE blocks SET last_used = ?, used_unix = ?, expires_unix = ? + ttl_seconds WHERE id = ?",
                [(use, used_unix, used_unix, block) for block in blocks],
            )

    def put_stray(self, stray: StrayRow) -> None:
        """Count a file that is no indexed block, or correct what is known of it."""
        self.drop_strays([stray.path])
        with transaction(self._database):
            self._database.execute(
                "INSERT INTO strays (path, kind, file_bytes, modified) VALUES (?, ?, ?, ?)",
                (stray.path, stray.kind, stray.file_bytes, stray.modified),
            )
        self.strays += 1
        self.stray_bytes += stray.file_bytes

    def drop_strays(self, paths: Iterable[str]) -> None:
        """These files are gone, or are strays no longer."""
        with transaction(self._database):
            gone: list[int] = []
            for path in paths:
                gone += [
                    row[0]
                    for row in self._database.execute("DELETE FROM strays WHERE path = ? RETURNING file_bytes", (path,))
                ]
        self.strays -= len(gone)
        self.stray_bytes -= sum(gone)

    # --- checks -----------------------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """What is wrong in the index itself; empty when all is well. Slow: for tests."""
        checks = {
            "the block totals are wrong": (self.blocks, self.block_bytes)
            != self._sum("SELECT count(*), total(file_bytes) FROM blocks"),
            "the stray totals are wrong": (self.strays, self.stray_bytes)
            != self._sum("SELECT count(*), total(file_bytes) FROM strays"),
            "a count of children is wrong": self._sum(
                "SELECT count(*), 0 FROM blocks b WHERE children !="
                " (SELECT count(*) FROM blocks c WHERE c.model = b.model AND c.parent = b.key)"
            )[0],
            "the grains of a block that is gone remain": self._sum(
                "SELECT count(*), 0 FROM grains WHERE block NOT IN (SELECT id FROM blocks)"
            )[0],
            "a count of pins is wrong": self._sum(
                "SELECT count(*), 0 FROM blocks b WHERE pins !="
                " (SELECT count(*) FROM pinned_blocks p WHERE p.block = b.id)"
            )[0],
            "a pin of a block that is gone remains": self._sum(
                "SELECT count(*), 0 FROM pinned_blocks WHERE block NOT IN (SELECT id FROM blocks)"
            )[0],
        }
        return [fault for fault, found in checks.items() if found]

    # --- inside -----------------------------------------------------------------------------------------------------

    def _matching(self, criteria: Criteria) -> tuple[str, tuple[object, ...]]:
        tests = {
            "m.fingerprint = ?": criteria.fingerprint,
            "b.owner = ?": criteria.owner,
            "b.used_unix <= ?": criteria.unused_since_unix,
        }
        given = {test: value for test, value in tests.items() if value is not None}
        return " AND ".join(["b.condemned = 0", *given]), tuple(given.values())

    def _insert_block(self, models: dict[str, int], new: NewBlock) -> int:
        model = models.get(new.fingerprint)
        if model is None:
            model = self._insert("INSERT INTO models (fingerprint) VALUES (?) RETURNING id", new.fingerprint)
            models[new.fingerprint] = model
        use = self.next_use() if new.last_used is None else new.last_used
        expires_unix = None if new.ttl_seconds is None else new.used_unix + new.ttl_seconds
        block = self._insert(
            "INSERT INTO blocks (model, key, parent, file_bytes, checksum, last_used, owner, used_unix, ttl_seconds,"
            " expires_unix, grains, children) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,"
            " (SELECT count(*) FROM blocks WHERE model = ? AND parent = ?)) RETURNING id",
            *(model, new.key, new.parent, new.file_bytes, new.checksum, use, new.owner, new.used_unix, new.ttl_seconds),
            *(expires_unix, join_digests(new.grains), model, new.key),
        )
        self._database.execute(
            "UPDATE blocks SET children = children + 1 WHERE model = ? AND key = ?", (model, new.parent)
        )
        self._database.executemany(
            "INSERT OR IGNORE INTO grains (grain, block) VALUES (?, ?)", [(grain, block) for grain in new.grains]
        )
        return block

    def _insert(self, sql: str, *values: object) -> int:
        return int(self._database.execute(sql, values).fetchone()[0])

    def _sum(self, sql: str, *values: object) -> tuple[int, int]:
        count, total = self._database.execute(sql, values).fetchone()
        return int(count), int(total)

    def _one(self, sql: str, *values: object) -> BlockRow | None:
        row = self._database.execute(sql, values).fetchone()
        return None if row is None else block_row(row)

    def _strays_where(self, condition: str, *values: object) -> list[StrayRow]:
        rows: Iterator[tuple[str, StrayKind, int, int]] = self._database.execute(
            f"SELECT path, kind, file_bytes, modified FROM strays WHERE {condition} ORDER BY kind, modified", values
        )
        return [
            StrayRow(path=path, kind=kind, file_bytes=file_bytes, modified=modified)
            for path, kind, file_bytes, modified in rows
        ]


def _candidate(values: tuple[int, int | None, int, int, int]) -> Candidate:
    block, parent, children, file_bytes, last_used = values
    return Candidate(block=block, parent=parent, children=children, file_bytes=file_bytes, last_used=last_used)
