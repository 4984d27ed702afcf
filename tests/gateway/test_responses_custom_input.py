"""A custom tool's arguments, however they are cut, and its input."""

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.responses.custom_input import CustomInput

PLACES = st.lists(st.integers(0, 10**6), max_size=12)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


def fed(*pieces: str) -> tuple[list[str], str | None]:
    """What each piece gave, what the end gave, and the arguments if they hold more than the input."""
    custom = CustomInput()
    given = [custom.feed(piece) for piece in pieces]
    return [*given, custom.end()], custom.arguments


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


# --- table -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "*** Begin Patch\\n+a\\n"}', "*** Begin Patch\n+a\n"),
        (' { "input" : "x" } ', "x"),
        ('{"input":""}', ""),
        ('{"input": "\\ud83d\\ude80"}', "\N{ROCKET}"),
        ('{"input": "a\\ud83dz"}', "a\N{REPLACEMENT CHARACTER}z"),
        ('{"input": "\\ude80"}', "\N{REPLACEMENT CHARACTER}"),
        ('{"input": "a raw\nline"}', "a raw\nline"),
        ('{"input": "\\d+ \\uZZ"}', "\\d+ \\uZZ"),
        ('{"input": "cut \\u00', "cut \\u00"),
        ('{"input": "cut \\', "cut \\"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"inp', '{"inp'),
        ("plain text", "plain text"),
        ('"a string"', '"a string"'),
        ("{}", "{}"),
        ("", ""),
    ],
)
def test_the_input_of_arguments(arguments: str, expected: str) -> None:
    """The text inside; what is no such object is the input as it stands; what JSON knows no escape for is itself."""
    given, more = fed(arguments)
    assert "".join(given) == expected
    assert more is None


def test_more_than_the_input_is_not_lost() -> None:
    """A second key has no place in an input: it is in the arguments, which say all that the model wrote."""
    arguments = '{"input": "x", "why": "because"}'
    given, more = fed(*arguments)
    assert ("".join(given), more) == ("x", arguments)


def test_it_comes_as_it_is_written() -> None:
    """Nothing is held back but an escape that is not whole."""
    given, _ = fed('{"input": "one', " two", "\\", "n", "three", '"}')
    assert given == ["one", " two", "", "\n", "three", "", ""]


# --- properties ------------------------------------------------------------------------------------------------------


@given(TEXTS, PLACES, st.sampled_from(["ascii", "utf-8"]), st.sampled_from(["", "\n", "  "]))
@example("\N{ROCKET}", [17, 19, 21, 23], "ascii", "")
def test_any_text_survives_any_cut(text: str, places: list[int], written: str, space: str) -> None:
    """Whatever JSON a model's text is written as, and however it is cut: the input is the text."""
    quoted = json.dumps(text, ensure_ascii=written == "ascii")
    arguments = space.join(["", "{", '"input"', ":", quoted, "}", ""])
    given, more = fed(*cut(arguments, places))
    assert ("".join(given), more) == (text, None)


@given(st.text('{}"inputx\\du0: \n', max_size=40), PLACES)
def test_a_cut_changes_nothing(arguments: str, places: list[int]) -> None:
    """Arguments of any form, valid or not: in pieces or at once they give the same."""
    in_pieces, more_in_pieces = fed(*cut(arguments, places))
    at_once, more_at_once = fed(arguments)
    assert ("".join(in_pieces), more_in_pieces) == ("".join(at_once), more_at_once)
