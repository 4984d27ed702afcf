"""What an answer is made of, as its reader finds it. Pure."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Text:
    """More of the visible answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class CallBegan:
    """A call of this tool; calls are numbered from 0 and one is over before the next begins."""

    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsText:
    """More of a call's arguments, JSON as text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallDone:
    """The call is whole."""

    index: int


Part = Text | Thought | CallBegan | ArgumentsText | CallDone

AnswerEnd = Literal["stop", "length", "stop_string"]
"""Why no more text comes: the model's own end, the token limit, or a stop string of the client."""


def joined(parts: list[Part]) -> list[Part]:
    """The same parts, neighbours of one kind put together and empty ones left out."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        match part:
            case Text(text=text) | Thought(text=text) | ArgumentsText(text=text) if not text:
                continue
            case Text(text=text) if isinstance(last, Text):
                result[-1] = Text(last.text + text)
            case Thought(text=text) if isinstance(last, Thought):
                result[-1] = Thought(last.text + text)
            case ArgumentsText(index=index, text=text) if isinstance(last, ArgumentsText) and last.index == index:
                result[-1] = ArgumentsText(index, last.text + text)
            case _:
                result.append(part)
    return result
