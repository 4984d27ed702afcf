"""Events become OpenAI's objects: a joined stream says the same as the whole answer."""

import json
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects import Rendering
from gateway.openai.chat_rendering import ChatRendering
from gateway.openai.envelope import AnswerStyle, Envelope
from gateway.openai.text_rendering import TextRendering
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    AnswerEvent,
    ChosenLogprob,
    Delta,
    Failed,
    Finished,
    FinishReason,
    Prefilling,
    Queued,
    RequestEvent,
    TokenLogprob,
    Usage,
)
from protocol.ids import RequestId
from tests.fakes.collecting import collect
from tests.fakes.openai_app import sse_data
from tests.fakes.scripted_generator import TIMINGS

Asked = Literal["asked", "unasked"]

ID = RequestId("req_1")
ENVELOPE = Envelope(id="chatcmpl-1", created=17, model="org/m:4bit", system_fingerprint=None)
QUEUED = Queued(request_id=ID, prompt_tokens=7)
SAME = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 17, "model": "org/m:4bit"}


def delta(text: str, *logprobs: ChosenLogprob) -> Delta:
    return Delta(request_id=ID, text=text, tokens=1, logprobs=logprobs)


def finished(reason: FinishReason = FinishReason.STOP) -> Finished:
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
    return Finished(request_id=ID, reason=reason, usage=usage, timings=TIMINGS)


def token(token_bytes: bytes, logprob: float = -0.5, *, top: Sequence[tuple[bytes, float]] = ()) -> ChosenLogprob:
    def one(data: bytes, value: float) -> TokenLogprob:
        return TokenLogprob(token=data.decode(errors="replace"), token_bytes=data, logprob=value)

    return ChosenLogprob(chosen=one(token_bytes, logprob), top=tuple(one(*other) for other in top))


def streamed(rendering: Rendering, events: Sequence[RequestEvent]) -> list[Any]:
    """As `gateway.answering` drives it, one choice."""
    parts = [rendering.opening()]
    for event in events:
        match event:
            case Failed(failure=failure):
                parts.append(rendering.failed(failure))
            case Prefilling():
                parts.append(rendering.progress(event, 0.5))
            case _:
                parts.append(rendering.encode(event, 0))
    if isinstance(events[-1], Finished):
        parts.append(rendering.closing())
    return [line if line == "[DONE]" else json.loads(line) for line in sse_data(b"".join(parts))]


def chat(usage: Asked = "unasked", top_logprobs: int | None = None, envelope: Envelope = ENVELOPE) -> ChatRendering:
    return ChatRendering(envelope, AnswerStyle(usage=usage, top_logprobs=top_logprobs))


def text(usage: Asked = "unasked", top_logprobs: int | None = None) -> TextRendering:
    return TextRendering(ENVELOPE, AnswerStyle(usage=usage, top_logprobs=top_logprobs))


def chat_chunks(*events: RequestEvent, usage: Asked = "unasked") -> list[Any]:
    return streamed(chat(usage), events)


def text_chunks(*events: RequestEvent, usage: Asked = "unasked", top_logprobs: int | None = None) -> list[Any]:
    return streamed(text(usage, top_logprobs), events)


def chat_completion(events: Sequence[AnswerEvent], end: Finished, *, top_logprobs: int | None) -> Any:
    return json.loads(chat(top_logprobs=top_logprobs).whole([collect(events, end)]))


def text_completion(events: Sequence[AnswerEvent], end: Finished, *, top_logprobs: int | None) -> Any:
    return json.loads(text(top_logprobs=top_logprobs).whole([collect(events, end)]))


def test_a_chat_stream_from_first_chunk_to_done() -> None:
    """B03, B04: role first, texts, one finish_reason, [DONE]; empty texts send nothing; no usage unasked."""
    prefilling = Prefilling(request_id=ID, done_tokens=1, total_tokens=7, cached_tokens=0)
    *chunks, done = chat_chunks(QUEUED, prefilling, QUEUED, delta("Hel"), delta(""), delta('lo "\n'), finished())
    assert done == "[DONE]"
    assert all(chunk.items() >= SAME.items() and "usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"] for chunk in chunks]
    assert choices == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "Hel"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": 'lo "\n'}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]


