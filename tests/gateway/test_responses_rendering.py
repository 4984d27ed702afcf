"""One response's bytes, streamed and whole."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from gateway.caller import Caller
from gateway.dialects import Asked
from gateway.in_flight import RequestView
from gateway.latency_class import LatencyClass
from gateway.responses.answers import CacheDiagnostics
from gateway.responses.dialect import ResponsesDialect
from gateway.responses.rendering import ResponseRendering
from gateway.responses.schema import CreateRequest, Decoded, decode_request
from gateway.responses.sealed_reasoning import unseal
from gateway.responses.translate import input_items
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    AnswerEvent,
    CacheReport,
    CallArguments,
    CallEnded,
    CallStarted,
    ChosenLogprob,
    Delta,
    Finished,
    FinishReason,
    Prefilling,
    Queued,
    Reasoning,
    TokenLogprob,
    Usage,
    Waiting,
    Warmed,
)
from protocol.ids import ModelName, RequestId
from tests.fakes.collecting import collect
from tests.fakes.responses_app import asking, events_in, types_in
from tests.fakes.scripted_generator import TIMINGS

ID = RequestId(f"req_{1:032x}")
SCOPE = b"scope of alice"
TOOLS = [
    {"type": "function", "name": "grep", "parameters": {"type": "object"}},
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "read"}]},
]
LOGPROB = ChosenLogprob(chosen=TokenLogprob(token="a", token_bytes=b"a", logprob=-0.5))


def rendering(*, details: bool = False, diagnosis: CacheDiagnostics | None = None, **fields: Any) -> ResponseRendering:
    body = json.dumps(asking(**{"tools": TOOLS, **fields})).encode()
    decoded = decode_request(body, CreateRequest)
    assert isinstance(decoded, Decoded), decoded
    dialect = ResponsesDialect(
        decoded,
        input_items(decoded.request),
        store="unasked",
        diagnose=lambda _: diagnosis or CacheDiagnostics(type="unavailable"),
    )
    asked = Asked(
        request_id=ID,
        caller=Caller(key_name="alice", cache_scope=SCOPE),
        headers=(),
        created_unix=7,
        system_fingerprint=None,
        details="asked" if details else "unasked",
    )
    accepted = dialect.accept(b"", asked)
    assert not isinstance(accepted, Failure), accepted
    return dialect.rendering(accepted, asked)


def finished(reason: FinishReason = FinishReason.STOP) -> Finished:
    usage = Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
    return Finished(request_id=ID, reason=reason, usage=usage, timings=TIMINGS)


def text(piece: str, *, logprobs: tuple[ChosenLogprob, ...] = ()) -> Delta:
    return Delta(request_id=ID, text=piece, tokens=1, logprobs=logprobs)


def thought(piece: str) -> Reasoning:
    return Reasoning(request_id=ID, text=piece, tokens=1)


def call(name: str, *pieces: str, index: int = 0, whole: bool = True) -> list[AnswerEvent]:
    return [
        CallStarted(request_id=ID, index=index, call_id=f"call_{index}", name=name),
        *(CallArguments(request_id=ID, index=index, text=piece) for piece in pieces),
        *([CallEnded(request_id=ID, index=index)] if whole else []),
    ]


def stream_of(answer: ResponseRendering, events: Sequence[AnswerEvent], end: Finished) -> list[dict[str, Any]]:
    parts = [answer.opening(), answer.encode(Queued(request_id=ID, prompt_tokens=9), 0)]
    parts += [answer.encode(event, 0) for event in (*events, end)]
    return events_in(b"".join([*parts, answer.closing()]))


def whole_of(answer: ResponseRendering, events: Sequence[AnswerEvent], end: Finished) -> dict[str, Any]:
    return json.loads(answer.whole([collect(events, end)]))


# --- the order of events ---------------------------------------------------------------------------------------------

TEXT_EVENTS = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]


def test_a_text() -> None:
    """The documented order; the item's id is one throughout; the last event has the whole response with its usage."""
    events = stream_of(rendering(), [text("Hel"), text("lo")], finished())
    assert types_in(events) == ["created", "in_progress", *TEXT_EVENTS, "completed"]
    _, _, added, part, one, two, done, part_done, item_done, completed = events
    item_id = added["item"]["id"]
    assert {event["item_id"] for event in (part, one, two, done, part_done)} == {item_id}
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert (one["delta"], two["delta"], done["text"]) == ("Hel", "lo", "Hello")
    assert part_done["part"] == item_done["item"]["content"][0]
    assert item_done["item"] == completed["response"]["output"][0]
    assert item_done["item"] == {
        "type": "message",
        "id": item_id,
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    assert completed["response"]["status"] == "completed"
    assert completed["response"]["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }


def test_reasoning_then_text_then_calls() -> None:
    """Items come one after another, each whole before the next begins, numbered by their place."""
    events = stream_of(
        rendering(),
        [
            thought("why"),
            text("so"),
            *call("grep", '{"p"', ": 1}"),
            *call("apply_patch", '{"input": "a\\', 'n"}', index=1),
            *call("mcp__files__read", "{}", index=2),
        ],
        finished(FinishReason.TOOL_CALLS),
    )
    assert types_in(events)[2:] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *(kind for at, kind in enumerate(TEXT_EVENTS) if at != 3),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.delta"),
        *("custom_tool_call_input.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == [
        *("reasoning", "message", "function_call", "custom_tool_call", "function_call")
    ]
    reasoning, _, grep, patch, read = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert (reasoning["summary"], "encrypted_content" in reasoning) == ([], False)
    assert (grep["name"], grep["call_id"], grep["arguments"]) == ("grep", "call_0", '{"p": 1}')
    assert (patch["name"], patch["call_id"], patch["input"]) == ("apply_patch", "call_1", "a\n")
    assert (read["name"], read["namespace"], read["arguments"]) == ("read", "mcp__files__", "{}")
    assert len({item["id"] for item in response["output"]}) == 5
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    assert response["status"] == "completed"


def test_a_call_of_a_tool_nobody_offered_passes_through() -> None:
    """A07: the client answers that it has no such tool, and the model recovers."""
    events = stream_of(rendering(), call("no_such_tool", "{}"), finished(FinishReason.TOOL_CALLS))
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "no_such_tool", "{}")


def test_waiting_is_told_in_whole_events() -> None:
    """Queued until it is worked on, in progress then, as often as is needed to be seen alive; nothing after the end."""
    answer = rendering()
    view = RequestView(
        id=ID,
        key="alice",
        model=ModelName("m"),
        latency_class=LatencyClass.STANDARD,
        phase="queued",
        seconds=1.0,
        ahead=2,
    )
    assert answer.keepalive(view) == b""
    parts = [
        answer.opening(),
        answer.keepalive(view),
        answer.encode(Waiting(request_id=ID, ahead=1), 0),
        answer.progress(Prefilling(request_id=ID, done_tokens=1, total_tokens=9, cached_tokens=0), 0.0),
        answer.progress(Prefilling(request_id=ID, done_tokens=2, total_tokens=9, cached_tokens=0), 0.0),
        answer.keepalive(view),
        answer.encode(text("x"), 0),
        answer.keepalive(view),
        answer.encode(finished(), 0),
        answer.closing(),
        answer.keepalive(view),
    ]
    events = events_in(b"".join(parts))
    assert types_in(events)[:6] == ["created", "queued", "queued", "in_progress", "in_progress", "output_item.added"]
    assert (events[1]["mlxd"]["ahead"], events[1]["response"]["status"]) == (2, "queued")
    assert types_in(events).count("in_progress") == 3


# --- ends ------------------------------------------------------------------------------------------------------------


def test_cut_at_the_limit() -> None:
    """Incomplete, with the reason; the item that was cut says so, too; nothing is lost."""
    events = stream_of(rendering(), [thought("hm"), text("half a sen")], finished(FinishReason.LENGTH))
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


def test_a_cut_call_is_shown_as_far_as_it_came() -> None:
    """A04: what was generated reaches the client, and the call says that it is not whole."""
    events = [text("a"), *call("apply_patch", '{"input": "abc\\', whole=False)]
    response = whole_of(rendering(), events, finished(FinishReason.LENGTH))
    assert stream_of(rendering(), events, finished(FinishReason.LENGTH))[-1]["response"] == response
    assert (response["output"][1]["status"], response["output"][1]["input"]) == ("incomplete", "abc\\")


def test_an_answer_without_a_word_is_an_empty_message() -> None:
    """Clients look for a first item; and an empty reasoning block makes none (D03)."""
    response = whole_of(rendering(), [thought("")], finished())
    assert [item["content"][0]["text"] for item in response["output"]] == [""]
    assert stream_of(rendering(), [thought("")], finished())[-1]["response"] == response


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Failure(kind=FailureKind.CONTEXT_LENGTH_EXCEEDED, message="too long"), "context_length_exceeded"),
        (Failure(kind=FailureKind.OVERLOADED, message="Busy.", retry_after_seconds=1.2), "rate_limit_exceeded"),
        (Failure(kind=FailureKind.OVERLOADED, message="Spent.", retry_after_seconds=9000), "insufficient_quota"),
        (Failure(kind=FailureKind.INVALID_REQUEST, message="no"), "invalid_prompt"),
        (Failure(kind=FailureKind.WORKER_DIED, message="gone", retry_after_seconds=1), "server_error"),
        (Failure(kind=FailureKind.INTERNAL, message="oh"), "server_error"),
    ],
)
def test_failing_in_the_middle(failure: Failure, code: str) -> None:
    """One of the codes by which clients know whether to try again, with what there is of the output; then nothing."""
    answer = rendering()
    events = events_in(answer.opening() + answer.encode(text("par"), 0) + answer.failed(failure))
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", code)
    assert failure.message in response["error"]["message"]
    assert response["output"][0]["content"][0]["text"] == "par"
    if code == "rate_limit_exceeded":
        assert "try again in 2s" in response["error"]["message"]


