"""Events become Anthropic's objects: a joined stream says the same as the whole message."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.anthropic.answers import CacheMiss, DiagnosticsObject
from gateway.anthropic.billing import OutputBill, bill
from gateway.anthropic.conversation import CacheMark
from gateway.anthropic.rendering import PING, Diagnose, Envelope, MessagesRendering
from gateway.in_flight import PromptProgress, RequestView
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    AnswerEvent,
    CallArguments,
    CallEnded,
    CallStarted,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Prefilling,
    Queued,
    Reasoning,
    RequestEvent,
    Usage,
    Warmed,
)
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass
from tests.fakes.anthropic_app import joined, named_events
from tests.fakes.collecting import collect
from tests.fakes.scripted_generator import TIMINGS

ID = RequestId("req_1")
QUEUED = Queued(request_id=ID, prompt_tokens=70, message_starts=(10, 40))
PREFILLING = Prefilling(request_id=ID, done_tokens=64, total_tokens=70, cached_tokens=16)


def text(text: str) -> Delta:
    return Delta(request_id=ID, text=text, tokens=1)


def thought(text: str) -> Reasoning:
    return Reasoning(request_id=ID, text=text, tokens=1)


def call(index: int, name: str, *pieces: str, is_whole: bool = True) -> list[AnswerEvent]:
    events: list[AnswerEvent] = [CallStarted(request_id=ID, index=index, call_id=f"toolu_{index}", name=name)]
    events += [CallArguments(request_id=ID, index=index, text=piece, tokens=1) for piece in pieces]
    return [*events, CallEnded(request_id=ID, index=index)] if is_whole else events


def finished(
    reason: FinishReason = FinishReason.STOP, *, completion_tokens: int = 5, matched_stop: str | None = None
) -> Finished:
    usage = Usage(prompt_tokens=70, completion_tokens=completion_tokens, cached_tokens=16, reasoning_tokens=2)
    return Finished(request_id=ID, reason=reason, usage=usage, timings=TIMINGS, matched_stop=matched_stop)


def rendering(
    *, max_tokens: int = 5, marks: tuple[CacheMark, ...] = (), diagnose: Diagnose | None = None
) -> MessagesRendering:
    envelope = Envelope(
        request_id=ID,
        model="org/m:4bit",
        max_tokens=max_tokens,
        marks=marks,
        service_tier="standard",
        details="unasked",
    )
    return MessagesRendering(envelope, secret=b"secret", diagnose=diagnose)


def streamed(events: Sequence[RequestEvent], made: MessagesRendering | None = None) -> list[dict[str, Any]]:
    """As `gateway.answering` drives it."""
    made = made or rendering()
    parts = [made.opening()]
    for event in events:
        match event:
            case Failed(failure=failure):
                parts.append(made.failed(failure))
            case Prefilling():
                parts.append(made.progress(event, 0.5))
            case _:
                parts.append(made.encode(event, 0))
    if isinstance(events[-1], Finished):
        parts.append(made.closing())
    return named_events(b"".join(parts))


def whole(
    events: Sequence[AnswerEvent], end: Finished | Warmed | None = None, made: MessagesRendering | None = None
) -> dict[str, Any]:
    return json.loads((made or rendering()).whole([collect(events, end or finished(), QUEUED)]))


def view(**fields: Any) -> RequestView:
    given: dict[str, Any] = {
        "id": ID,
        "key": "alice",
        "model": ModelName("m"),
        "latency_class": LatencyClass.STANDARD,
        "phase": "prefilling",
        "seconds": 1.0,
    }
    return RequestView(**{**given, **fields})


def test_a_stream_from_message_start_to_message_stop() -> None:
    """G04: the prompt's numbers first, then text in one block, then the reason and the whole bill."""
    events = streamed([QUEUED, PREFILLING, PREFILLING, text("Hel"), text(""), text('lo "\n'), finished()])
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"] == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "org/m:4bit",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 54,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 16,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (events[-2]["usage"]["output_tokens"], events[-2]["usage"]["cache_read_input_tokens"]) == (5, 16)


