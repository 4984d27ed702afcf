"""Asking a live service over HTTP, and reading its answers as strictly as the SDKs do."""

import contextlib
import itertools
import json
from collections.abc import Generator, Iterator
from typing import Any

import httpx
from msgspec import Struct
from msgspec.structs import replace

from tests.fakes.live_service import LiveService

_FINISHES = ("stop", "length", "tool_calls")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Call(Struct, frozen=True, kw_only=True):
    """A tool call. `arguments` is the string that the client gets."""

    call_id: str
    name: str
    arguments: str

    @property
    def said(self) -> tuple[str, str]:
        """What both modes must agree on; ids are made anew each time."""
        return self.name, self.arguments


class Answer(Struct, frozen=True, kw_only=True):
    """A whole answer, whichever way it came. `error` is the envelope's inside."""

    status: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    warnings: tuple[str, ...] = ()
    finish: str | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    headers: dict[str, str] = {}

    @property
    def cached_tokens(self) -> int:
        assert self.usage is not None
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def completion_tokens(self) -> int:
        assert self.usage is not None
        return int(self.usage["completion_tokens"])

    @property
    def prompt_tokens(self) -> int:
        assert self.usage is not None
        return int(self.usage["prompt_tokens"])


class Stream:
    """An open event stream. `events` gives each `data:` payload; comments are passed over, and are in `lines`."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.lines = response.iter_lines()

    def events(self) -> Iterator[str]:
        for line in self.lines:
            assert not line.startswith(("id:", "retry:", "event:")), line
            if line.startswith("data: "):
                yield line.removeprefix("data: ")
            else:
                assert not line or line.startswith(":"), line

    def chunks(self) -> Iterator[dict[str, Any]]:
        for event in self.events():
            if event != "[DONE]":
                yield json.loads(event)

    def chunks_from_text(self) -> Iterator[dict[str, Any]]:
        """From the first piece of text on: a stream may begin while its model still loads."""
        return itertools.dropwhile(lambda chunk: not any(map(_piece, chunk.get("choices", ()))), self.chunks())

    def texts(self) -> Iterator[str]:
        """Each piece of text as it comes."""
        for chunk in self.chunks():
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                if piece := _piece(choice):
                    yield piece


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def body(model: str, /, *, said: object = None, **fields: Any) -> dict[str, Any]:
    """A chat request of one user message, or with the messages or prompt that `fields` hold."""
    prompt = {} if {"messages", "prompt"} & fields.keys() else {"messages": user(said)}
    return {"model": model, "max_tokens": 300, **prompt, **fields}


@contextlib.contextmanager
def open_stream(client: httpx.Client, request: dict[str, Any], *, path: str = CHAT) -> Generator[Stream]:
    with client.stream("POST", path, json={**request, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        yield Stream(response)


def ask_whole(client: httpx.Client, request: dict[str, Any], *, path: str = CHAT) -> Answer:
    response = client.post(path, json={**request, "stream": False})
    headers = dict(response.headers)
    document = response.json()
    if response.status_code != 200:
        return Answer(status=response.status_code, error=_envelope(document), headers=headers)
    (choice,) = document["choices"]
    message = choice.get("message", {"content": choice.get("text")})
    calls = tuple(
        Call(call_id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    assert choice["finish_reason"] in _FINISHES
    assert isinstance(message["content"], str) or calls
    return Answer(
        status=200,
        text=message["content"] or "",
        reasoning=message.get("reasoning_content", ""),
        calls=calls,
        warnings=tuple(document.get("mlxd", {}).get("warnings", ())),
        finish=choice["finish_reason"],
        model=document["model"],
        usage=document["usage"],
        headers=headers,
    )


def ask_stream(client: httpx.Client, request: dict[str, Any], *, path: str = CHAT) -> Answer:
    """Read a stream to its end, holding B01 and B04 on the way: no half character, one finish, [DONE], end of body."""
    asked = {**request, "stream": True}
    if request.get("stream_options", "unset") == "unset":
        asked["stream_options"] = {"include_usage": True}
    with client.stream("POST", path, json=asked) as response:
        headers = dict(response.headers)
        if response.status_code != 200:
            response.read()
            return Answer(status=response.status_code, error=_envelope(response.json()), headers=headers)
        assert headers["content-type"].startswith("text/event-stream")
        *events, done = list(Stream(response).events())
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert [chunk for chunk in chunks if "error" in chunk] == []
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    if path == CHAT:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    usage = None
    last_of_all = chunks[-1]
    if asked["stream_options"] == {"include_usage": True}:
        *chunks, last = chunks
        assert last["choices"] == []
        usage = last["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) == len(chunks)
    finishes = [choice["finish_reason"] for choice in choices]
    assert finishes[-1] in _FINISHES
    assert finishes[:-1] == [None] * (len(finishes) - 1)
    pieces = [_piece(choice) for choice in choices]
    thoughts = [choice.get("delta", {}).get("reasoning_content", "") for choice in choices]
    assert [piece for piece in (*pieces, *thoughts) if "\ufffd" in piece or _has_surrogate(piece)] == []
    return Answer(
        status=200,
        text="".join(pieces),
        reasoning="".join(thoughts),
        calls=_streamed_calls(choices),
        warnings=tuple(last_of_all.get("mlxd", {}).get("warnings", ())),
        finish=finishes[-1],
        model=chunks[0]["model"],
        usage=usage,
        headers=headers,
    )


def ask(client: httpx.Client, request: dict[str, Any], *, path: str = CHAT) -> Answer:
    """Ask twice, whole and as a stream: the two must say the same. Gives the whole one."""
    whole = ask_whole(client, request, path=path)
    stream = ask_stream(client, request, path=path)
    assert _said(stream) == _said(whole), f"{_said(stream)} != {_said(whole)}"
    if stream.usage is not None and whole.usage is not None:
        assert stream.completion_tokens == whole.completion_tokens
        assert stream.prompt_tokens == whole.prompt_tokens
    return whole


def _said(answer: Answer) -> tuple[object, ...]:
    calls = [call.said for call in answer.calls]
    said = (answer.status, answer.text, answer.reasoning, calls, answer.warnings)
    return (*said, answer.finish, answer.model, answer.error)


def assert_serves(service: LiveService, model: str, *, key: str | None = None) -> None:
    """What must hold after every case: the list is there, and four tokens can be had."""
    with service.client(key=key) as client:
        listed = client.get("/v1/models")
        assert listed.status_code == 200
        answer = ask_whole(client, body(model, said="SC19", max_tokens=4))
        assert (answer.status, answer.completion_tokens, answer.finish) == (200, 4, "length"), answer


def _envelope(document: dict[str, Any]) -> dict[str, Any]:
    assert document.keys() == {"error"}
    error = document["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def _streamed_calls(choices: list[dict[str, Any]]) -> tuple[Call, ...]:
    """A02, as the SDKs add pieces up: each call begins once, with the next index; its pieces hold arguments only."""
    calls: list[Call] = []
    for choice in choices:
        for piece in choice.get("delta", {}).get("tool_calls", ()):
            function = piece["function"]
            if piece["index"] == len(calls):
                assert piece["type"] == "function"
                calls.append(Call(call_id=piece["id"], name=function["name"], arguments=function["arguments"]))
                continue
            assert piece["index"] == len(calls) - 1, "a call went on after another had begun"
            assert (piece.keys(), function.keys()) == ({"index", "function"}, {"arguments"})
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + function["arguments"])
    return tuple(calls)


def _piece(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
