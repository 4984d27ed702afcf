"""Reasoning: where it begins and ends, and that no piece of a tag is seen."""

import pytest

from tests.worker.answers.reading import parser_of, read
from worker.answers import formats, thinking
from worker.answers.parts import AnswerEnd
from worker.answers.thinking import Start, ThinkSyntax, start_after, think_syntax

THINK = ThinkSyntax(opens=("<think>",), closes=("</think>",))


@pytest.mark.parametrize(
    ("starts", "text", "thought", "shown"),
    [
        ("answer", "<think>why15 because</think>answer15", "why15 because", "answer15"),  # SC15
        ("thinking", "implicit16 reasoning</think>answer16", "implicit16 reasoning", "answer16"),  # SC16
        ("answer", "<think></think>answer21", "", "answer21"),  # SC21
        ("answer", "<think>\n\n</think>\n\nanswer", "", "answer"),
        ("answer", "<think>\nwhy\n</think>\n\nanswer\n", "why", "answer\n"),
        ("answer", "\n<think>why</think>answer", "why", "answer"),
        ("answer", "alpha beta", "", "alpha beta"),  # SC04
        ("answer", "\n  alpha", "", "\n  alpha"),
        ("answer", "a <think>b</think> c", "", "a <think>b</think> c"),
        ("answer", "</think>x", "", "</think>x"),
        ("thinking", "<think>twice</think>x", "twice", "x"),
        ("thinking", "why <think> so</think>x", "why <think> so", "x"),
        ("thinking", "  indented\n    more</think>\n\n    code", "  indented\n    more", "    code"),
        ("answer", "<think>one</think><think>two</think>x", "onetwo", "x"),
        ("thinking", "never closed </thi", "never closed </thi", ""),
        ("answer", "<thin", "", "<thin"),
        ("thinking", "", "", ""),
    ],
)
@pytest.mark.parametrize("end", ["stop", "length"])
def test_reasoning_is_told_apart(starts: Start, text: str, thought: str, shown: str, end: AnswerEnd) -> None:
    """D01, D02, D03: whole and character by character; a block that never closes is reasoning to the end."""
    for pieces in ([text], list(text)):
        answer = read(parser_of(thinking=THINK, starts=starts), pieces, end)

        assert (answer.thought, answer.text) == (thought, shown)


def test_each_piece_is_seen_as_it_comes() -> None:
    """D01: text waits only while it may become a tag."""
    parser = parser_of(thinking=THINK, starts="thinking")

    assert [parser.push(piece) for piece in ("a", "b<", "c", "</th")] == [
        [thinking_part("a")],
        [thinking_part("b")],
        [thinking_part("<c")],
        [],
    ]


def thinking_part(text: str) -> object:
    from worker.answers.parts import Thought

    return Thought(text)


def test_a_call_after_reasoning() -> None:
    """The line breaks around both are layout: the text is empty, not blank."""
    text = '<think>\nI must look.\n</think>\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    answer = read(parser_of(formats.HERMES, thinking=THINK), text)

    assert (answer.thought, answer.text) == ("I must look.", "")
    assert answer.kinds == ["Thought", "CallBegan", "ArgumentsText", "CallDone"]


def test_what_is_thought_about_is_no_call() -> None:
    """A model that rehearses a call in its reasoning has not made it."""
    text = '<think>I could say <tool_call>{"name": "get_time", "arguments": {}}</tool_call></think>No.'
    answer = read(parser_of(formats.HERMES, thinking=THINK), text)

    assert answer.calls == []
    assert answer.text == "No."


@pytest.mark.parametrize(
    ("text", "thought", "shown", "calls"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello",
            "Hm.",
            "Hello",
            [],
        ),
        (
            "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}',
            "Need it.",
            "",
            [("get_weather", '{"city":"Oslo"}')],
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
            "<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Done.",
            "ab",
            "I look.Done.",
            [],
        ),
        ("<|channel|>final<|message|>Just text", "", "Just text", []),
        ("Just text", "", "Just text", []),
        ("<|channel|>analysis<|message|>cut here", "cut here", "", []),
    ],
)
def test_harmony(text: str, thought: str, shown: str, calls: list[tuple[str, str]]) -> None:
    """gpt-oss: analysis is reasoning, final and commentary are text, a recipient makes a call."""
    for pieces in ([text], list(text)):
        answer = read(parser_of(formats.HARMONY, thinking=thinking.HARMONY), pieces)

        assert (answer.thought, answer.text, answer.whole) == (thought, shown, calls)


@pytest.mark.parametrize(
    ("tail", "starts"),
    [
        ("<|im_end|>\n<|im_start|>assistant\n", "answer"),
        ("<|im_end|>\n<|im_start|>assistant\n<think>\n", "thinking"),
        ("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "answer"),
        ("", "answer"),
    ],
)
def test_the_prompts_end_says_where_an_answer_begins(tail: str, starts: str) -> None:
    """D01, D03."""
    assert start_after(tail, THINK) == starts


@pytest.mark.parametrize(
    ("template", "vocabulary", "closes"),
    [
        ("… <think> … </think> …", set(), "</think>"),
        ("…", {"<think>", "</think>"}, "</think>"),
        ("… [THINK] [/THINK]", set(), "[/THINK]"),
        ("… <seed:think> </seed:think>", set(), "</seed:think>"),
        ("… <|START_THINKING|> <|END_THINKING|>", set(), "<|END_THINKING|>"),
        ("…", {"<|channel>", "<channel|>"}, "<channel|>"),
        ("…", {"<|start|>", "<|channel|>", "<|message|>"}, "<|end|>"),
        ("…", {"<|open|>", "<|close|>", "<|sep|>"}, "<|close|>think<|sep|>"),
    ],
)
def test_markers_of_a_model(template: str, vocabulary: set[str], closes: str) -> None:
    """By its template, else by its vocabulary."""
    syntax = think_syntax(template, vocabulary)

    assert syntax is not None
    assert syntax.closes[0] == closes


def test_a_model_without_markers() -> None:
    """It cannot think aloud."""
    assert think_syntax("{{ messages }}", {"a", "b"}) is None
