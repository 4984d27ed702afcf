"""Which clients there are, and what came of driving them: two files and the README's table. Decides only."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

HERE = Path(__file__).parent
CLIENTS_PATH = HERE / "clients.toml"
VERDICTS_PATH = HERE / "verdicts.json"
README_PATH = HERE.parents[1] / "README.md"
BEGIN = "<!-- clients: written by make clients -->"
END = "<!-- clients: end -->"
ROUND_TRIP = "tool round trip"


class Client(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client and its exact packages, of which the first is its own.

    `drive`: a script of `drives` and its arguments, run in the client's environment. `launch`: the name that
    `mlxd launch` knows an agent by, and `arguments` what it is started with. `edits`: the file that an agent without
    tools is told to write.
    """

    name: str
    registry: Literal["pypi", "npm"]
    packages: tuple[str, ...]
    home: str = ""
    drive: tuple[str, ...] = ()
    launch: str = ""
    arguments: tuple[str, ...] = ()
    edits: str = ""

    @property
    def folder(self) -> str:
        """Where its packages are installed, below the cache."""
        return self.home or self.name.replace(" ", "-")

    @property
    def version(self) -> str:
        first = self.packages[0]
        return first.rpartition("==" if self.registry == "pypi" else "@")[2]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a client did, and how it ended."""

    check: str
    verdict: Literal["pass", "fail"]
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One client's run. `not_installed` has no checks, and `detail` says why."""

    client: str
    version: str
    date: str
    outcome: Literal["ran", "not_installed"]
    checks: tuple[Check, ...] = ()
    detail: str = ""


def read_clients(text: str) -> tuple[Client, ...]:
    """The pinned clients, in their order."""
    return msgspec.convert(tomllib.loads(text)["client"], tuple[Client, ...])


def read_verdicts(data: bytes) -> tuple[Verdict, ...]:
    return msgspec.json.decode(data, type=tuple[Verdict, ...])


def write_verdicts(verdicts: Sequence[Verdict]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(verdicts), indent=1) + b"\n"


def merged(old: Sequence[Verdict], new: Sequence[Verdict], clients: Sequence[Client]) -> tuple[Verdict, ...]:
    """The newest verdict of each client, in the clients' order; those of clients that are no more are dropped."""
    newest = {verdict.client: verdict for verdict in (*old, *new)}
    return tuple(newest[client.name] for client in clients if client.name in newest)


def conformance_table(verdicts: Sequence[Verdict]) -> str:
    """Markdown: a row for each client; the round trip of a tool has a column of its own."""
    rows = ["| client | version | tool round trip | also | does not |", "|---|---|---|---|---|"]
    for verdict in verdicts:
        if verdict.outcome == "not_installed":
            rows.append(f"| {verdict.client} | {verdict.version} | - | | not installed: {verdict.detail} |")
            continue
        of = {check.check: check.verdict for check in verdict.checks}
        trip = {"pass": "yes", "fail": "**no**", None: "-"}[of.pop(ROUND_TRIP, None)]
        passed = ", ".join(check for check, outcome in of.items() if outcome == "pass")
        failed = ", ".join(f"**{check}**" for check, outcome in of.items() if outcome == "fail")
        rows.append(f"| {verdict.client} | {verdict.version} | {trip} | {passed} | {failed} |")
    return "\n".join(rows)


def with_table(readme: str, table: str) -> str:
    """The README with this table between its markers."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"README.md lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
