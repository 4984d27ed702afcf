"""What a failure of the disk or of SQLite means for a request. Decides only."""

import errno
import sqlite3
from typing import Literal

Trouble = Literal["no_space", "read_only", "unavailable"]
"""Why the store cannot do a thing just now. The word goes to the worker as the reason of a miss or a decline."""

_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_UNREADABLE = frozenset((errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.EINVAL))


def trouble_of(why: OSError | sqlite3.Error) -> Trouble:
    """Which trouble this error is."""
    match why:
        case OSError(errno=number) if number in _NO_SPACE:
            return "no_space"
        case OSError(errno=errno.EROFS):
            return "read_only"
        case sqlite3.Error() if _sqlite_code(why) == sqlite3.SQLITE_FULL:
            return "no_space"
        case sqlite3.Error() if _sqlite_code(why) == sqlite3.SQLITE_READONLY:
            return "read_only"
        case _:
            return "unavailable"


def is_unreadable(why: OSError) -> bool:
    """Whether this is the file's own fault, so that the block is lost; not a passing shortage of ours."""
    return why.errno in _UNREADABLE


def loses_index(why: OSError | sqlite3.Error) -> bool:
    """Whether the open index cannot be used any further (a full disk passes; a damaged or vanished file does not)."""
    return isinstance(why, sqlite3.Error) and trouble_of(why) != "no_space"


def is_damaged(why: OSError | sqlite3.Error) -> bool:
    """Whether the index file itself is broken, so that it must be rebuilt and not only opened again."""
    return isinstance(why, sqlite3.Error) and _sqlite_code(why) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _sqlite_code(why: sqlite3.Error) -> int | None:
    code = getattr(why, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None
