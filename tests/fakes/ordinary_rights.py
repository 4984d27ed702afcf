"""Children that may not read what is forbidden, even where the tests run as root (in most containers)."""

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_PR_CAPBSET_DROP = 24
_READS_AND_WRITES_EVERYTHING = (1, 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


def drop_roots_rights() -> None:
    """For `preexec_fn`: what is executed next is subject to the modes of files. It stays the user that it was."""
    if os.geteuid() != 0 or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for capability in _READS_AND_WRITES_EVERYTHING:
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


@functools.cache
def files_can_be_forbidden() -> bool:
    """Whether a child with ordinary rights is really kept from a file of mode 000 (not for root on macOS)."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "forbidden"
        file.write_text("secret")
        file.chmod(0)
        read = subprocess.run(["cat", str(file)], preexec_fn=drop_roots_rights, capture_output=True, check=False)
        return read.returncode != 0
