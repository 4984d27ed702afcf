"""The catalog as the event loop sees it: what the last scan found. The disk is read by a thread, never by the loop."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

import structlog

from gateway.catalog import Catalog, ModelEntry

PATIENCE_SECONDS = 1.0
"""So long a request waits for a scan. A disk that takes longer (an external one that sleeps, a share that is gone)
costs nobody more than that: the list is then what it was."""

_SLOW_SECONDS = 5.0

_log = structlog.get_logger()


class CatalogSnapshot:
    """Reading it does no I/O. `refresh` brings it up to date; one scan runs at a time, whoever waits for it."""

    def __init__(self, catalog: Catalog, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._catalog = catalog
        self._patience_seconds = patience_seconds
        self._entries: tuple[ModelEntry, ...] = ()
        self._by_name: dict[str, ModelEntry] = {}
        self._running: asyncio.Future[None] | None = None
        self._next: asyncio.Future[None] | None = None

    def entries(self) -> tuple[ModelEntry, ...]:
        """All models by name, good and broken."""
        return self._entries

    def find(self, name: str) -> ModelEntry | None:
        """The model of exactly this name."""
        return self._by_name.get(name)

    async def refresh(self) -> None:
        """Return when a scan that began after this call has ended, or when the patience is over."""
        await asyncio.wait({self._scan_from_now()}, timeout=self._patience_seconds)

    def _scan_from_now(self) -> "asyncio.Future[None]":
        """The one that runs may have passed what its caller has just changed, so that waits for the next one."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_future()
            self._start(self._running)
            return self._running
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def _start(self, scan: "asyncio.Future[None]") -> None:
        loop = asyncio.get_running_loop()

        def work() -> None:
            began = time.monotonic()
            found: tuple[ModelEntry, ...] | None = None
            try:
                found = self._catalog.entries()
            except OSError as why:
                _log.warning("models_not_listed", why=why.strerror)
            if (seconds := time.monotonic() - began) > _SLOW_SECONDS:
                _log.warning("models_slowly_listed", seconds=round(seconds, 1))
            _tell(loop, lambda: self._scanned(scan, found))

        # A daemon, unlike the threads of a pool: a disk that never answers must not keep the service from ending.
        threading.Thread(target=work, name="catalog", daemon=True).start()

    def _scanned(self, scan: "asyncio.Future[None]", found: tuple[ModelEntry, ...] | None) -> None:
        if found is not None:
            self._entries = found
            self._by_name = {entry.name: entry for entry in found}
        scan.set_result(None)
        self._running, self._next = self._next, None
        if self._running is not None:
            self._start(self._running)


def concerns_models(method: str, path: str) -> bool:
    """Whether the answer to a request depends on which models there are."""
    return method == "POST" or path.startswith(("/v1/models", "/admin/status", "/admin/cache"))


def _tell(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who could want to know
        loop.call_soon_threadsafe(act)
