"""Field case B07 in every dialect, both modes and every phase: who leaves frees all that was held for it.

Seen three ways: the list of open requests, what the gateway still waits for of the worker, and the worker's own books.
"""

import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Generator, Iterator
from typing import Any, Literal

import httpx
import pytest

from tests.cases.conftest import MODEL
from tests.fakes.dialect_calls import CHAT_DIALECTS, PATHS, Dialect, request_body
from tests.fakes.http_answers import ask_whole, assert_serves, body, open_stream
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.script_model import make_script_model, said_by

Mode = Literal["stream", "whole"]
MODES: tuple[Mode, ...] = ("stream", "whole")
CONTEXT_TOKENS = 65_536
LONG_PROMPT_TOKENS = 30_000
SLICE_SECONDS = 10.0
"""A slice is meant to take a second at most; on a busy machine the first one takes what it takes. So slices are counted
where the law is about them, and this is only when to give up."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """One row, so that a second request waits; a context so long that no prompt is read in one slice."""
    folder = make_script_model(tmp_path_factory.mktemp("models") / "long", context_tokens=CONTEXT_TOKENS)
    with live_service({MODEL: folder}, settings_toml="worker.max_rows = 1\n") as live:
        assert_serves(live, MODEL)
        yield live
        assert_serves(live, MODEL)
        assert live.model(MODEL).restarts == 0


@contextlib.contextmanager
def asking(service: LiveService, dialect: Dialect, mode: Mode, said: str) -> Generator[None]:
    """A client that has asked. It hangs up when the block ends, whatever it has got until then."""
    client = service.client()
    request = request_body(dialect, MODEL, said, max_tokens=20_000, stream=mode == "stream")

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError), client.stream("POST", PATHS[dialect], json=request) as answer:
            for _ in answer.iter_raw():
                if hung_up.is_set():
                    return

    hung_up = threading.Event()
    asked = threading.Thread(target=ask)
    asked.start()
    try:
        yield
    finally:
        hung_up.set()
        _hang_up(client)
        asked.join(20)
        assert not asked.is_alive()
        client.close()


def _hang_up(client: httpx.Client) -> None:
    """Close the connection under a thread that reads it, as a killed program does."""
    transport: Any = client._transport  # pyright: ignore[reportPrivateUsage]
    for connection in transport._pool.connections:
        with contextlib.suppress(OSError):
            connection._connection._network_stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def phases(service: LiveService) -> list[str]:
    with service.client() as client:
        return [view["phase"] for view in client.get("/v1/requests").json()["data"]]


def nothing_is_held(service: LiveService, *, base_bytes: int) -> None:
    """Within one slice: no open request, none with the worker, no row and no KV but the prefix cache's."""
    until("no request is open", lambda: phases(service) == [], seconds=SLICE_SECONDS)
    service.until_idle(MODEL, seconds=SLICE_SECONDS)
    books = service.books(MODEL)
    assert (books.running_rows, books.waiting_requests) == (0, 0)
    assert books.active_bytes <= base_bytes + books.hot_cache_bytes + 2**20, books


def base_bytes(service: LiveService) -> int:
    """What the model takes when it does nothing, beside what its prefix cache holds."""
    service.until_idle(MODEL)
    books = service.books(MODEL)
    return books.active_bytes - books.hot_cache_bytes


@pytest.mark.parametrize("dialect", CHAT_DIALECTS)
@pytest.mark.parametrize("mode", MODES)
def test_b07_leaving_while_it_decodes(narrow: LiveService, dialect: Dialect, mode: Mode) -> None:
    """B07 i, ii: who leaves an answer that never ends has ended it."""
    base = base_bytes(narrow)
    with asking(narrow, dialect, mode, "SC20"):
        until("it decodes", lambda: phases(narrow) == ["decoding"])
        assert narrow.books(MODEL).running_rows == 1
    nothing_is_held(narrow, base_bytes=base)


@pytest.mark.parametrize("dialect", CHAT_DIALECTS)
@pytest.mark.parametrize("mode", MODES)
def test_b07_leaving_while_its_prompt_is_read(narrow: LiveService, dialect: Dialect, mode: Mode) -> None:
    """B07 iii: after the slice that runs, the rest of the prompt is not read any more."""
    base = base_bytes(narrow)
    marks = f"{dialect} {mode} "
    said = (marks * (LONG_PROMPT_TOKENS // len(marks)))[:LONG_PROMPT_TOKENS]
    with asking(narrow, dialect, mode, said):
        until("it is read", lambda: phases(narrow) == ["prefilling"])
        before, steps = narrow.model(MODEL), narrow.books(MODEL).steps
    nothing_is_held(narrow, base_bytes=base)
    assert narrow.model(MODEL).pid == before.pid
    assert narrow.books(MODEL).steps <= steps + 2, "more than the slice that ran, and one that crossed the hang-up"
    ended = [line for line in narrow.log.splitlines() if "phase=prefilling" in line]
    assert "prompt_tokens=30" in ended[-1], ended[-1]


@pytest.mark.parametrize("dialect", CHAT_DIALECTS)
@pytest.mark.parametrize("mode", MODES)
def test_b07_leaving_while_it_waits_for_a_row(narrow: LiveService, dialect: Dialect, mode: Mode) -> None:
    """B07 iv: who leaves the queue is out of it; the row that runs goes on, and ends when its own client leaves."""
    base = base_bytes(narrow)
    endless = body(MODEL, said="SC20", max_tokens=20_000)
    with narrow.client() as client, open_stream(client, endless) as running:
        texts = running.texts()
        next(texts)
        with asking(narrow, dialect, mode, "SC04"):
            until("it is queued", lambda: phases(narrow) == ["decoding", "queued"])
            assert narrow.books(MODEL).waiting_requests == 1
        until("the queue is empty", lambda: phases(narrow) == ["decoding"], seconds=SLICE_SECONDS)
        until("the worker knows", lambda: narrow.model(MODEL).open_requests == 1, seconds=SLICE_SECONDS)
        assert narrow.books(MODEL).waiting_requests == 0
        assert [next(texts) for _ in range(5)]
    nothing_is_held(narrow, base_bytes=base)


@pytest.mark.parametrize("mode", MODES)
def test_b07_the_next_in_the_queue_gets_the_row(narrow: LiveService, mode: Mode) -> None:
    """B07: what one who left held is the next one's at once."""
    with narrow.client() as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        with asking(narrow, "messages", mode, "SC20"):
            until("it decodes", lambda: phases(narrow) == ["decoding"])
            second = threads.submit(ask_whole, client, body(MODEL, said="SC04"))
            until("the other is queued", lambda: phases(narrow) == ["decoding", "queued"])
        assert second.result(20).text == said_by("SC04")
