"""The catalog on the event loop: as fresh as the last question, and never waiting for a disk."""

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from gateway.catalog import Catalog, ModelEntry
from gateway.catalog_snapshot import CatalogSnapshot, concerns_models
from protocol.ids import ModelName
from tests.gateway.http_parts import make_model

ENTRY = ModelEntry(name=ModelName("a"), path="/a", created_unix=0)


class SlowDisk(Catalog):
    """Lists when the test lets it; counts how often it was asked, and by which threads."""

    def __init__(self) -> None:
        super().__init__([])
        self.may_go_on = threading.Event()
        self.begun: list[threading.Thread] = []
        self.error: OSError | None = None

    def entries(self) -> tuple[ModelEntry, ...]:
        self.begun.append(threading.current_thread())
        self.may_go_on.wait(10)
        if self.error is not None:
            raise self.error
        return (ENTRY,)


async def test_it_is_what_the_folders_are(tmp_path: Path) -> None:
    """Empty before the first look; then what is there, and after the next look what is there by then."""
    snapshot = CatalogSnapshot(Catalog([tmp_path]))
    make_model(tmp_path / "org" / "a")
    assert (snapshot.entries(), snapshot.find("org/a")) == ((), None)
    await snapshot.refresh()
    found = snapshot.find("org/a")
    assert found is not None
    assert snapshot.entries() == (found,)
    shutil.rmtree(tmp_path / "org")
    make_model(tmp_path / "b")
    await snapshot.refresh()
    assert [entry.name for entry in snapshot.entries()] == ["b"]
    assert snapshot.find("org/a") is None


async def test_a_disk_that_does_not_answer_holds_nobody_up() -> None:
    """Whoever asks goes on with what was known, the loop runs all the while, and one thread serves all of them."""
    disk = SlowDisk()
    snapshot = CatalogSnapshot(disk, patience_seconds=0.05)
    async with asyncio.timeout(5):
        await asyncio.gather(*(snapshot.refresh() for _ in range(50)))
    assert snapshot.entries() == ()
    assert len(disk.begun) == 1
    disk.may_go_on.set()
    async with asyncio.timeout(5):
        while not snapshot.entries():
            await snapshot.refresh()
    assert snapshot.find("a") is ENTRY
    assert threading.main_thread() not in disk.begun


async def test_who_asks_during_a_scan_gets_a_later_one() -> None:
    """It may have changed what the running one has passed already. However many ask, it is one more."""
    disk = SlowDisk()
    snapshot = CatalogSnapshot(disk, patience_seconds=5.0)
    first = asyncio.create_task(snapshot.refresh())
    await asyncio.sleep(0)
    later = [asyncio.create_task(snapshot.refresh()) for _ in range(5)]
    await asyncio.sleep(0)
    assert not first.done()
    disk.may_go_on.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first, *later)
    assert len(disk.begun) == 2


async def test_a_scan_that_fails_changes_nothing() -> None:
    """The models stay what they were, and the next look is a new chance."""
    disk = SlowDisk()
    disk.may_go_on.set()
    snapshot = CatalogSnapshot(disk)
    await snapshot.refresh()
    disk.error = OSError(5, "Input/output error")
    await snapshot.refresh()
    assert snapshot.entries() == (ENTRY,)
    disk.error = None
    await snapshot.refresh()
    assert snapshot.entries() == (ENTRY,)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/admin/models/load"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/org/name"),
        ("GET", "/admin/status"),
        ("GET", "/admin/cache"),
    ],
)
def test_what_tells_of_models_looks_at_them(method: str, path: str) -> None:
    """A folder that was just put there is served, and one that was mended."""
    assert concerns_models(method, path)


@pytest.mark.parametrize("path", ["/v1/requests", "/ready", "/admin/requests", "/v1/cache/pins"])
def test_what_needs_no_models_reads_no_disk(path: str) -> None:
    """Who watches the queue every second does not walk the folders for it."""
    assert not concerns_models("GET", path)
