"""Messages as chat templates want them, which is not the same for all. Pure.

What a template wants is found by trying: a way is right if the template does not raise and loses no call.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from protocol.generation import ChatMessage


@dataclass(frozen=True, kw_only=True)
class TemplateWay:
    """`empty`: what stands for the text of a message that only calls. `arguments`: a mapping, or its JSON as text.
    `thoughts` "alone": a message that calls and has text goes without its reasoning."""

    empty: Literal["text", "none"] = "text"
    arguments: Literal["mapping", "text"] = "mapping"
    thoughts: Literal["given", "alone"] = "given"


_WAYS = (
    TemplateWay(),
    TemplateWay(empty="none"),
    TemplateWay(arguments="text"),
    TemplateWay(empty="none", arguments="text"),
    TemplateWay(thoughts="alone"),  # gpt-oss
)


def ways(messages: Sequence[ChatMessage]) -> Iterator[TemplateWay]:
    """What to try, in this order; without calls there is nothing to choose."""
    yield from _WAYS if any(message.tool_calls for message in messages) else _WAYS[:1]


def template_messages(messages: Sequence[ChatMessage], way: TemplateWay, template: str) -> list[dict[str, Any]]:
    """For `apply_chat_template`. Only what is there: a template asks `is defined`, and null would be an answer."""
    ids_are_short = "[TOOL_CALLS]" in template
    # gpt-oss has a name of its own for reasoning, and several use the short one.
    thoughts = [name for name in ("thinking", "reasoning") if re.search(rf"\b{name}\b", template)]
    return [_template_message(message, way, "short" if ids_are_short else "given", thoughts) for message in messages]


def lost_call(messages: Sequence[ChatMessage], text: str) -> int | None:
    """The index of a message whose call is not in the rendered text, or stands there as Python and not as JSON.

    Looked for behind the messages before it: most templates name the tools themselves in front of all of them.
    """
    behind = 0
    for index, message in enumerate(messages):
        for call in message.tool_calls:
            as_python = str(call.arguments)
            if text.find(call.name, behind) < 0 or ("'" in as_python and as_python in text):
                return index
        behind = max(behind, text.find(message.content.strip(), behind))
    return None


def _template_message(
    message: ChatMessage, way: TemplateWay, ids: Literal["given", "short"], thoughts: Sequence[str]
) -> dict[str, Any]:
    is_empty = bool(message.tool_calls) and not message.content
    content = None if is_empty and way.empty == "none" else message.content
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        fields["name"] = message.name
    is_alone = way.thoughts == "alone" and bool(message.tool_calls) and bool(message.content)
    if message.reasoning_content is not None and not is_alone:
        for name in ("reasoning_content", *thoughts):
            fields[name] = message.reasoning_content
    if message.tool_call_id is not None:
        fields["tool_call_id"] = _call_id(message.tool_call_id, ids)
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": _call_id(call.id, ids),
                "function": {
                    "name": call.name,
                    "arguments": call.arguments
                    if way.arguments == "mapping"
                    else json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _call_id(given: str, ids: Literal["given", "short"]) -> str:
    """Mistral's templates raise unless an id is nine letters and digits: another one gets nine that are its own."""
    if ids == "given" or (len(given) == 9 and given.isalnum()):
        return given
    return hashlib.blake2b(given.encode(), digest_size=5).hexdigest()[:9]
