"""One conversation asked in every dialect, by every client, whole and streamed, and what each of them made of it.

The conversation is written as Chat Completions has it. What comes back is compared as one `Outcome`, whatever the client.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import anthropic
import httpx
import openai
from msgspec import Struct

from tests.fakes.live_service import LiveService

Dialect = Literal["chat", "messages", "responses"]
Clients = Literal["all", "http"]
DIALECTS: tuple[Dialect, ...] = ("chat", "messages", "responses")
_PATHS: Mapping[Dialect, str] = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
_INVALID = "INVALID_JSON"


class Outcome(Struct, frozen=True, kw_only=True):
    """What a client has in the end. A call is its name and arguments: the decoded ones, or the text that is no JSON."""

    status: int = 200
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    finish: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    code: str | None = None
    param: str | None = None
    message: str = ""


class EveryClient:
    """The raw HTTP client and both SDKs, for one service. The SDKs do not try again by themselves."""

    def __init__(self, service: LiveService) -> None:
        self.http = service.client()
        url = service.base_url
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.anthropic.close()

    def ask(self, dialect: Dialect, chat: Mapping[str, Any], *, clients: Clients = "all") -> Outcome:
        """Ask a conversation in each way that there is: all must have the same outcome."""
        return self.send(dialect, in_dialect(dialect, chat), clients=clients)

    def send(self, dialect: Dialect, body: Mapping[str, Any], *, clients: Clients = "all") -> Outcome:
        """The same of a body in the dialect's own words. `clients` "http" is for what SDKs do not let out."""
        whole = self._http_whole(dialect, body)
        ways = {"http stream": self._http_stream(dialect, body)}
        if clients == "all":
            ways["sdk"] = self._sdk(dialect, body, "whole")
            ways["sdk stream"] = self._sdk(dialect, body, "stream")
        for way, outcome in ways.items():
            assert outcome == whole, f"{dialect}, {way}: {outcome}\nis not {whole}"
        return whole

    def assert_served(self, model: str) -> None:
        """What must hold after every case: the list is there, and four tokens can be had."""
        assert self.http.get("/v1/models").status_code == 200
        body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "SC19"}]}
        outcome = self._http_whole("chat", body)
        assert (outcome.status, outcome.completion_tokens, outcome.finish) == (200, 4, "length")

    # --- raw HTTP ----------------------------------------------------------------------------------------------------

    def _http_whole(self, dialect: Dialect, body: Mapping[str, Any]) -> Outcome:
        answer = self.http.post(_PATHS[dialect], json=body)
        if answer.status_code != 200:
            return failed(dialect, answer.status_code, answer.json())
        return _whole(dialect, answer.json())

    def _http_stream(self, dialect: Dialect, body: Mapping[str, Any]) -> Outcome:
        extra = {"stream_options": {"include_usage": True}} if dialect == "chat" else {}
        answer = self.http.post(_PATHS[dialect], json={**body, "stream": True, **extra})
        if answer.status_code != 200:
            return failed(dialect, answer.status_code, answer.json())
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        assert "\ufffd" not in answer.text
        events = list(_events(answer.text))
        match dialect:
            case "chat":
                return _joined_chat(events)
            case "messages":
                return _whole("messages", _joined_message(events))
            case "responses":
                return _whole("responses", _joined_response(events))

    # --- the SDKs ----------------------------------------------------------------------------------------------------

    def _sdk(self, dialect: Dialect, body: Mapping[str, Any], mode: Literal["whole", "stream"]) -> Outcome:
        try:
            match dialect, mode:
                case "chat", "whole":
                    return _whole("chat", _dump(self.openai.chat.completions.create(**_for_openai(body))))
                case "chat", "stream":
                    return self._chat_stream(body)
                case "messages", "whole":
                    return _whole("messages", _dump(self.anthropic.messages.create(**_for_anthropic(body))))
                case "messages", "stream":
                    with self.anthropic.messages.stream(**_for_anthropic(body)) as stream:
                        return _whole("messages", _dump(stream.get_final_message()))
                case "responses", "whole":
                    return _whole("responses", _dump(self.openai.responses.create(**_for_openai(body))))
                case _:
                    with self.openai.responses.stream(**_for_openai(body)) as stream:
                        *_, last = stream  # its get_final_response does not know answers that were cut
                        return _whole("responses", _dump(last)["response"])
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            return failed(dialect, error.status_code, error.response.json())

    def _chat_stream(self, body: Mapping[str, Any]) -> Outcome:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(self.openai.chat.completions.create(**_for_openai(body), **options))
        return _joined_chat([json.dumps(_dump(chunk)) for chunk in chunks] + ["[DONE]"])


# --- what is sent ------------------------------------------------------------------------------------------------------


