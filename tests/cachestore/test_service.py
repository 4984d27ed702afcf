"""The verbs, on a real directory: what is found, what is refused, and what survives."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from cachestore import disk
from cachestore.index import BlockIndex
from cachestore.pins import READ_LEASE_SECONDS, STAGE_LEASE_SECONDS
from cachestore.refusals import NO_LEASE
from cachestore.service import REOPEN_SECONDS
from protocol.block_file import block_metadata
from protocol.blocks import (
    CacheFailed,
    Declined,
    Forget,
    Forgotten,
    Found,
    FoundBlock,
    Lookup,
    Publish,
    Published,
    Staged,
)
from protocol.ids import BlockKey
from tests.cachestore.block_files import (
    FINGERPRINT,
    PER_BLOCK,
    WorkerSide,
    block_bytes,
    block_paths,
    chain,
    open_service,
    slot,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def worker(directory: Path):
    side = open_service(directory)
    yield side
    side.service.close()


def grains_found(worker: WorkerSide, grains, **more) -> list[int]:
    """Of the blocks that a worker can use."""
    return [block.grains for block in worker.read(grains, **more)]


# --- finding ---------------------------------------------------------------------------------------------------------


def test_what_was_published_is_found_in_order_and_its_files_are_the_bytes_that_were_written(worker):
    """Fetch answers with the chain's blocks, first to last, as files with the published bytes."""
    grains = chain("a", 40)
    worker.store_all(grains)
    leased = worker.fetch(grains)
    assert [block.grains for block in leased.blocks] == [16, 16, 8]
    for number, block in enumerate(leased.blocks):
        parent, own = slot(grains, number)
        assert block.key == own[-1]
        assert Path(block.path).read_bytes() == block_bytes(parent, own)


@pytest.mark.parametrize(
    ("asked", "found"),
    [(1, [1]), (15, [15]), (16, [16]), (17, [16, 1]), (33, [16, 16, 1]), (40, [16, 16, 8])],
)
def test_a_prompt_that_ends_inside_a_block_uses_its_part(worker, asked, found):
    """A block serves as many grains as the prompt shares with it, be it whole or a tail."""
    grains = chain("a", 40)
    worker.store_all(grains)
    assert grains_found(worker, grains[:asked]) == found


def test_a_prompt_that_leaves_the_chain_uses_what_both_share(worker):
    """Divergence inside a block reuses that block up to the last common grain, and nothing after it."""
    grains = chain("a", 48)
    worker.store_all(grains)
    assert grains_found(worker, chain("b", 30, after=grains[:21])) == [16, 5]
    assert grains_found(worker, chain("b", 30, after=grains[:16])) == [16]
    assert worker.fetch(chain("c", 48)).miss_reason == "absent"


def test_skipped_blocks_are_not_named_and_need_not_be_there(worker, directory):
    """A worker that holds the first blocks in RAM is told of those after them, even if the first are gone from disk."""
    grains = chain("a", 40)
    worker.store_all(grains)
    first = worker.read(grains)[0]
    assert grains_found(worker, grains, skip_blocks=1) == [16, 8]
    assert grains_found(worker, grains, skip_blocks=9) == []
    Path(first.path).unlink()
    assert grains_found(worker, grains, skip_blocks=2) == [8]


def test_lookup_says_what_fetch_would_find(worker):
    """Lookup names the same blocks as Fetch and takes no lease."""
    grains = chain("a", 40)
    worker.store_all(grains)
    found = worker.ask(Lookup(call_id=9, fingerprint=FINGERPRINT, grains=grains[:35]))
    assert found == Found(
        call_id=9,
        blocks=tuple(
            FoundBlock(key=BlockKey(own[-1]), grains=shared, file_bytes=len(block_bytes(parent, own)))
            for (parent, own), shared in zip([slot(grains, number) for number in range(3)], [16, 16, 3], strict=True)
        ),
    )
    assert worker.books().leases == 0


def test_another_model_finds_nothing(worker):
    """A chain belongs to its fingerprint, and the same key may be stored for two."""
    grains = chain("a", 16)
    worker.store(grains, 0)
    assert grains_found(worker, grains, fingerprint="other") == []
    assert isinstance(worker.store(grains, 0, fingerprint="other"), Published)
    assert grains_found(worker, grains, fingerprint="other") == [16]


