"""Anthropic's system, messages and blocks → one conversation of plain messages. Pure.

Text blocks are joined with nothing between them, neighbouring messages of one role with an empty line: they are one
turn. A system text stays where it stands, so that a note added later changes no earlier token.
"""

from typing import Literal

from msgspec import Struct

from gateway.anthropic.schema import Block, CacheControl, Message, PromptRequest, Source, Ttl
from gateway.openai.json_values import plain
from gateway.openai.refusals import invalid, unsupported
from gateway.volatile_heads import without_volatile_head
from protocol.generation import ChatMessage, ToolCall

_JOINT = "\n\n"
_TEXT_ONLY = "this is a text-only model. Send text."


class CacheMark(Struct, frozen=True, kw_only=True):
    """A `cache_control` marker: it covers the tools and the first `messages` of the conversation."""

    messages: int
    ttl: Ttl


class Conversation(Struct, frozen=True, kw_only=True):
    """What the chat template gets. `ending` as in ChatPrompt. `marks` are in the order of what they cover."""

    messages: tuple[ChatMessage, ...]
    ending: Literal["new_message", "continue"]
    marks: tuple[CacheMark, ...]


def conversation(request: PromptRequest) -> Conversation:
    """Raises Refusal."""
    building = _Building()
    _add_system(building, request.system, "system")
    for at, message in enumerate(request.messages):
        _add(building, message, f"messages[{at}]")
    ending = _ending(building, f"messages[{len(request.messages) - 1}]")
    marks = [CacheMark(messages=0, ttl=ttl) for ttl in _tool_marks(request)] + building.marks
    if request.cache_control is not None:
        marks.append(CacheMark(messages=len(building.messages), ttl=_ttl(request.cache_control)))
    return Conversation(messages=tuple(building.messages), ending=ending, marks=tuple(marks))


class _Building:
    """The conversation so far, and which call of it has which name."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.marks: list[CacheMark] = []
        self.call_names: dict[str, str] = {}

    def add(self, message: ChatMessage) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != message.role or message.role not in ("user", "assistant"):
            self.messages.append(message)
            return
        reasoning = [text for text in (last.reasoning_content, message.reasoning_content) if text]
        self.messages[-1] = ChatMessage(
            role=message.role,
            content=_JOINT.join(text for text in (last.content, message.content) if text),
            reasoning_content=_JOINT.join(reasoning) or None,
            tool_calls=last.tool_calls + message.tool_calls,
        )

    def mark(self, control: CacheControl | None) -> None:
        if control is not None:
            self.marks.append(CacheMark(messages=len(self.messages), ttl=_ttl(control)))


def _ttl(control: CacheControl) -> Ttl:
    return control.ttl or "5m"


def _tool_marks(request: PromptRequest) -> list[Ttl]:
    return [_ttl(tool.cache_control) for tool in request.tools or () if tool.cache_control is not None]


def _ending(building: _Building, at: str) -> Literal["new_message", "continue"]:
    """An assistant's message at the end is the beginning of the answer."""
    last = building.messages[-1] if building.messages else None
    if last is None:
        raise invalid("messages", "hold no text. Send at least one message of the user's.")
    if last.role != "assistant":
        return "new_message"
    if last.tool_calls:
        raise invalid(at, "ends with a call. Send its tool_result in a message of the user's.")
    if last.content != last.content.rstrip():
        raise invalid(at, "the answer's beginning must not end with whitespace. Cut it off.")
    if last.content:
        return "continue"
    if last.reasoning_content:
        raise invalid(at, "an answer cannot begin with thinking alone. Add its text, or leave the message out.")
    building.messages.pop()
    return _ending(building, at)


# --- messages --------------------------------------------------------------------------------------------------------


def _add(building: _Building, message: Message, at: str) -> None:
    match message.role:
        case "user":
            _add_user(building, message.content, f"{at}.content")
        case "assistant":
            _add_assistant(building, message.content, f"{at}.content")
        case "system":
            _add_system(building, message.content, f"{at}.content")
        case _:
            raise invalid(f"{at}.role", "unknown role. Use user, assistant or system.")


def _add_system(building: _Building, content: str | list[Block] | None, at: str) -> None:
    """Heads that change with every request come off block by block, before blocks are joined."""
    blocks = [Block(type="text", text=content)] if isinstance(content, str) else content or []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block.type != "text" or block.text is None:
            raise invalid(f"{at}[{index}]", "only text blocks can be system text. Send blocks of type `text`.")
        texts.append(without_volatile_head(block.text))
    text = "".join(texts)
    if text:
        building.add(ChatMessage(role="system", content=text))
    for block in blocks:
        building.mark(block.cache_control)


