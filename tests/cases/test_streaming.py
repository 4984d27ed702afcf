"""Field cases of streams (B): whole characters, stop strings, one end, clients that leave."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.conftest import MODEL
from tests.fakes.dialect_calls import CHAT_DIALECTS, PATHS, Dialect, events, request_body
from tests.fakes.http_answers import (
    CHAT,
    COMPLETIONS,
    ask,
    ask_stream,
    ask_whole,
    assert_serves,
    body,
    open_stream,
)
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.script_model import said_by


@pytest.mark.parametrize(("tag", "text"), [("SC01", "ok 👩‍🚀 end01"), ("SC02", "東京02.")])
def test_b01_characters_arrive_whole(client: httpx.Client, tag: str, text: str) -> None:
    """B01: a character that is cut over tokens reaches the client once it is whole, in no delta before."""
    answer = ask(client, body(MODEL, said=tag))
    assert (answer.text, answer.finish) == (text, "stop")


def test_b01_the_legacy_route_too(client: httpx.Client) -> None:
    """B01: /v1/completions has the same detokenizer."""
    answer = ask(client, body(MODEL, prompt="<|SC01|>"), path=COMPLETIONS)
    assert (answer.text, answer.finish) == (said_by("SC01"), "stop")


def test_b01_an_aborted_stream_leaves_no_half_character(client: httpx.Client) -> None:
    """B01: the bytes held for one client never reach the next one."""
    for _ in range(5):
        with open_stream(client, body(MODEL, said="SC01")) as stream:
            assert next(stream.texts()).startswith("ok")
        assert ask_stream(client, body(MODEL, said="SC02")).text == "東京02."


@pytest.mark.parametrize(
    ("tag", "stop", "text", "most_tokens"),
    [
        ("SC04", ["beta gamma"], "alpha ", 6),
        ("SC04", "gamma", "alpha beta ", 6),
        ("SC19", ["t005 t006"], " t000 t001 t002 t003 t004 ", 10),
        ("SC19", ["never", "t003", "t005"], " t000 t001 t002 ", 10),
        ("SC20", ["la la la"], " ", 6),
    ],
)
def test_b02_a_stop_string_ends_the_answer(
    client: httpx.Client, tag: str, stop: object, text: str, most_tokens: int
) -> None:
    """B02: the text ends before the match, whatever tokens spell it, and the generation really ends there."""
    answer = ask(client, body(MODEL, said=tag, stop=stop))
    assert (answer.text, answer.finish) == (text, "stop")
    assert answer.completion_tokens <= most_tokens


def test_b02_on_the_legacy_route(client: httpx.Client) -> None:
    """B02: the same on /v1/completions."""
    answer = ask(client, body(MODEL, prompt="<|SC19|>", stop=["t005 t006"]), path=COMPLETIONS)
    assert (answer.text, answer.finish) == (" t000 t001 t002 t003 t004 ", "stop")
    assert answer.completion_tokens <= 10


@pytest.mark.parametrize("stop", [[""], ["a", "b", "c", "d", "e"], [1], {"a": 1}])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_b02_one_to_four_stops(client: httpx.Client, path: str, stop: object) -> None:
    """B02: an empty stop string, five of them, or no string at all is the client's mistake."""
    prompt: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"said": "x"}
    answer = ask(client, body(MODEL, stop=stop, **prompt), path=path)
    assert answer.status == 400
    assert answer.error is not None
    assert str(answer.error["param"]).startswith("stop")


@pytest.mark.parametrize(("tag", "max_tokens"), [("SC04", 300), ("SC19", 5)])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_b03_usage_only_when_asked_for(client: httpx.Client, tag: str, max_tokens: int, options: object) -> None:
    """B03: no chunk has empty choices unless usage was asked for; then exactly one does, after the finish."""
    answer = ask_stream(client, body(MODEL, said=tag, max_tokens=max_tokens, stream_options=options))
    assert (answer.usage is None) == (options != {"include_usage": True})
    assert answer.text


