"""`make clients`: install what installs, drive each client, record the verdicts, rewrite the README's table.

Arguments are the names of the clients to drive, all by default. Ends with 1 if a client failed in something.
"""
# ruff: noqa: T201

import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.clients import table
from tests.clients.driving import EMBEDDER, MODEL, drive
from tests.clients.environments import NotInstalled, cache_directory, install
from tests.fakes import minilm
from tests.fakes.client_model import make_client_model
from tests.fakes.live_service import LiveService, live_service


def main(wanted: Sequence[str]) -> int:
    clients = table.read_clients(table.CLIENTS_PATH.read_text(encoding="utf-8"))
    if unknown := sorted(set(wanted) - {client.name for client in clients}):
        print(f"no such client: {', '.join(unknown)}; see {table.CLIENTS_PATH.name}", file=sys.stderr)
        return 2
    script = make_client_model(cache_directory() / "model")
    embedder = minilm.build(cache_directory() / "minilm")
    with live_service({MODEL: script, EMBEDDER: embedder}) as service:
        key = service.add_key("clients")
        verdicts = [_verdict(client, service, key) for client in clients if not wanted or client.name in wanted]

    old = table.read_verdicts(table.VERDICTS_PATH.read_bytes()) if table.VERDICTS_PATH.exists() else ()
    recorded = table.merged(old, verdicts, clients)
    table.VERDICTS_PATH.write_bytes(table.write_verdicts(recorded))
    readme = table.with_table(table.README_PATH.read_text(encoding="utf-8"), table.conformance_table(recorded))
    table.README_PATH.write_text(readme, encoding="utf-8")
    return int(any(check.verdict == "fail" for verdict in verdicts for check in verdict.checks))


def _verdict(client: table.Client, service: LiveService, key: str) -> table.Verdict:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        folder: Path = install(client)
        checks = drive(client, folder, service, key)
    except NotInstalled as why:
        print(f"{client.name} {client.version}: not installed: {why}", flush=True)
        return table.Verdict(
            client=client.name, version=client.version, date=today, outcome="not_installed", detail=str(why)
        )
    said = ", ".join(f"{check.check} {check.verdict}" for check in checks)
    print(f"{client.name} {client.version}: {said}", flush=True)
    return table.Verdict(client=client.name, version=client.version, date=today, outcome="ran", checks=checks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