def test_of_two_tails_the_one_that_ends_where_the_prompt_does_is_preferred(worker):
    """A block used whole is worth more than another one's part: some layers' state cannot be cut."""
    long, short = chain("a", 12), chain("a", 5)
    worker.store(long, 0)
    worker.store(short, 0)
    assert worker.read(short)[0].key == short[-1]
    assert worker.read(long)[0].key == long[-1]


# --- publishing ------------------------------------------------------------------------------------------------------


def test_a_block_that_is_there_is_not_written_twice(worker, directory):
    """Staging or publishing a present key is declined as present, and the staged file is gone."""
    grains = chain("a", 16)
    data = block_bytes(*slot(grains, 0))
    first, second = worker.stage(BlockKey(grains[-1]), len(data)), worker.stage(BlockKey(grains[-1]), len(data))
    assert isinstance(first, Staged)
    assert isinstance(second, Staged)
    for staged in (first, second):
        Path(staged.path).write_bytes(data)
    publishing = [worker.ask(Publish(call_id=1, lease=s.lease, parent=b"", grains=grains)) for s in (first, second)]
    assert publishing == [Published(call_id=1, file_bytes=len(data)), Declined(call_id=1, reason="present")]
    assert worker.stage(BlockKey(grains[-1]), 10) == Declined(call_id=1, reason="present")
    assert not Path(second.path).exists()
    worker.check()


def test_a_longer_tail_supersedes_the_shorter_one_it_contains(worker, directory):
    """The shorter file goes, at once or when its reader gives it back; an unrelated block never goes."""
    short, long, longest = chain("a", 5), chain("a", 9), chain("a", 12)
    other = chain("b", 4)
    worker.store(other, 0)
    worker.store(short, 0)
    worker.store(long, 0, supersedes=BlockKey(short[-1]))
    assert len(block_paths(directory)) == 2
    reading = worker.fetch(long)
    worker.store(longest, 0, supersedes=BlockKey(long[-1]))
    assert Path(reading.blocks[0].path).exists()
    assert worker.read(long)[0].key == longest[-1]
    worker.release(reading.lease)
    assert not Path(reading.blocks[0].path).exists()
    worker.store(chain("c", 4), 0, supersedes=BlockKey(other[-1]))
    assert len(block_paths(directory)) == 3
    worker.check()


@pytest.mark.parametrize(
    ("why", "spoil"),
    [
        ("cut by one byte", lambda data: data[:-1]),
        ("one byte too many", lambda data: data + b"\0"),
        ("empty", lambda data: b""),
        ("no header", lambda data: b"\xff" * len(data)),
        ("another model's", lambda data: data.replace(FINGERPRINT.encode(), FINGERPRINT[::-1].encode())),
        ("another format", lambda data: data.replace(b'"mlxd_format":"1"', b'"mlxd_format":"2"')),
    ],
)
def test_a_staged_file_that_is_not_the_announced_block_is_refused(worker, directory, why, spoil):
    """Publish checks all it can before a block gets its name; nothing of a refused one stays."""
    grains = chain("a", 16)
    data = block_bytes(*slot(grains, 0))
    staged = worker.stage(BlockKey(grains[-1]), len(data))
    spoiled = spoil(data)
    assert spoiled != data
    Path(staged.path).write_bytes(spoiled)
    reply = worker.ask(Publish(call_id=1, lease=staged.lease, parent=BlockKey(b""), grains=grains))
    assert reply == Declined(call_id=1, reason="integrity")
    assert block_paths(directory) == []
    assert not Path(staged.path).exists()
    worker.check()


def test_a_staged_file_that_is_gone_or_no_file_is_refused(worker):
    """What a worker does to its staged file harms nobody."""
    grains = chain("a", 16)
    for spoil in (Path.unlink, lambda path: (path.unlink(), path.symlink_to("/etc/hosts")), _make_directory):
        staged = worker.stage(BlockKey(grains[-1]), 1000)
        spoil(Path(staged.path))
        reply = worker.ask(Publish(call_id=1, lease=staged.lease, parent=BlockKey(b""), grains=grains))
        assert isinstance(reply, Declined)
    assert isinstance(worker.store(grains, 0), Published)


