"""The shape of `mlxd status --json`: scripts rely on its names."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.config import settings_from
from gateway.control import ServiceAddress, service_url
from gateway.status import AdminModel, AdminStatus, CachestoreStatus, GatewayStatus, LastExit, ModelStatus
from gateway.status_report import status_report
from protocol.blocks import Described
from protocol.ids import Incarnation, ModelName

GATEWAY = GatewayStatus(pid=7, version="1.2.3", uptime_seconds=5.0)
BOOKS = Described(
    call_id=1,
    blocks=3,
    file_bytes=4096,
    quota_bytes=10**9,
    leases=0,
    published=0,
    written_bytes=0,
    evicted=0,
    quarantined=0,
)


def model(process: ModelStatus | None, problem: str | None = None) -> AdminModel:
    return AdminModel(
        name=ModelName("org/name"), path="/m", weight_bytes=9, context_tokens=4096, problem=problem, process=process
    )


def report_of(*models: AdminModel, cachestore: CachestoreStatus | None = None) -> Any:
    status = AdminStatus(gateway=GATEWAY, models=models, cachestore=cachestore)
    return json.loads(msgspec.json.encode(status_report(status, url="http://127.0.0.1:1")))


def test_the_names_that_scripts_rely_on() -> None:
    """Every promised key is there, whatever there is to tell."""
    running = ModelStatus(
        name=ModelName("org/name"),
        state="ready",
        since_unix=0.0,
        pid=4711,
        incarnation=Incarnation(5),
        restarts=2,
        memory_bytes=10,
    )
    store = CachestoreStatus(state="ready", since_unix=0.0, pid=8, books=BOOKS)
    report = report_of(model(running), model(None), cachestore=store)
    promised = {"id", "state", "pid", "incarnation", "restarts", "memory_bytes", "last_error"}
    assert {name: report[name] for name in ("version", "url", "pid")} == {
        "version": "1.2.3",
        "url": "http://127.0.0.1:1",
        "pid": 7,
    }
    first, second = report["models"]
    assert {name: first[name] for name in promised} == {
        "id": "org/name",
        "state": "ready",
        "pid": 4711,
        "incarnation": 5,
        "restarts": 2,
        "memory_bytes": 10,
        "last_error": None,
    }
    assert {name: second[name] for name in promised} == {
        "id": "org/name",
        "state": "absent",
        "pid": None,
        "incarnation": 0,
        "restarts": 0,
        "memory_bytes": None,
        "last_error": None,
    }
    disk = report["cachestore"]
    assert {name: disk[name] for name in ("pid", "state", "blocks", "bytes")} == {
        "pid": 8,
        "state": "ready",
        "blocks": 3,
        "bytes": 4096,
    }
    assert report_of()["cachestore"] is None


CRASHED = LastExit(reason="exit code 1", at_unix=0.0, exit_code=1, stderr_tail=("first", "no such layer"))


@pytest.mark.parametrize(
    ("last_exit", "problem", "words"),
    [
        (CRASHED, None, "exit code 1: no such layer"),
        (msgspec.structs.replace(CRASHED, last_words="out of memory"), None, "exit code 1: out of memory"),
        (LastExit(reason="signal 9", at_unix=0.0, signal=9), None, "signal 9"),
        (LastExit(reason="signal 15", at_unix=0.0, signal=15, was_ordered=True), None, None),
        (LastExit(reason="exit code 0", at_unix=0.0, exit_code=0, stderr_tail=("bye",)), None, None),
        (None, None, None),
        (CRASHED, "config.json is damaged", "config.json is damaged"),
    ],
)
def test_the_last_error_is_the_most_telling(last_exit: LastExit | None, problem: str | None, words: str | None) -> None:
    """The folder's problem first, then a bad end with what the process said last; a good end is no error."""
    process = ModelStatus(name=ModelName("org/name"), state="given_up", since_unix=0.0, last_exit=last_exit)
    assert report_of(model(process, problem))["models"][0]["last_error"] == words


@pytest.mark.parametrize(
    ("document", "host", "url"),
    [
        ({}, "127.0.0.1", "http://127.0.0.1:80"),
        ({}, "localhost", "http://localhost:80"),
        ({}, "::1", "http://[::1]:80"),
        ({}, "0.0.0.0", "http://127.0.0.1:80"),  # noqa: S104
        ({}, "::", "http://[::1]:80"),
        ({}, "192.168.1.5", "http://192.168.1.5:80"),
        ({"allowed_hosts": ["studio.local"]}, "0.0.0.0", "http://studio.local:80"),  # noqa: S104
        ({"allowed_hosts": ["studio.local"]}, "127.0.0.1", "http://127.0.0.1:80"),
    ],
)
def test_the_url_can_be_called(document: dict[str, object], host: str, url: str) -> None:
    """A wildcard address is nobody's; a service that answers to certain names only is called by one of them."""
    settings = settings_from(document, home=Path("/h"), base=Path("/h"), user_id=0)
    assert service_url(settings, ServiceAddress(pid=1, host=host, port=80)) == url
