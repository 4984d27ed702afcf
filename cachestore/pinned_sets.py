"""Sets of blocks that somebody asked to keep, under an owner and a name, until a time. In the index's SQLite file.

A set holds the blocks that were named and all before them, since a block without its parents cannot be found. Held
blocks are not offered to eviction (index.leaves) nor to expiry; forgetting takes them all the same. The files do not
know of pins: an index that is lost and rebuilt has none.
"""

import sqlite3
from collections.abc import Sequence

from cachestore.database import transaction
from protocol.blocks import PinBooks
from protocol.ids import BlockKey

MAX_PINNED_SETS = 256


class PinnedSets:
    """All pinned sets. Raises sqlite3.Error when the disk fails it."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def has_room_for(self, owner: str, name: str) -> bool:
        """Whether this set may be made, or made anew."""
        others = self._database.execute(
            "SELECT count(*) FROM pinned_sets WHERE NOT (owner = ? AND name = ?)", (owner, name)
        ).fetchone()
        return int(others[0]) < MAX_PINNED_SETS

    def pin(
        self, *, fingerprint: str, keys: Sequence[BlockKey], owner: str, name: str, expires_unix: float | None
    ) -> int:
        """Hold these blocks and their parents, in place of what the set held. How many of the named ones are there."""
        with transaction(self._database):
            self._unpin(owner, name)
            named, held = self._with_parents(fingerprint, keys)
            if held:
                pinned_set: int = self._database.execute(
                    "INSERT INTO pinned_sets (owner, name, expires_unix) VALUES (?, ?, ?) RETURNING id",
                    (owner, name, expires_unix),
                ).fetchone()[0]
                self._database.executemany(
                    "INSERT INTO pinned_blocks (block, pinned_set) VALUES (?, ?)",
                    [(block, pinned_set) for block in held],
                )
                self._database.executemany(
                    "UPDATE blocks SET pins = pins + 1 WHERE id = ?", [(block,) for block in held]
                )
        return named

    def unpin(self, owner: str, name: str) -> int:
        """Let a set go. How many blocks it held."""
        with transaction(self._database):
            return self._unpin(owner, name)

    def expire(self, now_unix: float) -> int:
        """Let go of the sets whose time is over, and of those that hold nothing any more. How many sets."""
        over: list[tuple[str, str]] = self._database.execute(
            "SELECT owner, name FROM pinned_sets WHERE expires_unix <= ?"
            " OR NOT EXISTS (SELECT 1 FROM pinned_blocks WHERE pinned_set = pinned_sets.id)",
            (now_unix,),
        ).fetchall()
        for owner, name in over:
            self.unpin(owner, name)
        return len(over)

    def books(self) -> tuple[PinBooks, ...]:
        """Every set that holds something; blocks and bytes with the parents, so sets may share some."""
        rows = self._database.execute(
            "SELECT s.owner, s.name, count(*), total(b.file_bytes), s.expires_unix FROM pinned_sets s"
            " JOIN pinned_blocks p ON p.pinned_set = s.id JOIN blocks b ON b.id = p.block"
            " GROUP BY s.id ORDER BY s.owner, s.name"
        )
        return tuple(
            PinBooks(owner=owner, name=name, blocks=blocks, file_bytes=int(file_bytes), expires_unix=expires_unix)
            for owner, name, blocks, file_bytes, expires_unix in rows
        )

    def held_bytes(self) -> int:
        """What all sets together keep from eviction, each block once."""
        row = self._database.execute("SELECT total(file_bytes) FROM blocks WHERE pins > 0").fetchone()
        return int(row[0])

    def _unpin(self, owner: str, name: str) -> int:
        found = self._database.execute(
            "DELETE FROM pinned_sets WHERE owner = ? AND name = ? RETURNING id", (owner, name)
        ).fetchone()
        if found is None:
            return 0
        self._database.execute(
            "UPDATE blocks SET pins = pins - 1 WHERE id IN (SELECT block FROM pinned_blocks WHERE pinned_set = ?)",
            found,
        )
        return self._database.execute("DELETE FROM pinned_blocks WHERE pinned_set = ?", found).rowcount

    def _with_parents(self, fingerprint: str, keys: Sequence[BlockKey]) -> tuple[int, set[int]]:
        model: tuple[int] | None = self._database.execute(
            "SELECT id FROM models WHERE fingerprint = ?", (fingerprint,)
        ).fetchone()
        named: set[int] = set()
        held: set[int] = set()
        if model is None:
            return 0, held
        for key in keys:
            row = self._block(model[0], key)
            if row is not None:
                named.add(row[0])
            while row is not None and row[0] not in held:
                held.add(row[0])
                row = self._block(model[0], row[1])
        return len(named), held

    def _block(self, model: int, key: bytes) -> tuple[int, bytes] | None:
        return self._database.execute(
            "SELECT id, parent FROM blocks WHERE model = ? AND key = ? AND NOT condemned", (model, key)
        ).fetchone()
