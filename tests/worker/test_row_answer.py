"""A row's events: every token is counted once, with its logprob, in the part that its text went to."""

import itertools

from protocol.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    ChosenLogprob,
    Delta,
    Reasoning,
    TokenLogprob,
)
from protocol.ids import RequestId
from worker.answers import formats
from worker.answers.plan import AnswerPlan
from worker.answers.thinking import ThinkSyntax
from worker.row_answer import RowAnswer

THINK = ThinkSyntax(opens=("<think>",), closes=("</think>",))


def events_of(plan: AnswerPlan, text: str, scored: str = "no") -> tuple[RowAnswer, list[object]]:
    """One token a character."""
    ids = itertools.count()
    row = RowAnswer(RequestId("r"), plan.parser(), lambda: f"call_{next(ids)}")
    events: list[object] = []
    for character in text:
        row.drew()
        if scored == "yes":
            row.scored(ChosenLogprob(chosen=TokenLogprob(token=character, token_bytes=b"", logprob=-1.0)))
        events += row.push(character)
    row.drew()  # the end's token
    return row, [*events, *row.finish("", "stop")]


TEXT = (
    '<think>\nwhy\n</think>\n\nI ask.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>{"name": "g"}</tool_call>'
)
PLAN = AnswerPlan(thinking=THINK, form=formats.HERMES)


def test_the_events_of_an_answer() -> None:
    """In order, each call with an id of its own, and a start and an end."""
    row, events = events_of(PLAN, TEXT)
    kinds = [type(event) for event in events]

    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "why"
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "I ask."
    assert kinds[-6:] == [CallStarted, CallArguments, CallEnded] * 2
    assert [event.call_id for event in events if isinstance(event, CallStarted)] == ["call_0", "call_1"]
    assert row.has_whole_call
    assert not row.is_over


def test_tokens_and_logprobs_are_counted_once() -> None:
    """They sum up to what was drawn, but for the token that ended the row; reasoning is a part of them."""
    row, events = events_of(PLAN, TEXT, scored="yes")
    carriers = [event for event in events if isinstance(event, Delta | Reasoning | CallArguments)]

    assert sum(event.tokens for event in carriers) == len(TEXT)
    chosen = [logprob.chosen.token for event in carriers for logprob in event.logprobs]
    assert "".join(chosen) == TEXT
    assert len("<think>\nwhy\n</think>") - len("<think") <= row.reasoning_tokens <= len("<think>\nwhy\n</think>")


def test_logprobs_of_text_that_is_layout_are_not_lost() -> None:
    """An answer that ends in layout still tells what its last tokens were worth."""
    _, events = events_of(PLAN, "<think></think>", scored="yes")

    assert [(type(event), event.text, len(event.logprobs)) for event in events if isinstance(event, Delta)] == [
        (Delta, "", 15)
    ]


def test_a_row_without_anything_to_tell_apart() -> None:
    """A05: markers are text, each piece goes out at once."""
    row, events = events_of(AnswerPlan(), "<think>a</think>")

    assert len(events) == len("<think>a</think>")
    assert row.reasoning_tokens == 0
    assert row.warnings == ()
