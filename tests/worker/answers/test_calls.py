"""Calls that are not as they should be, and how many of them an answer may have."""

import json

import pytest

from tests.worker.answers.reading import TOOLS, parser_of, read
from worker.answers import formats
from worker.answers.envelope import STREAMED_FROM_CHARACTERS
from worker.answers.json_calls import mend_json_calls
from worker.answers.plan import read_foreign

HERMES = formats.HERMES


def called(inside: str) -> str:
    return f"<tool_call>{inside}</tool_call>"


# --- mending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ('{"name": "grep", "arguments": {"pattern": "a', {"pattern": "a"}),
        (r'{"name": "grep", "arguments": {"pattern": "\d+"}}', {"pattern": r"\d+"}),  # SC10
        (r'{"name": "grep", "arguments": {"pattern": "it\'s"}}', {"pattern": "it's"}),
        (r'{"name": "grep", "arguments": {"pattern": "\u12"}}', {"pattern": r"\u12"}),
        ('{"name": "grep", "arguments": {"pattern": "a\n\tb"}}', {"pattern": "a\n\tb"}),
        (
            "{'name': 'grep', 'arguments': {'pattern': 'say \"x\"', 'n': None, 'b': True}}",
            {"pattern": 'say "x"', "n": None, "b": True},
        ),
        ('{"name": "grep", "arguments": {"pattern": True, "n": -1}}', {"pattern": True, "n": -1}),
        ('{"name": "grep", "arguments": {"pattern": "a"}', {"pattern": "a"}),
        ('{"name": "grep", "arguments": {"pattern": "a"}}}', {"pattern": "a"}),
        ('{"name": "grep", "arguments": {"pattern": ["a", "b"}}', {"pattern": ["a", "b"]}),
    ],
)
def test_what_is_almost_json_is_mended(inside: str, arguments: dict[str, object]) -> None:
    """A03: the call that was meant, with a warning; its arguments are valid JSON."""
    answer = read(parser_of(HERMES), called(inside))

    assert [(name, json.loads(text)) for name, text in answer.whole] == [("grep", arguments)]
    assert answer.warnings == ("tool_call_repaired",)
    assert answer.text == ""


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "get_weather",
        '{"city": "Oslo"}',
        '{"name": 7, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "text"}',
        '{"name": "f" "arguments": {}}',
        "[[[[",
        "[" * 5000,
        '{"a":' * 5000,
    ],
)
def test_what_is_no_call_is_text(inside: str) -> None:
    """A04: the raw text with its markers, a warning, and no call."""
    answer = read(parser_of(HERMES), ["before ", called(inside), " after"])

    assert answer.calls == []
    assert answer.text == f"before {called(inside)} after"
    assert answer.warnings == ("tool_call_unparsed",)


def test_a_call_behind_a_bad_one_is_found() -> None:
    """One envelope that cannot be read does not swallow the next."""
    good = called('{"name": "get_time", "arguments": {"tz": "CET"}}')
    answer = read(parser_of(HERMES), called('{"name": "f", "arguments": {"a": "never closed}}') + good)

    assert answer.whole == [("f", '{"a": "never closed"}'), ("get_time", '{"tz": "CET"}')]
    assert answer.warnings == ("tool_call_repaired",)


@pytest.mark.parametrize(
    "end",
    ["stop", "length"],
)
def test_an_envelope_that_never_closes_is_text(end: str) -> None:
    """SC12: as the model ended by itself, and as the limit cut it."""
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Ri'
    answer = read(parser_of(HERMES), text, "stop" if end == "stop" else "length")

    assert answer.calls == []
    assert answer.text == text
    assert answer.warnings == (("tool_call_unparsed",) if end == "stop" else ("tool_call_cut",))


@pytest.mark.parametrize("held", ["<", "<tool", "<tool_call"])
def test_the_beginning_of_a_marker_is_text_at_the_end(held: str) -> None:
    """What was held back because it might have become a marker."""
    answer = read(parser_of(HERMES), f"so {held}", "length")

    assert answer.text == f"so {held}"
    assert answer.warnings == ()


# --- streaming -------------------------------------------------------------------------------------------------------


def test_long_arguments_stream() -> None:
    """Once they are longer than the bound, each piece goes on at once, and the call began before."""
    parser = parser_of(HERMES)
    assert parser.push('<tool_call>{"name": "edit_file", "arguments": {"text": "') == []
    assert parser.push("x" * (STREAMED_FROM_CHARACTERS - 10)) == []
    sent = [str(part) for piece in ("y" * 20, "z", "\n", '"}}\n</tool_call>') for part in parser.push(piece)]

    assert sent[0] == "CallBegan(index=0, name='edit_file')"
    assert sent[2] == "ArgumentsText(index=0, text='z')"
    assert sent[3] == r"ArgumentsText(index=0, text='\\n')"
    assert sent[-1] == "CallDone(index=0)"
    assert parser.warnings == ("tool_call_repaired",)


