"""The gate: nobody passes it unasked, whatever the path, and it tells no secret."""

import asyncio
import json
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
import structlog
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from litestar import Litestar

from gateway.auth import check_bind, echoed_request_id, is_admin_path
from gateway.config import settings_from
from gateway.control import open_port
from gateway.keys import KeyRecord, remove_key
from tests.gateway.http_parts import (
    ADMIN_TOKEN,
    LOCAL_SCOPE,
    House,
    build_house,
    make_model,
)

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
CHAT = {"model": "org/name", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def house(tmp_path: Path) -> House:
    make_model(tmp_path / "models" / "org" / "name")
    return build_house(tmp_path)


def routes_of(house: House) -> Litestar:
    """What the gate really stands before, not a second copy of it."""
    inner = house.app._app
    assert isinstance(inner, Litestar)
    return inner


def spellings(path: str) -> list[str]:
    """The same path as a router might still understand it."""
    first = path[1:2] or "x"
    return [
        path,
        path + "/",
        "/" + path,
        path.replace("/", "//"),
        "/." + path,
        "/x/.." + path,
        f"/%{ord(first):02x}{path[2:]}",
        path.replace("/", "/%2e/"),
        "/" + path[1:].replace("/", "%2F"),
        path + ";x",
        path.upper(),
        path + "%00",
    ]


async def call(
    house: House, method: str, raw_path: str, *, query: str = "", headers: Mapping[str, str] = {}
) -> tuple[int, bytes]:
    """As a server calls the app: httpx would tidy the path before anybody sees it."""
    messages: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        messages.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(raw_path), "raw_path": raw_path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(b"host", b"localhost"), *((name.encode(), value.encode()) for name, value in headers.items())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8321),
    }  # fmt: skip
    await house.app(scope, receive, send)
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])


async def test_no_route_answers_without_a_key(house: House):
    """S01: every route of the table, and paths that are none, in every spelling and method, is 401 without a valid
    key, in the header, empty, wrong or in the query. The table is read from the app: a new route cannot slip.
    The exceptions are GET or HEAD of exactly /health and /, which tell nothing."""
    key = house.add_key("ann")
    table = [route.path.replace("{model_id:path}", "org/name") for route in routes_of(house).routes]
    assert {"/v1/chat/completions", "/v1/models", "/v1/models/org/name", "/admin/status", "/ready"} <= set(table)
    paths = {
        spelling for path in [*table, "/", "/none", "/docs", "/schema", "/metrics"] for spelling in spellings(path)
    }
    credentials: list[tuple[str, dict[str, str]]] = [
        ("", {}),
        ("", {"authorization": "Bearer wrong"}),
        ("", {"authorization": "Bearer "}),
        ("", {"authorization": key}),
        ("", {"authorization": f"Basic {key}"}),
        ("", {"x-api-key": ""}),
        ("", {"x-api-key": key[:-1]}),
        ("", {"cookie": f"key={key}"}),
        (f"key={key}&api_key={key}&access_token={key}", {}),
    ]
    open_doors: list[tuple[str, str]] = []
    for path in sorted(paths):
        for query, headers in credentials:
            # Every method without credentials; the other wrong ones need no more than two.
            for method in METHODS if not query and not headers else ("GET", "POST"):
                status, body = await call(house, method, path, query=query, headers=headers)
                if status != 401:
                    open_doors.append((method, path))
                else:
                    error = json.loads(body)["error"]
                    assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")
    assert set(open_doors) == {(method, path) for method in ("GET", "HEAD") for path in ("/health", "/")}
    assert house.generator.asked == []


async def test_a_valid_key_opens_every_route_but_admin(house: House):
    """G01: either header works, and a foreign key beside the right one does no harm."""
    key = house.add_key("ann")
    for headers in (
        {"authorization": f"Bearer {key}"},
        {"authorization": f"bearer  {key}"},
        {"x-api-key": key},
        {"authorization": f"Bearer {key}", "x-api-key": "sk-foreign"},
        {"authorization": "Bearer sk-foreign", "x-api-key": key},
    ):
        async with house.client() as client:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
            assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
            assert (await client.get("/admin/status", headers=headers)).status_code == 401
            assert (await client.get("/none", headers=headers)).status_code == 404
            assert (await client.delete("/v1/models", headers=headers)).status_code == 405


