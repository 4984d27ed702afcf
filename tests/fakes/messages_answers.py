"""Asking a live service's Messages API over HTTP, and reading its answers as strictly as the SDKs do."""

from typing import Any

import httpx
from msgspec import Struct

from tests.fakes.anthropic_app import MESSAGES, joined, named_events


class MessageAnswer(Struct, frozen=True, kw_only=True):
    """A whole answer, whichever way it came. `message` is empty when it failed; `error` is the envelope's inside."""

    status: int
    headers: dict[str, str]
    message: dict[str, Any] = {}
    error: dict[str, Any] = {}

    @property
    def text(self) -> str:
        return "".join(block["text"] for block in self.message["content"] if block["type"] == "text")

    @property
    def thinking(self) -> str:
        return "".join(block["thinking"] for block in self.message["content"] if block["type"] == "thinking")

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(block["name"], block["input"]) for block in self.message["content"] if block["type"] == "tool_use"]

    @property
    def kinds(self) -> list[str]:
        return [block["type"] for block in self.message["content"]]

    @property
    def stop_reason(self) -> str:
        return self.message["stop_reason"]

    @property
    def prompt_tokens(self) -> int:
        usage = self.message["usage"]
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        return sum(usage[name] for name in names)

    @property
    def cached_tokens(self) -> int:
        return int(self.message["usage"]["cache_read_input_tokens"])


def messages_body(model: str, /, *, said: object = None, **fields: Any) -> dict[str, Any]:
    """A request of one user message, or with the messages that `fields` hold."""
    prompt = {} if "messages" in fields else {"messages": [{"role": "user", "content": said}]}
    return {"model": model, "max_tokens": 300, **prompt, **fields}


def ask_message(client: httpx.Client, request: dict[str, Any], *, path: str = MESSAGES) -> MessageAnswer:
    """The whole answer, not streamed."""
    response = client.post(path, json=request)
    headers = dict(response.headers)
    assert headers["request-id"].startswith("req_")
    document = response.json()
    if response.status_code == 200:
        return MessageAnswer(status=200, headers=headers, message=document)
    return MessageAnswer(status=response.status_code, headers=headers, error=envelope(document, headers))


def stream_message(client: httpx.Client, request: dict[str, Any]) -> MessageAnswer:
    """The same of a stream, read to its end."""
    response = client.post(MESSAGES, json={**request, "stream": True})
    headers = dict(response.headers)
    if response.status_code != 200:
        return MessageAnswer(status=response.status_code, headers=headers, error=envelope(response.json(), headers))
    assert headers["content-type"].startswith("text/event-stream")
    return MessageAnswer(status=200, headers=headers, message=joined(named_events(response.content)))


def ask_both(client: httpx.Client, request: dict[str, Any]) -> MessageAnswer:
    """Ask twice, whole and as a stream: the two must say the same. Gives the whole one."""
    whole, stream = ask_message(client, request), stream_message(client, request)
    assert (stream.status, stream.error) == (whole.status, whole.error)
    if whole.status == 200:
        assert without_ids(stream.message) == without_ids(whole.message)
        assert stream.prompt_tokens == whole.prompt_tokens
    return whole


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one question have in common: all but ids, and what the first put into the cache."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    same = {name: value for name, value in message.items() if name not in ("id", "usage", "diagnostics")}
    return {**same, "content": content, "output_tokens": message["usage"]["output_tokens"]}


def envelope(document: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    """The inside of an error. Its request id is the header's."""
    assert document.keys() == {"type", "error", "request_id"}
    assert (document["type"], document["request_id"]) == ("error", headers["request-id"])
    assert document["error"].keys() == {"type", "message"}
    return document["error"]
