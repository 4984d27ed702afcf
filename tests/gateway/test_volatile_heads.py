"""K08: known heads are taken off and nothing else is; two texts that differ only in a date have one form."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.volatile_heads import volatile_form, volatile_words, without_volatile_head

FRAME = "You are a careful programmer. Answer briefly."


@pytest.mark.parametrize(
    "head",
    [
        "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=a1b2c;",
        "x-anthropic-billing-header: cch=00000",
        "X-Anthropic-Billing-Header:cc_version=2.0.1;cch=",
        "x-anthropic-billing-header: cc_version=2.1.81.c2a; cc_entrypoint=claude-vscode; cch=00000; cc_workload=cron;",
        "\n  x-anthropic-billing-header: cc_version=2.1.63.a43; cc_entrypoint=sdk-py; cch=fa690;",
        "\ufeffx-anthropic-billing-header: cch=a1b2c;",
    ],
)
def test_a_known_head_is_taken_off(head: str) -> None:
    """Alone in a part of its own, or as the first line: what is left is the same whatever the head said."""
    assert without_volatile_head(head) == ""
    assert without_volatile_head(f"{head}\n{FRAME}") == FRAME
    assert without_volatile_head(f"{head}\r\n{FRAME}") == FRAME


@pytest.mark.parametrize(
    "text",
    [
        "",
        FRAME,
        f"{FRAME}\nx-anthropic-billing-header: cch=1;",
        "x-anthropic-billing-header: please explain what this header is for",
        "x-anthropic-billing-header: cch=1; You are a careful programmer.",
        "x-anthropic-billing-header",
        "x-anthropic-billing-header: cch=1 You are a careful programmer.",
        " \n " + FRAME,
        "x-anthropic-billing-header: cch=" + "1" * 2000 + "\nYou are",
    ],
)
def test_text_for_the_model_is_never_dropped(text: str) -> None:
    """Only a whole first line of fields is a head; a question about the header stays a question."""
    assert without_volatile_head(text) == text


@given(st.text(max_size=200))
def test_other_texts_stay_as_they_are(text: str) -> None:
    """And taking a head off twice is taking it off once, as long as there is only one."""
    assert without_volatile_head(text) == text or "x-anthropic-billing-header:" in text.lower()
    assert without_volatile_head("x-anthropic-billing-header: cch=1;\n" + text) == text


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        ("Today is 2026-01-12.", "Today is 2026-02-03.", {"date"}),
        ("Today is Monday, January 12, 2026.", "Today is Tuesday, January 13, 2026.", {"date"}),
        ("It is 12 Jan 2026, 9:05 AM", "It is 13 Feb 2026, 11:45 PM", {"date", "time"}),
        ("now: 2026-01-12T10:05:33.123Z", "now: 2026-01-12T10:05:34.001Z", {"time"}),
        (
            "session 550e8400-e29b-41d4-a716-446655440000",
            "session 6fa459ea-ee8a-3ca4-894e-db77e160355e",
            {"uuid"},
        ),
        ("commit 0a1b2c3d4e5f", "commit ffee00112233", {"id"}),
        # what `date` prints, with its padded day
        ("Now: Mon Jan 12 10:05:33 UTC 2026", "Now: Tue Feb  3 11:15:01 UTC 2026", {"date", "time"}),
        ("Today is Monday the 12th of January", "Today is Tuesday the 3rd of February", {"date"}),
        ("It is 10:05 CET, still 9am", "It is 11:06 CEST, still 10 PM", {"time"}),
        # a git status in a coding agent's system prompt
        ("Recent commits:\n3e1f2a9 wip\n77bd012 more", "Recent commits:\n90ab1cd wip\n3e1f2a9 more", {"id"}),
        # a ULID, and an id as APIs give them
        ("session 01JH3Y8K2Q5T7V9X1Z3B5D7F9H", "session 01JH3Y9M4R6S8W0Y2A4C6E8G0J", {"id"}),
        ("after req_011CSHoEeqs5C35K2UUqR7Fy", "after req_011CSHoExxs5C11K2UUqR9Ab", {"id"}),
        ("This is request 41 of today", "This is request 42 of today", {"number"}),
    ],
)
def test_texts_that_differ_in_something_volatile_have_one_form(one: str, other: str, kinds: set[str]) -> None:
    """And the values of each kind say in which kinds they differ."""
    first, second = volatile_form(one), volatile_form(other)
    assert first.text == second.text
    assert first.values.keys() == second.values.keys()
    assert {kind for kind in first.values if first.values[kind] != second.values[kind]} == kinds


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Use the tool look_at_every_file", "Use the tool look_at_another_file"),
        ("internationalization", "interoperabilities__"),
        ("Answer in May", "Answer in March"),
        ("It is 10:05 in LIGHT", "It is 10:05 in NIGHT"),
    ],
)
def test_other_words_are_other_texts(one: str, other: str) -> None:
    """What a person wrote is not taken for an id or a time."""
    assert volatile_form(one).text != volatile_form(other).text


@given(st.text(max_size=300))
def test_form_and_values_tell_texts_apart(text: str) -> None:
    """Nothing is lost: with its values put back a form is the text again, so equal ones mean equal texts."""
    form = volatile_form(text)
    values = {kind: iter(found.split("\0")) for kind, found in form.values.items()}
    back: list[str] = []
    rest = form.text
    while rest:
        if not rest.startswith("\0"):
            back.append(rest[0])
            rest = rest[1:]
        elif rest.startswith("\0\0"):
            back.append("\0")
            rest = rest[2:]
        else:
            kind, _, rest = rest[1:].partition("\0")
            back.append(next(values[kind]))  # pyright: ignore[reportArgumentType]
    assert "".join(back) == text


@pytest.mark.parametrize(
    "pattern",
    ["1", "a1", "1-", "1:", "Jan ", "12:30:30.", "550e8400-", "May 1, ", "\0", "x-anthropic-billing-header:="],
)
def test_no_text_takes_long(pattern: str) -> None:
    """Time grows with length alone, whatever an attacker sends."""
    text = pattern * (400_000 // len(pattern))
    began = time.process_time()
    volatile_form(text)
    without_volatile_head("x-anthropic-billing-header:" + text)
    assert time.process_time() - began < 2.0


def test_kinds_are_named_in_words() -> None:
    """As they stand in an explanation."""
    assert volatile_words(("date",)) == "a date"
    assert volatile_words(("date", "time", "uuid")) == "a date, a time and a uuid"