@pytest.mark.parametrize(
    ("tag", "max_tokens", "finish"), [("SC04", 300, "stop"), ("SC19", 5, "length"), ("SC19", 300, "stop")]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_b04_one_finish_then_done(client: httpx.Client, path: str, tag: str, max_tokens: int, finish: str) -> None:
    """B04: exactly one finish_reason, [DONE], the body's end; `ask_stream` holds the rest of the law."""
    prompt: dict[str, Any] = {"prompt": f"<|{tag}|>"} if path == COMPLETIONS else {"said": tag}
    answer = ask(client, body(MODEL, max_tokens=max_tokens, **prompt), path=path)
    assert answer.finish == finish
    assert answer.text == (said_by(tag) if finish == "stop" else " t000 t001 t002 t003 t004")


# --- B07: the client leaves ------------------------------------------------------------------------------------------

ENDLESS: dict[str, Any] = {"said": "SC20", "max_tokens": 1_000_000}


@pytest.fixture(scope="module")
def narrow(script_model: Path) -> Iterator[LiveService]:
    """One row at a time, so that a second request waits."""
    with live_service({MODEL: script_model}, settings_toml="worker.max_rows = 1") as live:
        yield live


def test_b07_i_leaving_a_stream_frees_the_row(service: LiveService, client: httpx.Client) -> None:
    """B07 i: the row of a closed stream is gone within two seconds; another row goes on as if nothing was."""
    with service.client() as stays, open_stream(stays, body(MODEL, **ENDLESS)) as other:
        texts = other.texts()
        next(texts)
        with open_stream(client, body(MODEL, **ENDLESS)) as stream:
            next(stream.texts())
            assert service.model(MODEL).open_requests == 2
        until("one row is left", lambda: service.model(MODEL).open_requests == 1, seconds=2.0)
        assert [next(texts) for _ in range(5)]
    service.until_idle(MODEL)


def test_b07_ii_leaving_without_stream_frees_the_row(service: LiveService) -> None:
    """B07 ii: the same for a client that waits for the whole answer."""
    with service.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=body(MODEL, **ENDLESS), timeout=httpx.Timeout(20.0, read=0.5))
    service.until_idle(MODEL)
    assert_serves(service, MODEL)


def test_b07_iv_leaving_while_queued(narrow: LiveService) -> None:
    """B07 iv: who leaves the queue is out of it within two seconds, in both modes, and the running row goes on."""
    with narrow.client() as first, open_stream(first, body(MODEL, **ENDLESS)) as running:
        texts = running.texts()
        next(texts)
        with narrow.client() as second, open_stream(second, body(MODEL, said="SC04")):
            assert narrow.model(MODEL).open_requests == 2
        until("the queue is empty", lambda: narrow.model(MODEL).open_requests == 1, seconds=2.0)
        with narrow.client() as second, pytest.raises(httpx.ReadTimeout):
            second.post(CHAT, json=body(MODEL, said="SC04"), timeout=httpx.Timeout(20.0, read=0.3))
        until("the queue is empty", lambda: narrow.model(MODEL).open_requests == 1, seconds=2.0)
        assert [next(texts) for _ in range(5)]
    narrow.until_idle(MODEL)
    assert_serves(narrow, MODEL)


def test_b07_iv_leaving_before_the_model_is_loaded(script_model: Path) -> None:
    """B07 iv: a client that leaves during the load leaves no request behind, and the load serves the next one."""
    with live_service({MODEL: script_model}) as live:
        with live.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json=body(MODEL, said="SC04"), timeout=httpx.Timeout(20.0, read=0.1))
        live.until_idle(MODEL)
        assert live.model(MODEL).state in ("starting", "ready")
        assert_serves(live, MODEL)
        assert live.model(MODEL).restarts == 0


