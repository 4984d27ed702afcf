"""Any message survives the wire; any bytes are a message or a MalformedMessage, and nothing else ever happens."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.framing import Codec, MalformedMessage
from protocol.generation import TextPrompt, WorkerCommand, WorkerEvent
from tests.protocol.examples import DIRECTIONS, EXAMPLES, reader_of
from tests.protocol.strategies import messages

_UNIONS = [pytest.param(union, id=name) for name, union in DIRECTIONS.items()]
_STRATEGIES = {name: messages(union) for name, union in DIRECTIONS.items()}


@given(st.sampled_from(list(DIRECTIONS)).flatmap(lambda name: st.tuples(st.just(name), _STRATEGIES[name])))
def test_any_message_survives(sent: tuple[str, Any]) -> None:
    """Decoding what was encoded gives an equal value of the same type."""
    name, message = sent
    codec: Codec[Any, Any] = Codec(DIRECTIONS[name])

    received = codec.decode(codec.encode(message))

    assert (type(received), received) == (type(message), message)


@given(data=st.binary(max_size=200), name=st.sampled_from(list(DIRECTIONS)))
def test_any_bytes_give_a_value_or_malformed(data: bytes, name: str) -> None:
    """No bytes raise anything but MalformedMessage."""
    _value_or_malformed(DIRECTIONS[name], data)


@given(
    example=st.sampled_from(EXAMPLES),
    cut=st.integers(0, 400),
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), max_size=3),
)
def test_damaged_messages_give_a_value_or_malformed(example: Any, cut: int, flips: list[tuple[int, int]]) -> None:
    """Truncation and flipped bits reach deeper into a decoder than random bytes do; it holds there as well."""
    data = bytearray(msgspec.msgpack.encode(example)[: cut or None])
    for position, mask in flips:
        data[position % len(data)] ^= mask

    _value_or_malformed(reader_of(example), bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"type": "NoSuchMessage"}),
        msgspec.msgpack.encode({"type": "Cancel"}),
        msgspec.msgpack.encode({"type": "Cancel", "request_id": 5}),
        msgspec.msgpack.encode({"type": "Cancel", "request_id": "r"}) + b"\x00",
        msgspec.msgpack.encode([{"type": "Cancel", "request_id": "r"}]),
        msgspec.msgpack.encode({"type": "Cancel", "request_id": "r"}).replace(b"\xa1r", b"\xa1\xff"),
    ],
    ids=["empty", "no msgpack", "deep", "unknown tag", "no field", "wrong type", "more after", "a list", "bad utf-8"],
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    """Each way of not being a message ends in MalformedMessage."""
    with pytest.raises(MalformedMessage):
        Codec[WorkerCommand, WorkerEvent](WorkerCommand).decode(data)


@pytest.mark.parametrize("union", _UNIONS)
def test_an_unknown_field_is_ignored(union: Any) -> None:
    """One more field than known is no reason to drop a message."""
    example = next(message for message in EXAMPLES if reader_of(message) is union)
    more = {**msgspec.msgpack.decode(msgspec.msgpack.encode(example)), "of_the_future": 1}

    assert Codec[Any, Any](union).decode(msgspec.msgpack.encode(more)) == example


def test_a_malformed_message_is_not_quoted() -> None:
    """Its bytes may hold a prompt, and errors end in logs."""
    secret = "the prompt of somebody"
    data = msgspec.msgpack.encode({"type": "Generate", "prompt": TextPrompt(text=secret), "sampling": secret})

    with pytest.raises(MalformedMessage) as raised:
        Codec[WorkerCommand, WorkerEvent](WorkerCommand).decode(data)

    assert secret not in str(raised.value)
    assert raised.value.__cause__ is None


def _value_or_malformed(union: Any, data: bytes) -> None:
    try:
        Codec[Any, Any](union).decode(data)
    except MalformedMessage:
        return
