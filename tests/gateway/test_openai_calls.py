"""Calls, thoughts and several choices become OpenAI's objects: a joined stream says the same as the whole answer."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from gateway.answer_parts import Collected
from gateway.openai.chat_rendering import ChatRendering
from gateway.openai.envelope import AnswerStyle, Envelope
from gateway.openai.text_rendering import TextRendering
from protocol.generation import (
    AnswerEvent,
    CallArguments,
    CallEnded,
    CallStarted,
    Delta,
    Finished,
    FinishReason,
    OutputWarning,
    Reasoning,
    Usage,
)
from protocol.ids import RequestId
from tests.fakes.collecting import collect
from tests.fakes.openai_app import sse_data
from tests.fakes.scripted_generator import TIMINGS

ID = RequestId("r")
ENVELOPE = Envelope(id="chatcmpl-1", created=17, model="m", system_fingerprint=None)


def text(said: str) -> Delta:
    return Delta(request_id=ID, text=said, tokens=1)


def thought(said: str) -> Reasoning:
    return Reasoning(request_id=ID, text=said, tokens=1)


def call(index: int, name: str, *pieces: str) -> list[AnswerEvent]:
    return [
        CallStarted(request_id=ID, index=index, call_id=f"call_{index}", name=name),
        *(CallArguments(request_id=ID, index=index, text=piece, tokens=1) for piece in pieces),
        CallEnded(request_id=ID, index=index),
    ]


def end(
    reason: FinishReason = FinishReason.STOP, *, prompt_tokens: int = 7, warnings: tuple[OutputWarning, ...] = ()
) -> Finished:
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
    return Finished(request_id=ID, reason=reason, usage=usage, timings=TIMINGS, warnings=warnings)


def whole(events: Sequence[AnswerEvent], ended: Finished, style: AnswerStyle) -> Any:
    return json.loads(ChatRendering(ENVELOPE, style).whole([collect(events, ended)]))


def chunks(events: Sequence[AnswerEvent], ended: Finished, style: AnswerStyle) -> list[Any]:
    rendering = ChatRendering(ENVELOPE, style)
    parts = [rendering.opening(), *(rendering.encode(event, 0) for event in (*events, ended)), rendering.closing()]
    *data, done = sse_data(b"".join(parts))
    assert done == "[DONE]"
    return [json.loads(line) for line in data]


def joined(streamed: list[Any]) -> dict[str, Any]:
    """As a client of deltas puts the message together, by field and by a call's index."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "function": None}
    for chunk in streamed:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning_content", "")
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["type"] == "function"
                    assert piece["index"] == len(message["calls"])
                    message["calls"][piece["index"]] = [piece["id"], piece["function"]["name"], ""]
                else:
                    assert piece.keys() == {"index", "function"}
                    assert piece["function"].keys() == {"arguments"}
                message["calls"][piece["index"]][2] += piece["function"]["arguments"]
            if "function_call" in delta:
                name, arguments = message["function"] or ("", "")
                piece = delta["function_call"]
                message["function"] = (name + piece.get("name", ""), arguments + piece["arguments"])
    return message


PLAIN = AnswerStyle()
EVENTS = [
    thought("hm "),
    thought("so"),
    text("Let me "),
    text("look."),
    *call(0, "get_weather", '{"city": ', '"Zürich \\"Altstadt\\""}'),
    *call(1, "get_time"),
]


def test_calls_come_with_their_own_index() -> None:
    """A01, A02: a call has its name and id once, its arguments in pieces under its index, and no markup in the text;
    the text before it is kept."""
    message = joined(chunks(EVENTS, end(FinishReason.TOOL_CALLS), PLAIN))
    assert message["content"] == "Let me look."
    assert message["reasoning"] == "hm so"
    assert message["calls"] == {
        0: ["call_0", "get_weather", '{"city": "Zürich \\"Altstadt\\""}'],
        1: ["call_1", "get_time", ""],
    }


def test_the_whole_answer_has_the_calls() -> None:
    """A01: arguments are a JSON string; reasoning has a key of its own; the bill counts it."""
    answer = whole(EVENTS, end(FinishReason.TOOL_CALLS), PLAIN)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me look.",
        "refusal": None,
        "reasoning_content": "hm so",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Zürich \\"Altstadt\\""}'},
            },
            {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": ""}},
        ],
    }
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


def test_only_calls_are_no_text() -> None:
    """OpenAI's content is null then, and a plain empty answer's is empty."""
    assert whole(call(0, "f"), end(FinishReason.TOOL_CALLS), PLAIN)["choices"][0]["message"]["content"] is None
    assert whole([], end(), PLAIN)["choices"][0]["message"]["content"] == ""


