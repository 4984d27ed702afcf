"""What to say to a chat template: the conversation as it is, then in other words for templates that know less. Pure."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal, NamedTuple

from protocol.generation import ChatMessage
from protocol.tools import Tool
from worker.answers.call_syntax import HERMES, CallSyntax
from worker.answers.tool_preamble import told_of_tools, without_calls

ToldBy = Literal["template", "preamble"]
"""Who told the model of its tools, and so how it will write a call."""


class Conversation(NamedTuple):
    """Messages to try, and whether the template is to be given the tools with them."""

    messages: tuple[ChatMessage, ...]
    told_by: ToldBy = "template"


def conversations(
    given: Sequence[ChatMessage], tools: Sequence[Tool], template: str, syntax: CallSyntax | None
) -> Iterator[Conversation]:
    """What to try, from what was sent to what differs most from it.

    Many templates raise on a system message that is not the first, or drop it; then such messages are folded into the
    user turn that follows, so that every earlier token stays what it was (hoisting them to the front would change the
    whole prefix at each turn). Some take one call a message only; some know tools but no calls of the past, which are
    then text as the model writes it (`syntax`); some know neither, and the model is told by a text of ours. So it is,
    too, where nobody knows how the template teaches it to call (`syntax` None).
    `template` "None": mlx-lm renders with code of its own, which is for models that know all of it.
    """
    messages = tuple(given) if "developer" in template else tuple(_as_system(message) for message in given)
    knows_all = template == "None"
    knows_tools = not tools or (syntax is not None and (knows_all or "tools" in template))
    has_calls = any(message.tool_calls or message.role == "tool" for message in messages)
    kinds: list[Conversation] = []
    if knows_tools and (knows_all or not has_calls or "tool" in template):
        kinds.append(Conversation(messages))
        if any(len(message.tool_calls) > 1 for message in messages):
            kinds.append(Conversation(one_call_a_message(messages)))
    if knows_tools and has_calls:
        own = syntax or HERMES
        if "tool" in template:
            kinds.append(Conversation(without_calls(messages, own, results="tool")))
        kinds.append(Conversation(without_calls(messages, own)))
    if tools:
        kinds.append(Conversation(told_of_tools(messages, tools), "preamble"))
        if messages and messages[0].role == "user":
            kinds.append(Conversation(told_of_tools(messages, tools, told="user"), "preamble"))
    for kind, fold in product(kinds, (tuple[ChatMessage, ...], fold_system_messages)):
        yield Conversation(fold(kind.messages), kind.told_by)


def one_call_a_message(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Several calls of one message become as many messages, each before its own result where that is known."""
    result: list[ChatMessage] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.tool_calls) < 2:
            result.append(message)
            continue
        results: list[ChatMessage] = []
        while at < len(messages) and messages[at].role == "tool":
            results.append(messages[at])
            at += 1
        for place, call in enumerate(message.tool_calls):
            result.append(
                ChatMessage(
                    role=message.role,
                    content=message.content if place == 0 else "",
                    reasoning_content=message.reasoning_content if place == 0 else None,
                    tool_calls=(call,),
                )
            )
            own = [answer for answer in results if answer.tool_call_id == call.id]
            result += own
            results = [answer for answer in results if answer.tool_call_id != call.id]
        result += results
    return tuple(result)


def fold_system_messages(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Leading system messages become one; later ones go into the user message that follows (or end the one before)."""
    leading: list[str] = []
    folded: list[ChatMessage] = []
    notes: list[str] = []
    for message in messages:
        if message.role in ("system", "developer"):
            (notes if folded else leading).append(message.content)
        elif message.role == "user" and notes:
            folded.append(_with_content(message, "\n\n".join([*notes, message.content])))
            notes = []
        else:
            folded.append(message)
    if notes:
        last_user = next((i for i in reversed(range(len(folded))) if folded[i].role == "user"), None)
        if last_user is None:
            folded.append(ChatMessage(role="user", content="\n\n".join(notes)))
        else:
            folded[last_user] = _with_content(folded[last_user], "\n\n".join([folded[last_user].content, *notes]))
    if leading:
        folded.insert(0, ChatMessage(role="system", content="\n\n".join(leading)))
    return tuple(folded)


def _as_system(message: ChatMessage) -> ChatMessage:
    if message.role != "developer":
        return message
    return ChatMessage(role="system", content=message.content, name=message.name)


def _with_content(message: ChatMessage, content: str) -> ChatMessage:
    return ChatMessage(role=message.role, content=content, name=message.name)