def test_a_file_much_larger_than_announced_is_refused(worker):
    """A reservation is a promise to the quota."""
    grains = chain("a", 16)
    data = block_bytes(*slot(grains, 0), data_bytes=200_000)
    staged = worker.stage(BlockKey(grains[-1]), 1000)
    Path(staged.path).write_bytes(data)
    reply = worker.ask(Publish(call_id=1, lease=staged.lease, parent=BlockKey(b""), grains=grains))
    assert reply == Declined(call_id=1, reason="quota")
    worker.check()


@pytest.mark.parametrize("fingerprint", ["", "..", "a/b", "quarantine", "index.sqlite3", "UPPER", "x" * 200, "a\0b"])
def test_a_fingerprint_that_is_no_plain_name_is_refused(worker, fingerprint):
    """Nothing a worker says becomes a path outside its model's directory."""
    assert worker.stage(BlockKey(b"k" * 16), 10, fingerprint) == Declined(call_id=1, reason="invalid")


def test_a_lease_serves_only_the_peer_that_took_it(worker):
    """Another worker can neither publish into nor give back a lease; a lease of an earlier run names nothing."""
    grains = chain("a", 16)
    staged = worker.stage(BlockKey(grains[-1]), 1000)
    stranger = WorkerSide(worker.service, b"worker:2")
    publish = Publish(call_id=1, lease=staged.lease, parent=BlockKey(b""), grains=grains)
    assert stranger.ask(publish) == Declined(call_id=1, reason="lease")
    stranger.release(staged.lease)
    assert worker.books().leases == 1
    worker.release(staged.lease)
    worker.release(staged.lease)
    assert worker.books().leases == 0
    assert worker.ask(publish) == Declined(call_id=1, reason="lease")


# --- leases ----------------------------------------------------------------------------------------------------------


def test_leases_end_by_time_and_with_their_peer(worker):
    """A worker that died holds back neither blocks nor bytes."""
    grains = chain("a", 16)
    worker.store_all(grains)
    staged = worker.stage(BlockKey(b"k" * 16), 1000)
    worker.fetch(grains)
    worker.now = READ_LEASE_SECONDS
    worker.settle()
    assert worker.books().leases == 1
    assert Path(staged.path).exists()
    worker.now = STAGE_LEASE_SECONDS
    worker.settle()
    assert worker.books().leases == 0
    assert not Path(staged.path).exists()
    worker.fetch(grains)
    worker.service.drop_peer(worker.peer, worker.now)
    assert worker.books().leases == 0


def test_forget_deletes_a_model_or_all_and_leased_blocks_when_given_back(worker, directory):
    """After Forget nothing is found; a reader keeps its files until it gives them back."""
    mine, theirs = chain("a", 40), chain("b", 16)
    worker.store_all(mine)
    worker.store(theirs, 0, fingerprint="other")
    reading = worker.fetch(mine)
    reply = worker.ask(Forget(call_id=1, fingerprint=FINGERPRINT))
    assert isinstance(reply, Forgotten)
    assert reply.blocks == 3
    assert grains_found(worker, mine) == []
    assert all(Path(block.path).exists() for block in reading.blocks)
    worker.release(reading.lease)
    assert len(block_paths(directory)) == 1
    worker.check()
    assert worker.ask(Forget(call_id=1, fingerprint=None)).blocks == 1
    assert block_paths(directory) == []
    assert worker.books().blocks == 0
    worker.check()