def in_dialect(dialect: Dialect, chat: Mapping[str, Any]) -> dict[str, Any]:
    """The body of another dialect that says the same. Fields that it does not know go as they are."""
    match dialect:
        case "chat":
            return dict(chat)
        case "messages":
            return _as_messages(dict(chat))
        case "responses":
            return _as_response(dict(chat))


def _as_messages(body: dict[str, Any]) -> dict[str, Any]:
    body["messages"] = [_message_of(message) for message in body["messages"]]
    if "stop" in body:
        stop = body.pop("stop")
        body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if "tools" in body:
        functions = [tool["function"] for tool in body["tools"]]
        body["tools"] = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
    parallel = body.pop("parallel_tool_calls", True)
    choice = body.pop("tool_choice", None if parallel else "auto")
    if isinstance(choice, dict):
        body["tool_choice"] = {"type": "tool", "name": choice["function"]["name"]}
    elif choice is not None:
        body["tool_choice"] = {"type": {"required": "any"}.get(choice, choice)}
    if not parallel:
        body["tool_choice"]["disable_parallel_tool_use"] = True
    return body


def _message_of(message: dict[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
        return {"role": "user", "content": [block]}
    if calls := message.get("tool_calls"):
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        uses = [
            {"type": "tool_use", "id": c["id"], "name": c["function"]["name"], "input": _decoded(c["function"])}
            for c in calls
        ]
        return {"role": role, "content": [*texts, *uses]}
    return {"role": role, "content": content}


def _as_response(body: dict[str, Any]) -> dict[str, Any]:
    body["store"] = False
    body["input"] = [item for message in body.pop("messages") for item in _items_of(message)]
    if "max_tokens" in body:
        body["max_output_tokens"] = body.pop("max_tokens")
    if "tools" in body:
        body["tools"] = [{"type": "function", "strict": False, **tool["function"]} for tool in body["tools"]]
    if isinstance(choice := body.get("tool_choice"), dict):
        body["tool_choice"] = {"type": "function", "name": choice["function"]["name"]}
    return body


def _items_of(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    role, content = message["role"], message.get("content")
    if isinstance(content, list):
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{**part, "type": kind} if part.get("type") == "text" else part for part in content]
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}
        return
    if content is not None or not message.get("tool_calls"):
        yield {"role": role, "content": content}
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield {
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
        }


def _for_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the SDK has no argument for go in its `extra_body`."""
    known = {"chat_template_kwargs", "seed"} - ({"seed"} if "messages" in body else set())
    extra = {name: value for name, value in body.items() if name in known}
    plain: dict[str, Any] = {name: value for name, value in body.items() if name not in known}
    return {**plain, "extra_body": extra} if extra else plain


def _for_anthropic(body: Mapping[str, Any]) -> dict[str, Any]:
    known = {"temperature", "top_p", "top_k"}  # this SDK has no arguments for them any more
    extra = {name: value for name, value in body.items() if name in known}
    plain: dict[str, Any] = {name: value for name, value in body.items() if name not in known}
    return {**plain, "extra_body": extra} if extra else plain


# --- what came ---------------------------------------------------------------------------------------------------------


def _dump(model: Any) -> dict[str, Any]:
    return model.to_dict(mode="json", warnings=False)


def _decoded(function: Mapping[str, Any]) -> Any:
    try:
        return json.loads(function["arguments"])
    except ValueError:
        return function["arguments"]


def failed(dialect: Dialect, status: int, document: Any) -> Outcome:
    """An error of a dialect: its envelope has all its keys and no others."""
    error = document["error"]
    if dialect == "messages":
        assert (document.keys(), document["type"]) == ({"type", "error", "request_id"}, "error"), document
        assert error.keys() == {"type", "message"}, document
        return Outcome(status=status, code=error["type"], message=error["message"])
    assert document.keys() == {"error"}, document
    assert error.keys() == {"message", "type", "param", "code"}, document
    return Outcome(
        status=status, code=error["code"] or error["type"], param=error["param"], message=error["message"]
    )


def _whole(dialect: Dialect, document: dict[str, Any]) -> Outcome:
    match dialect:
        case "chat":
            return _whole_chat(document)
        case "messages":
            return _whole_message(document)
        case "responses":
            return _whole_response(document)


def _whole_chat(document: dict[str, Any]) -> Outcome:
    (choice,) = document["choices"]
    message, usage = choice["message"], document["usage"]
    calls = message.get("tool_calls", [])
    assert all(isinstance(call["function"]["arguments"], str) and call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls} - {""}) == len(calls)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"].keys() >= {"cached_tokens"}
    return Outcome(
        text=message["content"] or "",
        reasoning=message.get("reasoning_content") or "",
        calls=tuple((call["function"]["name"], _decoded(call["function"])) for call in calls),
        finish=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


def _whole_message(document: dict[str, Any]) -> Outcome:
    blocks, usage = document["content"], document["usage"]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    assert len({use["id"] for use in uses} - {""}) == len(uses)
    assert [block for block in blocks if block.get("text", "x") == "" or block.get("thinking", "x") == ""] == []
    assert all(block["signature"] for block in blocks if block["type"] == "thinking")
    reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    reasons["model_context_window_exceeded"] = "length"
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return Outcome(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        calls=tuple((use["name"], use["input"].get(_INVALID, use["input"])) for use in uses),
        finish=reasons[document["stop_reason"]],
        prompt_tokens=sum(usage[name] for name in names),
        completion_tokens=usage["output_tokens"],
    )


def _whole_response(document: dict[str, Any]) -> Outcome:
    items, usage = document["output"], document["usage"]
    calls = [item for item in items if item["type"] == "function_call"]
    assert len({call["call_id"] for call in calls} - {""}) == len(calls)
    assert len({item["id"] for item in items}) == len(items)
    if document["status"] == "incomplete":
        assert document["incomplete_details"] == {"reason": "max_output_tokens"}
        finish = "length"
    else:
        assert document["status"] == "completed"
        finish = "tool_calls" if calls else "stop"
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return Outcome(
        text="".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]),
        reasoning="".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]),
        calls=tuple((call["name"], _decoded(call)) for call in calls),
        finish=finish,
        prompt_tokens=usage["input_tokens"],
        completion_tokens=usage["output_tokens"],
    )


# --- streams, read as strictly as their contracts say -------------------------------------------------------------------


def _events(stream: str) -> Iterator[str]:
    """The data of each event. An `event:` line says what the data's type says; nothing but comments is between."""
    assert stream.endswith("\n\n")
    for block in stream.split("\n\n")[:-1]:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        assert len(lines) <= 2, block
        data = lines[-1].removeprefix("data: ")
        if len(lines) == 2:
            assert lines[0] == f"event: {json.loads(data)['type']}", block
        yield data


def _joined_chat(events: list[str]) -> Outcome:
    """Chunks to one answer: role first, one finish, then the usage, then [DONE] and nothing more."""
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    *chunks, last = chunks
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) == len(chunks)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    calls: list[dict[str, Any]] = []
    for piece in (piece for choice in choices for piece in choice["delta"].get("tool_calls") or ()):
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
        else:
            assert piece.keys() == {"index", "function"}
            assert piece["function"].keys() == {"arguments"}
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    message = {
        "content": "".join(choice["delta"].get("content") or "" for choice in choices),
        "reasoning_content": "".join(choice["delta"].get("reasoning_content") or "" for choice in choices),
        "tool_calls": calls,
    }
    choice = {"message": message, "finish_reason": choices[-1]["finish_reason"]}
    return _whole_chat({"choices": [choice], "usage": last["usage"]})


