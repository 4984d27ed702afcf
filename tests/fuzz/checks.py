"""What every answer must be, whatever was asked: valid, whole, and each refusal in the API's own envelope."""

import json
from typing import Any

import httpx

from tests.fuzz.bodies import Route

_OPENAI_ERROR = {"message", "type", "param", "code"}


def check_refusal(route: Route, response: httpx.Response) -> None:
    """A 4xx with words for a person. A 429 would mean that something was left open, a 5xx that it was ours."""
    assert 400 <= response.status_code < 500, response.text
    assert response.status_code != 429, response.text
    error = _error(route, strict_json(response.content.decode()))
    assert len(error["message"]) > 10
    assert "Traceback" not in error["message"]


def check_answer(route: Route, response: httpx.Response) -> None:
    """Valid JSON in valid UTF-8; a stream ends with its mark, or with one error event in the same envelope."""
    text = response.content.decode()
    if not response.headers["content-type"].startswith("text/event-stream"):
        document = strict_json(text)
        assert "error" not in document or document["error"] is None
        return
    assert text.endswith("\n\n")
    events = [event for block in text.split("\n\n")[:-1] if (event := _data(block)) is not None]
    match route.dialect:
        case "openai":
            if events[-1] == "[DONE]":
                events.pop()
                assert events
            else:
                _error(route, strict_json(events.pop()))
            assert all("error" not in strict_json(event) for event in events)
        case "anthropic":
            *earlier, last = [strict_json(event) for event in events]
            assert last["type"] in ("message_stop", "error")
            assert all(event["type"] not in ("message_stop", "error") for event in earlier)
        case "responses":
            *earlier, last = [strict_json(event) for event in events]
            ends = ("response.completed", "response.incomplete", "response.failed", "error")
            assert last["type"] in ends
            assert all(event["type"] not in ends for event in earlier)
            assert [event["sequence_number"] for event in (*earlier, last)] == list(range(len(events)))


def strict_json(text: str) -> Any:
    """What is no JSON, such as NaN, fails."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def _error(route: Route, document: Any) -> dict[str, Any]:
    if route.dialect == "anthropic":
        assert document.keys() == {"type", "error", "request_id"}
        assert document["type"] == "error"
        assert document["error"].keys() == {"type", "message"}
    else:
        assert document.keys() == {"error"}
        assert document["error"].keys() == _OPENAI_ERROR
    return document["error"]


def _data(block: str) -> str | None:
    """An event's data. Comments have none; only what SDKs read is in an event."""
    if block.startswith(":"):
        return None
    *names, data = block.split("\n")
    assert all(name.startswith("event: ") for name in names)
    assert len(names) <= 1
    assert data.startswith("data: "), block
    return data.removeprefix("data: ")
