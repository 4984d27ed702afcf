"""What a client has in the end, from whole answers and streams of each dialect, read as strictly as the SDKs do."""
# pyright: basic

import json
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from tests.fakes.same_conversation import Dialect, decoded

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


def failed(dialect: Dialect, status: int, document: Any) -> Outcome:
    """An error of a dialect: its envelope has all its keys and no others."""
    error = document["error"]
    if dialect == "messages":
        assert (document.keys(), document["type"]) == ({"type", "error", "request_id"}, "error"), document
        assert error.keys() == {"type", "message"}, document
        return Outcome(status=status, code=error["type"], message=error["message"])
    assert document.keys() == {"error"}, document
    assert error.keys() == {"message", "type", "param", "code"}, document
    return Outcome(status=status, code=error["code"] or error["type"], param=error["param"], message=error["message"])


def whole(dialect: Dialect, document: dict[str, Any]) -> Outcome:
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
        calls=tuple((call["function"]["name"], decoded(call["function"])) for call in calls),
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
        calls=tuple((call["name"], decoded(call)) for call in calls),
        finish=finish,
        prompt_tokens=usage["input_tokens"],
        completion_tokens=usage["output_tokens"],
    )


# --- streams, read as strictly as their contracts say ----------------------------------------------------------------


def events_of(stream: str) -> Iterator[str]:
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


def joined_chat(events: list[str]) -> Outcome:
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


def joined_message(events: list[str]) -> dict[str, Any]:
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
            said = decoded({"arguments": partial or "{}"})
            block["input"] = said if isinstance(said, dict) else {_INVALID: said}
    usage = {**message["usage"], **delta["usage"]}
    return {**message, **delta["delta"], "content": blocks, "usage": usage}


def joined_response(events: list[str]) -> dict[str, Any]:
    """The last event's response, which must be what its items' events said."""
    told = [json.loads(event) for event in events]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    types = [event["type"] for event in told if event["type"] != "response.queued"]  # that one says how it waits
    assert types[:2] == ["response.created", "response.in_progress"]
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