def test_thinking_text_and_calls_are_blocks_in_order() -> None:
    """G04, SC09, SC15: thinking with its signature before the text, calls one after the other, whichever mode."""
    events = [
        thought("why"),
        thought(" so"),
        text("Look: "),
        *call(0, "get_weather", '{"city": ', '"Zü\\"}]"}'),
        *call(1, "get_time"),
    ]
    end = finished(FinishReason.TOOL_CALLS)
    message = joined(streamed([QUEUED, PREFILLING, *events, end]))
    thinking, *others = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "why so")
    assert len(thinking["signature"]) > 20
    assert others == [
        {"type": "text", "text": "Look: "},
        {"type": "tool_use", "id": "toolu_0", "name": "get_weather", "input": {"city": 'Zü"}]'}},
        {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message == whole(events, end)


def test_nothing_empty_is_sent() -> None:
    """D03, G04: an empty thought and an empty text are no blocks, and do not part what stands around them."""
    events = [thought(""), text("a"), thought(""), text("b"), text("")]
    assert joined(streamed([QUEUED, *events, finished()]))["content"] == [{"type": "text", "text": "ab"}]
    assert whole(events)["content"] == [{"type": "text", "text": "ab"}]
    assert joined(streamed([QUEUED, finished()]))["content"] == whole([])["content"] == []


@pytest.mark.parametrize(
    ("end", "max_tokens", "stop_reason", "stop_sequence"),
    [
        (finished(), 9, "end_turn", None),
        (finished(matched_stop="\n\nHuman"), 9, "stop_sequence", "\n\nHuman"),
        (finished(FinishReason.TOOL_CALLS), 9, "tool_use", None),
        (finished(FinishReason.LENGTH), 5, "max_tokens", None),
        (finished(FinishReason.LENGTH), 6, "model_context_window_exceeded", None),
    ],
)
def test_the_stop_reason_is_exact(end: Finished, max_tokens: int, stop_reason: str, stop_sequence: str | None) -> None:
    """The stop string that matched is named; the context's end is not the client's own limit."""
    for message in (
        joined(streamed([QUEUED, text("a"), end], rendering(max_tokens=max_tokens))),
        whole([text("a")], end, rendering(max_tokens=max_tokens)),
    ):
        assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)


def test_a_cut_call_never_looks_whole() -> None:
    """A04, G04: its block ends, but the reason is the limit, and its arguments are under the key for broken ones."""
    events = call(0, "get_weather", '{"city": "Os', is_whole=False)
    end = finished(FinishReason.LENGTH)
    for message in (joined(streamed([QUEUED, *events, end])), whole(events, end)):
        (block,) = message["content"]
        assert block["input"] == {"INVALID_JSON": '{"city": "Os'}
        assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("arguments", ["[1]", "7", "{", '{"a": NaN}', '{"pattern": "\\d+"}', "{}{}", "null"])
def test_arguments_that_are_no_object_are_shown(arguments: str) -> None:
    """A03: what the model wrote reaches the client in an object, as the API wants one."""
    (block,) = whole(call(0, "grep", arguments))["content"]
    assert block["input"] == {"INVALID_JSON": arguments}


def test_a_calls_json_is_not_written_anew() -> None:
    """Keys keep their order and numbers their digits, however large."""
    arguments = '{"z": 100000000000000000000000000, "a": 1.10}'
    body = rendering().whole([collect(call(0, "f", arguments), finished(), QUEUED)])
    assert arguments.encode() in body


def test_a_failure_in_mid_stream_is_told_and_nothing_follows() -> None:
    """B08: an error event with the envelope; no stop reason, no message_stop."""
    failed = Failed(request_id=ID, failure=Failure(kind=FailureKind.WORKER_DIED, message="Try again."))
    *_, last = streamed([QUEUED, text("a"), failed])
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "Try again."},
        "request_id": "req_1",
    }
    (only,) = streamed([failed])
    assert only["type"] == "error"


def test_a_keepalive_says_what_is_waited_for_beside_the_ping() -> None:
    """The state stands in a comment, a block of its own before a whole event; with nothing known there is none."""
    made = rendering()
    progress = PromptProgress(done_tokens=20, total_tokens=70, cached_tokens=20)
    waits = view(phase="prefilling", progress=progress, eta_seconds=3.2)
    comment, event, rest = made.keepalive(waits).split(b"\n\n")
    assert comment == b": mlxd prefill=20/70 cached=20 eta=4s"
    assert event.startswith(b"event: message_start\ndata: {")
    assert rest == b""
    assert made.keepalive(waits) == comment + b"\n\n" + PING
    assert made.keepalive(view(phase="decoding")) == PING


def test_a_keepalive_begins_the_message_and_then_pings() -> None:
    """B05: no event comes before message_start; what was not known then, message_delta corrects."""
    made = rendering()
    first = named_events(made.keepalive(view(progress=None)))
    assert [event["type"] for event in first] == ["message_start"]
    assert first[0]["message"]["usage"]["input_tokens"] == 0
    assert named_events(made.keepalive(view())) == [{"type": "ping"}]
    rest = streamed([QUEUED, PREFILLING, text("a"), finished()], made)
    message = joined([*first, *rest])
    assert (message["usage"]["input_tokens"], message["usage"]["cache_read_input_tokens"]) == (54, 16)

    made = rendering()
    made.encode(QUEUED, 0)
    progress = PromptProgress(done_tokens=20, total_tokens=70, cached_tokens=20)
    _, event = made.keepalive(view(progress=progress)).split(b"\n\n", 1)
    (start,) = named_events(event)
    assert (start["message"]["usage"]["input_tokens"], start["message"]["usage"]["cache_read_input_tokens"]) == (50, 20)


