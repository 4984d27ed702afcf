"""The prefill lease: a file lock that one worker of the machine holds while it prefills.

The kernel takes it from a holder that dies. A holder that is stopped keeps it, and nobody can take it away: then the
others go without, which `neighbours` decides by what the board says.
"""

import fcntl
import os
from pathlib import Path
from typing import Literal

from protocol.addresses import prefill_lease


class PrefillLease:
    """One worker's hand on the lease. Never waits. Use from one thread."""

    def __init__(self, runtime_directory: Path) -> None:
        """Raises OSError when the file cannot be opened. No worker removes it: two files would be two leases."""
        path = prefill_lease(runtime_directory)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._is_held = False

    @property
    def is_held(self) -> bool:
        return self._is_held

    def try_take(self) -> Literal["taken", "refused"]:
        """Idempotent."""
        if not self._is_held:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "refused"
            self._is_held = True
        return "taken"

    def release(self) -> None:
        """Idempotent."""
        if self._is_held:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._is_held = False

    def close(self) -> None:
        """Give it back, for good."""
        os.close(self._descriptor)
        self._is_held = False