def test_a_prewarm_answers_with_nothing_but_its_bill() -> None:
    """Filled, not generated: no output, the prompt's tokens."""
    end = Warmed(
        request_id=ID, prompt_tokens=512, cached_tokens=256, blocks=2, size_bytes=1, durable_blocks=0, timings=TIMINGS
    )
    answer = rendering(prompt_cache_options={"prewarm": True})
    events = events_in(answer.opening() + answer.encode(end, 0) + answer.closing())
    assert types_in(events) == ["created", "in_progress", "completed"]
    response = events[-1]["response"]
    assert (response["output"], response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == ([], 512, 0)
    assert json.loads(rendering(prompt_cache_options={"prewarm": True}).whole([collect([], end)])) == response


# --- what is asked for -----------------------------------------------------------------------------------------------


def test_settings_come_back() -> None:
    """As they were understood, with every key that OpenAI's object has."""
    response = whole_of(
        rendering(
            instructions="be brief",
            temperature=0.5,
            max_output_tokens=7,
            reasoning={"effort": "low", "summary": "auto"},
            metadata={"a": "b"},
            parallel_tool_calls=False,
            tool_choice={"type": "function", "name": "grep"},
            text={"verbosity": "low"},
            prompt_cache_key="conversation",
            user="u",
        ),
        [text("x")],
        finished(),
    )
    assert response["tools"] == TOOLS
    assert response["tool_choice"] == {"type": "function", "name": "grep"}
    assert response["reasoning"] == {"effort": "low", "summary": "auto"}
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (response["temperature"], response["max_output_tokens"], response["metadata"]) == (0.5, 7, {"a": "b"})
    assert (response["instructions"], response["prompt_cache_key"], response["user"]) == (
        "be brief",
        "conversation",
        "u",
    )
    assert (response["parallel_tool_calls"], response["store"], response["background"]) == (False, False, False)
    assert (response["error"], response["incomplete_details"], response["previous_response_id"]) == (None, None, None)
    assert "mlxd" not in response
    assert "prompt_cache_diagnostics" not in response


def test_sealed_reasoning_opens_again_for_its_caller_only() -> None:
    """An agent without a store gives it back, and the model reads what it thought."""
    response = whole_of(rendering(include=["reasoning.encrypted_content"]), [thought("because é")], finished())
    sealed = response["output"][0]["encrypted_content"]
    assert unseal(sealed, SCOPE) == "because é"
    assert unseal(sealed, b"scope of bob") is None
    assert unseal(sealed[:-8] + "AAAAAAA=", SCOPE) is None
    assert unseal("gAAAAA-of-somebody-else", SCOPE) is None


def test_logprobs() -> None:
    """In the deltas, when the text is done, and in the item."""
    events = stream_of(
        rendering(include=["message.output_text.logprobs"]), [text("a", logprobs=(LOGPROB,))], finished()
    )
    token = {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}
    assert [event["logprobs"] for event in events if "logprobs" in event] == [[token], [token]]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [token]


def test_details_diagnosis_and_warnings() -> None:
    """For who asked; warnings for everybody."""
    end = replace(finished(), warnings=("tool_call_repaired",), cache=CacheReport(ram_tokens=4))
    diagnosis = CacheDiagnostics(type="cache_miss", reason="tools_changed", cache_missed_tokens=3)
    asked = rendering(
        details=True, diagnosis=diagnosis, prompt_cache_options={"comparison_response_id": "resp_earlier"}
    )
    response = whole_of(asked, [text("x")], end)
    assert response["prompt_cache_diagnostics"] == {
        "type": "cache_miss",
        "reason": "tools_changed",
        "cache_missed_tokens": 3,
    }
    assert (response["mlxd"]["request_id"], response["mlxd"]["cache"]["ram_tokens"]) == (ID, 4)
    plain = whole_of(rendering(), [text("x")], end)
    assert plain["mlxd"] == {"warnings": ["tool_call_repaired"]}
    assert diagnosis.mlxd_reason is UNSET


# --- stream and whole ------------------------------------------------------------------------------------------------

PIECES = st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=4)
ARGUMENTS = st.lists(
    st.sampled_from(['{"input": "', "a\\n", "b", '"', "}", "{", '"x"', "\\ud83d", "\\ude80", ""]), max_size=6
)
NAMES = st.sampled_from(["grep", "apply_patch", "mcp__files__read", "no_such_tool"])


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[AnswerEvent], Finished]:
    events: list[AnswerEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call"]), max_size=5)):
        if kind == "call":
            events += call(draw(NAMES), *draw(ARGUMENTS), index=calls)
            calls += 1
        else:
            events += [text(piece) if kind == "text" else thought(piece) for piece in draw(PIECES)]
    reason = draw(st.sampled_from(FinishReason))
    if reason is FinishReason.LENGTH and draw(st.booleans()):
        events += call(draw(NAMES), *draw(ARGUMENTS), index=calls, whole=False)
    return events, finished(reason)


@given(answers())
@example(([text("0"), thought("")], finished(FinishReason.LENGTH)))
@example(([text("0"), thought(""), text("1")], finished(FinishReason.STOP)))
def test_a_stream_says_what_a_whole_answer_says(answer: tuple[list[AnswerEvent], Finished]) -> None:
    """The last event's response is the whole answer; its items are those that were done, one by one; and the deltas
    of each, joined, are its text."""
    events, end = answer
    stream = stream_of(rendering(), events, end)
    response = whole_of(rendering(), events, end)
    assert stream[-1]["response"] == response
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    for at, item in enumerate(done):
        deltas = "".join(event["delta"] for event in stream if event.get("output_index") == at and "delta" in event)
        inside = item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input"))
        assert deltas == inside
        ids = {event["item_id"] for event in stream if event.get("output_index") == at and "item_id" in event}
        assert ids <= {item["id"]}
