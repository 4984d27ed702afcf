"""The OpenAI routes behind a stand-in for the gate: called in process, or served by uvicorn in the test's own loop."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from gateway.admission import ClassLimits, DayTokens
from gateway.answering import Answering, Patience
from gateway.caller import Caller
from gateway.front_desk import FrontDesk
from gateway.openai.routes import openai_router
from gateway.ports import Generator
from gateway.status import ServiceStatus, StatusSource
from tests.fakes.gated_app import GatedApp
from tests.fakes.scripted_generator import FewModels, KnownModel

MODEL = "org/tiny:4bit"
BROKEN = "org/broken"
SCOPE = b"scope of alice"
CREATED = 1_700_000_000
MAX_BODY_BYTES = 200_000
ALICE = Caller(key_name="alice", cache_scope=SCOPE)


class NoModels:
    """A service in which nothing loads."""

    def status(self) -> ServiceStatus:
        return ServiceStatus()


def make_desk(
    *,
    class_limits: ClassLimits | None = None,
    tokens: DayTokens | None = None,
    status_source: StatusSource | None = None,
) -> FrontDesk:
    return FrontDesk(
        class_limits=class_limits or ClassLimits(),
        tokens=tokens or DayTokens(),
        status_source=status_source or NoModels(),
        clock=time.monotonic,
        unix_clock=lambda: CREATED + 0.5,
    )


def openai_app(
    generator: Generator,
    *,
    keepalive_seconds: float = 10.0,
    headers_seconds: float = 30.0,
    desk: FrontDesk | None = None,
    caller: Caller = ALICE,
) -> GatedApp:
    """An ASGI app."""
    answering = Answering(
        generator,
        FewModels(KnownModel(MODEL), KnownModel(BROKEN, problem="model.safetensors is missing")),
        desk or make_desk(),
        max_body_bytes=MAX_BODY_BYTES,
        unix_clock=lambda: CREATED + 0.5,
        patience=Patience(keepalive_seconds=keepalive_seconds, headers_seconds=headers_seconds),
        system_fingerprint="mlxd-test",
    )
    return GatedApp([openai_router(answering)], caller)


class Answer:
    """A whole HTTP answer."""

    def __init__(self, messages: Sequence[dict[str, Any]]) -> None:
        start, *parts = messages
        self.status: int = start["status"]
        self.headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        self.body = b"".join(part.get("body", b"") for part in parts)
        self.is_whole = bool(parts) and not parts[-1].get("more_body", False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[str]:
        return sse_data(self.body)


async def call(
    app: Any,
    path: str,
    body: bytes | dict[str, Any],
    *,
    headers: dict[str, str] | None = None,
    method: str = "POST",
) -> Answer:
    """One exchange in process. The client stays until the answer is whole."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent: list[dict[str, Any]] = []
    incoming = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    given = {"content-type": "application/json"} if headers is None else headers
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    async with asyncio.timeout(10):
        await app(scope, receive, send)
    return Answer(sent)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """The base URL of this app, served for real."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="warning", access_log=False))
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task


async def until(holds: Callable[[], bool], *, deadline_seconds: float = 10.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + deadline_seconds
    while not holds():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.002)


def sse_data(stream: bytes) -> list[str]:
    """The data of each event. Asserts that only comments and data lines were sent, each block whole."""
    assert stream.endswith(b"\n\n") or not stream
    data: list[str] = []
    for block in stream.decode().split("\n\n")[:-1]:
        (line,) = block.split("\n")
        if not line.startswith(":"):
            assert line.startswith("data: "), line
            data.append(line.removeprefix("data: "))
    return data