async def test_a_removed_key_is_refused_at_the_next_request(house: House):
    """Hot reload: adding and removing need no restart."""
    house.add_key("other")
    key = house.add_key("ann")
    async with house.client(authorization=f"Bearer {key}") as client:
        assert (await client.get("/v1/models")).status_code == 200
        remove_key(house.settings.keys_path, "ann")
        assert (await client.get("/v1/models")).status_code == 401


async def test_the_admin_token_opens_admin_alone(house: House):
    """The token is needed for admin routes also where no key is, and is no key itself."""
    async with house.client(authorization=f"Bearer {ADMIN_TOKEN}") as client:
        assert (await client.get("/admin/status")).status_code == 200
        house.add_key("ann")
        assert (await client.get("/admin/status")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
    async with house.client() as client:
        assert (await client.get("/admin/status")).status_code == 401
        assert (await client.get("/admin/none")).status_code == 401
    for path in ("//admin/status", "/admin//status/", "/%61dmin/status"):
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        assert (await call(house, "GET", path, headers=headers))[0] == 200
        assert (await call(house, "GET", path))[0] == 401


async def test_callers_differ_in_scope(house: House):
    """S04: without keys everybody local shares one secret scope; each key has its own, the same at every request."""
    async with house.client() as client:
        await client.post("/v1/chat/completions", json=CHAT)
    keys = [house.add_key("ann"), house.add_key("bob")]
    for key in [keys[0], keys[1], keys[0]]:
        async with house.client(x_api_key=key) as client:
            await client.post("/v1/chat/completions", json=CHAT)
    local, ann, bob, ann_again = [generate.cache.scope for generate in house.generator.asked]
    assert local == LOCAL_SCOPE
    assert ann == ann_again
    assert len({local, ann, bob}) == 3


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:1", 200), ("127.0.0.1:8321", 200), ("[::1]:8321", 200), ("localhost.", 200),
        ("evil.example", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example:8321", 403), ("", 403),
        ("localhost:x", 403), ("localhost@evil.example", 403), ("192.168.1.7:8321", 403),
    ],
)  # fmt: skip
async def test_a_foreign_host_is_refused_on_loopback(house: House, host: str, status: int):
    """DNS rebinding: a page that points its own name at 127.0.0.1 gets nothing."""
    async with house.client() as client:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == status


async def test_hosts_of_a_lan_service(tmp_path: Path):
    """Bound to the network, any Host is served, or only those listed."""
    for allowed, host, status in (
        ([], "any", 200),
        (["studio.local"], "Studio.local:8321", 200),
        (["studio.local"], "any", 403),
    ):
        house = build_house(tmp_path / f"{allowed}{host}", host="192.0.2.1", allowed_hosts=allowed)
        key = house.add_key("ann")
        async with house.client(x_api_key=key) as client:
            assert (await client.get("/v1/models", headers={"host": host})).status_code == status


async def test_web_pages_are_refused_unless_listed(tmp_path: Path):
    """Origin: off by default, exact match when configured; a page of a listed origin may read every answer, refusals
    too, and no CORS header is ever sent to others or for admin routes."""
    house = build_house(tmp_path, allowed_origins=["https://chat.example.org"])
    async with house.client() as client:
        for origin, path, status in (
            ("https://chat.example.org", "/v1/models", 200),
            ("https://chat.example.org", "/none", 404),
            ("https://chat.example.org", "/admin/status", 401),
            ("https://chat.example.org.evil", "/v1/models", 403),
            ("null", "/v1/models", 403),
        ):
            response = await client.get(path, headers={"origin": origin})
            assert response.status_code == status
            allowed = response.headers.get("access-control-allow-origin")
            assert allowed == (origin if status in (200, 404) else None)
            assert response.headers.get("vary") == ("Origin" if allowed else None)


