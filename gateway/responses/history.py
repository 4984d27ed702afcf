"""Items of the input → the wire's messages. Pure: nothing that a model should read is dropped on the way.

What one turn of the model gave are several items here and one message for a template: its reasoning, its text and its
calls. A message that a client sends twice in a row as the assistant is one message, too, since templates want turns.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from gateway.openai.json_values import object_in, plain
from gateway.openai.refusals import Refusal, invalid, unsupported
from gateway.responses.schema import (
    AdditionalToolsItem,
    CallOutputItem,
    ContentPart,
    CustomCallItem,
    FunctionCallItem,
    ItemKind,
    MessageItem,
    ReasoningItem,
)
from gateway.responses.sealed_reasoning import unseal
from gateway.responses.tools import CUSTOM_INPUT, model_name, read
from gateway.volatile_heads import without_volatile_head
from protocol.generation import ChatMessage, ToolCall

RAW_ARGUMENTS = "_raw"
"""The key under which a template sees arguments that are no JSON object. A model writes such now and then, and a
conversation in which it did must go on."""

_UNREAD = frozenset(
    {"code_interpreter_call", "file_search_call", "image_generation_call", "mcp_list_tools", "web_search_call"}
)
"""What only OpenAI's own servers do and note down: nothing in it is for another model to read."""

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_MEDIA = {"input_image": "image", "input_file": "file", "input_audio": "audio", "computer_screenshot": "image"}
Media = Literal["refused", "named"]
_UNSEEN = "[{kind}: left out, since this model reads text only]"


class History(Struct, frozen=True, kw_only=True):
    """What the input says. `tools` are those added in it, with where they stand; `ignored` is left out."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[tuple[str, msgspec.Raw], ...]
    ignored: tuple[str, ...]


def history_of(items: Iterable[tuple[str, msgspec.Raw]], *, instructions: str | None, cache_scope: bytes) -> History:
    """`items` come with where they stand. `instructions` are the first message. Raises Refusal."""
    reader = _Reader(cache_scope)
    if instructions:
        reader.add(ChatMessage(role="system", content=without_volatile_head(instructions)))
    for at, raw in items:
        reader.read(raw, at)
    return reader.history()


class _Reader:
    """Messages as they are read, and the assistant's turn that is still open."""

    def __init__(self, cache_scope: bytes) -> None:
        self._cache_scope = cache_scope
        self._messages: list[ChatMessage] = []
        self._tools: list[tuple[str, msgspec.Raw]] = []
        self._ignored: list[str] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def history(self) -> History:
        self._end_turn()
        return History(
            messages=tuple(self._messages), tools=tuple(self._tools), ignored=tuple(dict.fromkeys(self._ignored))
        )

    def add(self, message: ChatMessage) -> None:
        """Of anybody but the assistant."""
        self._end_turn()
        self._messages.append(message)

    def read(self, raw: msgspec.Raw, at: str) -> None:
        kind = read(raw, ItemKind, at).type
        match kind:
            case "message" | None:
                self._read_message(read(raw, MessageItem, at), at)
            case "reasoning":
                self._read_reasoning(read(raw, ReasoningItem, at), at)
            case "function_call":
                call = read(raw, FunctionCallItem, at)
                arguments = _arguments(call.arguments, f"{at}.arguments")
                self._add_call(call.call_id, call.name, call.namespace, arguments, at)
            case "custom_tool_call":
                custom = read(raw, CustomCallItem, at)
                self._add_call(custom.call_id, custom.name, custom.namespace, {CUSTOM_INPUT: custom.input}, at)
            case "function_call_output" | "custom_tool_call_output":
                output = read(raw, CallOutputItem, at)
                text = _text(output.output, f"{at}.output", media="named")
                self.add(ChatMessage(role="tool", content=text, tool_call_id=output.call_id))
            case "additional_tools":
                tools = read(raw, AdditionalToolsItem, at).tools
                self._tools.extend((f"{at}.tools[{index}]", tool) for index, tool in enumerate(tools))
            case _ if kind in _UNREAD:
                self._ignored.append(f"input.{kind}")
            case _:
                raise unsupported(
                    f"{at}.type",
                    "is no type of item that this server knows. Send message, function_call, function_call_output, "
                    "custom_tool_call, custom_tool_call_output or reasoning; leave this one out.",
                )

    # --- the assistant's turn ----------------------------------------------------------------------------------------

    def _read_message(self, message: MessageItem, at: str) -> None:
        content = f"{at}.content"
        match message.role:
            case "system" | "developer":
                text = _text(_without_volatile_heads(message.content), content, media="refused")
                self.add(ChatMessage(role=message.role, content=text))
            case "user":
                if message.content == []:
                    raise invalid(content, "must not be an empty list. Send a string or a list of input_text parts.")
                self.add(ChatMessage(role="user", content=_text(message.content, content, media="refused")))
            case "assistant":
                text = _text(message.content, content, media="refused")
                if self._calls:
                    self._end_turn()
                self._texts.append(text)
            case _:
                raise invalid(f"{at}.role", "unknown role. Use user, assistant, system or developer.")

    def _read_reasoning(self, item: ReasoningItem, at: str) -> None:
        """Its text, if it is there in any form. A summary is not what the model thought, and its template would show it
        as that."""
        text = _text(item.content or [], f"{at}.content", media="refused")
        if not text and item.encrypted_content is not None:
            text = unseal(item.encrypted_content, self._cache_scope) or ""
        if self._texts or self._calls:
            self._end_turn()
        if text:
            self._reasoning.append(text)
        elif item.encrypted_content is not None or item.summary:
            self._ignored.append("input.reasoning")

    def _add_call(self, call_id: str, name: str, namespace: str | None, arguments: dict[str, Any], at: str) -> None:
        if not name:
            raise invalid(f"{at}.name", "must not be empty. Name the tool that was called.")
        self._calls.append(ToolCall(id=call_id, name=model_name(name, namespace), arguments=arguments))

    def _end_turn(self) -> None:
        if not (self._reasoning or self._texts or self._calls):
            return
        self._messages.append(
            ChatMessage(
                role="assistant",
                content="\n\n".join(self._texts),
                reasoning_content="\n".join(self._reasoning) or None,
                tool_calls=tuple(self._calls),
            )
        )
        self._reasoning, self._texts, self._calls = [], [], []


