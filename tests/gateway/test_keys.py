"""API keys: shown once, kept as hashes, private, hot-reloaded."""

import json
import multiprocessing
import os
import re
import stat
import tomllib
from pathlib import Path

import pytest
import structlog
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.admission import KeyLimits
from gateway.keys import (
    KeyRecord,
    Keyring,
    KeysError,
    add_key,
    change_key,
    digest_of,
    list_keys,
    match_key,
    remove_key,
)
from gateway.latency_class import ClassRights
from gateway.private_files import read_or_make_secret
from protocol.latency import LatencyClass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def record(name: str, key: str) -> KeyRecord:
    return KeyRecord(name=name, sha256=digest_of(key), created_unix=0, cache_salt="00" * 32)


@given(st.lists(st.text(), unique=True, max_size=6), st.text())
def test_a_key_matches_its_own_record_and_no_other(keys: list[str], presented: str):
    """Matching is exact, whatever text a header holds."""
    records = [record(str(number), key) for number, key in enumerate(keys)]
    found = match_key(records, presented)
    assert (found.name if found else None) == (str(keys.index(presented)) if presented in keys else None)


def test_every_record_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch):
    """The time taken says nothing: no early end, and only constant-time comparisons."""
    compared: list[bytes] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return left == right

    monkeypatch.setattr("gateway.keys.hmac.compare_digest", compare)
    records = [record("a", "1"), record("b", "2"), record("c", "3")]
    for presented in ("1", "3", "none"):
        compared.clear()
        match_key(records, presented)
        assert len(compared) == 3


def test_a_key_is_long_random_and_not_in_the_file(path: Path):
    """The file, 0600, holds the hash and a secret salt; two keys share neither."""
    first, second = add_key(path, "ann", now_unix=5), add_key(path, "bob", now_unix=6)
    assert re.fullmatch(r"mlxd-[A-Za-z0-9_-]{43}", first)
    assert first != second
    assert first.removeprefix("mlxd-") not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ann, bob = list_keys(path)
    assert (ann.name, ann.created_unix, bob.name) == ("ann", 5, "bob")
    assert ann.cache_scope != bob.cache_scope
    assert len(ann.cache_scope) == 32
    assert match_key(list_keys(path), first) == ann


def test_names_are_unique_and_plain(path: Path):
    """A name stands in logs: no spaces, no newlines, no second key under it; the refusal says what to do."""
    add_key(path, "ann", now_unix=0)
    for name in ("ann", "", "a b", "a\nb", "x" * 65, "-x", "../x"):
        with pytest.raises(KeysError, match="choose"):
            add_key(path, name, now_unix=0)
    with pytest.raises(KeysError, match="the keys are: ann"):
        remove_key(path, "bob")


def test_others_must_not_read_the_file(path: Path):
    """A readable key file is refused with the command that mends it."""
    add_key(path, "ann", now_unix=0)
    path.chmod(0o644)
    with pytest.raises(KeysError, match=r"run: chmod 600"):
        Keyring(path)


@pytest.mark.parametrize("content", ["{", "= 1", '[[keys]]\nname = "a"', "version = 9", "kys = []", "keys = 1", "\x00"])
def test_a_damaged_file_is_refused(path: Path, content: str):
    """Never guessed at, never overwritten."""
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(KeysError):
        Keyring(path)
    with pytest.raises(KeysError):
        add_key(path, "ann", now_unix=0)
    assert path.read_text() == content


def test_a_running_service_sees_changes_at_once(path: Path):
    """Added keys work and removed keys stop working at the next refresh, also when the last one goes."""
    ring = Keyring(path)
    ann = add_key(path, "ann", now_unix=0)
    assert ring.match(ann) is None
    ring.refresh()
    assert ring.match(ann) is not None
    remove_key(path, "ann")
    ring.refresh()
    assert ring.match(ann) is None
    assert ring.records == ()


