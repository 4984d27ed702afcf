"""The bytes of every message are fixed; see `tests.protocol.examples` for how to change them on purpose."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import Struct

from protocol.generation import Generate, Prompt
from protocol.handshake import Hello
from tests.protocol.examples import DIRECTIONS, EXAMPLES, golden, name_of, reader_of

_GOLDEN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_bytes_are_as_reviewed(example: Struct) -> None:
    """Encoding a message gives the reviewed bytes, and those bytes give the message."""
    expected = bytes.fromhex(_GOLDEN[name_of(example)]["bytes"])

    assert msgspec.msgpack.encode(example) == expected
    assert msgspec.msgpack.decode(expected, type=reader_of(example)) == example


def test_the_file_holds_nothing_else() -> None:
    """A message that left the protocol leaves the golden file too, and its readable half is true."""
    assert golden() == _GOLDEN


def test_every_message_has_an_example() -> None:
    """Nobody adds a message to a union without its bytes being reviewed."""
    seen = {type(example) for example in EXAMPLES}
    seen |= {type(example.prompt) for example in EXAMPLES if isinstance(example, Generate)}
    declared = {member for union in (*DIRECTIONS.values(), Prompt) for member in get_args(union)}

    assert declared - seen == set()


def test_hello_stays_readable_for_ever() -> None:
    """A gateway of any version reads the Hello of any other: these fields and this tag never change."""
    old = msgspec.msgpack.encode(
        {"type": "Hello", "protocol_version": 0, "model": "m", "incarnation": 1, "pid": 2, "of_the_future": True}
    )

    assert msgspec.msgpack.decode(old, type=Hello).protocol_version == 0
