"""Tools for a model whose chat template knows none: a system text tells it, calls and results are plain text. Pure.

Read back with the Hermes format, which is what most models have seen.
"""

from collections.abc import Sequence
from typing import Literal

from protocol.generation import ChatMessage
from protocol.tools import Tool
from worker.answers.call_syntax import HERMES, CallSyntax
from worker.answers.openai_tools import openai_tool
from worker.answers.readings import as_json

_BEFORE_TOOLS = (
    "You can call functions. Each line between <tools> and </tools> is one, with a schema of its parameters."
)
_AFTER_TOOLS = (
    "To call a function, write this and nothing after it, once for each call:\n"
    '<tool_call>\n{"name": "the function", "arguments": {"parameter": "value"}}\n</tool_call>\n'
    "You will then be given the result between <tool_response> and </tool_response>. "
    "When no function helps, answer in plain text."
)


def told_of_tools(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], told: Literal["system", "user"] = "system"
) -> tuple[ChatMessage, ...]:
    """The conversation with a system text about the tools, behind the client's own system text if there is one.

    `told` "user" puts it before the text of the first message, for templates that take no system message.
    """
    lines = "\n".join(as_json(openai_tool(tool)) for tool in tools)
    text = f"{_BEFORE_TOOLS}\n<tools>\n{lines}\n</tools>\n{_AFTER_TOOLS}"
    plain = without_calls(messages, HERMES)
    if told == "user" and plain:
        first = plain[0]
        return (ChatMessage(role=first.role, content=f"{text}\n\n{first.content}", name=first.name), *plain[1:])
    if plain and plain[0].role in ("system", "developer"):
        first = plain[0]
        content = f"{first.content}\n\n{text}" if first.content else text
        return (ChatMessage(role=first.role, content=content, name=first.name), *plain[1:])
    return (ChatMessage(role="system", content=text), *plain)


def without_calls(
    messages: Sequence[ChatMessage], syntax: CallSyntax, results: Literal["user", "tool"] = "user"
) -> tuple[ChatMessage, ...]:
    """The same conversation with its calls in the assistant's text, and their results in a role the template knows."""
    plain: list[ChatMessage] = []
    follows_result = False
    for message in messages:
        is_result = message.role == "tool" and results == "user"
        if is_result:
            content = f"<tool_response>\n{message.content}\n</tool_response>"
            if follows_result:
                content = f"{plain.pop().content}\n{content}"
            plain.append(ChatMessage(role="user", content=content))
        elif message.tool_calls:
            content = (
                f"{message.content}\n{_written(message, syntax)}" if message.content else _written(message, syntax)
            )
            reasoning = message.reasoning_content
            plain.append(ChatMessage(role=message.role, content=content, reasoning_content=reasoning))
        else:
            plain.append(message)
        follows_result = is_result
    return tuple(plain)


def _written(message: ChatMessage, syntax: CallSyntax) -> str:
    calls = [
        f"{syntax.before_name}{call.name}{syntax.before_arguments}{as_json(call.arguments)}{syntax.after_arguments}"
        for call in message.tool_calls
    ]
    return f"{syntax.section_start}{syntax.separator.join(calls)}{syntax.section_end}"
