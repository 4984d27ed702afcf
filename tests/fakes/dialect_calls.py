"""The same generation asked in each of the four dialects, and what the events of its stream mean.

For laws that hold whichever API a client speaks: that a request ends once, that leaving frees everything.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, assert_never

from msgspec import Struct

Dialect = Literal["chat", "completions", "messages", "responses"]
DIALECTS: tuple[Dialect, ...] = ("chat", "completions", "messages", "responses")
CHAT_DIALECTS: tuple[Dialect, ...] = ("chat", "messages", "responses")
"""Those that speak in messages, and so go through a chat template."""

PATHS: dict[Dialect, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}

_DONE = "[DONE]"


class Seen(Struct, frozen=True, kw_only=True):
    """One event of a stream: the text that it adds, and whether it is the last one, and of which kind."""

    text: str = ""
    end: Literal["good", "bad", None] = None
    error: str = ""


def request_body(dialect: Dialect, model: str, said: str, *, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request of one user message (a prompt, in completions), not streamed unless `fields` say so."""
    user = [{"role": "user", "content": said}]
    match dialect:
        case "chat":
            return {"model": model, "messages": user, "max_tokens": max_tokens, **fields}
        case "completions":
            return {"model": model, "prompt": said, "max_tokens": max_tokens, **fields}
        case "messages":
            return {"model": model, "messages": user, "max_tokens": max_tokens, **fields}
        case "responses":
            return {"model": model, "input": said, "max_output_tokens": max_tokens, "store": False, **fields}
        case _:
            assert_never(dialect)


def events(dialect: Dialect, lines: Iterable[str]) -> Iterator[Seen]:
    """What each event of a stream means. Comments and blank lines are passed over."""
    for line in lines:
        if line.startswith("data: "):
            yield _seen(dialect, line.removeprefix("data: "))


def whole_text(dialect: Dialect, document: dict[str, Any]) -> str:
    """The text of an answer that was not streamed."""
    match dialect:
        case "chat":
            return document["choices"][0]["message"]["content"] or ""
        case "completions":
            return document["choices"][0]["text"]
        case "messages":
            return "".join(block["text"] for block in document["content"] if block["type"] == "text")
        case "responses":
            items = [item for item in document["output"] if item["type"] == "message"]
            return "".join(part["text"] for item in items for part in item["content"])
        case _:
            assert_never(dialect)


def error_code(document: dict[str, Any]) -> str:
    """The code, or the type where a dialect has no codes, of an error's envelope."""
    error = document["error"]
    return str(error.get("code") or error["type"])


def _seen(dialect: Dialect, data: str) -> Seen:
    if data == _DONE:
        return Seen(end="good")
    event: dict[str, Any] = json.loads(data)
    match dialect:
        case "chat" | "completions":
            return _openai(event)
        case "messages":
            return _anthropic(event)
        case "responses":
            return _responses(event)
        case _:
            assert_never(dialect)


def _openai(event: dict[str, Any]) -> Seen:
    if "error" in event:
        return Seen(end="bad", error=error_code(event))
    pieces = (choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"])
    return Seen(text="".join(pieces))


def _anthropic(event: dict[str, Any]) -> Seen:
    match event["type"]:
        case "error":
            return Seen(end="bad", error=error_code(event))
        case "message_stop":
            return Seen(end="good")
        case "content_block_delta":
            return Seen(text=event["delta"].get("text", ""))
        case _:
            return Seen()


def _responses(event: dict[str, Any]) -> Seen:
    match event["type"]:
        case "response.failed":
            return Seen(end="bad", error=str(event["response"]["error"]["code"]))
        case "error":
            return Seen(end="bad", error=str(event["code"]))
        case "response.completed" | "response.incomplete":
            return Seen(end="good")
        case "response.output_text.delta":
            return Seen(text=event["delta"])
        case _:
            return Seen()