# --- K06: corrupt or missing blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criteria", "outcome"),
    [
        ({}, Declined(call_id=3, reason="forgotten")),
        ({"owner": "ada"}, Declined(call_id=3, reason="forgotten")),
        ({"owner": "ada", "fingerprint": FINGERPRINT}, Declined(call_id=3, reason="forgotten")),
        ({"owner": "bob"}, Published),
        ({"owner": "ada", "fingerprint": "beef"}, Published),
        ({"owner": "ada", "unused_for_seconds": 60.0}, Published),
    ],
)
def test_what_is_being_written_when_it_is_forgotten_is_not_published(worker, directory, criteria, outcome):
    """A block between Stage and Publish matches like one on disk: else it would come back after the purge. Its file is
    deleted, and the same block may be written again."""
    grains = chain("a", 16)
    parent, own = slot(grains, 0)
    data = block_bytes(parent, own, owner="ada")
    staged = worker.stage(BlockKey(own[-1]), len(data), owner="ada")
    Path(staged.path).write_bytes(data)
    assert isinstance(worker.ask(Forget(call_id=2, asked_by="t", **criteria)), Forgotten)
    answer = worker.ask(Publish(call_id=3, lease=staged.lease, parent=parent, grains=own))
    assert answer == outcome or type(answer) is outcome
    assert not Path(staged.path).exists()
    assert grains_found(worker, grains) == ([] if isinstance(answer, Declined) else [16])
    if isinstance(answer, Declined):
        assert isinstance(worker.store(grains, 0), Published)
    worker.check()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _flip_in_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


def _make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_bytes(b"x" * 100)


def _dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("restart", ["same run", "after a restart", "after a restart with the index lost"])
@pytest.mark.parametrize("damage", [_cut, _flip, _flip_in_header, Path.unlink, _make_directory, _dangling_link, _pipe])
def test_a_damaged_block_is_a_miss_and_the_prefix_before_it_is_used(directory, damage, restart):
    """Whatever happens to one file, blocks before it serve, it and those after it do not, and the books stay exact."""
    grains = chain("a", 64)
    worker = open_service(directory)
    worker.store_all(grains)
    victim = Path(worker.read(grains)[1].path)
    if restart != "same run":
        worker.service.close()
    damage(victim)
    if restart.endswith("lost"):
        for path in directory.glob("index.sqlite3*"):
            path.unlink()
    if restart != "same run":
        worker = open_service(directory)
    leased = worker.fetch(grains)
    assert [block.grains for block in leased.blocks] == ([16] if damage is not _flip else [16, 16, 16, 16])
    if restart == "same run" and damage is not _flip:
        assert leased.miss_reason == ("missing" if damage is Path.unlink else "integrity")
    assert [block.grains for block in worker.read_leased(leased)] == [16]
    assert grains_found(worker, grains) == [16]
    worker.check()
    for number in (1, 2, 3):  # it can be stored again, whatever lies in quarantine
        assert isinstance(worker.store(grains, number), Published) or restart.endswith("lost")
    assert grains_found(worker, grains) == [16, 16, 16, 16]
    worker.check()
    worker.service.close()


@pytest.mark.parametrize("restart", ["same run", "after a restart"])
def test_two_files_swapped_for_one_another_are_both_misses(directory, restart):
    """A name carries its file's checksum, so a sound block in another one's place is not served."""
    grains = chain("a", 48)
    worker = open_service(directory)
    worker.store_all(grains)
    second, third = (Path(block.path) for block in worker.read(grains)[1:])
    aside = directory / "aside"
    second.rename(aside)
    third.rename(second)
    aside.rename(third)
    if restart != "same run":
        worker.service.close()
        worker = open_service(directory)
    assert grains_found(worker, grains) == [16]
    assert worker.books().quarantined == 1
    worker.settle()
    worker.service.close()


