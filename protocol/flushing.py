"""Putting a file on the disk, as each system does it: for who writes a block file, and for who answers for it."""

import fcntl
import os

_F_BARRIERFSYNC = 85  # of <sys/fcntl.h> on macOS; Python does not name it


def flush_file(descriptor: int) -> None:
    """Put a file's (or directory's) content on disk before anything written later. Knows how each system does it.

    On macOS a barrier, not F_FULLFSYNC, which empties the drive's cache and takes tens of milliseconds: a power cut may
    cost the last blocks, and one whose name arrived without its bytes does not match its checksum.
    """
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS
        try:
            fcntl.fcntl(descriptor, _F_BARRIERFSYNC)
        except OSError:  # a network or FAT volume does not know it
            os.fsync(descriptor)
    else:
        os.fsync(descriptor)