# --- content ---------------------------------------------------------------------------------------------------------


def _without_volatile_heads(content: str | list[ContentPart]) -> str | list[ContentPart]:
    """Before parts are joined: a client may send such a head as a part of its own, without a line's end."""
    if isinstance(content, str):
        return without_volatile_head(content)
    return [
        part if part.text is None else ContentPart(type=part.type, text=without_volatile_head(part.text))
        for part in content
    ]


def _text(content: str | Sequence[ContentPart], at: str, *, media: Media) -> str:
    """Text parts joined in order, with nothing between them.

    A picture in a tool's result was sent by no person: refusing it would end the conversation for good, so it is named
    in its place. Anywhere else it is refused.
    """
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{at}[{index}]", media=media) for index, part in enumerate(content))


def _part(part: ContentPart, at: str, *, media: Media) -> str:
    if part.type in _TEXTS or part.type == "refusal":
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise invalid(f"{at}.{'refusal' if part.type == 'refusal' else 'text'}", "must be a string. Send the text.")
        return text
    kind = _MEDIA.get(part.type)
    if kind is None:
        raise invalid(f"{at}.type", "unknown type of part. Use input_text.")
    if media == "named":
        return _UNSEEN.format(kind=kind)
    raise unsupported(at, "this is a text-only model. Send parts of type input_text only.")


def _arguments(arguments: str | dict[str, Any] | None, at: str) -> dict[str, Any]:
    """Templates want a mapping, the API has JSON in a string, and models write an empty one for no arguments."""
    if isinstance(arguments, dict):
        return plain(arguments, at)
    if not arguments or not arguments.strip():
        return {}
    decoded = object_in(arguments)
    try:
        return {RAW_ARGUMENTS: arguments} if decoded is None else plain(decoded, at)
    except Refusal:
        return {RAW_ARGUMENTS: arguments}
