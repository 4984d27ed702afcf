"""How many bytes of blocks were written on which day, across restarts. In the index's SQLite file.

A lost index loses the day's count. What SQLite and the audit log write for themselves is not in it: a few percent.
"""

import sqlite3

from cachestore.database import transaction

_KEPT_DAYS = 7


class WriteLedger:
    """Counts in memory, and on disk where that is possible: a full disk does not unwrite what was written."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._written: dict[int, int] = dict(database.execute("SELECT day, written_bytes FROM writes"))

    def written_bytes(self, day: int) -> int:
        return self._written.get(day, 0)

    def add(self, day: int, written_bytes: int) -> None:
        """Count. Raises sqlite3.Error when it cannot be put on disk; the next that can puts all of it there."""
        self._written[day] = self.written_bytes(day) + written_bytes
        self._save(day)

    def at_least(self, day: int, written_bytes: int) -> None:
        """This much is known to have been written that day, by the same process before its index was lost."""
        if written_bytes > self.written_bytes(day):
            self._written[day] = written_bytes
            self._save(day)

    def _save(self, day: int) -> None:
        for old in [kept for kept in self._written if kept <= day - _KEPT_DAYS]:
            del self._written[old]
        with transaction(self._database):
            self._database.execute(
                "INSERT OR REPLACE INTO writes (day, written_bytes) VALUES (?, ?)", (day, self._written[day])
            )
            self._database.execute("DELETE FROM writes WHERE day <= ?", (day - _KEPT_DAYS,))