def test_an_unreadable_block_is_a_miss(worker, monkeypatch):
    """A file that may not be opened is lost like a damaged one (root ignores modes, so the error is made)."""
    grains = chain("a", 32)
    worker.store_all(grains)
    victim = worker.read(grains)[1].path
    os.utime(victim, ns=(1, 1))  # else it is known to be sound and not opened at all
    real_open = os.open

    def refuse(path, *arguments, **more):
        if str(path) == victim:
            raise PermissionError(13, "Permission denied")
        return real_open(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    leased = worker.fetch(grains)
    assert ([block.grains for block in leased.blocks], leased.miss_reason) == ([16], "integrity")
    monkeypatch.undo()
    worker.check()


def test_quarantine_keeps_only_the_newest_few(worker, directory):
    """Damaged files are evidence, not an archive; they count towards the quota while they stay."""
    for number in range(8):
        grains = chain(f"q{number}", 16)
        worker.store_all(grains)
        _flip(Path(worker.read(grains)[0].path))
        assert grains_found(worker, grains) == []
    assert len(list((directory / "quarantine").iterdir())) == 4
    assert worker.books().quarantined == 8
    worker.check()


# --- K07: quota, full disks, unusable directories --------------------------------------------------------------------


def test_the_quota_holds_after_every_write_and_the_least_used_leave_first(directory):
    """Usage never exceeds the quota; a chain in use keeps its head; a parent never goes before its child."""
    worker = open_service(directory, quota_bytes=1_600_000)
    kept = chain("kept", 32)
    worker.store_all(kept, data_bytes=20_000)
    for number in range(80):
        grains = chain(f"n{number}", 32)
        for block in (0, 1):
            assert isinstance(worker.store(grains, block, data_bytes=20_000), Published)
            assert worker.books().file_bytes <= 1_600_000
        assert grains_found(worker, kept) == [16, 16]
    assert worker.books().evicted > 60
    worker.check()
    worker.service.close()


def test_pinned_blocks_are_never_evicted_and_a_write_that_cannot_fit_evicts_nothing(directory):
    """All or nothing: declined as quota, and every block is still there."""
    worker = open_service(directory, quota_bytes=1_000_000)
    grains = chain("a", 64)
    worker.store_all(grains, data_bytes=100_000)
    reading = worker.fetch(grains)
    assert worker.stage(BlockKey(b"k" * 16), 700_000) == Declined(call_id=1, reason="quota")
    assert worker.stage(BlockKey(b"k" * 16), 2_000_000) == Declined(call_id=1, reason="quota")
    assert all(Path(block.path).exists() for block in reading.blocks)
    worker.release(reading.lease)
    assert isinstance(worker.stage(BlockKey(b"k" * 16), 700_000), Staged)
    worker.check()
    worker.service.close()


def test_staged_files_count_what_they_may_take(directory):
    """Two writers at once cannot exceed the quota together."""
    worker = open_service(directory, quota_bytes=1_000_000)
    assert isinstance(worker.stage(BlockKey(b"k" * 16), 500_000), Staged)
    assert worker.stage(BlockKey(b"l" * 16), 500_000) == Declined(call_id=1, reason="quota")
    worker.service.close()


def test_old_formats_count_and_go_first_and_other_files_count_and_stay(directory):
    """Blocks that no mlxd of today can read leave before any that it can; what is not ours is never deleted."""
    worker = open_service(directory)
    grains = chain("a", 16)
    worker.store_all(grains, data_bytes=50_000)
    worker.service.close()
    old = directory / "0ldm0del" / "ab" / ("ab" * 16 + ".safetensors")
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x" * 500_000)
    notes = [directory / "notes.txt", directory / FINGERPRINT / "ab" / "notes.txt", directory / "holiday" / "a.jpg"]
    for path in notes:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"n" * 1000)
    worker = open_service(directory, quota_bytes=10_000_000)
    worker.check()
    assert worker.books().file_bytes > 553_000
    worker.service.close()
    worker = open_service(directory, quota_bytes=500_000)
    worker.check()
    assert not old.exists()
    assert all(path.exists() for path in notes)
    assert grains_found(worker, grains) == [16]
    worker.service.close()


def test_a_smaller_quota_is_enforced_at_the_start(directory):
    """Usage is under the quota before the first request."""
    worker = open_service(directory)
    for number in range(10):
        worker.store_all(chain(f"n{number}", 16), data_bytes=100_000)
    worker.service.close()
    worker = open_service(directory, quota_bytes=600_000)
    assert worker.books().file_bytes <= 600_000
    assert grains_found(worker, chain("n9", 16)) == [16]
    assert grains_found(worker, chain("n0", 16)) == []
    worker.check()
    worker.service.close()


def test_the_free_space_floor_declines_writes(directory):
    """A write that would leave the volume with less than the floor is declined."""
    worker = open_service(directory, free_floor_bytes=1 << 60)
    assert worker.stage(BlockKey(b"k" * 16), 10) == Declined(call_id=1, reason="no_space")
    worker.service.close()


