"""An answer's meaning depends on its text alone: not on how tokens cut it, whatever nonsense the text is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.answers.reading import parser_of, read
from worker.answers import formats
from worker.answers.formats import CallFormat
from worker.answers.thinking import HARMONY, ThinkSyntax

THINK = ThinkSyntax(opens=("<think>",), closes=("</think>",), layout=("<|END|>",))

FORMS = [
    formats.HERMES,
    formats.QWEN_CODER,
    formats.GLM,
    formats.MINIMAX,
    formats.MISTRAL_LIST,
    formats.MISTRAL_NAMED,
    formats.LLAMA,
    formats.DEEPSEEK_V3,
    formats.DEEPSEEK_V31,
    formats.KIMI_K2,
    formats.PHI,
    formats.GRANITE_LIST,
    formats.COMMAND,
    formats.GEMMA4,
    formats.LFM2,
    formats.HARMONY,
]

COMMON = [
    *("<think>", "</think>", "<|END|>", "<", ">", "\n", "  ", "text", "ü", "{", "}", "[", "]", '"', "\\", "\\d", "\t"),
    *('"name": "get_time"', '"arguments": {', '"parameters": {', ", ", ";", '"tz": "CET"', "'", "null", "a" * 70),
    *('{"name": "get_time", "arguments": {"tz": "CET"}}', '{"name": "get_time", "parameters": {"tz": "' + "x" * 70),
    *(
        "get_time(",
        "tz='CET')",
        "call:get_time{tz:1}",
        "<function=get_time>",
        "</function>",
        "<parameter=tz>",
        "get_time",
    ),
    *("</parameter>", "<arg_key>tz</arg_key>", "<arg_value>", "</arg_value>", "[ARGS]", "```json\n", "```", ":0"),
    *("<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "function", "<|message|>", "<|constrain|>json", "<|call|>"),
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant"),
]


def texts(form: CallFormat) -> st.SearchStrategy[str]:
    """Salads of the format's own pieces."""
    markers = [*form.opens, *form.closes, *form.sections]
    pieces = st.sampled_from([*COMMON, *markers, *markers, *markers])
    return st.lists(pieces, max_size=14).map("".join)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("calls", ["many", "one"])
@settings(max_examples=40)
@given(data=st.data())
def test_the_cut_of_the_text_does_not_matter(form: CallFormat, calls: str, data: st.DataObject) -> None:
    """Any cutting into pieces gives the same reasoning, text, calls and warnings."""
    text = data.draw(texts(form))
    starts = data.draw(st.sampled_from(["thinking", "answer"]))
    end = data.draw(st.sampled_from(["stop", "length"]))
    thinking = HARMONY if form is formats.HARMONY else THINK
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def parser() -> object:
        return parser_of(form, thinking=thinking, starts=starts, calls=calls)

    whole = read(parser(), [text], end)  # pyright: ignore
    assert read(parser(), pieces, end) == whole  # pyright: ignore
    assert read(parser(), text, end) == whole  # pyright: ignore


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=40)
@given(data=st.data())
def test_text_without_a_call_is_the_text(form: CallFormat, data: st.DataObject) -> None:
    """A04: whatever looks like a call and is none comes back to the letter, markers included."""
    text = data.draw(texts(form))
    answer = read(parser_of(form), text, data.draw(st.sampled_from(["stop", "length", "stop_string"])))

    if not answer.calls:
        assert answer.text == text


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=40)
@given(data=st.data())
def test_what_is_no_marker_is_never_lost(form: CallFormat, data: st.DataObject) -> None:
    """Beside whatever else an answer holds, a word in it reaches the client, as text, reasoning or data of a call."""
    before, after = data.draw(texts(form)), data.draw(texts(form))
    answer = read(parser_of(form, thinking=THINK), before + "Wörtchen" + after)

    everything = answer.text + answer.thought + "".join(call.name + call.arguments for call in answer.calls)
    assert "Wörtchen" in everything


@given(st.lists(st.sampled_from(["a", "<", "<think>", "</think>", "\n", " "]), max_size=12).map("".join))
def test_reasoning_and_text_hold_every_word(text: str) -> None:
    """Nothing but markers and white space is left out, nothing is doubled."""
    answer = read(parser_of(thinking=THINK), text)

    seen = answer.thought + answer.text
    assert seen.count("a") == text.count("a")
    assert not answer.calls
