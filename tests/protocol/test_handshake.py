"""Who may join, and where sockets may lie."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import addresses
from protocol.handshake import PROTOCOL_VERSION, Hello, Refused, Welcome, answer_hello
from protocol.ids import Incarnation, ModelName


def _hello(*, protocol_version: int = PROTOCOL_VERSION, incarnation: int = 3) -> Hello:
    return Hello(protocol_version=protocol_version, model=ModelName("m"), incarnation=Incarnation(incarnation), pid=1)


@pytest.mark.parametrize(
    ("hello", "expected", "words"),
    [
        (_hello(), 3, None),
        (_hello(), 4, "does not run m as incarnation 3"),
        (_hello(incarnation=5), 4, "does not run m as incarnation 5"),
        (_hello(), None, "does not run m"),
        (_hello(protocol_version=PROTOCOL_VERSION + 1), 3, "one installation"),
        (_hello(protocol_version=PROTOCOL_VERSION - 1), 3, "one installation"),
        (_hello(protocol_version=0), None, "one installation"),
    ],
    ids=["the one", "older spawn", "newer spawn", "not expected", "newer wire", "older wire", "wire before spawn"],
)
def test_who_may_join(hello: Hello, expected: int | None, words: str | None) -> None:
    """Only the very spawn the gateway runs, of exactly its version; everyone else is told why."""
    answer = answer_hello(hello, expected=None if expected is None else Incarnation(expected))

    match answer:
        case Welcome():
            assert words is None
        case Refused(reason=reason):
            assert words is not None
            assert words in reason


@given(st.integers(1, 200))
def test_a_socket_path_is_short_enough_or_refused(length: int) -> None:
    """No path over 103 bytes is handed out, and the refusal names the setting to change."""
    directory = Path("/" + "d" * length)
    for place in (addresses.gateway_socket, addresses.cachestore_socket):
        try:
            path = place(directory)
        except addresses.SocketPathTooLong as why:
            assert "runtime_directory" in str(why)
            continue
        assert len(os.fsencode(path)) <= addresses.SOCKET_PATH_MAX_BYTES


def test_bytes_count_not_characters() -> None:
    """The kernel's limit is in bytes: 40 three-byte characters do not fit."""
    with pytest.raises(addresses.SocketPathTooLong):
        addresses.gateway_socket(Path("/" + "京" * 40))
