"""The four endpoints, over real sockets: what is sent arrives typed, and no bad or lost peer ends anybody's loop."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from protocol.framing import MalformedMessage
from protocol.generation import Cancel, Ping, Pong, WorkerCommand, WorkerEvent
from protocol.ids import RequestId
from protocol.sockets import AsyncListener, AsyncPeer, Listener, Peer, PeerGone

DEADLINE_SECONDS = 10.0

Server = Listener[Any, Any]
Client = Peer[Any, Any]


def _pong(nonce: int) -> Pong:
    return Pong(
        nonce=nonce,
        steps=0,
        running_rows=0,
        waiting_requests=0,
        active_bytes=0,
        hot_cache_bytes=0,
        hot_cache_blocks=0,
    )


@pytest.fixture
def path(runtime_directory: Path) -> Path:
    return runtime_directory / "s.sock"


@contextmanager
def _raw_peer(path: Path, name: bytes) -> Iterator["zmq.Socket[bytes]"]:
    """A peer that can send what no peer of ours would."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, name)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{path}")
        yield socket


def test_messages_go_both_ways(path: Path) -> None:
    """A listener sees each message with its sender's name and answers that one only."""
    with (
        Listener[WorkerEvent, WorkerCommand](path, WorkerEvent) as listener,
        closing(Peer[WorkerCommand, WorkerEvent](path, b"one", WorkerCommand)) as one,
        closing(Peer[WorkerCommand, WorkerEvent](path, b"two", WorkerCommand)) as two,
    ):
        one.send(_pong(1))
        two.send(_pong(2))
        received = dict(filter(None, (listener.receive(DEADLINE_SECONDS) for _ in range(2))))
        listener.send(b"two", Ping(nonce=7))

        assert received == {b"one": _pong(1), b"two": _pong(2)}
        assert two.receive(DEADLINE_SECONDS) == [Ping(nonce=7)]
        assert one.receive(0) == []


def test_messages_of_one_peer_keep_their_order(path: Path) -> None:
    """A delta never overtakes another."""
    with Server(path, WorkerEvent) as listener, closing(Client(path, b"w", WorkerCommand)) as peer:
        for nonce in range(500):
            peer.send(_pong(nonce))
        received = [listener.receive(DEADLINE_SECONDS) for _ in range(500)]

        assert received == [(b"w", _pong(nonce)) for nonce in range(500)]


def test_a_listener_waits_no_longer_than_told(path: Path) -> None:
    """A timeout is an answer, not an error: the caller's loop has other work."""
    with Server(path, WorkerEvent) as listener:
        assert listener.receive(0.0) is None


def test_the_socket_file_is_private(path: Path) -> None:
    """Whoever can connect can make a model speak: only the owner can."""
    with Server(path, WorkerEvent):
        assert path.stat().st_mode & 0o777 == 0o600


def test_sending_to_a_peer_that_never_was(path: Path) -> None:
    """A message to nobody is an error at once; it never vanishes."""
    with Server(path, WorkerEvent) as listener, pytest.raises(PeerGone):
        listener.send(b"nobody", Ping(nonce=1))


def test_sending_to_a_peer_that_left(path: Path) -> None:
    """Soon after a peer is gone, sending to it says so."""
    with Server(path, WorkerEvent) as listener:
        with closing(Client(path, b"w", WorkerCommand)) as peer:
            peer.send(_pong(1))
            assert listener.receive(DEADLINE_SECONDS) is not None
        deadline = time.monotonic() + DEADLINE_SECONDS
        with pytest.raises(PeerGone):
            while time.monotonic() < deadline:
                listener.send(b"w", Ping(nonce=1))
                listener.receive(0.01)  # lets the socket notice


@pytest.mark.parametrize(
    "frames",
    [[b"\xc1"], [b""], [b"a", b"b"], [b"", b""], [b"\x81\xa4type\xa4Nope"]],
    ids=["no message", "empty", "two frames", "two empty frames", "unknown kind"],
)
def test_malformed_bytes_are_a_value(path: Path, frames: list[bytes]) -> None:
    """A peer that sends nonsense is heard as such, by name, and the next good message of another is heard too."""
    with (
        Server(path, WorkerEvent) as listener,
        _raw_peer(path, b"bad") as bad,
        closing(Client(path, b"good", WorkerCommand)) as good,
    ):
        bad.send_multipart(frames)
        heard = listener.receive(DEADLINE_SECONDS)
        good.send(_pong(1))

        assert heard is not None
        assert heard[0] == b"bad"
        assert isinstance(heard[1], MalformedMessage)
        assert listener.receive(DEADLINE_SECONDS) == (b"good", _pong(1))