def _add_user(building: _Building, content: str | list[Block], at: str) -> None:
    """A tool's results become messages of their own, where they stand among the texts."""
    if isinstance(content, str):
        building.add(ChatMessage(role="user", content=content))
        return
    if not content:
        raise invalid(at, "must not be an empty list. Send a string or a list of blocks.")
    texts: list[str] = []
    controls: list[CacheControl | None] = []

    def flush() -> None:
        if texts:
            building.add(ChatMessage(role="user", content="".join(texts)))
        for control in controls:
            building.mark(control)
        texts.clear()
        controls.clear()

    for index, block in enumerate(content):
        where = f"{at}[{index}]"
        if block.type == "tool_result":
            flush()
            building.add(_tool_message(building, block, where))
            building.mark(block.cache_control)
        else:
            texts.append(_user_text(block, where))
            controls.append(block.cache_control)
    flush()


def _add_assistant(building: _Building, content: str | list[Block], at: str) -> None:
    blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        where = f"{at}[{index}]"
        match block.type:
            case "text":
                texts.append(_required(block.text, f"{where}.text"))
            case "thinking":
                thoughts.append(_required(block.thinking, f"{where}.thinking"))
            case "redacted_thinking":
                pass  # holds nothing that this server could read
            case "tool_use":
                calls.append(_call(building, block, where))
            case kind if _is_foreign_tool(kind):
                texts.append(_omitted(kind))
            case _:
                raise invalid(f"{where}.type", "unknown type of block. Use text, thinking or tool_use.")
    building.add(
        ChatMessage(
            role="assistant",
            content="".join(texts),
            reasoning_content="".join(thoughts) or None,
            tool_calls=tuple(calls),
        )
    )
    for block in blocks:
        building.mark(block.cache_control)


# --- blocks ----------------------------------------------------------------------------------------------------------


def _user_text(block: Block, at: str) -> str:
    match block.type:
        case "text":
            return _required(block.text, f"{at}.text")
        case "document":
            text = _document_text(block)
            if text is None:
                raise unsupported(at, "only documents of plain text can be read. Send the text itself.")
            return text
        case "search_result":
            return _search_result_text(block)
        case "image" | "container_upload":
            raise unsupported(at, _TEXT_ONLY)
        case _:
            raise invalid(f"{at}.type", "unknown type of block. Use text, document or tool_result.")


def _tool_message(building: _Building, block: Block, at: str) -> ChatMessage:
    call_id = _required(block.tool_use_id, f"{at}.tool_use_id")
    match block.content:
        case None:
            text = ""
        case str():
            text = block.content
        case list():
            text = "".join(_result_part(part, f"{at}.content[{i}]") for i, part in enumerate(block.content))
        case _:
            raise invalid(f"{at}.content", "must be a string or a list of blocks. Correct it.")
    if block.is_error:
        text = f"error: {text}" if text else "error"
    return ChatMessage(role="tool", content=text, name=building.call_names.get(call_id), tool_call_id=call_id)


def _result_part(part: Block, at: str) -> str:
    """What a text-only model cannot read is named in its place: a tool's result must not end the conversation."""
    match part.type:
        case "text":
            return _required(part.text, f"{at}.text")
        case "search_result":
            return _search_result_text(part)
        case "document":
            return _document_text(part) or _omitted("document")
        case kind:
            return _omitted(kind)


def _call(building: _Building, block: Block, at: str) -> ToolCall:
    call_id, name = _required(block.id, f"{at}.id"), _required(block.name, f"{at}.name")
    if block.input is None:
        raise invalid(f"{at}.input", "is required. Send the call's arguments as an object.")
    building.call_names[call_id] = name
    return ToolCall(id=call_id, name=name, arguments=plain(block.input, f"{at}.input"))


def _document_text(block: Block) -> str | None:
    """None for what is no plain text."""
    match block.source:
        case Source(type="text", data=str() as text):
            pass
        case Source(type="content", content=str() as text):
            pass
        case Source(type="content", content=list() as parts) if all(part.type == "text" for part in parts):
            text = "".join(part.text or "" for part in parts)
        case _:
            return None
    return "\n".join(part for part in (block.title, block.context, text) if part)


def _search_result_text(block: Block) -> str:
    parts = block.content if isinstance(block.content, list) else []
    source = block.source if isinstance(block.source, str) else None
    text = "".join(part.text or "" for part in parts)
    return "\n".join(part for part in (block.title, source, text) if part)


def _is_foreign_tool(kind: str) -> bool:
    """Blocks of tools that run on Anthropic's servers: a conversation may have begun there."""
    return kind in ("server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result")


def _omitted(kind: str) -> str:
    return f"[{kind[:64]} omitted: this model reads text only]"


def _required(text: str | None, at: str) -> str:
    if text is None:
        raise invalid(at, "is required. Send a string.")
    return text