def test_a_warm_answers_with_no_content() -> None:
    """`max_tokens: 0`: what was computed is what was created."""
    warmed = Warmed(
        request_id=ID, prompt_tokens=70, cached_tokens=16, blocks=1, size_bytes=1, durable_blocks=0, timings=TIMINGS
    )
    message = whole([], warmed, rendering(max_tokens=0, marks=(CacheMark(messages=3, ttl="5m"),)))
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    usage = message["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    assert [usage[name] for name in names] == [0, 54, 16, 0]


def test_diagnostics_are_there_for_who_asked() -> None:
    """They are in message_start when the prompt is known then, else in message_delta; and in the whole message."""
    asked: list[Queued | None] = []

    def diagnose(queued: Queued | None) -> DiagnosticsObject:
        asked.append(queued)
        return DiagnosticsObject(cache_miss_reason=CacheMiss(type="system_changed", cache_missed_input_tokens=12))

    said = {"cache_miss_reason": {"type": "system_changed", "cache_missed_input_tokens": 12}}
    events = streamed([QUEUED, PREFILLING, text("a"), finished()], rendering(diagnose=diagnose))
    assert (events[0]["message"]["diagnostics"], "diagnostics" in events[-2]) == (said, False)
    assert whole([text("a")], made=rendering(diagnose=diagnose))["diagnostics"] == said
    late = rendering(diagnose=diagnose)
    (start,) = named_events(late.keepalive(view()))
    assert start["message"]["diagnostics"] == {"cache_miss_reason": None}
    assert streamed([QUEUED, text("a"), finished()], late)[-2]["diagnostics"] == said
    assert asked == [QUEUED] * 3
    assert "diagnostics" not in whole([text("a")])


# --- properties ------------------------------------------------------------------------------------------------------

PIECES = st.text(max_size=5)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerEvent]:
    """Any order of texts, thoughts and calls; calls are numbered, and only the last may be cut."""
    events: list[AnswerEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call"]), max_size=8)):
        match kind:
            case "text":
                events.append(text(draw(PIECES)))
            case "thought":
                events.append(thought(draw(PIECES)))
            case _:
                arguments = draw(st.sampled_from(["", "{}", '{"a": [1, {"b": "}"}]}']) | PIECES)
                cut = draw(st.integers(0, len(arguments)))
                events += call(calls, "f", arguments[:cut], arguments[cut:])
                calls += 1
    if draw(st.booleans()):
        events += call(calls, "f", '{"a": "', is_whole=False)
    return events


@given(answers(), st.sampled_from(FinishReason), st.integers(1, 9))
def test_a_joined_stream_equals_the_whole_message(
    events: list[AnswerEvent], reason: FinishReason, max_tokens: int
) -> None:
    """Both modes say the same: blocks, signatures, reason and usage; the stream in the order that SDKs rest on."""
    marks = (CacheMark(messages=1, ttl="5m"),)
    end = finished(reason)
    stream = joined(streamed([QUEUED, *events, end], rendering(max_tokens=max_tokens, marks=marks)))
    assert stream == whole(events, end, rendering(max_tokens=max_tokens, marks=marks))


MARKS = st.lists(st.builds(CacheMark, messages=st.integers(0, 6), ttl=st.sampled_from(["5m", "1h"])), max_size=4)


@given(st.integers(0, 99), st.integers(0, 99), MARKS, st.lists(st.integers(0, 99), max_size=5).map(sorted))
def test_the_bill_is_disjoint(prompt: int, cached: int, marks: list[CacheMark], starts: list[int]) -> None:
    """K09: read, created and the rest sum to the prompt, none is negative, nothing is created without a marker."""
    usage = bill(
        prompt_tokens=prompt, cached_tokens=cached, marks=marks, message_starts=starts, output=OutputBill(tokens=1)
    )
    parts = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
    assert sum(parts) == prompt
    assert min(parts) >= 0
    created = usage.cache_creation
    assert created.ephemeral_1h_input_tokens + created.ephemeral_5m_input_tokens == usage.cache_creation_input_tokens
    assert min(created.ephemeral_1h_input_tokens, created.ephemeral_5m_input_tokens) >= 0
    assert usage.cache_read_input_tokens == min(cached, prompt)
    if not marks:
        assert usage.cache_creation_input_tokens == 0


def test_the_longer_marker_has_its_own_part() -> None:
    """A system prompt for an hour and a conversation for five minutes, and the rest is plain input."""
    marks = (CacheMark(messages=1, ttl="1h"), CacheMark(messages=2, ttl="5m"))
    usage = bill(prompt_tokens=100, cached_tokens=8, marks=marks, message_starts=(4, 40, 90))
    assert (usage.cache_creation.ephemeral_1h_input_tokens, usage.cache_creation.ephemeral_5m_input_tokens) == (32, 50)
    assert usage.input_tokens == 10