@pytest.mark.parametrize(
    ("error", "reason"), [(28, "no_space"), (30, "read_only"), (13, "unavailable"), (5, "unavailable")]
)
@pytest.mark.parametrize("step", ["create_private_file", "seal", "put_in_place", "make_directory"])
def test_a_disk_that_fails_a_write_declines_it_and_serving_goes_on(worker, directory, monkeypatch, step, error, reason):
    """ENOSPC, EROFS and the like, at any step of a write: declined with the reason, nothing left, hits still served."""
    grains, other = chain("a", 16), chain("b", 16)
    worker.store_all(grains)

    def fail(*_arguments):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(disk, step, fail)
    assert worker.store(other, 0) == Declined(
        call_id=1 if step in {"create_private_file", "make_directory"} else 2, reason=reason
    )
    assert grains_found(worker, grains) == [16]
    monkeypatch.undo()
    assert worker.books().leases == 0
    assert isinstance(worker.store(other, 0), Published)
    worker.check()


def test_a_directory_that_cannot_be_made_serves_misses_until_it_can(tmp_path):
    """Unusable at the start is no reason to exit: misses, and a retry at intervals."""
    blocker = tmp_path / "volume"
    blocker.write_bytes(b"not mounted")
    worker = open_service(blocker / "cache")
    grains = chain("a", 16)
    leased = worker.fetch(grains)
    assert (leased.lease, leased.blocks, leased.miss_reason) == (NO_LEASE, (), "unavailable")
    assert worker.store(grains, 0) == Declined(call_id=1, reason="unavailable")
    assert isinstance(worker.ask(Forget(call_id=1, fingerprint=None)), CacheFailed)
    blocker.unlink()
    worker.service.idle(REOPEN_SECONDS - 1)
    assert worker.fetch(grains).miss_reason == "unavailable"
    worker.service.idle(REOPEN_SECONDS)
    assert isinstance(worker.store(grains, 0), Published)
    worker.check()
    worker.service.close()


def test_a_directory_removed_under_the_store_is_opened_anew(worker, directory):
    """`rm -rf` of the cache while it runs costs the cache and nothing else."""
    grains = chain("a", 32)
    worker.store_all(grains)
    shutil.rmtree(directory)
    worker.fetch(grains)
    worker.store(chain("b", 16), 0)
    worker.settle()
    assert isinstance(worker.store(grains, 0), Published)
    assert grains_found(worker, grains) == [16]
    worker.check()


@pytest.mark.parametrize("damage", ["nonsense", "another schema", "gone", "damaged inside"])
def test_a_lost_index_is_rebuilt_from_the_files(directory, damage):
    """The files are the truth: everything is found again, with exact books."""
    worker = open_service(directory)
    chains = [chain(f"n{number}", 40) for number in range(5)]
    for grains in chains:
        worker.store_all(grains)
    worker.service.close()
    index = directory / "index.sqlite3"
    match damage:
        case "nonsense":
            index.write_bytes(b"nonsense" * 1000)
        case "another schema":
            data = bytearray(index.read_bytes())
            data[60:64] = (99).to_bytes(4, "big")  # SQLite's user_version
            index.write_bytes(data)
        case "damaged inside":
            data = bytearray(index.read_bytes())
            data[4096:] = os.urandom(len(data) - 4096)
            index.write_bytes(data)
        case _:
            index.unlink()
    worker = open_service(directory)
    worker.settle()
    for grains in chains:
        assert grains_found(worker, grains) == [16, 16, 8]
    worker.check()
    worker.service.close()


@pytest.mark.parametrize("code", [sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL])
def test_an_index_that_fails_while_in_use_is_a_miss_and_then_mended(worker, monkeypatch, code):
    """Damage found by a query costs that request: afterwards everything is served again."""
    grains = chain("a", 40)
    worker.store_all(grains)

    def fail(*_arguments):
        error = sqlite3.DatabaseError("made up")
        error.sqlite_errorcode = code
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(BlockIndex, "walk", fail)
        leased = worker.fetch(grains)
    assert leased.blocks == ()
    assert leased.miss_reason == ("no_space" if code == sqlite3.SQLITE_FULL else "unavailable")
    worker.settle()
    assert grains_found(worker, grains) == [16, 16, 8]
    worker.check()


def test_a_full_disk_does_not_keep_a_hit_from_being_served(worker, monkeypatch):
    """That a use cannot be noted is no reason to miss."""
    grains = chain("a", 16)
    worker.store_all(grains)

    def fail(*_arguments):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(BlockIndex, "touch", fail)
    assert grains_found(worker, grains) == [16]