def test_the_sdk_accumulates_what_was_meant() -> None:
    """The openai SDK's own accumulator makes the same message of the stream."""
    state = ChatCompletionStreamState()
    for chunk in chunks(EVENTS, end(FinishReason.TOOL_CALLS), AnswerStyle(usage="asked")):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    completion = state.get_final_completion()
    (choice,) = completion.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    calls = [(made.id, made.function.name, made.function.arguments) for made in choice.message.tool_calls or []]  # pyright: ignore
    assert calls == [("call_0", "get_weather", '{"city": "Zürich \\"Altstadt\\""}'), ("call_1", "get_time", "")]


def test_the_legacy_way_of_telling_a_call() -> None:
    """Who asked with `functions` reads `function_call`, in both modes, and its own finish_reason."""
    style = AnswerStyle(calls="function_call")
    events = call(0, "f", "{", "}")
    streamed = chunks(events, end(FinishReason.TOOL_CALLS), style)
    assert joined(streamed)["function"] == ("f", "{}")
    assert joined(streamed)["calls"] == {}
    assert streamed[-1]["choices"][0]["finish_reason"] == "function_call"
    (choice,) = whole(events, end(FinishReason.TOOL_CALLS), style)["choices"]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"


def test_thoughts_can_be_hidden() -> None:
    """`include_reasoning: false`: no thought in either mode; it is paid for all the same."""
    style = AnswerStyle(reasoning="hidden")
    assert joined(chunks(EVENTS, end(), style))["reasoning"] == ""
    answer = whole(EVENTS, end(), style)
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


def test_a_repaired_call_is_told() -> None:
    """The last chunk and the whole answer name what became of a call, for everybody."""
    ended = end(warnings=("tool_call_unparsed",))
    assert whole([text("x")], ended, PLAIN)["mlxd"] == {"warnings": ["tool_call_unparsed"]}
    for style in (PLAIN, AnswerStyle(usage="asked")):
        streamed = chunks([text("x")], ended, style)
        assert ["mlxd" in chunk for chunk in streamed] == [False] * (len(streamed) - 1) + [True]


PIECES = st.lists(st.text(max_size=4), max_size=3)
PARTS = st.lists(
    st.builds(lambda pieces: ("text", pieces), PIECES)
    | st.builds(lambda pieces: ("thought", pieces), PIECES)
    | st.builds(lambda pieces: ("call", pieces), PIECES),
    max_size=5,
)


@given(PARTS, st.sampled_from(FinishReason), st.sampled_from(["shown", "hidden"]))
def test_both_modes_say_the_same(parts: list[tuple[str, list[str]]], reason: FinishReason, shown: Any) -> None:
    """A01: whatever the model says, in whatever order, the joined stream is the whole answer."""
    events: list[AnswerEvent] = []
    count = 0
    for kind, pieces in parts:
        if kind == "call":
            events += call(count, f"f{count}", *pieces)
            count += 1
        else:
            events += [(text if kind == "text" else thought)(piece) for piece in pieces]
    style = AnswerStyle(reasoning=shown)
    message = joined(chunks(events, end(reason), style))
    (choice,) = whole(events, end(reason), style)["choices"]
    told = choice["message"]
    assert message["content"] == (told["content"] or "")
    assert message["reasoning"] == told.get("reasoning_content", "")
    calls = [
        [made["id"], made["function"]["name"], made["function"]["arguments"]] for made in told.get("tool_calls", [])
    ]
    assert list(message["calls"].values()) == calls


# --- several prompts, and their echo ---------------------------------------------------------------------------------

TWO_BY_TWO = AnswerStyle(choices=4, choices_per_prompt=2, echo=("a ", "b "), usage="asked")
ENDS = [end(prompt_tokens=tokens) for tokens in (7, 7, 3, 3)]


def test_each_prompt_is_billed_once() -> None:
    """Two prompts with two answers each: their prompts are counted once, their answers all."""
    answers: list[Collected] = [collect([text(str(index))], ended) for index, ended in enumerate(ENDS)]
    answer = json.loads(TextRendering(ENVELOPE, TWO_BY_TWO).whole(answers))
    assert [choice["text"] for choice in answer["choices"]] == ["a 0", "a 1", "b 2", "b 3"]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 20, 30)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 8


def test_a_stream_echoes_and_bills_alike() -> None:
    """The same of a stream."""
    rendering = TextRendering(ENVELOPE, TWO_BY_TWO)
    parts = [rendering.opening()]
    for index, ended in enumerate(ENDS):
        parts += [rendering.encode(text(str(index)), index), rendering.encode(ended, index)]
    *data, done = sse_data(b"".join([*parts, rendering.closing()]))
    streamed = [json.loads(line) for line in data]
    texts = ["", "", "", ""]
    for chunk in streamed:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert (texts, done) == (["a 0", "a 1", "b 2", "b 3"], "[DONE]")
    assert streamed[-1]["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize("style", [PLAIN, AnswerStyle(choices=2)])
def test_without_echo_nothing_is_echoed(style: AnswerStyle) -> None:
    """The legacy route's stream begins with its text."""
    assert TextRendering(ENVELOPE, style).opening() == b""
