"""Stop strings: found in text, whatever the tokens; never seen by a client."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.output import StopStrings


def read(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    """All that a client sees of these pieces, and the stop that ended them."""
    finder = StopStrings(stops)
    text = ""
    for piece in pieces:
        emitted = finder.push(piece)
        text += emitted.text
        if emitted.matched is not None:
            return text, emitted.matched
    return text + finder.flush(), None


def read_naively(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """One more character at a time, until the text so far ends with a stop."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "seen", "matched"),
    [
        (("beta gamma",), ["alpha", " be", "ta ga", "mma", " delta"], "alpha ", "beta gamma"),  # B02, SC04
        (("gamma",), ["alpha", " be", "ta ga", "mma", " delta"], "alpha beta ", "gamma"),
        (("t005 t006",), [f" t{i:03d}" for i in range(200)], " t000 t001 t002 t003 t004 ", "t005 t006"),  # SC19
        (("la la la",), [" la"] * 9, " ", "la la la"),  # SC20
        ((), ["a", "b"], "ab", None),
        (("",), ["a", "b"], "ab", None),
        (("ab",), ["a"], "a", None),  # held back, then text after all
        (("ab", "b"), ["a", "b"], "", "ab"),  # both complete here: the longer one leaks nothing
        (("abcd", "bc"), ["abcd"], "a", "bc"),  # the one that completes first
        (("aab",), ["a", "a", "a", "b"], "a", "aab"),  # a failed beginning that holds another one
        (("\n\n",), ["x\n", "\ny"], "x", "\n\n"),
        (("ö",), ["sch", "ön"], "sch", "ö"),
    ],
)
def test_field_cases(stops: tuple[str, ...], pieces: list[str], seen: str, matched: str | None) -> None:
    """B02 and its kin."""
    assert read(stops, pieces) == (seen, matched)


ALPHABET = st.sampled_from("abc ")
STOPS = st.lists(st.text(ALPHABET, max_size=4), max_size=4).map(tuple)


@given(STOPS, st.lists(st.text(ALPHABET, max_size=6), max_size=12))
def test_the_cut_of_the_text_does_not_matter(stops: tuple[str, ...], pieces: list[str]) -> None:
    """What a client sees depends on the text alone, not on how tokens cut it."""
    assert read(stops, pieces) == read_naively(stops, "".join(pieces))


@given(STOPS, st.lists(st.text(ALPHABET, max_size=6), max_size=12))
def test_no_stop_string_leaks(stops: tuple[str, ...], pieces: list[str]) -> None:
    """Not in any delta, not across deltas, not at the end."""
    seen, _ = read(stops, pieces)

    assert not any(stop in seen for stop in stops if stop)


@given(st.text(ALPHABET, max_size=30))
def test_text_is_held_back_only_while_it_may_be_a_stop(text: str) -> None:
    """A reader sees each character as soon as it cannot belong to a stop any more."""
    finder = StopStrings(("abc",))
    seen = ""
    for character in text:
        emitted = finder.push(character)
        seen += emitted.text
        if emitted.matched is not None:
            return
    held = text[len(seen) :]
    assert held in ("", "a", "ab")