def test_a_block_that_cannot_be_indexed_does_not_stay_on_disk(worker, directory, monkeypatch):
    """SQLite finds the disk full after the rename: declined, and no file is left out of the books."""

    def fail(*_arguments, **_named):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(BlockIndex, "insert", fail)
        assert worker.store(chain("a", 16), 0) == Declined(call_id=2, reason="no_space")
    assert block_paths(directory) == []
    worker.check()
    assert isinstance(worker.store(chain("a", 16), 0), Published)


def test_blocks_and_books_are_there_after_a_restart(directory):
    """A restart loses nothing and sweeps what was being written."""
    worker = open_service(directory)
    grains = chain("a", 40)
    worker.store_all(grains)
    staged = worker.stage(BlockKey(b"k" * 16), 1000)
    worker.service.close()
    worker = open_service(directory)
    assert not Path(staged.path).exists()
    assert grains_found(worker, grains) == [16, 16, 8]
    worker.check()
    worker.service.close()


def test_files_and_directories_are_private(worker, directory):
    """Nothing in the cache can be opened by another user."""
    previous = os.umask(0)
    try:
        worker.store_all(chain("a", 20))
    finally:
        os.umask(previous)
    for path in directory.rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert path.stat().st_mode & 0o777 == wanted, path


def test_metadata_that_contradicts_itself_is_not_adopted(directory):
    """Rebuilding believes no header that does not match the file's name."""
    worker = open_service(directory)
    grains = chain("a", 16)
    worker.store_all(grains)
    worker.service.close()
    [path] = block_paths(directory)
    (directory / "index.sqlite3").unlink()
    other = chain("b", 16)
    path.write_bytes(block_bytes(*slot(other, 0)))
    worker = open_service(directory)
    assert grains_found(worker, grains) == []
    assert grains_found(worker, other) == []
    worker.check()
    worker.service.close()
    assert block_metadata(FINGERPRINT, BlockKey(grains[-1]), BlockKey(b""), grains, 256)["tokens"] == str(
        PER_BLOCK * 16
    )


def test_several_blocks_may_hold_the_last_part(worker):
    """A reader that needs more than tokens gets a choice, those that share most first; one that does not gets one."""
    grains = chain("a", 24)
    worker.store_all(grains)
    worker.store(chain("b", 7, after=grains[:20]), 1)
    worker.store(chain("c", 7, after=grains[:18]), 1)
    asked = (*grains[:22], *chain("d", 4))
    assert grains_found(worker, asked) == [16, 6]
    assert grains_found(worker, asked, parts=3) == [16, 6, 4, 2]
    assert grains_found(worker, asked, parts=2) == [16, 6, 4]
    assert grains_found(worker, grains[:16], parts=4) == [16]


# --- verified reads --------------------------------------------------------------------------------------------------


def unread(worker: WorkerSide, grains) -> list[bool]:
    """Of a lease's blocks, which ones their reader is asked to check. Nothing is said when it is given back."""
    leased = worker.fetch(grains)
    worker.release(leased.lease)
    return [bool(block.checksum) for block in leased.blocks]


def test_a_lease_reads_no_tensor_and_says_which_files_nobody_has_read(directory, monkeypatch):
    """What was published in this run was read then; after a start every block is new, until a worker has read it."""
    grains = chain("a", 48)
    worker = open_service(directory)
    worker.store_all(grains)
    assert unread(worker, grains) == [False, False, False]
    worker.service.close()
    worker = open_service(directory)

    def refuse(_path):
        raise AssertionError("the cachestore read a whole file to lease it")

    monkeypatch.setattr(disk, "inspect", refuse)
    assert unread(worker, grains) == [True, True, True]
    assert unread(worker, grains) == [True, True, True]
    leased = worker.fetch(grains)
    assert [Path(block.path).stem[-32:] for block in leased.blocks] == [b.checksum.hex() for b in leased.blocks]
    worker.release(leased.lease, verified=[leased.blocks[0].key, leased.blocks[2].key])
    assert unread(worker, grains) == [False, True, False]
    assert len(worker.read(grains)) == 3
    assert unread(worker, grains) == [False, False, False]
    worker.service.close()


