"""A conversation as Chat Completions has it → the same in another dialect, and as an SDK's arguments."""
# pyright: basic

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Dialect = Literal["chat", "messages", "responses"]
DIALECTS: tuple[Dialect, ...] = ("chat", "messages", "responses")


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
        body["tool_choice"] = {**body["tool_choice"], "disable_parallel_tool_use": True}
    return body


def _message_of(message: dict[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
        return {"role": "user", "content": [block]}
    if calls := message.get("tool_calls"):
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        uses = [
            {"type": "tool_use", "id": c["id"], "name": c["function"]["name"], "input": decoded(c["function"])}
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


def for_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the SDK has no argument for go in its `extra_body`."""
    known = {"chat_template_kwargs", "seed"} - ({"seed"} if "messages" in body else set())
    extra = {name: value for name, value in body.items() if name in known}
    plain: dict[str, Any] = {name: value for name, value in body.items() if name not in known}
    return {**plain, "extra_body": extra} if extra else plain


def for_anthropic(body: Mapping[str, Any]) -> dict[str, Any]:
    known = {"temperature", "top_p", "top_k"}  # this SDK has no arguments for them any more
    extra = {name: value for name, value in body.items() if name in known}
    plain: dict[str, Any] = {name: value for name, value in body.items() if name not in known}
    return {**plain, "extra_body": extra} if extra else plain


def decoded(function: Mapping[str, Any]) -> Any:
    """A call's arguments, or their text where that is no JSON."""
    try:
        return json.loads(function["arguments"])
    except ValueError:
        return function["arguments"]
