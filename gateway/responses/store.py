"""Responses that their clients asked to have stored: one SQLite file, bounded, each row with its time and its holder.

One thread owns the connection; the event loop only waits. The file is made when the first response is stored. What a
row held is overwritten when it goes.
"""

import asyncio
import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import structlog
from msgspec import Struct

from gateway.responses.answers import ENDED, ResponseError, Status
from gateway.responses.stored import CHAIN_MAX, StoredResponse, with_status

Result = TypeVar("Result")

_TIDY_SECONDS = 600.0
_LEFT_OVER = ResponseError(
    code="server_error", message="The server was restarted while this response was made. Ask again."
)

_SCHEMA = """
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS responses (
    holder TEXT NOT NULL,
    id TEXT NOT NULL,
    created_unix REAL NOT NULL,
    used_unix REAL NOT NULL,
    status TEXT NOT NULL,
    background INTEGER NOT NULL,
    previous_response_id TEXT,
    input_items BLOB NOT NULL,
    response BLOB NOT NULL,
    size_bytes INTEGER NOT NULL,
    PRIMARY KEY (holder, id)
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used_unix);
"""
_SELECT = (
    "SELECT holder, id, created_unix, status, background, previous_response_id, input_items, response FROM responses"
)
_INSERT = """
INSERT OR REPLACE INTO responses (holder, id, created_unix, status, background, previous_response_id, input_items,
    response, used_unix, size_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

_log = structlog.stdlib.get_logger("mlxd.responses")


class StoreLimits(Struct, frozen=True, kw_only=True):
    """How long a response stays after it was last built upon, and how many there may be. `keep_seconds` 0: none."""

    keep_seconds: float
    holder_responses: int
    holder_bytes: int
    total_bytes: int


class ResponseStore:
    """The file and its thread. Its methods raise sqlite3.Error or OSError when the disk refuses."""

    def __init__(self, path: Path, limits: StoreLimits, *, unix_clock: Callable[[], float]) -> None:
        self._path = path
        self._limits = limits
        self._unix_clock = unix_clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="responses")
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False

    @property
    def is_on(self) -> bool:
        """Whether anything is stored at all."""
        return self._limits.keep_seconds > 0

    @property
    def keep_hours(self) -> float:
        return self._limits.keep_seconds / 3600.0

    async def put(self, stored: StoredResponse) -> None:
        """Store it, or replace what it was. Others go where there is no room: those first that were unused longest."""
        await self._do(lambda database: self._put(database, stored))

    async def replace(self, holder: str, response_id: str, *, status: Status, response: bytes) -> None:
        """What became of it. Nothing happens when it was deleted meanwhile."""

        def update(database: sqlite3.Connection) -> None:
            database.execute(
                "UPDATE responses SET status = ?, response = ?, size_bytes = length(input_items) + ?, used_unix = ?"
                " WHERE holder = ? AND id = ?",
                (status, response, len(response), self._unix_clock(), holder, response_id),
            )
            self._make_room(database, holder)

        await self._do(update)

    async def get(self, holder: str, response_id: str) -> StoredResponse | None:
        """This holder's response, None for everybody else's."""
        return await self._look(lambda database: self._get(database, holder, response_id), None)

    async def chain(self, holder: str, response_id: str) -> list[StoredResponse] | None:
        """The response with all that it builds on, the first of them first; at most one more than CHAIN_MAX. Their time
        starts again. None when one of them is not there."""
        return await self._look(lambda database: self._chain(database, holder, response_id), None)

    async def delete(self, holder: str, response_id: str) -> bool:
        """Whether it was there."""

        def delete(database: sqlite3.Connection) -> bool:
            cursor = database.execute("DELETE FROM responses WHERE holder = ? AND id = ?", (holder, response_id))
            return cursor.rowcount > 0

        return await self._look(delete, False)  # noqa: FBT003 - the answer without a file

    async def keep_tidy(self) -> None:
        """Until cancelled: drop what is over its time, though nobody asks for anything."""
        while True:
            try:
                await self._look(self._tidy, None)
            except (sqlite3.Error, OSError) as why:
                _log.error("responses_not_tidied", error_type=type(why).__qualname__)
            await asyncio.sleep(_TIDY_SECONDS)

    def close(self) -> None:
        """Wait for what is under way, and close the file."""
        self._thread.submit(self._close).result()

    # --- in the store's thread ---------------------------------------------------------------------------------------

    async def _do(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    async def _look(self, work: Callable[[sqlite3.Connection], Result], nothing: Result) -> Result:
        """The same for what needs no file: `nothing` is its answer without one."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run_if_there, work, nothing)

    def _run_if_there(self, work: Callable[[sqlite3.Connection], Result], nothing: Result) -> Result:
        return self._run(work) if self._connection is not None or self._path.exists() else nothing

    def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        if self._is_closed:
            raise sqlite3.ProgrammingError("the store is closed")
        database = self._connection or self._open()
        with database:
            return work(database)

    def _open(self) -> sqlite3.Connection:
        try:
            database = self._connect()
        except sqlite3.DatabaseError as why:
            if isinstance(why, sqlite3.OperationalError):
                raise
            damaged = self._path.with_suffix(".damaged")
            _log.error("responses_damaged", moved_to=str(damaged), error_type=type(why).__qualname__)
            self._path.replace(damaged)
            database = self._connect()
        self._connection = database
        return database

    def _connect(self) -> sqlite3.Connection:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
                os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
        database = sqlite3.connect(self._path)
        try:
            database.executescript(_SCHEMA)
            with database:
                self._fail_left_over(database)
                self._drop_old(database)
        except BaseException:
            database.close()
            raise
        return database

    def _fail_left_over(self, database: sqlite3.Connection) -> None:
        """Nobody works any more on what a service before this one had not finished."""
        rows = database.execute(_SELECT + " WHERE status NOT IN (?, ?, ?, ?)", ENDED)
        for stored in [_from_row(row) for row in rows]:
            database.execute(
                "UPDATE responses SET status = 'failed', response = ? WHERE holder = ? AND id = ?",
                (with_status(stored.response, "failed", error=_LEFT_OVER), stored.holder, stored.id),
            )

    def _put(self, database: sqlite3.Connection, stored: StoredResponse) -> None:
        size_bytes = len(stored.input_items) + len(stored.response)
        database.execute(
            _INSERT,
            (
                stored.holder,
                stored.id,
                stored.created_unix,
                stored.status,
                int(stored.background),
                stored.previous_response_id,
                stored.input_items,
                stored.response,
                self._unix_clock(),
                size_bytes,
            ),
        )
        self._make_room(database, stored.holder)

    def _get(self, database: sqlite3.Connection, holder: str, response_id: str) -> StoredResponse | None:
        row = database.execute(
            _SELECT + " WHERE holder = ? AND id = ? AND used_unix > ?",
            (holder, response_id, self._oldest_unix()),
        ).fetchone()
        return None if row is None else _from_row(row)

    def _chain(self, database: sqlite3.Connection, holder: str, response_id: str) -> list[StoredResponse] | None:
        chain: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None and len(chain) <= CHAIN_MAX:
            found = self._get(database, holder, wanted)
            if found is None:
                return None
            chain.append(found)
            wanted = found.previous_response_id
        now = self._unix_clock()
        database.executemany(
            "UPDATE responses SET used_unix = ? WHERE holder = ? AND id = ?",
            [(now, holder, stored.id) for stored in chain],
        )
        return chain[::-1]

    def _tidy(self, database: sqlite3.Connection) -> None:
        self._drop_old(database)
        database.commit()
        database.execute("PRAGMA incremental_vacuum").fetchall()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _oldest_unix(self) -> float:
        return self._unix_clock() - self._limits.keep_seconds

    def _drop_old(self, database: sqlite3.Connection) -> None:
        database.execute("DELETE FROM responses WHERE used_unix <= ?", (self._oldest_unix(),))

    def _make_room(self, database: sqlite3.Connection, holder: str) -> None:
        """What is still worked on is not counted out: its client waits for it."""
        self._drop_old(database)
        limits = self._limits
        mine = database.execute(
            "SELECT rowid, size_bytes, status FROM responses WHERE holder = ? ORDER BY used_unix DESC, rowid DESC",
            (holder,),
        ).fetchall()
        self._drop_over(database, mine, most=limits.holder_responses, most_bytes=limits.holder_bytes)
        (total_bytes,) = database.execute("SELECT coalesce(sum(size_bytes), 0) FROM responses").fetchone()
        if total_bytes > limits.total_bytes:
            everything = database.execute(
                "SELECT rowid, size_bytes, status FROM responses ORDER BY used_unix DESC, rowid DESC"
            ).fetchall()
            self._drop_over(database, everything, most=len(everything), most_bytes=limits.total_bytes)

    def _drop_over(
        self, database: sqlite3.Connection, rows: Sequence[tuple[int, int, str]], *, most: int, most_bytes: int
    ) -> None:
        """`rows` come with the latest used first."""
        kept, kept_bytes = 0, 0
        for rowid, size_bytes, status in rows:
            if status in ENDED and (kept + 1 > most or kept_bytes + size_bytes > most_bytes):
                database.execute("DELETE FROM responses WHERE rowid = ?", (rowid,))
                continue
            kept, kept_bytes = kept + 1, kept_bytes + size_bytes

    def _close(self) -> None:
        self._is_closed = True
        if self._connection is not None:
            with closing(self._connection) as database:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection = None


def _from_row(row: tuple[str, str, float, Status, int, str | None, bytes, bytes]) -> StoredResponse:
    holder, id_, created_unix, status, background, previous, input_items, response = row
    return StoredResponse(
        holder=holder,
        id=id_,
        created_unix=created_unix,
        status=status,
        background=bool(background),
        previous_response_id=previous,
        input_items=input_items,
        response=response,
    )