def test_usage_comes_once_and_only_when_asked() -> None:
    """B03: null in every chunk, then one with no choices, after the finish chunk and before [DONE]."""
    for chunks in (
        chat_chunks(QUEUED, delta("a"), finished(FinishReason.LENGTH), usage="asked"),
        text_chunks(QUEUED, delta("a"), finished(FinishReason.LENGTH), usage="asked"),
    ):
        *earlier, usage, done = chunks
        assert done == "[DONE]"
        assert all(chunk["usage"] is None for chunk in earlier)
        assert earlier[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["choices"] == []
        assert usage["usage"] == {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


def test_a_failure_in_mid_stream_is_told_and_nothing_follows() -> None:
    """B08: an error event, no finish_reason, no [DONE]: SDKs raise on it, and only on it."""
    failed = Failed(request_id=ID, failure=Failure(kind=FailureKind.WORKER_DIED, message="Try again."))
    for chunks in (chat_chunks(QUEUED, delta("a"), failed), text_chunks(QUEUED, delta("a"), failed)):
        *earlier, error = chunks
        expected = {"message": "Try again.", "type": "server_error", "param": None, "code": "worker_died"}
        assert error == {"error": expected}
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in earlier)


@pytest.mark.parametrize("model", ["a\0text\0b", '\\u0000text\\u0000"', "org/名:tag"])
def test_no_model_name_confuses_the_prebuilt_halves(model: str) -> None:
    """The text goes to its own place, whatever the name holds."""
    envelope = Envelope(id="x", created=1, model=model, system_fingerprint=None)
    (line,) = sse_data(chat(envelope=envelope).encode(delta("hi"), 0))
    chunk = json.loads(line)
    assert (chunk["model"], chunk["choices"][0]["delta"]) == (model, {"content": "hi"})


def test_the_whole_chat_answer() -> None:
    """Every key that the API has for a plain answer."""
    answer = chat_completion([delta("Hel"), delta("lo")], finished(), top_logprobs=None)
    assert answer.pop("usage")["total_tokens"] == 10
    assert answer == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 17,
        "model": "org/m:4bit",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "system_fingerprint": None,
    }


def test_chat_logprobs() -> None:
    """Tokens with their bytes and alternatives; a chunk without text still carries them; no infinity in JSON."""
    first = token(b"Hi", -0.25, top=[(b"Hi", -0.25), (b"Yo", float("-inf"))])
    half = token(b"\xf0\x9f", -1.5)
    deltas = [delta("Hi", first), delta("", half)]
    whole = chat_completion(deltas, finished(), top_logprobs=2)["choices"][0]["logprobs"]
    assert whole == {
        "content": [
            {
                "token": "Hi",
                "bytes": [72, 105],
                "logprob": -0.25,
                "top_logprobs": [
                    {"token": "Hi", "bytes": [72, 105], "logprob": -0.25},
                    {"token": "Yo", "bytes": [89, 111], "logprob": -9999.0},
                ],
            },
            {"token": "\ufffd", "bytes": [240, 159], "logprob": -1.5, "top_logprobs": []},
        ],
        "refusal": None,
    }
    chunks = chat_chunks(QUEUED, *deltas, finished())[1:-2]
    assert [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks] == [[entry] for entry in whole["content"]]


def test_legacy_logprobs() -> None:
    """Parallel lists; the drawn token is among the alternatives; offsets count characters, also inside one."""
    deltas = [
        delta("aé", token("aé".encode(), -0.5, top=[(b"b", -0.7)])),
        delta("", token(b"\xf0\x9f", -1.0)),
        delta("🚀", token(b"\x9a\x80", -2.0)),
        delta("z", token(b"z", -3.0)),
    ]
    whole = text_completion(deltas, finished(), top_logprobs=1)["choices"][0]["logprobs"]
    assert whole["token_logprobs"] == [-0.5, -1.0, -2.0, -3.0]
    assert whole["text_offset"] == [0, 2, 2, 3]
    assert whole["top_logprobs"][0] == {"aé": -0.5, "b": -0.7}
    none_asked = text_completion(deltas, finished(), top_logprobs=0)["choices"][0]["logprobs"]
    assert none_asked["top_logprobs"] is None
    streamed = [chunk["choices"][0]["logprobs"] for chunk in text_chunks(*deltas, finished(), top_logprobs=1)[:-2]]
    assert [offset for part in streamed for offset in part["text_offset"]] == whole["text_offset"]


TOKENS = st.builds(token, st.binary(max_size=4), st.floats(max_value=0, allow_nan=False))
DELTAS = st.lists(st.builds(delta, st.text(max_size=6)) | st.builds(delta, st.text(max_size=6), TOKENS), max_size=8)


@given(DELTAS, st.sampled_from(FinishReason))
def test_a_joined_stream_equals_the_whole_answer(deltas: list[Delta], reason: FinishReason) -> None:
    """Both modes of both routes say the same: text, logprobs, finish_reason and usage."""
    end = finished(reason)
    *chat, chat_usage, _ = chat_chunks(QUEUED, *deltas, end, usage="asked")
    whole = chat_completion(deltas, end, top_logprobs=0)
    choices = [chunk["choices"][0] for chunk in chat]
    assert (
        "".join(choice["delta"].get("content", "") for choice in choices) == whole["choices"][0]["message"]["content"]
    )
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert reasons == [whole["choices"][0]["finish_reason"]]
    assert chat_usage["usage"] == whole["usage"]

    *texts, text_usage, _ = text_chunks(QUEUED, *deltas, end, usage="asked", top_logprobs=0)
    whole = text_completion(deltas, end, top_logprobs=0)
    choices = [chunk["choices"][0] for chunk in texts]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    for key in ("tokens", "token_logprobs", "text_offset"):
        joined = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"][key]]
        assert joined == whole["choices"][0]["logprobs"][key]
    assert text_usage["usage"] == whole["usage"]
