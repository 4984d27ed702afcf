"""What the README says of real clients is what was recorded, of the versions that are pinned."""

import pytest

from tests.clients.table import (
    BEGIN,
    CLIENTS_PATH,
    END,
    README_PATH,
    ROUND_TRIP,
    VERDICTS_PATH,
    Check,
    Verdict,
    conformance_table,
    merged,
    read_clients,
    read_verdicts,
    with_table,
    write_verdicts,
)

CLIENTS = read_clients(CLIENTS_PATH.read_text(encoding="utf-8"))
VERDICTS = read_verdicts(VERDICTS_PATH.read_bytes())


def test_the_readme_shows_the_recorded_verdicts() -> None:
    """The table is generated: writing it again changes nothing."""
    readme = README_PATH.read_text(encoding="utf-8")
    assert with_table(readme, conformance_table(VERDICTS)) == readme


def test_every_client_has_a_verdict_of_its_pinned_version() -> None:
    """A pin is moved together with a run."""
    recorded = {verdict.client: verdict.version for verdict in VERDICTS}
    assert recorded == {client.name: client.version for client in CLIENTS}


def test_eight_clients_complete_a_tool_round_trip() -> None:
    """What was promised: eight at least."""
    trips = [
        verdict.client
        for verdict in VERDICTS
        if any(check.check == ROUND_TRIP and check.verdict == "pass" for check in verdict.checks)
    ]
    assert len(trips) >= 8


def test_every_client_is_pinned_and_is_driven_in_one_way() -> None:
    """An exact version, and either a drive or a launch."""
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
    for client in CLIENTS:
        assert client.version[0].isdigit(), client
        assert bool(client.drive) != bool(client.launch), client


def _verdict(client: str, date: str, *checks: Check) -> Verdict:
    return Verdict(client=client, version="1", date=date, outcome="ran", checks=checks)


def test_a_run_replaces_what_it_ran_and_keeps_the_rest() -> None:
    """In the order of the clients, without those that are no more."""
    first, second = CLIENTS[0].name, CLIENTS[1].name
    old = (_verdict("gone", "2026-01-01"), _verdict(second, "2026-01-01"), _verdict(first, "2026-01-01"))
    new = (_verdict(first, "2026-02-02"),)
    kept = merged(old, new, CLIENTS)
    assert [(verdict.client, verdict.date) for verdict in kept] == [(first, "2026-02-02"), (second, "2026-01-01")]


def test_a_failure_shows_in_the_table() -> None:
    """A client that fails is named with what failed; one that could not be installed says why."""
    failed = _verdict("one", "d", Check(check=ROUND_TRIP, verdict="fail"), Check(check="text", verdict="pass"))
    absent = Verdict(client="two", version="2", date="d", outcome="not_installed", detail="there is no npm")
    rows = conformance_table((failed, absent)).splitlines()[2:]
    assert rows == ["| one | 1 | **no** | text |  |", "| two | 2 | - | | not installed: there is no npm |"]


def test_verdicts_survive_their_file() -> None:
    assert read_verdicts(write_verdicts(VERDICTS)) == VERDICTS


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        with_table(f"{BEGIN} no {END[:-1]}", "table")
