"""The day's tokens of every key and class, kept in one private file so that a restart does not give them again.

Written at most every few seconds, and at a clean stop: what a crash loses is a few seconds of counting.
"""

import asyncio
from pathlib import Path

import msgspec
import structlog

from gateway.admission import DayBook, DayTokens
from gateway.private_files import FileNotPrivate, read_private, write_private

_SAVE_SECONDS = 5.0

_log = structlog.stdlib.get_logger("mlxd.tokens")


class TokenLedger:
    """One file and what it holds. `tokens` is charged on the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tokens = _load(path)
        self._saved_changes = 0

    async def keep_saved(self) -> None:
        """Until cancelled: write what changed, off the event loop, which must not wait for a disk."""
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Write the file if anything changed. A disk that refuses costs a log line, not a request."""
        changes = self.tokens.changes
        if changes == self._saved_changes:
            return
        try:
            write_private(self._path, msgspec.json.encode(self.tokens.book()))
        except OSError as why:
            _log.error(
                "tokens_not_saved", reason=f"{why.strerror or why}; a restart would count today's from an older number"
            )
            return
        self._saved_changes = changes


def _load(path: Path) -> DayTokens:
    """What is damaged counts as nothing, and says so: nobody may be locked out by a broken counter."""
    try:
        book = msgspec.json.decode(read_private(path), type=DayBook)
    except FileNotFoundError:
        return DayTokens()
    except (OSError, FileNotPrivate, msgspec.DecodeError) as why:
        _log.warning("tokens_start_at_zero", path=str(path), reason=f"{why}; it is replaced at the next request")
        return DayTokens()
    return DayTokens(book)
