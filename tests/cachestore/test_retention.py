"""What is kept and for how long: expiry, pins, forgetting and its audit line."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore import audit, disk, pinned_sets
from protocol.blocks import Declined, Forget, Forgotten, PinBlocks, PinBooks, Pinned, Publish, Published, Staged
from protocol.ids import BlockKey
from tests.cachestore.block_files import FINGERPRINT, Clock, WorkerSide, block_paths, chain, open_service

TTL_SECONDS = 100.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(directory: Path, clock: Clock):
    side = open_service(directory, clock=clock)
    yield side
    side.service.close()


def found(worker: WorkerSide, grains) -> list[int]:
    return [block.grains for block in worker.read(grains)]


def forget(worker: WorkerSide, **criteria) -> Forgotten:
    reply = worker.ask(Forget(call_id=1, **criteria))
    assert isinstance(reply, Forgotten)
    return reply


def lose_index(directory: Path) -> None:
    for path in directory.glob("index.sqlite3*"):
        path.unlink()


# --- expiry ----------------------------------------------------------------------------------------------------------


def test_an_unused_block_expires_after_its_time_and_a_use_renews_it(worker, clock):
    """Unused for `ttl_seconds` it goes; read in between it stays; without a time it stays."""
    short, kept = chain("short", 32), chain("kept", 16)
    worker.store_all(short, ttl_seconds=TTL_SECONDS)
    worker.store_all(kept)
    worker.pass_time(clock, TTL_SECONDS - 1)
    assert found(worker, short) == [16, 16]
    worker.pass_time(clock, TTL_SECONDS - 1)
    assert worker.books().expired == 0
    worker.pass_time(clock, 1)
    assert worker.books().expired == 2
    assert found(worker, short) == []
    assert found(worker, kept) == [16]
    worker.check()


def test_a_parent_outlives_its_time_while_a_child_is_in_use(worker, clock):
    """Leaves first: a chain is never cut off from its root by the clock."""
    grains = chain("a", 16)
    longer = chain("b", 16, after=grains)
    worker.store_all(grains, ttl_seconds=TTL_SECONDS)
    assert isinstance(worker.store(longer, 1, ttl_seconds=3 * TTL_SECONDS), Published)
    worker.pass_time(clock, 2 * TTL_SECONDS)
    assert worker.books().blocks == 2
    worker.pass_time(clock, TTL_SECONDS)
    assert worker.books().blocks == 0
    assert worker.books().expired == 2


def test_a_block_that_is_read_while_it_expires_goes_when_it_is_given_back(worker, clock):
    """A reader keeps its file."""
    grains = chain("a", 16)
    worker.store_all(grains, ttl_seconds=1.0)
    reading = worker.fetch(grains)
    worker.pass_time(clock, 2.0)
    assert found(worker, grains) == []
    assert Path(reading.blocks[0].path).exists()
    worker.release(reading.lease)
    assert not Path(reading.blocks[0].path).exists()
    worker.check()


def test_expiry_goes_on_while_nothing_runs(directory, clock):
    """A restart after the time has passed drops what lay unused."""
    worker = open_service(directory, clock=clock)
    worker.store_all(chain("a", 40), ttl_seconds=TTL_SECONDS)
    worker.service.close()
    clock.unix += TTL_SECONDS
    worker = open_service(directory, clock=clock)
    worker.settle()
    assert worker.books().blocks == 0
    assert block_paths(directory) == []
    worker.service.close()


def test_a_rebuilt_index_knows_owner_and_time_from_the_files(directory, clock):
    """What was promised to an owner holds without the index: forgotten by owner, and dropped when its time is over."""
    worker = open_service(directory, clock=clock)
    worker.store_all(chain("a", 40), owner="mine")
    worker.store_all(chain("b", 40), owner="theirs", ttl_seconds=TTL_SECONDS)
    worker.service.close()
    lose_index(directory)
    clock.unix = block_paths(directory)[0].stat().st_mtime
    worker = open_service(directory, clock=clock)
    assert forget(worker, owner="mine").blocks == 3
    assert worker.books().blocks == 3
    worker.pass_time(clock, 2 * TTL_SECONDS)
    assert worker.books().blocks == 0
    worker.check()
    worker.service.close()


def test_a_block_of_another_owner_than_announced_is_refused(worker):
    """Or forgetting an owner would miss it once the index is lost."""
    grains = chain("a", 16)
    staged = worker.stage(BlockKey(grains[-1]), 5000, owner="mine")
    assert isinstance(staged, Staged)
    other = WorkerSide(worker.service)
    assert isinstance(other.store(grains, 0, owner="theirs"), Published)
    Path(staged.path).write_bytes(block_paths(Path(staged.path).parents[2])[0].read_bytes())
    forget(worker, owner="theirs")
    reply = worker.ask(Publish(call_id=1, lease=staged.lease, parent=BlockKey(b""), grains=grains))
    assert reply == Declined(call_id=1, reason="integrity")


@pytest.mark.parametrize("ttl_seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(worker, ttl_seconds):
    """Neither a block nor a pin can end before it begins, or never while it says it ends."""
    assert worker.stage(BlockKey(b"k" * 16), 10, ttl_seconds=ttl_seconds) == Declined(call_id=1, reason="invalid")
    pin = PinBlocks(call_id=1, fingerprint=FINGERPRINT, keys=(), owner="o", name="n", ttl_seconds=ttl_seconds)
    assert worker.ask(pin) == Declined(call_id=1, reason="invalid")


# --- pins ------------------------------------------------------------------------------------------------------------


def test_pinned_blocks_and_their_parents_are_not_evicted_until_the_pin_ends(directory, clock):
    """Others leave for them, restart or not; afterwards they age like any other."""
    worker = open_service(directory, quota_bytes=2_000_000, clock=clock)
    pinned = chain("pinned", 48)
    worker.store_all(pinned, data_bytes=100_000)
    assert worker.pin(pinned, name="system prompt", owner="me", ttl_seconds=TTL_SECONDS) == 1
    for number in range(10):
        worker.store_all(chain(f"n{number}", 16), data_bytes=100_000)
    worker.service.close()
    worker = open_service(directory, quota_bytes=2_000_000, clock=clock)
    for number in range(10, 30):
        worker.store_all(chain(f"n{number}", 16), data_bytes=100_000)
    [books] = worker.books().pins
    assert books == PinBooks(
        owner="me",
        name="system prompt",
        blocks=3,
        file_bytes=books.file_bytes,
        expires_unix=clock.unix + TTL_SECONDS,
    )
    assert books.file_bytes >= 300_000
    assert found(worker, pinned) == [16, 16, 16]
    worker.check()
    worker.pass_time(clock, TTL_SECONDS)
    assert worker.books().pins == ()
    for number in range(30, 60):
        worker.store_all(chain(f"n{number}", 16), data_bytes=100_000)
    assert found(worker, pinned) == []
    worker.check()
    worker.service.close()


def test_pins_count_in_the_quota_and_a_write_beside_them_is_declined(directory):
    """A full cache of pinned blocks declines; unpinned it makes room."""
    worker = open_service(directory, quota_bytes=1_000_000)
    grains = chain("a", 64)
    worker.store_all(grains, data_bytes=150_000)
    worker.pin(grains)
    assert worker.stage(BlockKey(b"k" * 16), 500_000) == Declined(call_id=1, reason="quota")
    assert found(worker, grains) == [16, 16, 16, 16]
    assert worker.unpin() == 4
    assert isinstance(worker.stage(BlockKey(b"k" * 16), 500_000), Staged)
    worker.check()
    worker.service.close()


def test_a_set_is_replaced_by_its_name_and_sets_may_share_blocks(worker):
    """A shared block stays held until the last set lets it go; an unknown name and an absent block are fine."""
    head = chain("head", 16)
    first, second = chain("a", 16, after=head), chain("b", 16, after=head)
    worker.store_all(first)
    assert isinstance(worker.store(second, 1), Published)
    assert worker.pin(first, name="x") == 1
    assert worker.pin(second, name="y") == 1
    assert [(pins.name, pins.blocks) for pins in worker.books().pins] == [("x", 2), ("y", 2)]
    assert worker.pin(head, name="x") == 1
    assert [(pins.name, pins.blocks) for pins in worker.books().pins] == [("x", 1), ("y", 2)]
    assert worker.pin(chain("absent", 16), name="x") == 0
    assert [(pins.name, pins.blocks) for pins in worker.books().pins] == [("y", 2)]
    assert worker.unpin(name="x") == 0
    assert worker.unpin(name="y", owner="somebody else") == 0
    worker.check()
    assert worker.unpin(name="y") == 2
    assert worker.books().pins == ()
    worker.check()


def test_a_pinned_block_does_not_expire_until_the_pin_does(worker, clock):
    """A pin outranks a time to live."""
    grains = chain("a", 32)
    worker.store_all(grains, ttl_seconds=10.0)
    worker.pin(grains, ttl_seconds=TTL_SECONDS)
    worker.pass_time(clock, TTL_SECONDS - 1)
    assert worker.books().blocks == 2
    worker.pass_time(clock, 1)
    assert worker.books().blocks == 0
    worker.check()


def test_a_pinned_tail_is_not_superseded(worker):
    """A model whose state cannot be cut is served by that tail alone."""
    short, long = chain("a", 5), chain("a", 9)
    worker.store(short, 0)
    worker.pin(short)
    worker.store(long, 0, supersedes=BlockKey(short[-1]))
    assert worker.read(short)[0].key == short[-1]
    assert worker.read(long)[0].key == long[-1]
    worker.check()


def test_damage_and_forgetting_end_a_pin_and_a_lost_index_loses_all(directory):
    """A pin holds blocks that are there; it is no reason to keep what must go."""
    worker = open_service(directory)
    grains, other = chain("a", 32), chain("b", 16)
    worker.store_all(grains)
    worker.store_all(other, owner="theirs")
    worker.pin(grains, name="damaged")
    worker.pin(other, name="forgotten")
    assert forget(worker, owner="theirs").blocks == 1
    path = Path(worker.read(grains)[1].path)
    path.write_bytes(path.read_bytes()[:-1])
    assert found(worker, grains) == [16]
    assert [(pins.name, pins.blocks) for pins in worker.books().pins] == [("damaged", 1)]
    worker.check()
    worker.service.close()
    lose_index(directory)
    worker = open_service(directory)
    assert worker.books().pins == ()
    assert found(worker, grains) == [16]
    worker.check()
    worker.service.close()


def test_a_smaller_quota_does_not_break_a_pin(directory):
    """The promise is kept and nothing more is written: the log says what to do."""
    worker = open_service(directory)
    grains = chain("a", 32)
    worker.store_all(grains, data_bytes=200_000)
    worker.pin(grains)
    worker.service.close()
    worker = open_service(directory, quota_bytes=300_000)
    assert found(worker, grains) == [16, 16]
    assert worker.stage(BlockKey(b"k" * 16), 10) == Declined(call_id=1, reason="quota")
    worker.service.close()


def test_pins_are_bounded(worker, monkeypatch):
    """Too many sets are declined as busy; one that is there may still be replaced; nonsense is invalid."""
    monkeypatch.setattr(pinned_sets, "MAX_PINNED_SETS", 2)
    grains = chain("a", 16)
    worker.store_all(grains)
    for name in ("x", "y", "x"):
        assert worker.pin(grains, name=name) == 1
    ask = {"call_id": 1, "fingerprint": FINGERPRINT, "owner": "o"}
    assert worker.ask(PinBlocks(**ask, keys=(BlockKey(grains[-1]),), name="z")) == Declined(call_id=1, reason="busy")
    for keys, name in (((b"short",), "n"), ((), ""), ((), "n" * 1000)):
        reply = worker.ask(PinBlocks(**ask, keys=tuple(map(BlockKey, keys)), name=name))
        assert reply == Declined(call_id=1, reason="invalid")
    assert worker.ask(PinBlocks(**{**ask, "fingerprint": "other"}, keys=(), name="x")) == Pinned(call_id=1, blocks=0)


# --- forgetting ------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    fingerprint=st.sampled_from([None, FINGERPRINT, "other", "unknown"]),
    owner=st.sampled_from([None, "a", "b", ""]),
    unused_for_seconds=st.sampled_from([None, 0.0, 50.0, 150.0, 1000.0]),
)
def test_forget_deletes_exactly_what_matches_all_that_is_given(
    tmp_path_factory, fingerprint, owner, unused_for_seconds
):
    """By model, owner and age, each alone or together; nothing given is everything."""
    clock = Clock()
    worker = open_service(tmp_path_factory.mktemp("forget"), clock=clock)
    stored = {}
    for age_seconds in (100.0, 0.0):
        for model in (FINGERPRINT, "other"):
            for of in ("a", "b"):
                grains = chain(f"{age_seconds}{model}{of}", 16)
                assert isinstance(worker.store(grains, 0, fingerprint=model, owner=of), Published)
                stored[grains] = (model, of, age_seconds)
        clock.unix += age_seconds
    reply = forget(worker, fingerprint=fingerprint, owner=owner, unused_for_seconds=unused_for_seconds)
    matching = {
        grains
        for grains, (model, of, age_seconds) in stored.items()
        if fingerprint in (None, model)
        and owner in (None, of)
        and (unused_for_seconds is None or age_seconds >= unused_for_seconds)
    }
    assert reply.blocks == len(matching)
    left = {grains for grains, (model, _, _) in stored.items() if worker.fetch(grains, fingerprint=model).blocks}
    assert left == stored.keys() - matching
    worker.check()
    worker.service.close()


def test_every_purge_leaves_one_line_that_says_who_what_and_how_much(worker, directory, clock):
    """JSON, private, no token data; also for a purge that found nothing."""
    worker.store_all(chain("a", 40), owner="0011")
    reply = forget(worker, owner="0011", asked_by="key morning-batch")
    forget(worker, unused_for_seconds=60.0)
    log = directory / "audit.log"
    first, second = map(json.loads, log.read_text().splitlines())
    assert first == {
        "unix": clock.unix,
        "asked_by": "key morning-batch",
        "criteria": {"owner": "0011"},
        "blocks": 3,
        "file_bytes": reply.file_bytes,
    }
    assert second["criteria"] == {"unused_for_seconds": 60.0}
    assert second["blocks"] == 0
    assert log.stat().st_mode & 0o777 == 0o600
    worker.check()


def test_the_audit_log_is_bounded_and_counts(worker, directory, monkeypatch):
    """Two files at most, and both are in the books; a line that was cut short does not take the next one with it."""
    monkeypatch.setattr(audit, "ROTATE_BYTES", 1000)
    for _ in range(40):
        forget(worker, asked_by="x" * 1000)
    names = sorted(path.name for path in directory.glob("audit*"))
    assert names == ["audit.log", "audit.log.1"]
    assert all((directory / name).stat().st_size <= 1000 for name in names)
    before = worker.books().file_bytes
    with (directory / "audit.log").open("a") as log:
        log.write('{"cut')
    assert worker.books().file_bytes == before + 5
    monkeypatch.undo()
    forget(worker)
    assert json.loads((directory / "audit.log").read_text().splitlines()[-1])["blocks"] == 0
    worker.check()
    worker.service.close()
    worker.service.open(0.0)
    assert (directory / "audit.log").exists()


def test_a_full_disk_does_not_keep_a_purge_from_being_made_and_written_down(worker, directory, monkeypatch):
    """The line that did not fit before the purge fits after it."""
    worker.store_all(chain("a", 16))
    real_append = audit.append

    def refuse(at: Path, line: audit.PurgeLine) -> None:
        if block_paths(directory):
            raise OSError(28, "No space left on device")
        real_append(at, line)

    monkeypatch.setattr(audit, "append", refuse)
    assert forget(worker).blocks == 1
    assert block_paths(directory) == []
    assert json.loads((directory / "audit.log").read_text())["blocks"] == 1


def test_a_purge_whose_line_cannot_be_written_is_made_all_the_same(worker, directory, monkeypatch, capsys):
    """What must go goes; the process's own log keeps the line."""
    worker.store_all(chain("a", 16))

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(audit, "append", refuse)
    assert forget(worker, asked_by="somebody").blocks == 1
    assert block_paths(directory) == []
    logged = capsys.readouterr().out
    assert "audit_line_lost" in logged
    assert "somebody" in logged


def test_old_formats_go_with_a_purge_of_their_model_or_age(directory, clock):
    """Nobody can read whose they are, so forgetting an owner takes them too."""
    old = directory / "0ldm0del" / "ab" / ("ab" * 16 + ".safetensors")
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x" * 1000)
    clock.unix = old.stat().st_mtime + 100
    worker = open_service(directory, clock=clock)
    worker.settle()
    forget(worker, fingerprint=FINGERPRINT)
    forget(worker, unused_for_seconds=200.0)
    assert old.exists()
    forget(worker, owner="mine")
    assert not old.exists()
    assert disk.tree_bytes(directory / "0ldm0del") == 0
    worker.check()
    worker.service.close()
