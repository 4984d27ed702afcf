"""Field cases of security (S): no route without a key, no secret and no prompt where it can be read, no path from a
name."""

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote, urlsplit

import psutil
import pytest
from litestar import Litestar

from gateway.app import create_app
from gateway.cache_doors import CacheAccess
from gateway.catalog import Catalog
from gateway.catalog_snapshot import CatalogSnapshot
from gateway.gate import DrainFlag, GateSecrets
from gateway.keys import Keyring
from tests.cases.conftest import MODEL
from tests.fakes.http_answers import CHAT, COMPLETIONS, ask, ask_whole, assert_serves, body, open_stream
from tests.fakes.live_service import LiveService
from tests.fakes.script_model import said_by

MARK = "zqxmarkzqx"


@pytest.fixture(scope="module")
def guarded(script_model: Path) -> Iterator[LiveService]:
    """A service with one key."""
    service = LiveService({MODEL: script_model}, "")
    try:
        service.add_key("alice")
        service.start()
        yield service
        assert_serves(service, MODEL, key=service.keys["alice"])
        service.stop()
        assert "Traceback" not in service.log
    finally:
        service.end()


def raw(service: LiveService, method: str, target: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """One request with its target sent exactly as it is written here."""
    address = urlsplit(service.base_url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    try:
        connection.putrequest(method, target)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        if method == "POST":
            connection.putheader("Content-Length", "2")
            connection.putheader("Content-Type", "application/json")
            connection.endheaders(b"{}")
        else:
            connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# --- S01 -------------------------------------------------------------------------------------------------------------


def route_table(service: LiveService) -> list[tuple[str, str]]:
    """Every method and path of the very app that `mlxd serve` makes, so that a new route cannot slip past this test.

    Nothing is asked of that app, so what it would act through is not there.
    """
    gate = create_app(
        settings=service.settings,
        keyring=Keyring(service.settings.keys_path),
        catalog=CatalogSnapshot(Catalog([])),
        generator=Mock(),
        status_source=Mock(),
        secrets=GateSecrets(admin_token="", local_scope=b""),
        drain=DrainFlag(),
        cache=CacheAccess(control=Mock(), recorder=Mock()),
        response_store=Mock(),
        model_control=Mock(),
    )
    app = gate._app  # pyright: ignore[reportPrivateUsage]
    assert isinstance(app, Litestar)
    return sorted(
        (str(method), re.sub(r"{[^}]*}", MODEL, route.path))
        for route in app.routes
        for method in getattr(route, "methods", ())
    )


def test_s01_the_route_table_is_whole(guarded: LiveService) -> None:
    """S01: the table that the next test walks holds the routes that clients know, or it would prove nothing."""
    paths = {path for _, path in route_table(guarded)}
    assert {CHAT, COMPLETIONS, "/v1/models", "/health", "/ready", "/admin/status", "/v1/cache/warm"} <= paths
    assert {"/v1/requests", f"/v1/requests/{MODEL}", "/admin/requests"} <= paths
    assert {"/v1/embeddings", "/v1/rerank", "/rerank", "/tokenize", "/v1/tokenize", "/detokenize"} <= paths
    assert {"/v1/responses", "/v1/responses/input_tokens", f"/v1/responses/{MODEL}"} <= paths
    assert {"/admin/models/load", "/admin/models/unload"} <= paths


def is_about_the_key(path: str, answer: dict[str, Any]) -> bool:
    """In the envelope of the API whose path it is."""
    if path.startswith("/v1/messages"):
        return answer["type"] == "error" and answer["error"]["type"] == "authentication_error"
    return answer["error"]["code"] == "invalid_api_key"


def test_s01_no_route_without_a_key(guarded: LiveService) -> None:
    """S01: without a valid key everything but the liveness probes is 401, however its path is spelled; HEAD and
    OPTIONS tell as little, and a key in the query is no key."""
    key = guarded.keys["alice"]
    wrong = f"{key[:-1]}{'a' if key[-1] != 'a' else 'b'}"
    attempts: list[dict[str, str]] = [
        {},
        {"Authorization": f"Bearer {wrong}"},
        {"x-api-key": wrong},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {key}"},
        {"Authorization": key},
        {"x-api-key": ""},
        {"Cookie": f"key={key}"},
        {"x-forwarded-for": "127.0.0.1"},
    ]
    for method, path in route_table(guarded):
        for headers in attempts:
            status, text = raw(guarded, method, path, headers)
            allowed = path in ("/health", "/") and method in ("GET", "HEAD")
            assert status == (200 if allowed else 401), (method, path, headers, status)
            if status == 401 and method not in ("HEAD", "OPTIONS"):
                assert is_about_the_key(path, json.loads(text))
        head, _, tail = path.lstrip("/").partition("/")
        for spelled in (
            f"{path}?key={key}&api_key={key}&access_token={key}",
            f"{path}/",
            f"/{path}",
            f"//{path}//",
            f"/./{path}",
            f"/x/..{path}",
            f"/%2e{path}",
            f"/%2e%2e{path}",
            f"/%{ord(head[0]):02x}{head[1:]}/{tail}".rstrip("/") if head else "/%2f",
            path.upper(),
        ):
            for spelled_method in {method, "HEAD", "OPTIONS"}:
                status, _ = raw(guarded, spelled_method, spelled)
                is_probe = spelled.partition("?")[0] in ("/health", "/") and spelled_method in ("GET", "HEAD")
                assert status == (200 if is_probe else 401), (spelled_method, spelled, status)


def test_s01_either_header_opens(guarded: LiveService) -> None:
    """S01, or the test above proves nothing: the key opens by either header, beside a foreign one; admin wants its
    own token and no caller's key."""
    key = guarded.keys["alice"]
    for headers in (
        {"Authorization": f"Bearer {key}"},
        {"authorization": f"bearer {key}"},
        {"x-api-key": key},
        {"x-api-key": "sk-foreign", "Authorization": f"Bearer {key}"},
        {"x-api-key": key, "Authorization": "Bearer sk-foreign"},
    ):
        assert raw(guarded, "GET", "/v1/models", headers)[0] == 200
    assert raw(guarded, "GET", "/admin/status", {"Authorization": f"Bearer {key}"})[0] == 401
    token = guarded.settings.admin_token_path.read_text()
    assert raw(guarded, "GET", "/v1/models", {"Authorization": f"Bearer {token}"})[0] == 401


def test_s01_keys_come_and_go_while_it_runs(guarded: LiveService) -> None:
    """S01: a key that was taken back opens nothing any more, at once."""
    key = guarded.add_key("bob")
    assert raw(guarded, "GET", "/v1/models", {"x-api-key": key})[0] == 200
    assert guarded.command("keys", "revoke", "bob").returncode == 0
    assert raw(guarded, "GET", "/v1/models", {"x-api-key": key})[0] == 401


def test_s01_other_hosts_and_origins(guarded: LiveService) -> None:
    """S01: a web page of another origin, or a name that was pointed at loopback, gets nothing even with a key."""
    key = {"x-api-key": guarded.keys["alice"]}
    assert raw(guarded, "GET", "/v1/models", {**key, "Origin": "https://evil.example"})[0] == 403
    address = urlsplit(guarded.base_url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    try:
        connection.putrequest("GET", "/v1/models", skip_host=True)
        connection.putheader("Host", "evil.example")
        connection.putheader("x-api-key", guarded.keys["alice"])
        connection.endheaders()
        assert connection.getresponse().status == 403
    finally:
        connection.close()


def test_no_keys_no_lan(script_model: Path) -> None:
    """S01: a bind that others can reach refuses to start without a key, in one line that says what to do."""
    service = LiveService({MODEL: script_model}, "")
    try:
        ended = service.command("serve", "--host", "0.0.0.0", "--port", "0")  # noqa: S104  it must not listen
    finally:
        service.end()
    assert ended.returncode == 1
    assert "mlxd keys add" in ended.stderr.splitlines()[-1]


# --- S02 -------------------------------------------------------------------------------------------------------------

BREAKING_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content.startswith('raise ') -%}{{ raise_exception(message.content) }}{%- endif -%}
{%- if message.content.startswith('lookup ') -%}{{ 'x'.encode(message.content) }}{%- endif -%}
{%- if message.content.startswith('divide ') -%}{{ 1 / (message.content | length * 0) }}{%- endif -%}
{{ message.content }}
{%- endfor -%}
"""


def _breaking_model(script_model: Path, to: Path) -> Path:
    """A model whose template fails in ways that quote what the user wrote."""
    to.mkdir()
    for file in script_model.iterdir():
        if "template" not in file.name and file.name != "tokenizer_config.json":
            (to / file.name).symlink_to(file)
    config = json.loads((script_model / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": BREAKING_TEMPLATE}))
    return to


def test_s02_secrets_and_prompts_stay_where_they_belong(script_model: Path, tmp_path: Path) -> None:
    """S02: a key, right or wrong, in a header, URL or body, and what users write, are in no log line at debug level,
    no process's arguments, no status, no file's name and no file but the key file's hash; crashes included."""
    breaking = _breaking_model(script_model, tmp_path / "breaking")
    service = LiveService({MODEL: script_model, "breaking": breaking}, 'log_level = "debug"\n')
    try:
        key = service.add_key("alice")
        service.start()
        secrets = (key, MARK)
        _misuse(service, key)
        _break_templates(service, key)
        _crash_with_prompts(service, key)
        assert raw(service, "GET", "/health")[0] == 200  # a probe is told at debug level

        arguments = " ".join(" ".join(process.cmdline()) for process in _all_processes(service))
        status = service.command("status", "--json")
        assert status.returncode == 0
        shown = arguments + status.stdout + service.command("status").stdout + service.command("keys", "list").stdout
        assert [secret for secret in secrets if secret in shown] == []
        service.stop()
        log = service.log
        assert [line for line in log.splitlines() if any(secret in line for secret in secrets)] == []
        assert "level=debug" in log
        for path in service.home.rglob("*"):
            if path.is_symlink() or "models" in path.parts:
                continue
            assert not any(secret in path.name for secret in secrets)
            assert path.stat().st_mode & 0o077 == 0 or path.name in ("service.log", "mlxd.toml"), path
            if path.is_file():
                data = path.read_bytes()
                assert not any(secret.encode() in data for secret in secrets), path
    finally:
        service.end()


def _misuse(service: LiveService, key: str) -> None:
    """The marker wherever a client can put it."""
    bearer = {"Authorization": f"Bearer {key}"}
    assert raw(service, "GET", f"/v1/models?key={key}&x={MARK}", bearer)[0] == 200
    assert raw(service, "GET", f"/v1/models/{MARK}", bearer)[0] == 404
    assert raw(service, "GET", f"/{MARK}/{key}", bearer)[0] == 404
    assert raw(service, "GET", "/v1/models", {"Authorization": f"Bearer {MARK}"})[0] == 401
    assert raw(service, "GET", "/v1/models", {"Authorization": f"Bearer {key}{MARK}"})[0] == 401
    assert raw(service, "GET", "/v1/models", {"Authorization": key})[0] == 401
    assert raw(service, "GET", "/v1/models", {**bearer, "x-request-id": key})[0] == 200
    assert raw(service, "GET", "/v1/models", {**bearer, "User-Agent": MARK, "Cookie": MARK, MARK: MARK})[0] == 200
    assert raw(service, MARK.upper(), "/v1/models", bearer)[0] in (400, 404, 405)
    with service.client(key=key) as client:
        for broken in (b'{"model": "' + MARK.encode(), b'"' + MARK.encode() + b'"', MARK.encode()):
            assert client.post(CHAT, content=broken, headers={"content-type": "application/json"}).status_code == 400
        for fields in (
            {"model": MARK},
            {"user": MARK, "metadata": {MARK: MARK}},
            {"api_key": key, MARK: MARK},
            {"messages": [{"role": MARK, "content": "x"}]},
            {"messages": [{"role": "user", "content": MARK, "name": MARK}]},
            {"messages": [{"role": "assistant", "tool_calls": [{"id": MARK, "function": {"name": MARK}}]}]},
            {"stop": [MARK], "prompt_cache_key": MARK, "cache_salt": MARK},
            {"chat_template_kwargs": {MARK: MARK}},
            {"chat_template_kwargs": {"tokenize": MARK}},
            {"logit_bias": {MARK: 1}},
        ):
            ask(client, body(MODEL, said=f"{MARK} SC04 " * 12, **fields))
        ask(client, body(MODEL, prompt=f"{MARK} <|SC04|>"), path=COMPLETIONS)


def _break_templates(service: LiveService, key: str) -> None:
    with service.client(key=key) as client:
        for verb in ("raise", "lookup", "divide"):
            answer = ask(client, body("breaking", said=f"{verb} {MARK}"))
            assert answer.status in (400, 500), answer
        assert ask_whole(client, body("breaking", said=f"{MARK} <|SC04|>")).status == 200


def _crash_with_prompts(service: LiveService, key: str) -> None:
    """Deaths that print: the interpreter's fault handler, and a cut-off answer."""
    with service.client(key=key) as client:
        with open_stream(client, body(MODEL, said=f"SC20 {MARK}", max_tokens=100_000)) as stream:
            chunks = stream.chunks_from_text()
            next(chunks)
            os.kill(service.worker_pid(MODEL), signal.SIGSEGV)
            *_, last = chunks
        assert last["error"]["code"] == "worker_died"
        assert MARK not in json.dumps(last)
        assert ask_whole(client, body(MODEL, said=f"SC04 {MARK}")).text == said_by("SC04")
    assert "Fatal Python error" in service.log


def _all_processes(service: LiveService) -> list[psutil.Process]:
    return [psutil.Process(service.pid), *service.children()]


# --- S03 -------------------------------------------------------------------------------------------------------------

PATHS = ["../../etc", "/etc", "a\u0000b", "~root", "~x", "x" * 1000, "..", ".", "script/..", "./script", "script/"]


@pytest.mark.parametrize("name", PATHS, ids=range(len(PATHS)))
def test_s03_a_name_is_no_path(service: LiveService, name: str) -> None:
    """S03: a model's name is compared with the list and with nothing else: 404, at once, no process, no file."""
    started = time.monotonic()
    with service.client() as client:
        for path, prompt in ((CHAT, {"said": "SC04"}), (COMPLETIONS, {"prompt": "<|SC04|>"})):
            fields: dict[str, Any] = prompt
            answer = ask(client, body(name, **fields), path=path)
            assert answer.status == 404
            assert answer.error is not None
            assert answer.error["code"] == "model_not_found"
    status, _ = raw(service, "GET", f"/v1/models/{quote(name, safe='')}")
    assert status == 404
    assert time.monotonic() - started < 5
    assert_serves(service, MODEL)


def test_s03_a_very_long_name(service: LiveService) -> None:
    """S03: ten thousand characters are refused, and not repeated to the client in full."""
    with service.client() as client:
        answer = ask(client, body("x" * 10_000, said="SC04"))
    assert answer.status in (400, 404)
    assert answer.error is not None
    assert len(answer.error["message"]) < 1000
    assert_serves(service, MODEL)


@pytest.mark.parametrize(
    "target",
    ["..%2F..%2Fetc", "%2e%2e/%2e%2e/etc", "../../etc/passwd", "..%5c..%5cetc", "%2Fetc%2Fpasswd", "script%00"],
)
def test_s03_a_looked_up_id_is_no_path(service: LiveService, target: str) -> None:
    """S03: GET /v1/models/<anything> is a comparison as well."""
    assert raw(service, "GET", f"/v1/models/{target}")[0] == 404
    assert_serves(service, MODEL)


def test_s03_no_way_to_the_network(service: LiveService) -> None:
    """S03: after all that was asked of it, the service listens on its one port and is connected to nothing outside."""
    assert_serves(service, MODEL)
    for process in _all_processes(service):
        for connection in process.net_connections("inet"):
            assert connection.laddr[0] in ("127.0.0.1", "::1")
            assert not connection.raddr or connection.raddr[0] in ("127.0.0.1", "::1")
