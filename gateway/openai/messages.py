"""A chat request's messages → the wire's. Pure: nothing that a model should read is dropped on the way."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gateway.openai.json_values import object_in, plain
from gateway.openai.refusals import Refusal, invalid, unsupported
from gateway.openai.schema import CalledFunction, ContentPart, EarlierToolCall, Message
from gateway.volatile_heads import without_volatile_head
from protocol.generation import ChatMessage, ToolCall

RAW_ARGUMENTS = "_raw"
"""The key under which a template sees arguments that are no JSON object. A model writes such now and then, and a
conversation in which it did must go on."""

_UNSEEN = "[{kind}: left out, since this model reads text only]"
_MEDIA = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "file",
}


def chat_messages(messages: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Raises Refusal, which names the message."""
    translated: list[ChatMessage] = []
    for index, message in enumerate(messages):
        translated.append(_message(message, f"messages[{index}]", translated))
    return tuple(translated)


def _message(message: Message, at: str, earlier: Sequence[ChatMessage]) -> ChatMessage:
    if message.audio is not None:
        raise unsupported(f"{at}.audio", "this is a text-only model. Send text.")
    match message.role:
        case "system" | "developer":
            content = _required_content(_without_volatile_heads(message), at)
            return ChatMessage(role=message.role, content=content, name=message.name)
        case "user":
            return ChatMessage(role="user", content=_required_content(message, at), name=message.name)
        case "tool":
            if message.tool_call_id is None:
                raise invalid(f"{at}.tool_call_id", "is required. Name the call that this message answers.")
            return ChatMessage(
                role="tool",
                content=_required_content(message, at),
                name=message.name,
                tool_call_id=message.tool_call_id,
            )
        case "assistant":
            return _assistant(message, at)
        case "function":
            return ChatMessage(
                role="tool",
                content=_required_content(message, at),
                name=message.name,
                tool_call_id=_call_answered(message, at, earlier),
            )
        case _:
            raise invalid(f"{at}.role", "unknown role. Use system, developer, user, assistant or tool.")


def _assistant(message: Message, at: str) -> ChatMessage:
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    calls = [_tool_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        calls.append(_called(message.function_call, id=f"call_{at}", at=f"{at}.function_call"))
    content = _text(message.content or [], at) or message.refusal or ""
    if message.content is None and message.refusal is None and reasoning is None and not calls:
        raise invalid(f"{at}.content", "is required without `tool_calls`. Send a string, even an empty one.")
    return ChatMessage(
        role="assistant", content=content, name=message.name, reasoning_content=reasoning, tool_calls=tuple(calls)
    )


def _call_answered(message: Message, at: str, earlier: Sequence[ChatMessage]) -> str:
    """The legacy role names a function where `tool` names a call: the last one of that function is meant."""
    for before in reversed(earlier):
        for call in reversed(before.tool_calls):
            if call.name == message.name:
                return call.id
    raise invalid(f"{at}.name", "must be the function that an earlier message called. Correct it, or use role `tool`.")


# --- content ---------------------------------------------------------------------------------------------------------


def _without_volatile_heads(message: Message) -> Message:
    """Before parts are joined: a client may send such a head as a part of its own, without a line's end."""
    if isinstance(message.content, str):
        return replace(message, content=without_volatile_head(message.content))
    parts = [
        part if part.text is None else replace(part, text=without_volatile_head(part.text))
        for part in message.content or ()
    ]
    return message if message.content is None else replace(message, content=parts)


def _required_content(message: Message, at: str) -> str:
    if message.content is None:
        raise invalid(f"{at}.content", "is required for this role. Send a string or a list of text parts.")
    if message.content == [] and message.role == "user":
        raise invalid(f"{at}.content", "must not be an empty list. Send a string or a list of text parts.")
    if message.role in ("tool", "function") and not isinstance(message.content, str):
        return _text([_with_unseen_named(part) for part in message.content], at)
    return _text(message.content, at)


def _with_unseen_named(part: ContentPart) -> ContentPart:
    """A tool's result may hold a picture that nobody sent by hand: refusing it would end the conversation for good."""
    kind = _MEDIA.get(part.type)
    return part if kind is None else ContentPart(type="text", text=_UNSEEN.format(kind=kind))


def _text(content: str | Sequence[ContentPart], at: str) -> str:
    """Text parts joined in order, with nothing between them."""
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{at}.content[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, at: str) -> str:
    match part.type:
        case "text":
            if part.text is None:
                raise invalid(f"{at}.text", "must be a string. Send the text.")
            return part.text
        case "refusal":
            if part.refusal is None:
                raise invalid(f"{at}.refusal", "must be a string. Send the text.")
            return part.refusal
        case _:
            if part.type in _MEDIA:
                raise unsupported(at, "this is a text-only model. Send parts of type `text` only.")
            raise invalid(f"{at}.type", "unknown type of part. Use `text`.")


# --- earlier calls ---------------------------------------------------------------------------------------------------


def _tool_call(call: EarlierToolCall, at: str) -> ToolCall:
    if call.type != "function":
        raise unsupported(f"{at}.type", "only calls of type `function` are supported. Leave this one out.")
    if call.function is None:
        raise invalid(f"{at}.function", "is required. Send its name and arguments.")
    return _called(call.function, id=call.id, at=f"{at}.function")


def _called(function: CalledFunction, *, id: str, at: str) -> ToolCall:
    return ToolCall(id=id, name=function.name, arguments=_arguments(function.arguments, f"{at}.arguments"))


def _arguments(arguments: str | dict[str, Any] | None, at: str) -> dict[str, Any]:
    """Templates want a mapping, the API has JSON in a string, and models write an empty one for no arguments."""
    if not arguments or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, dict):
        return plain(arguments, at)
    decoded = object_in(arguments)
    if decoded is None:
        return {RAW_ARGUMENTS: arguments}
    try:
        return plain(decoded, at)
    except Refusal:
        return {RAW_ARGUMENTS: arguments}