def test_b07_v_fifty_opens_and_closes(service: LiveService, client: httpx.Client) -> None:
    """B07 v: streams that are opened and closed in a row leave nothing; the process is still the same."""
    before = service.worker_pid(MODEL) if service.model_or_none(MODEL) else None
    for _ in range(50):
        with open_stream(client, body(MODEL, **ENDLESS)) as stream:
            next(stream.chunks())
    service.until_idle(MODEL)
    started = time.monotonic()
    assert ask_whole(client, body(MODEL, said="SC04")).text == said_by("SC04")
    assert time.monotonic() - started < 2.0
    assert before in (None, service.worker_pid(MODEL))


# --- B08: what can be known is refused before the status line --------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"said": "x" * 6000}, 400),
        ({"said": "SC04", "model": "no/such"}, 404),
        ({"said": "SC04", "tools": [{"type": "function", "function": {"name": 1}}]}, 400),
        ({"said": "SC04", "tools": "get_weather"}, 400),
        ({"said": "SC04", "n": 0}, 400),
        ({"messages": [{"role": "user", "content": "a", "name": 5}]}, 400),
    ],
)
def test_b08_the_same_refusal_in_both_modes(client: httpx.Client, fields: dict[str, Any], status: int) -> None:
    """B08: no 200 for what can be known before generation; a stream is refused as a whole answer is."""
    request = body(MODEL, **fields)
    answer = ask(client, request)
    assert answer.status == status
    assert answer.error is not None
    assert len(answer.error["message"]) > 20


@pytest.mark.parametrize("dialect", CHAT_DIALECTS)
@pytest.mark.parametrize(
    ("said", "fields", "status"),
    [
        ("x" * 6000, {}, 400),
        ("SC04", {"model": "no/such"}, 404),
        ("SC04", {"tools": [{"type": "function", "name": 1}]}, 400),
        ("SC04", {"tools": "get_weather"}, 400),
        ("SC04", {"tool_choice": "sometimes"}, 400),
        ("SC04", {"temperature": "hot"}, 400),
    ],
    ids=["too long", "unknown model", "bad tool", "no tools", "bad choice", "bad number"],
)
def test_b08_in_every_dialect_a_stream_is_refused_as_a_whole_answer_is(
    client: httpx.Client, dialect: Dialect, said: str, fields: dict[str, Any], status: int
) -> None:
    """B08: the same status and the same words in both modes, before the status line of a stream."""
    answers = [
        client.post(
            PATHS[dialect],
            json={**request_body(dialect, MODEL, said, max_tokens=20, stream=stream), **fields},
        )
        for stream in (False, True)
    ]
    assert [answer.status_code for answer in answers] == [status, status], answers[1].text[:500]
    errors = [answer.json()["error"] for answer in answers]
    assert errors[0] == errors[1]
    assert len(errors[0]["message"]) > 20
    assert [answer.headers["content-type"].startswith("application/json") for answer in answers] == [True, True]


def test_b08_a_later_failure_is_an_error_event_of_the_dialect(script_model: Path) -> None:
    """B08: what goes wrong after the status line ends the stream with the dialect's error event, and with nothing that
    could be taken for a good end."""
    with live_service(dict.fromkeys(CHAT_DIALECTS, script_model)) as live, live.client() as client:
        for dialect in CHAT_DIALECTS:  # a model for each: one that dies again and again is closed for a while
            body = request_body(dialect, dialect, "SC20", max_tokens=3000, stream=True)
            with client.stream("POST", PATHS[dialect], json=body) as response:
                seen = events(dialect, response.iter_lines())
                while not next(seen).text:
                    pass
                os.kill(live.worker_pid(dialect), signal.SIGKILL)
                rest = list(seen)
            assert [event.end for event in rest if event.end] == ["bad"]
            assert rest[-1].end == "bad"
            assert rest[-1].error in ("worker_died", "api_error", "server_error")
        assert_serves(live, CHAT_DIALECTS[0])