def test_a_file_that_changes_is_to_be_read_again(worker):
    """Its inode, its size or its time of change is another one."""
    grains = chain("a", 32)
    worker.store_all(grains)
    path = Path(worker.read(grains)[1].path)
    os.utime(path, ns=(1, 1))
    assert unread(worker, grains) == [False, True]
    assert len(worker.read(grains)) == 2
    assert unread(worker, grains) == [False, False]
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.rename(path)
    assert unread(worker, grains) == [False, True]
    worker.check()


def test_what_a_worker_read_says_nothing_of_a_file_that_came_later(directory):
    """Verified is the file that was leased; the one that lies there when it is given back may be another."""
    grains = chain("a", 16)
    worker = open_service(directory)
    worker.store_all(grains)
    worker.service.close()
    worker = open_service(directory)
    leased = worker.fetch(grains)
    _flip(Path(leased.blocks[0].path))
    worker.release(leased.lease, verified=[leased.blocks[0].key])
    assert unread(worker, grains) == [True]
    assert worker.read(grains) == ()
    assert worker.books().quarantined == 1
    worker.check()
    worker.service.close()


def test_only_the_holder_of_a_lease_is_heard_and_only_about_its_blocks(directory):
    """A stranger, a lease that was given back, and a key that was not leased change nothing."""
    grains, other = chain("a", 16), chain("b", 16)
    worker = open_service(directory)
    worker.store_all(grains)
    worker.store_all(other)
    worker.service.close()
    worker = open_service(directory)
    leased = worker.fetch(grains)
    WorkerSide(worker.service, b"worker:2").release(leased.lease, verified=[leased.blocks[0].key])
    assert worker.books().leases == 1
    worker.release(leased.lease, verified=[BlockKey(other[-1])], suspect=[BlockKey(other[-1])])
    worker.release(leased.lease, verified=[leased.blocks[0].key], suspect=[leased.blocks[0].key])
    assert (unread(worker, grains), unread(worker, other)) == ([True], [True])
    worker.check()
    worker.service.close()


@pytest.mark.parametrize("restart", ["same run", "after a restart"])
def test_a_suspect_block_is_read_here_before_it_is_dropped(directory, restart):
    """A worker that cannot read a sound block, for whatever reason, costs nobody that block."""
    grains = chain("a", 32)
    worker = open_service(directory)
    worker.store_all(grains)
    if restart != "same run":
        worker.service.close()
        worker = open_service(directory)
    leased = worker.fetch(grains)
    worker.release(leased.lease, suspect=[block.key for block in leased.blocks])
    assert unread(worker, grains) == [False, False]
    assert worker.books().quarantined == 0
    worker.check()
    worker.service.close()


@pytest.mark.parametrize("damage", [_cut, _flip, _flip_in_header, Path.unlink, _make_directory, _dangling_link, _pipe])
def test_damage_that_comes_while_a_block_is_leased_is_found_when_it_is_given_back(worker, damage):
    """The lease was right when it was given. The block and those below it go, those before it stay."""
    grains = chain("a", 64)
    worker.store_all(grains)
    leased = worker.fetch(grains)
    damage(Path(leased.blocks[1].path))
    worker.release(leased.lease, suspect=[leased.blocks[1].key])
    assert worker.books().blocks == 1
    assert worker.books().quarantined == (0 if damage is Path.unlink else 1)
    assert grains_found(worker, grains) == [16]
    worker.check()


def test_a_suspect_that_others_read_or_that_is_forgotten_is_handled_once(worker):
    """Two readers find the same damage; a third had it forgotten meanwhile."""
    grains = chain("a", 32)
    worker.store_all(grains)
    leases = [worker.fetch(grains) for _ in range(3)]
    key = leases[0].blocks[0].key
    _flip(Path(leases[0].blocks[0].path))
    for leased in leases[:2]:
        worker.release(leased.lease, suspect=[key])
    assert worker.books().quarantined == 1
    worker.ask(Forget(call_id=1))
    worker.release(leases[2].lease, suspect=[key])
    assert (worker.books().blocks, worker.books().leases) == (0, 0)
    worker.check()
