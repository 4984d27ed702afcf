"""The step loop and what its rows write: reasoning, text and calls, and with what reason a row ends."""

from dataclasses import replace

import pytest

from protocol.generation import CallArguments, CallEnded, CallStarted, Delta, FinishReason, Reasoning
from tests.worker.test_loop import QUIET, Run, asks
from worker.answers import formats
from worker.answers.plan import AnswerPlan
from worker.answers.thinking import ThinkSyntax
from worker.sequence import Prepared

THINK = ThinkSyntax(opens=("<think>",), closes=("</think>",))
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def planned(plan: AnswerPlan, **more: object) -> Prepared:
    return replace(asks("r", max_tokens=more.pop("max_tokens", 500), **more), answer=plan)


@pytest.mark.parametrize(
    ("says", "more", "calls", "reason"),
    [
        (CALL, {}, 1, FinishReason.TOOL_CALLS),
        (CALL * 2, {}, 2, FinishReason.TOOL_CALLS),
        (CALL + "x", {"max_tokens": len(CALL) + 1}, 1, FinishReason.LENGTH),
        (CALL + "STOP", {"stop": ("STOP",)}, 1, FinishReason.STOP),
        ("<tool_call>nothing</tool_call>", {}, 0, FinishReason.STOP),
        ("<tool_call>", {}, 0, FinishReason.STOP),
        ("hello", {}, 0, FinishReason.STOP),
    ],
)
def test_the_reason_of_an_end(says: str, more: dict[str, object], calls: int, reason: FinishReason) -> None:
    """A04, B04: tool_calls only at the model's own end, and only with a whole call."""
    run = Run([planned(AnswerPlan(form=formats.HERMES), **more), *QUIET * 3], {"r": says})

    end = run.finished("r")
    assert end.reason is reason
    assert sum(isinstance(event, CallEnded) for event in run.of("r")) == calls


def test_one_call_ends_the_row() -> None:
    """A02: what the model would say behind it is never drawn."""
    run = Run([planned(AnswerPlan(form=formats.HERMES, calls="one")), *QUIET * 3], {"r": CALL + "more" + CALL})

    end = run.finished("r")
    assert end.reason is FinishReason.TOOL_CALLS
    assert end.usage.completion_tokens == len(CALL)
    assert len([event for event in run.of("r") if isinstance(event, CallStarted)]) == 1
    assert run.text("r") == ""


def test_two_calls_have_two_ids() -> None:
    """Unique, and of a form that clients know."""
    run = Run([planned(AnswerPlan(form=formats.HERMES)), *QUIET * 3], {"r": CALL * 2})

    ids = {event.call_id for event in run.of("r") if isinstance(event, CallStarted)}
    assert len(ids) == 2
    assert all(call_id.startswith("call_") and len(call_id) == 29 for call_id in ids)


def test_reasoning_is_counted_and_cut() -> None:
    """D02: all of it in reasoning, nothing in the text, nothing twice; usage says how much it was."""
    run = Run([planned(AnswerPlan(thinking=THINK), max_tokens=20), *QUIET], {"r": "<think>never ends, as it seems"})

    end = run.finished("r")
    assert end.reason is FinishReason.LENGTH
    assert run.text("r") == ""
    assert "".join(event.text for event in run.of("r") if isinstance(event, Reasoning)) == "never ends, a"
    assert end.usage.completion_tokens == 20
    assert 13 <= end.usage.reasoning_tokens <= 20


def test_a_stop_string_ends_a_row_wherever_it_comes() -> None:
    """In reasoning and in a call as in the text: what the client asked for comes first, and nothing is lost."""
    thinking = Run([planned(AnswerPlan(thinking=THINK), stop=("b",)), *QUIET], {"r": "<think>a b c</think>d"})
    calling = Run([planned(AnswerPlan(form=formats.HERMES), stop=('"a"',)), *QUIET * 3], {"r": CALL})

    assert "".join(event.text for event in thinking.of("r") if isinstance(event, Reasoning)) == "a "
    assert thinking.finished("r").matched_stop == "b"
    assert calling.text("r") == CALL[: CALL.index('"a"')]
    assert calling.finished("r").reason is FinishReason.STOP
    assert calling.finished("r").warnings == ("tool_call_cut",)


def test_tokens_of_all_events_are_those_drawn() -> None:
    """With the logprobs of each, but for the end's token."""
    text = f"<think>why</think>I ask.{CALL}"
    plan = AnswerPlan(thinking=THINK, form=formats.HERMES)
    run = Run([planned(plan, top_logprobs=0), *QUIET * 3], {"r": text})
    carriers = [event for event in run.of("r") if isinstance(event, Delta | Reasoning | CallArguments)]

    assert "".join(logprob.chosen.token for event in carriers for logprob in event.logprobs) == text
    assert sum(event.tokens for event in carriers) == len(text) == run.finished("r").usage.completion_tokens - 1
