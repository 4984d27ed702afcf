"""The one thread: a message in, a reply out; housekeeping when nobody asks."""

from collections.abc import Callable
from typing import Protocol

import structlog

from cachestore.service import Service
from protocol.blocks import BlockReply, BlockRequest, CacheFailed, StillHeld
from protocol.failures import Failure, FailureKind
from protocol.framing import MalformedMessage
from protocol.sockets import PeerGone

IDLE_SECONDS = 0.2
"""How long a stop may go unnoticed."""

HOUSEKEEPING_SECONDS = 1.0
"""However busy the socket is, leases end on time, and those of a peer that died soon after it."""

_log = structlog.get_logger("cachestore")


class Messages(Protocol):
    """What the loop needs of protocol.sockets.Listener."""

    def receive(self, timeout_seconds: float) -> tuple[bytes, BlockRequest | MalformedMessage] | None: ...

    def send(self, peer: bytes, message: BlockReply) -> None: ...


def run(listener: Messages, service: Service, clock: Callable[[], float], should_stop: Callable[[], bool]) -> None:
    """Serve until `should_stop`. A request that raises is answered and logged; bytes that are no request are logged."""
    housekept_at = looked_after_at = clock()
    wait_seconds = 0.0
    while not should_stop():
        received = listener.receive(wait_seconds)
        now = clock()
        if received is None or now - housekept_at >= HOUSEKEEPING_SECONDS:
            housekept_at = now
            wait_seconds = 0.0 if service.idle(now) == "busy" else IDLE_SECONDS
        if now - looked_after_at >= HOUSEKEEPING_SECONDS:
            looked_after_at = now
            for peer in service.lease_holders(now):
                _send(listener, service, peer, StillHeld(), now)
        if received is None:
            continue
        peer, request = received
        if isinstance(request, MalformedMessage):
            _log.warning("malformed_message", peer=_printable(peer), why=str(request))
            continue
        _send(listener, service, peer, _answer(service, peer, request, now), now)


def _send(listener: Messages, service: Service, peer: bytes, reply: BlockReply, now: float) -> None:
    try:
        listener.send(peer, reply)
    except PeerGone:
        _log.info("peer_gone", peer=_printable(peer))
        service.drop_peer(peer, now)


def _answer(service: Service, peer: bytes, request: BlockRequest, now: float) -> BlockReply:
    try:
        return service.handle(peer, request, now)
    except Exception:  # noqa: BLE001 -- answered and logged with its traceback: one bad request ends nobody's cache
        _log.exception("request_failed", peer=_printable(peer), request=type(request).__name__)
        message = "the cachestore could not serve this; its log has the traceback, please report it"
        return CacheFailed(call_id=request.call_id, failure=Failure(kind=FailureKind.INTERNAL, message=message))


def _printable(peer: bytes) -> str:
    return peer.decode("ascii", "backslashreplace")
