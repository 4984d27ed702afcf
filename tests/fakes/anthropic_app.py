"""The Messages routes behind the real gate's words: called in process, or served by uvicorn in the test's own loop."""

import json
from typing import Any

from gateway.answering import Answering, Patience
from gateway.anthropic.dialect import Comparing
from gateway.anthropic.routes import anthropic_router
from gateway.caller import Caller
from gateway.front_desk import FrontDesk
from gateway.ports import Generator
from gateway.single_answers import SingleAnswers
from tests.fakes.gated_app import GatedApp
from tests.fakes.openai_app import ALICE, BROKEN, CREATED, MAX_BODY_BYTES, MODEL, make_desk
from tests.fakes.scripted_generator import FewModels, KnownModel

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"

_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def anthropic_app(
    generator: Generator,
    *,
    keepalive_seconds: float = 10.0,
    headers_seconds: float = 30.0,
    desk: FrontDesk | None = None,
    caller: Caller = ALICE,
    earlier: Comparing | None = None,
) -> GatedApp:
    """An ASGI app."""
    models = FewModels(KnownModel(MODEL), KnownModel(BROKEN, problem="model.safetensors is missing"))
    desk = desk or make_desk()
    answering = Answering(
        generator,
        models,
        desk,
        max_body_bytes=MAX_BODY_BYTES,
        unix_clock=lambda: CREATED + 0.5,
        patience=Patience(keepalive_seconds=keepalive_seconds, headers_seconds=headers_seconds),
    )
    single_answers = SingleAnswers(generator, models, desk, max_body_bytes=MAX_BODY_BYTES)
    return GatedApp([anthropic_router(answering, single_answers, earlier=earlier)], caller)


def named_events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without comments. Asserts what SDKs rest on: a name line and a data line each, which say
    the same type."""
    assert stream.endswith(b"\n\n") or not stream
    events: list[dict[str, Any]] = []
    for block in stream.decode().split("\n\n")[:-1]:
        if block.startswith(":"):  # why it waits
            continue
        name, data = block.split("\n")
        assert name.startswith("event: "), block
        assert data.startswith("data: "), block
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        events.append(event)
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together of a stream's events, as strictly as the SDKs do, and stricter: blocks
    are numbered from 0, never interleaved, never empty; nothing follows `message_stop`."""
    events = [event for event in events if event["type"] != "ping"]
    start, *body, delta, stop = events
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    is_open = False
    arguments = ""
    for event in body:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                block = event["content_block"]
                assert block.items() >= _EMPTY[block["type"]].items()
                message["content"].append(block)
                is_open, arguments = True, ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                block, piece = message["content"][-1], event["delta"]
                match piece["type"]:
                    case "text_delta":
                        block["text"] += piece["text"]
                    case "thinking_delta":
                        block["thinking"] += piece["thinking"]
                    case "signature_delta":
                        assert block["signature"] == ""
                        block["signature"] = piece["signature"]
                    case "input_json_delta":
                        assert block["type"] == "tool_use"
                        arguments += piece["partial_json"]
                    case other:
                        raise AssertionError(other)
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                block = message["content"][-1]
                assert block.get("text", "full") and block.get("thinking", "full") and block.get("signature", "full")
                if block["type"] == "tool_use":
                    block["input"] = _parsed(arguments)
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    message["usage"] = delta["usage"]
    extra = {name: delta[name] for name in ("mlxd", "diagnostics") if name in delta}
    return {**message, **delta["delta"], **extra}


def _parsed(arguments: str) -> Any:
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except ValueError:
        return {"INVALID_JSON": arguments}
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