async def test_a_browser_asks_first(tmp_path: Path):
    """CORS: the question comes without a key, and a listed origin's is answered the same for every path; nobody else's
    is, and an OPTIONS that is no such question needs a key as ever."""
    house = build_house(tmp_path, allowed_origins=["https://chat.example.org"])
    house.add_key("ann")
    asking = {
        "origin": "https://chat.example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        "access-control-request-private-network": "true",
    }
    async with house.client() as client:
        answers = [await client.options(path, headers=asking) for path in ("/v1/chat/completions", "/none")]
        for answer in answers:
            assert (answer.status_code, answer.content) == (204, b"")
            assert answer.headers["access-control-allow-origin"] == asking["origin"]
            assert answer.headers["access-control-allow-headers"] == "authorization, content-type, x-stainless-lang"
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-private-network"] == "true"
            assert "access-control-allow-credentials" not in answer.headers
        for headers, path, status in (
            ({**asking, "origin": "https://evil.example"}, "/v1/models", 403),
            ({"origin": asking["origin"]}, "/v1/models", 401),
            (asking, "/admin/status", 401),
        ):
            refused = await client.options(path, headers=headers)
            assert refused.status_code == status
            assert "access-control-allow-methods" not in refused.headers


async def test_no_keys_on_the_network_lets_nobody_in(tmp_path: Path):
    """The bind check refuses this at start; if the last key is removed later, the gate does."""
    house = build_house(tmp_path, host="192.0.2.1")
    async with house.client() as client:
        assert (await client.get("/v1/models")).status_code == 401


def test_a_network_bind_needs_a_key(tmp_path: Path):
    """One clear line instead of an open server."""
    record = KeyRecord(name="ann", sha256="00" * 32, created_unix=0, cache_salt="00" * 32)
    lan = settings_from({"host": "0.0.0.0"}, home=tmp_path, base=tmp_path, user_id=0)  # noqa: S104
    loopback = settings_from({}, home=tmp_path, base=tmp_path, user_id=0)
    assert "mlxd keys add" in (check_bind(lan, []) or "")
    assert check_bind(lan, [record]) is None
    assert check_bind(loopback, []) is None


async def test_while_draining_only_liveness_and_admin_answer(house: House):
    """E04: new work gets 503 with a time to come back; strangers still get 401 and learn nothing."""
    house.drain.start()
    async with house.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
        assert response.headers["retry-after"]
        assert (await client.get("/health")).status_code == 200
        admin = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        assert (await client.get("/admin/status", headers=admin)).status_code == 200
        house.add_key("ann")
        assert (await client.get("/v1/models")).status_code == 401
    assert house.generator.asked == []


async def test_a_declared_long_body_is_refused_unread(tmp_path: Path):
    """413 before a byte is read, by the declared length; an undeclared one is stopped at the limit."""
    house = build_house(tmp_path, limits={"max_body": 1000})
    read = 0

    async def pieces():
        nonlocal read
        for _ in range(1000):
            read += 100
            yield b" " * 100

    async with house.client() as client:
        headers = {"content-length": "100000", "content-type": "application/json"}
        response = await client.post("/v1/chat/completions", content=pieces(), headers=headers)
        assert (response.status_code, read) == (413, 0)
        assert response.headers["connection"] == "close"
        response = await client.post(
            "/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"}
        )
        assert response.status_code == 413
        assert read <= 2000
        for length in ("x", "-1", "٣", "9" * 40):
            response = await client.post("/v1/models", headers={"content-length": length.encode()})
            assert response.status_code in (400, 413)


async def test_every_answer_names_its_request(house: House):
    """x-request-id: ours, or a sane one of the client's; never two, on errors too. The id inside is always ours and
    unique, since a client may use one id twice."""
    async with house.client() as client:
        for path in ("/v1/models", "/none", "/admin/status", "/health"):
            assert (await client.get(path)).headers["x-request-id"].startswith("req_")
        for _ in range(2):
            response = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
            assert response.headers.get_list("x-request-id") == ["mine-1"]
        for insane in ("", "a b", "x" * 65, "é", "mlxd-looks-like-a-key"):
            response = await client.get("/v1/models", headers={"x-request-id": insane.encode()})
            assert response.headers["x-request-id"].startswith("req_")
    first, second = house.generator.asked
    assert first.request_id != second.request_id


