"""The day's tokens survive a restart, in a private file, and a broken file locks nobody out."""

import json
import stat
from pathlib import Path

import pytest
import structlog

from gateway.admission import DAY_SECONDS
from gateway.token_ledger import TokenLedger

NOW = 20_000.5 * DAY_SECONDS


def test_a_restart_counts_on(tmp_path: Path) -> None:
    """What was saved is there again, 0600, for the same day only; nothing is written when nothing changed."""
    path = tmp_path / "home" / "tokens_today.json"
    ledger = TokenLedger(path)
    ledger.save()
    assert not path.exists()
    ledger.tokens.charge("ada", "standard", 42, unix_now=NOW)
    ledger.save()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {
        "day": 20_000,
        "tokens": {"ada": 42},
        "class_tokens": {"standard": 42},
    }
    again = TokenLedger(path)
    assert again.tokens.used("ada", unix_now=NOW) == 42
    assert again.tokens.used_by_class("standard", unix_now=NOW) == 42
    assert again.tokens.used("ada", unix_now=NOW + DAY_SECONDS) == 0


def test_a_file_from_before_classes_were_counted_counts_its_keys(tmp_path: Path) -> None:
    """An upgrade gives no key its day again."""
    path = tmp_path / "tokens_today.json"
    path.write_text('{"day": 20000, "tokens": {"ada": 42}}')
    path.chmod(0o600)
    tokens = TokenLedger(path).tokens
    assert tokens.used("ada", unix_now=NOW) == 42
    assert tokens.used_by_class("standard", unix_now=NOW) == 0


@pytest.mark.parametrize("content", ["{", "[]", '{"day": "x", "tokens": {}}'])
def test_a_damaged_file_counts_as_nothing_and_says_so(tmp_path: Path, content: str) -> None:
    """The next save replaces it."""
    path = tmp_path / "tokens_today.json"
    path.write_text(content)
    path.chmod(0o600)
    with structlog.testing.capture_logs() as logs:
        ledger = TokenLedger(path)
    assert [line["event"] for line in logs] == ["tokens_start_at_zero"]
    ledger.tokens.charge("ada", "standard", 1, unix_now=NOW)
    ledger.save()
    assert TokenLedger(path).tokens.used("ada", unix_now=NOW) == 1


def test_a_disk_that_refuses_is_a_log_line(tmp_path: Path) -> None:
    """And the next save tries again."""
    folder = tmp_path / "home"
    ledger = TokenLedger(folder / "tokens_today.json")
    ledger.tokens.charge("ada", "standard", 1, unix_now=NOW)
    folder.write_text("a file where the folder should be")
    with structlog.testing.capture_logs() as logs:
        ledger.save()
        ledger.save()
    assert [line["event"] for line in logs] == ["tokens_not_saved"] * 2
    folder.unlink()
    ledger.save()
    assert TokenLedger(folder / "tokens_today.json").tokens.used("ada", unix_now=NOW) == 1
