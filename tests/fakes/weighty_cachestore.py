"""The cachestore on a disk from which reading takes hours: it announces files a million times as large as they are.

A program, for `cachestore_command`.
"""

import sys

from msgspec.structs import replace

from cachestore import __main__ as cachestore
from cachestore.service import Service
from cachestore.store import Store
from protocol.blocks import Found, Lookup

_TIMES = 1_000_000


class WeightyService(Service):
    """Only what it says before anything is read is changed."""

    def _lookup(self, store: Store, request: Lookup) -> Found:
        found = super()._lookup(store, request)
        return replace(found, blocks=tuple(replace(b, file_bytes=b.file_bytes * _TIMES) for b in found.blocks))


if __name__ == "__main__":
    cachestore.Service = WeightyService
    sys.exit(cachestore.main())
