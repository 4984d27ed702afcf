"""The socket to the workers as the dispatch task uses it: each process is addressed by its incarnation."""

import itertools
from pathlib import Path
from typing import cast

import structlog

from protocol.addresses import gateway_socket
from protocol.framing import MalformedMessage
from protocol.generation import Ping, WorkerCommand, WorkerEvent
from protocol.ids import Incarnation
from protocol.sockets import AsyncListener, PeerGone

_log = structlog.get_logger()


class WorkerSocket:
    """Bound from its making until `close`."""

    def __init__(self, runtime_directory: str) -> None:
        self._path = gateway_socket(Path(runtime_directory))
        self._listener: AsyncListener[WorkerEvent, WorkerCommand] = AsyncListener(
            self._path, cast("type[WorkerEvent]", WorkerEvent)
        )
        self._nonces = itertools.count(1)

    async def receive(self) -> tuple[bytes, WorkerEvent | MalformedMessage]:
        """The next message and the name of the peer that sent it."""
        return await self._listener.receive()

    async def send(self, incarnation: Incarnation, command: WorkerCommand) -> None:
        """Raises PeerGone."""
        await self._listener.send(b"w%d" % incarnation, command)

    async def send_if_there(self, incarnation: Incarnation, command: WorkerCommand) -> None:
        """For commands that a process which is gone does not need."""
        await self.answer_if_there(b"w%d" % incarnation, command)

    async def answer_if_there(self, peer: bytes, command: WorkerCommand) -> None:
        """As `send_if_there`, to whoever wrote, a stranger too."""
        try:
            await self._listener.send(peer, command)
        except PeerGone as why:
            _log.debug("peer_gone", command=type(command).__name__, why=str(why))

    async def ping_if_there(self, incarnation: Incarnation) -> int:
        """Ask a process for its books; its Pong carries the nonce that is returned."""
        nonce = next(self._nonces)
        await self.send_if_there(incarnation, Ping(nonce=nonce))
        return nonce

    def close(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)


def incarnation_of_peer(peer: bytes) -> Incarnation:
    """Which process goes by this name on the socket; -1 for a name that none of ours has."""
    digits = peer[1:]
    return Incarnation(int(digits)) if peer[:1] == b"w" and digits.isdigit() and len(digits) < 20 else Incarnation(-1)