def _joined_message(events: list[str]) -> dict[str, Any]:
    """Events to one message: blocks one after another from index 0, each started, filled and stopped."""
    start, *middle, delta, stop = (event for event in map(json.loads, events) if event["type"] != "ping")
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message, blocks, opened = start["message"], [], False
    assert message["content"] == []
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert (opened, event["index"]) == (False, len(blocks))
                blocks.append({**event["content_block"], "partial": ""})
                opened = True
            case "content_block_delta":
                assert (opened, event["index"]) == (True, len(blocks) - 1)
                kind = event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(
                    kind["type"], "partial"
                )
                blocks[-1][name] += kind.get("partial_json", "") if name == "partial" else kind[name]
            case "content_block_stop":
                assert (opened, event["index"]) == (True, len(blocks) - 1)
                opened = False
            case kind:
                raise AssertionError(kind)
    assert not opened
    for block in blocks:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            said = _decoded({"arguments": partial or "{}"})
            block["input"] = said if isinstance(said, dict) else {_INVALID: said}
    usage = {**message["usage"], **delta["usage"]}
    return {**message, **delta["delta"], "content": blocks, "usage": usage}


def _joined_response(events: list[str]) -> dict[str, Any]:
    """The last event's response, which must be what its items' events said."""
    told = [json.loads(event) for event in events]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    response = told[-1]["response"]
    assert told[-1]["type"] == f"response.{response['status']}"
    assert len({event["response"]["id"] for event in told if "response" in event}) == 1
    for index, item in enumerate(response["output"]):
        of_item = [event for event in told if event.get("output_index") == index]
        assert of_item[0]["type"] == "response.output_item.added"
        assert (of_item[-1]["type"], of_item[-1]["item"]) == ("response.output_item.done", item)
        assert {event["item_id"] for event in of_item[1:-1]} <= {item["id"]}
        text = "".join(event["delta"] for event in of_item if event["type"].endswith(".delta"))
        parts = "".join(part.get("text", "") for part in item.get("content") or ())
        assert text == (item["arguments"] if item["type"] == "function_call" else parts)
    return response