def test_a_listener_that_talks_nonsense_is_survived(path: Path) -> None:
    """A peer hears malformed bytes as a value as well, in order between good messages."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"ipc://{path}")
        with closing(Client(path, b"w", WorkerCommand)) as peer:
            peer.send(_pong(1))
            name, _ = router.recv_multipart()
            router.send_multipart([name, b"\xc1"])
            router.send_multipart([name, b"\x82\xa4type\xa4Ping\xa5nonce\x01"])
            heard = _hear(peer, 2)

            assert isinstance(heard[0], MalformedMessage)
            assert heard[1] == Ping(nonce=1)


def test_wake_ends_a_receive(path: Path) -> None:
    """Another thread can end the wait of the one that owns the peer."""
    with Server(path, WorkerEvent), closing(Client(path, b"w", WorkerCommand)) as peer:
        heard: list[list[Any]] = []
        waiting = threading.Thread(target=lambda: heard.append(peer.receive(60.0)))
        waiting.start()
        peer.wake()
        waiting.join(DEADLINE_SECONDS)

        assert heard == [[]]


def test_a_wake_before_a_receive_counts_for_the_next(path: Path) -> None:
    """No wake-up is lost in the gap between two waits, and too many to hold neither block nor raise."""
    with Server(path, WorkerEvent), closing(Client(path, b"w", WorkerCommand)) as peer:
        for _ in range(100_000):  # more bytes than a pipe takes
            peer.wake()
        started = time.monotonic()

        assert peer.receive(60.0) == []
        assert time.monotonic() - started < DEADLINE_SECONDS


def test_what_was_sent_before_the_listener_came_arrives(path: Path) -> None:
    """A worker that is up before its cachestore need not wait for it."""
    with closing(Client(path, b"w", WorkerCommand)) as peer:
        peer.send(_pong(1))
        with Server(path, WorkerEvent) as listener:
            assert listener.receive(DEADLINE_SECONDS) == (b"w", _pong(1))


def test_a_peer_finds_a_restarted_listener(path: Path) -> None:
    """When the listener comes back at the same path, its peers speak to it under their names, unasked."""
    with closing(Client(path, b"w", WorkerCommand)) as peer:
        with Server(path, WorkerEvent) as first:
            peer.send(_pong(1))
            assert first.receive(DEADLINE_SECONDS) == (b"w", _pong(1))
        with Server(path, WorkerEvent) as second:
            heard = None
            deadline = time.monotonic() + DEADLINE_SECONDS
            while heard is None and time.monotonic() < deadline:
                peer.send(_pong(2))  # one that was sent into the closing connection may be lost
                heard = second.receive(0.05)
            assert heard == (b"w", _pong(2))
            second.send(b"w", Ping(nonce=3))
            assert _hear(peer, 1) == [Ping(nonce=3)]


def test_a_name_belongs_to_its_newest_connection(path: Path) -> None:
    """A respawned worker under the same name is heard and answered, although the dead one's connection lingers."""
    with Server(path, WorkerEvent) as listener, _raw_peer(path, b"w") as old:
        old.send(b"\xc1")
        assert listener.receive(DEADLINE_SECONDS) is not None
        with closing(Client(path, b"w", WorkerCommand)) as new:
            new.send(_pong(2))
            assert listener.receive(DEADLINE_SECONDS) == (b"w", _pong(2))
            listener.send(b"w", Ping(nonce=9))

            assert _hear(new, 1) == [Ping(nonce=9)]


def test_closing_is_quick_with_nobody_listening(path: Path) -> None:
    """Unsent messages delay a process's end by the linger time at most."""
    peer = Client(path, b"w", WorkerCommand)
    peer.send(_pong(1))
    started = time.monotonic()
    peer.close()

    assert time.monotonic() - started < DEADLINE_SECONDS


async def test_asyncio_messages_go_both_ways(path: Path) -> None:
    """The asyncio pair keeps the same promises."""
    listener = AsyncListener[WorkerEvent, WorkerCommand](path, WorkerEvent)
    peer = AsyncPeer[WorkerCommand, WorkerEvent](path, b"w", WorkerCommand)
    with closing(listener), closing(peer):
        async with asyncio.timeout(DEADLINE_SECONDS):
            await peer.send(_pong(1))
            assert await listener.receive() == (b"w", _pong(1))
            await listener.send(b"w", Cancel(request_id=RequestId("r")))
            assert await peer.receive() == Cancel(request_id=RequestId("r"))


async def test_asyncio_sending_to_nobody(path: Path) -> None:
    """The dispatcher learns that a worker is gone from the send itself."""
    with closing(AsyncListener[WorkerEvent, WorkerCommand](path, WorkerEvent)) as listener, pytest.raises(PeerGone):
        await listener.send(b"nobody", Ping(nonce=1))


async def test_asyncio_malformed_bytes_are_a_value(path: Path) -> None:
    """One bad worker cannot end the dispatcher's loop."""
    with (
        closing(AsyncListener[WorkerEvent, WorkerCommand](path, WorkerEvent)) as listener,
        _raw_peer(path, b"w") as bad,
    ):
        bad.send_multipart([b"x", b"y"])
        async with asyncio.timeout(DEADLINE_SECONDS):
            name, heard = await listener.receive()

        assert name == b"w"
        assert isinstance(heard, MalformedMessage)


async def test_an_asyncio_peer_meets_a_blocking_listener(path: Path) -> None:
    """The gateway asks the cachestore: asyncio on one side, a thread on the other."""
    with (
        Listener[WorkerEvent, WorkerCommand](path, WorkerEvent) as listener,
        closing(AsyncPeer[WorkerCommand, WorkerEvent](path, b"gateway", WorkerCommand)) as peer,
    ):
        async with asyncio.timeout(DEADLINE_SECONDS):
            await peer.send(_pong(1))
            assert await asyncio.to_thread(listener.receive, DEADLINE_SECONDS) == (b"gateway", _pong(1))
            listener.send(b"gateway", Ping(nonce=1))
            assert await peer.receive() == Ping(nonce=1)


def _hear(peer: Client, count: int) -> list[Any]:
    heard: list[Any] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(heard) < count and time.monotonic() < deadline:
        heard += peer.receive(0.05)
    return heard