def test_a_bad_change_opens_and_closes_nothing(path: Path):
    """A file that vanished, broke or became readable leaves the keys as they were, says so once, and is retried."""
    ann = add_key(path, "ann", now_unix=0)
    ring = Keyring(path)
    good = path.read_bytes()
    with structlog.testing.capture_logs() as logs:
        path.unlink()
        ring.refresh()
        ring.refresh()
        assert ring.match(ann) is not None
        path.write_text("{")
        path.chmod(0o600)
        ring.refresh()
        assert ring.match(ann) is not None
        path.write_bytes(good)
        path.chmod(0o644)
        ring.refresh()
        assert ring.match(ann) is not None
    assert [line["event"] for line in logs] == ["keys_kept_as_they_were"] * 3
    assert ann not in json.dumps(logs)
    path.chmod(0o600)
    remove_key(path, "ann")
    ring.refresh()
    assert ring.match(ann) is None


def add_some(path: Path, prefix: str) -> None:
    for number in range(5):
        add_key(path, f"{prefix}{number}", now_unix=0)


def test_two_writers_lose_nothing(path: Path):
    """Writers in different processes take turns."""
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=add_some, args=(path, prefix)) for prefix in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    assert len(list_keys(path)) == 10


def test_a_crash_while_writing_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file is replaced whole, and no half-written copy stays behind."""
    add_key(path, "ann", now_unix=0)
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeysError, match="No space left"):
        add_key(path, "bob", now_unix=0)
    assert path.read_bytes() == before
    assert {entry.name for entry in path.parent.iterdir()} == {"keys.toml", ".keys.toml.lock"}


def test_the_local_scope_survives_restarts(tmp_path: Path):
    """Keyless callers keep their cache across restarts, and the secret is private."""
    path = tmp_path / "local_scope"
    first = read_or_make_secret(path)
    assert read_or_make_secret(path) == first
    assert len(first) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_old_file_is_read_and_has_no_limits(path: Path):
    """A record of before classes and limits: standard, up to interactive, unlimited; nothing rewrites it for that."""
    add_key(path, "ann", now_unix=0)
    content = path.read_text()
    assert set(tomllib.loads(content)["keys"][0]) == {"name", "sha256", "created_unix", "cache_salt"}
    (ann,) = list_keys(path)
    assert (ann.classes, ann.limits) == (ClassRights(), KeyLimits())
    assert path.read_text() == content


def test_limits_can_be_changed_while_the_service_runs(path: Path):
    """The next refresh has them; the key itself stays what it was."""
    key = add_key(path, "ann", now_unix=0)
    ring = Keyring(path)
    change_key(path, "ann", lambda record: replace(record, max_running=2, default_class=LatencyClass.BATCH, weight=2))
    ring.refresh()
    ann = ring.match(key)
    assert ann is not None
    assert (ann.limits.max_running, ann.classes.default, ann.weight) == (2, LatencyClass.BATCH, 2.0)
    with pytest.raises(KeysError, match="the keys are: ann"):
        change_key(path, "bob", lambda record: record)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"max_running": 0}, "max_running must"),
        ({"max_queued": 0}, "max_queued must"),
        ({"max_queued": -1, "max_running": 1}, "max_queued must"),
        ({"tokens_per_day": 0}, "tokens_per_day must"),
        ({"weight": 0.0}, "weight must"),
        ({"weight": 1e9}, "weight must"),
        ({"highest_class": LatencyClass.BATCH}, "is above highest_class"),
    ],
)
def test_limits_that_mean_nothing_are_refused(path: Path, terms: dict[str, object], words: str):
    """Neither written nor read."""
    add_key(path, "ann", now_unix=0)
    content = path.read_text()
    with pytest.raises(KeysError, match=words):
        change_key(path, "ann", lambda record: replace(record, **terms))
    assert path.read_text() == content
    broken = tomllib.loads(content)
    broken["keys"][0] |= terms
    path.write_text(tomli_w.dumps(broken))
    with pytest.raises(KeysError, match=words):
        list_keys(path)
