"""Bodies: what is read, what is refused, and by which name the field at fault is told."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects import names_header
from gateway.openai.decode import decode
from gateway.openai.schema import ChatRequest, CompletionRequest
from gateway.request_body import Decoded
from protocol.failures import Failure, FailureKind

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> Decoded[ChatRequest] | Failure:
    return decode(json.dumps({**CHAT, **fields}).encode(), ChatRequest)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"[]",
        b"null",
        b'"x"',
        b'{"model":',
        b"\xff",
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"extra":"\xff"}',
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"temperature":NaN}',
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"temperature":1e999}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"seed":1' + b"0" * 5000 + b"}",
        b"\xef\xbb\xbf" + json.dumps(CHAT).encode(),
        json.dumps(CHAT)[:-1].encode() + b',"extra":' + b"[" * 100_000 + b"}",
        json.dumps(CHAT)[:-1].encode() + b',"chat_template_kwargs":' + b'{"a":' * 100_000 + b"}",
    ],
)
def test_a_broken_body_is_an_invalid_request(body: bytes) -> None:
    """C10: whatever the bytes, the answer is a 400 that says what to send, never an exception."""
    failure = decode(body, ChatRequest)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.INVALID_REQUEST
    assert failure.message.endswith(".")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 123}]}]},
            "messages[0].content[0].text",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": "1"}, "n"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 11}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "a"}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"service_tier": 1}, "service_tier"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"safety_identifier": "x" * 65}, "safety_identifier"),
        ({"response_format": {}}, "response_format.type"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    """C01, C02, C03, C12: types and ranges are strict, and `param` is the path as a client writes it."""
    failure = chat(**fields)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.INVALID_REQUEST
    assert failure.param == param
    assert param in failure.message


@pytest.mark.parametrize("name", sorted(set(ChatRequest.__struct_fields__) - {"model", "messages"}))
def test_null_is_absent(name: str) -> None:
    """C01: the SDKs' types allow null, and clients send it: every optional field takes it, and ignores nothing."""
    decoded = chat(**{name: None})
    assert isinstance(decoded, Decoded)
    assert decoded.request == chat().request  # pyright: ignore[reportAttributeAccessIssue]
    assert decoded.ignored == ()


@pytest.mark.parametrize("name", ["regex", "ebnf", "suffix", "audio", "web_search_options"])
def test_an_option_that_would_change_the_answer_is_refused(name: str) -> None:
    """C12: an option that cannot be honoured is not silently dropped."""
    failure = chat(**{name: {"a": 1}})
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.param) == (FailureKind.UNSUPPORTED, name)
    assert isinstance(chat(**{name: None}), Decoded)


def test_what_is_ignored_is_named() -> None:
    """Unknown fields, and known ones that nothing is done with, are accepted and listed in the client's order."""
    decoded = chat(
        user="u",
        temperature=0.5,
        brand_new_field={"deep": [1]},
        store=False,
        service_tier="flex",
        metadata={"a": "b"},
        reasoning_effort="low",
        tools=[{"type": "function", "function": {"name": "f"}}],
        priority=3,
    )
    assert isinstance(decoded, Decoded)
    assert decoded.ignored == (
        "user",
        "brand_new_field",
        "store",
        "metadata",
    )


@given(st.lists(st.text(), max_size=40))
def test_the_header_of_ignored_names_is_bounded_and_harmless(names: list[str]) -> None:
    """Names come from the client: no line break or odd character gets into a header, and it stays short."""
    header = names_header(tuple(names))
    assert len(header) < 1024
    assert header.isascii()
    assert header.isprintable() or not header


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_request_or_a_failure(body: bytes) -> None:
    """No bytes raise."""
    assert isinstance(decode(body, ChatRequest), (Decoded, Failure))
    assert isinstance(decode(body, CompletionRequest), (Decoded, Failure))