@given(st.lists(st.text(), max_size=2))
def test_an_echoed_id_is_always_safe(presented: list[str]):
    """Whatever is echoed has no character that could break a header or a log line."""
    echoed = echoed_request_id(presented)
    assert echoed is None or (len(echoed) <= 64 and echoed.isascii() and not set(echoed) & set(' \r\n"='))


@given(st.lists(st.sampled_from(["", ".", "admin", "ADMIN", "status"]), min_size=1))
def test_admin_is_seen_however_it_is_spelled(parts: list[str]):
    """Slashes doubled anywhere hide nothing."""
    meaning = [part for part in parts if part not in ("", ".")]
    assert is_admin_path("/" + "/".join(parts)) == (bool(meaning) and meaning[0].lower() == "admin")


async def test_logs_hold_no_key_and_no_prompt(house: House, capfd: pytest.CaptureFixture[str]):
    """S02: a marker in header, wrong header, path, query and body is in no log line and no error; each request leaves
    exactly one line with its id, route, status, key name and bytes."""
    key = house.add_key("ann")
    marker = "mlxd-MARKERMARKER"
    with structlog.testing.capture_logs() as logs:
        async with house.client(authorization=f"Bearer {key}") as client:
            responses = [
                await client.get("/v1/models", headers={"x-api-key": marker}),
                await client.get("/v1/models", headers={"x-request-id": marker, "x-marker": marker}),
                await client.get(f"/v1/models?key={marker}"),
                await client.get(f"/v1/models/{marker}"),
                await client.get(f"/{marker}"),
                await client.post("/v1/chat/completions", json={**CHAT, "model": "x", "user": marker}),
                await client.post("/v1/chat/completions", json={"model": 3, "messages": marker}),
                await client.request("BREW", "/v1/models"),
            ]
        async with house.client(authorization=f"Bearer {marker}") as client:
            responses.append(await client.get(f"/{marker}?{marker}"))
    assert marker not in json.dumps(logs)
    assert key not in json.dumps(logs)
    captured = capfd.readouterr()
    assert marker not in captured.err + captured.out
    assert all(marker not in response.text for response in responses)
    lines = [line for line in logs if line["event"] == "request"]
    assert len(lines) == len(responses)
    assert {line["key"] for line in lines} == {"ann", "-"}
    first = lines[0]
    assert (first["route"], first["status"], first["method"]) == ("/v1/models", 200, "GET")
    assert first["request_id"] == responses[0].headers["x-request-id"]
    assert first["sent_bytes"] == len(responses[0].content)
    assert first["seconds"] >= 0


async def test_a_fault_of_ours_is_answered_without_its_words(house: House, monkeypatch: pytest.MonkeyPatch):
    """An exception whose text quotes a prompt: 500 in the envelope, and the log has its type alone."""

    prompt = "".join(["SEC", "RET"])  # in no source line, since frames are logged

    def raise_secret(*_: object) -> None:
        raise RuntimeError(prompt)

    monkeypatch.setattr(house.status, "status", raise_secret)
    with structlog.testing.capture_logs() as logs:
        async with house.client() as client:
            response = await client.get("/v1/models")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "SECRET" not in response.text + json.dumps(logs)
    assert any(line.get("error_type") == "RuntimeError" for line in logs)


async def test_over_a_real_server(house: House):
    """The same through uvicorn: escaped paths, websockets, a refused body and a connection that lives on."""
    key = house.add_key("ann")
    server = uvicorn.Server(uvicorn.Config(house.app, log_config=None, access_log=False, lifespan="on"))
    listener = open_port("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        port = listener.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.head("/health")).status_code == 200
            assert (await client.get("/%68ealth")).status_code == 401
            assert (await client.get("/v1/models")).status_code == 401
            upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
                       "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}  # fmt: skip
            assert (await client.get("/v1/models", headers=upgrade)).status_code in (401, 403)
            good = {"x-api-key": key}
            response = await client.get("/v1/models/org%2Fname", headers=good)
            assert response.json()["id"] == "org/name"
            assert (await client.post("/v1/chat/completions", json=CHAT, headers=good)).status_code == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {key}\r\n".encode())
            writer.write(b"Content-Length: 99999999999\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.startswith(b"HTTP/1.1 413 ")
            writer.close()
            await writer.wait_closed()
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 10)
