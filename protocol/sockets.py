"""The one file that knows ZeroMQ. Four endpoints over Unix sockets, each typed by what it reads and writes.

- `Listener`: blocking, many peers (the cachestore).
- `AsyncListener`: asyncio, many peers (the gateway).
- `AsyncPeer`: asyncio, one listener (the gateway, towards the cachestore).
- `Peer`: blocking, one listener (a worker; also its cache thread). Another thread may `wake` it.

A peer names itself; the listener sees that name with every message. Bytes that are no message are received as a
MalformedMessage value, so that one bad peer cannot end anybody's loop. Sends to a peer that is gone raise PeerGone.
"""

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import zmq
import zmq.asyncio

from protocol.framing import Codec, MalformedMessage

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")

_HIGH_WATER_MESSAGES = 10_000
_LINGER_MILLISECONDS = 500
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024


class PeerGone(Exception):
    """No peer of that name is connected."""


class Listener(Generic[Incoming, Outgoing]):
    """Blocking server side. Use from one thread."""

    def __init__(self, path: Path, incoming: object) -> None:
        self._codec: Codec[Incoming, Outgoing] = Codec(incoming)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure_router(self._socket)
        self._socket.bind(_endpoint(path))
        path.chmod(0o600)

    def receive(self, timeout_seconds: float) -> tuple[bytes, Incoming | MalformedMessage] | None:
        """The next message with its peer's name, or None when the timeout passed."""
        if not self._socket.poll(int(timeout_seconds * 1000)):
            return None
        return _split(self._codec, self._socket.recv_multipart())

    def send(self, peer: bytes, message: Outgoing) -> None:
        try:
            self._socket.send_multipart([peer, self._codec.encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as why:
            raise PeerGone(str(why)) from None

    def close(self) -> None:
        self._socket.close(_LINGER_MILLISECONDS)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncListener(Generic[Incoming, Outgoing]):
    """Asyncio server side. Use from one event loop."""

    def __init__(self, path: Path, incoming: object) -> None:
        self._codec: Codec[Incoming, Outgoing] = Codec(incoming)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure_router(self._socket)
        self._socket.bind(_endpoint(path))
        path.chmod(0o600)
        # The same socket without futures: one for each message would cost a quarter of a busy gateway's time.
        self._at_once: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)  # pyright: ignore[reportUnknownMemberType]

    async def receive(self) -> tuple[bytes, Incoming | MalformedMessage]:
        """The next message with its peer's name. Does not give way to other tasks while there are messages."""
        while True:
            try:
                return _split(self._codec, self._at_once.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                await self._socket.poll()

    async def send(self, peer: bytes, message: Outgoing) -> None:
        # Not `_at_once`: a send may take the signal that messages have come, and only the other socket passes it on.
        try:
            await self._socket.send_multipart(  # pyright: ignore[reportUnknownMemberType]
                [peer, self._codec.encode(message)], zmq.DONTWAIT
            )
        except zmq.ZMQError as why:
            raise PeerGone(str(why)) from None

    def close(self) -> None:
        self._socket.close(_LINGER_MILLISECONDS)
        self._context.term()


class AsyncPeer(Generic[Incoming, Outgoing]):
    """Asyncio client side. Use from one event loop."""

    def __init__(self, path: Path, name: bytes, incoming: object) -> None:
        self._codec: Codec[Incoming, Outgoing] = Codec(incoming)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name)
        _configure(self._socket)
        self._socket.connect(_endpoint(path))

    async def receive(self) -> Incoming | MalformedMessage:
        """The next message."""
        return _decoded(self._codec, await self._socket.recv())

    async def send(self, message: Outgoing) -> None:
        """Queue a message. Raises PeerGone when the other side reads nothing for so long that the queue is full."""
        try:
            await self._socket.send(self._codec.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            raise PeerGone("the queue to the listener is full") from None

    def close(self) -> None:
        self._socket.close(_LINGER_MILLISECONDS)
        self._context.term()


class Peer(Generic[Incoming, Outgoing]):
    """Blocking client side: one thread owns it, any thread may call `wake`."""

    def __init__(self, path: Path, name: bytes, incoming: object) -> None:
        self._codec: Codec[Incoming, Outgoing] = Codec(incoming)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name)
        _configure(self._socket)
        self._socket.connect(_endpoint(path))
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def receive(self, timeout_seconds: float) -> list[Incoming | MalformedMessage]:
        """All messages waiting; blocks up to the timeout when there is none and nobody called `wake`."""
        ready = dict(self._poller.poll(max(0, int(timeout_seconds * 1000))))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        messages: list[Incoming | MalformedMessage] = []
        while True:
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return messages
            messages.append(_decoded(self._codec, data))

    def send(self, message: Outgoing) -> None:
        """Queue a message. Raises PeerGone when the other side reads nothing for so long that the queue is full."""
        try:
            self._socket.send(self._codec.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            raise PeerGone("the queue to the listener is full") from None

    def wake(self) -> None:
        """End the current or the next `receive` early. Safe from any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"w")

    def close(self) -> None:
        self._socket.close(_LINGER_MILLISECONDS)
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _endpoint(path: Path) -> str:
    return f"ipc://{path}"


def _configure(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MESSAGES)
    socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)


def _configure_router(socket: "zmq.Socket[Any]") -> None:
    _configure(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects under its name replaces the dead connection


def _split(codec: "Codec[Incoming, Outgoing]", frames: list[bytes]) -> tuple[bytes, Incoming | MalformedMessage]:
    if len(frames) != 2:
        return frames[0], MalformedMessage(f"{len(frames)} frames instead of a peer name and one message")
    return frames[0], _decoded(codec, frames[1])


def _decoded(codec: "Codec[Incoming, Outgoing]", data: bytes) -> Incoming | MalformedMessage:
    try:
        return codec.decode(data)
    except MalformedMessage as malformed:
        return malformed