def test_a_long_call_that_is_cut_stays_data_of_the_call() -> None:
    """What was sent as arguments cannot become text; the call has no end, and the client is told."""
    text = '<tool_call>{"name": "edit_file", "arguments": {"text": "' + "x" * 100
    answer = read(parser_of(HERMES), text, "length")

    assert answer.text == ""
    assert [(call.name, call.is_whole) for call in answer.calls] == [("edit_file", False)]
    assert answer.calls[0].arguments.endswith("x" * 100)
    assert answer.warnings == ("tool_call_cut",)


def test_long_arguments_that_break_go_on_to_the_marker() -> None:
    """Joined they are what the model wrote; the client is told that they are not valid."""
    arguments = '{"text": "' + "x" * 100 + '", broken}'
    answer = read(parser_of(HERMES), [called(f'{{"name": "edit_file", "arguments": {arguments}}}'), "after"])

    assert answer.whole == [("edit_file", arguments + "}")]
    assert answer.text == "after"
    assert answer.warnings == ("arguments_invalid",)


def test_text_between_long_arguments_and_the_marker_is_not_lost() -> None:
    """Nor are brackets too many taken for text."""
    head = '{"name": "edit_file", "arguments": {"text": "' + "x" * 100 + '"}'

    assert read(parser_of(HERMES), called(head + "}}}")).text == ""
    assert "remark" in read(parser_of(HERMES), called(head + "} remark ")).text
    never = read(parser_of(HERMES), f"<tool_call>{head} " + "prose " * 200)
    assert never.text.count("prose") == 200
    assert len(never.whole) == 1


# --- which calls ------------------------------------------------------------------------------------------------------


def test_a_tool_that_is_not_in_the_list_passes() -> None:
    """A07, SC13: unchanged; the client answers that it does not know it."""
    answer = read(parser_of(HERMES), called('{"name": "no_such_tool", "arguments": {}}'))

    assert answer.whole == [("no_such_tool", "{}")]
    assert answer.warnings == ()


def test_only_one_call() -> None:
    """A02: parallel_tool_calls false ends the answer after the first whole call."""
    text = called('{"name": "get_time", "arguments": {}}') * 2
    parser = parser_of(HERMES, calls="one")
    answer = read(parser, text)

    assert answer.whole == [("get_time", "{}")]
    assert parser.is_over


def test_nothing_between_two_calls() -> None:
    """A02: the line break between them is layout."""
    text = "\n".join(called(f'{{"name": "get_time", "arguments": {{"tz": "{tz}"}}}}') for tz in "AB") + "\n"
    answer = read(parser_of(HERMES), text)

    assert [arguments for _, arguments in answer.whole] == ['{"tz": "A"}', '{"tz": "B"}']
    assert answer.text == ""


@pytest.mark.parametrize(
    ("arguments", "is_valid"),
    [
        ('{"city": "Oslo", "days": 3}', True),
        ('{"city": "Oslo", "days": "three"}', False),
        ('{"days": 3}', False),
    ],
)
def test_arguments_against_the_schema_are_said_to_be(arguments: str, is_valid: bool) -> None:  # noqa: FBT001
    """The client is told, and gets them as they are."""
    answer = read(parser_of(HERMES), called(f'{{"name": "get_weather", "arguments": {arguments}}}'))

    assert answer.whole == [("get_weather", arguments)]
    assert answer.warnings == (() if is_valid else ("arguments_invalid",))


# --- other readers ----------------------------------------------------------------------------------------------------


def test_mlx_lms_own_parsers_are_asked() -> None:
    """A family that only mlx-lm can read; and one whose parser raises, or says that it does not know."""
    from worker.mlx_model import import_mlx_lm

    import_mlx_lm()
    from mlx_lm.tool_parsers import glm47, kimi_k3, longcat

    inside = (
        '<|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|><|close|>call<|sep|>'
    )
    form = formats.foreign(kimi_k3.tool_call_start, kimi_k3.tool_call_end)
    text = f"{kimi_k3.tool_call_start}{inside}{kimi_k3.tool_call_end}"
    parser = parser_of(form, foreign_parser=kimi_k3.parse_tool_call)

    assert read(parser, text).whole == [("get_weather", '{"city": "Oslo"}')]
    assert read_foreign(longcat.parse_tool_call, "nothing", TOOLS) is None
    assert read_foreign(glm47.parse_tool_call, "", TOOLS) is None


def test_mending_gives_up_on_what_is_too_much() -> None:
    """However deep or long: an answer, never an exception."""
    for text in ("{" * 20_000, "[" * 20_000, "(" * 20_000, "{'a':" * 20_000, '"' * 9_999, "-" * 20_000):
        assert mend_json_calls(text, ()) is None
