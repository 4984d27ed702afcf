"""Reasoning in an answer: which markers a model uses, and whether its prompt leaves it thinking. Pure."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

Start = Literal["thinking", "answer"]
"""What the first character of an answer belongs to."""


@dataclass(frozen=True, kw_only=True)
class ThinkSyntax:
    """A block of reasoning stands between one of `opens` and one of `closes`. `layout` are markers around the visible
    answer: no text of it."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    layout: tuple[str, ...] = ()


def _pair(opens: str, closes: str, *layout: str) -> ThinkSyntax:
    return ThinkSyntax(opens=(opens,), closes=(closes,), layout=layout)


HARMONY = ThinkSyntax(
    opens=("<|channel|>analysis<|message|>",),
    closes=("<|end|>", "<|start|>assistant"),
    layout=(
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>commentary<|message|>",
        "<|end|>",
        "<|return|>",
    ),
)
"""gpt-oss: three channels, of which only `analysis` is reasoning."""

_KNOWN = (
    _pair("<think>", "</think>"),
    _pair("<longcat_think>", "</longcat_think>"),
    _pair("<seed:think>", "</seed:think>"),
    _pair("<|think:start|>", "<|think:end|>"),
    _pair("[THINK]", "[/THINK]"),
    _pair("<mm:think>", "</mm:think>"),
    _pair("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    _pair("<|channel>thought", "<channel|>"),
    _pair("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    _pair(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
    ),
)


def think_syntax(template: str, vocabulary: Container[str]) -> ThinkSyntax | None:
    """How this model marks its reasoning, by its chat template, else by its vocabulary; None: it does not.

    A vocabulary alone proves little (many that never think share one with a model that does), and costs as little: text
    without a marker is the answer.
    """
    if all(token in vocabulary for token in ("<|start|>", "<|channel|>", "<|message|>")):
        return HARMONY
    in_template = next((syntax for syntax in _KNOWN if syntax.closes[0] in template), None)
    if in_template is not None:
        return in_template
    if all(token in vocabulary for token in ("<|channel>", "<channel|>")):
        return next(syntax for syntax in _KNOWN if syntax.closes == ("<channel|>",))
    if all(token in vocabulary for token in ("<|open|>", "<|close|>", "<|sep|>")):
        return _KNOWN[-1]
    return next((s for s in _KNOWN if s.opens[0] in vocabulary and s.closes[0] in vocabulary), None)


def end_of_thinking(syntax: ThinkSyntax, follows: Literal["answer", "anything"]) -> str:
    """The text that ends a block where the model did not: on a line of its own, as models write it. A turn of gpt-oss
    goes on with a channel: `final` if an answer must follow, else one of the model's choice."""
    if syntax != HARMONY:
        return f"\n{syntax.closes[0]}"
    ends = "".join(syntax.closes)
    return f"{ends}<|channel|>final<|message|>" if follows == "answer" else ends


def start_after(tail: str, syntax: ThinkSyntax) -> Start:
    """What an answer begins with after a prompt that ends in `tail`: the part that no user wrote."""
    opened = max(tail.rfind(marker) for marker in syntax.opens)
    closed = max(tail.rfind(marker) for marker in syntax.closes)
    return "thinking" if opened >= 0 and opened > closed else "answer"
