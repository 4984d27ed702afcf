"""The loop: every request is answered, and nothing a peer does ends it."""

from collections import deque
from typing import Any

from cachestore.loop import run
from protocol.blocks import CacheFailed, Describe, Released, StillHeld
from protocol.framing import MalformedMessage
from protocol.sockets import PeerGone


class ScriptedMessages:
    """Gives the listed messages, then silence."""

    def __init__(self, messages: list[tuple[bytes, Any]]) -> None:
        self.messages = deque(messages)
        self.sent: list[tuple[bytes, Any]] = []
        self.silences: list[float] = []

    def receive(self, timeout_seconds: float) -> Any:
        if self.messages:
            return self.messages.popleft()
        self.silences.append(timeout_seconds)
        return None

    def send(self, peer: bytes, message: Any) -> None:
        if peer == b"gone":
            raise PeerGone("no such peer")
        self.sent.append((peer, message))


class ScriptedService:
    """Fails for the peer `bad`; busy for a few rounds."""

    def __init__(self) -> None:
        self.dropped: list[bytes] = []
        self.idled: list[float] = []
        self.holders: set[bytes] = set()

    def handle(self, peer: bytes, request: Any, now: float) -> Any:
        if peer == b"bad":
            raise ZeroDivisionError("a fault of ours")
        return Released(call_id=request.call_id)

    def idle(self, now: float) -> str:
        self.idled.append(now)
        return "busy" if len(self.idled) < 3 else "quiet"

    def lease_holders(self, now: float) -> set[bytes]:
        return set(self.holders)

    def drop_peer(self, peer: bytes, now: float) -> None:
        self.dropped.append(peer)
        self.holders.discard(peer)


def serve(
    messages: list[tuple[bytes, Any]],
    rounds: int,
    seconds_a_round: float = 0.0,
    holders: frozenset[bytes] = frozenset(),
):
    listener, service = ScriptedMessages(messages), ScriptedService()
    service.holders |= holders
    left = iter([False] * rounds + [True] * 2)
    ticks = iter(round_ * seconds_a_round for round_ in range(10_000))
    run(listener, service, lambda: next(ticks), lambda: next(left))  # type: ignore[arg-type]
    return listener, service


def test_a_request_that_raises_is_answered_and_the_next_is_served():
    """A fault of ours is a CacheFailed with the same call id; bytes that are no request are skipped."""
    listener, _ = serve(
        [(b"bad", Describe(call_id=1)), (b"w", MalformedMessage("nonsense")), (b"w", Describe(call_id=2))], rounds=3
    )
    failed, served = listener.sent
    assert failed[0] == b"bad"
    assert isinstance(failed[1], CacheFailed)
    assert failed[1].call_id == 1
    assert "ZeroDivision" not in failed[1].failure.message
    assert served == (b"w", Released(call_id=2))


def test_a_peer_that_is_gone_loses_its_leases_and_the_loop_goes_on():
    """An answer that cannot be sent ends that peer's leases at once."""
    listener, service = serve([(b"gone", Describe(call_id=1)), (b"w", Describe(call_id=2))], rounds=2)
    assert service.dropped == [b"gone"]
    assert [peer for peer, _ in listener.sent] == [b"w"]


def test_housekeeping_runs_in_silence_without_waiting_while_there_is_more_and_waits_after():
    """The loop does not wait for messages while the service is busy, and does not spin when it is quiet."""
    listener, service = serve([], rounds=5)
    assert len(service.idled) == 5
    assert [seconds > 0 for seconds in listener.silences] == [False, False, False, True, True]


def test_housekeeping_runs_under_load_too():
    """A socket that is never silent does not keep leases from ending."""
    _, service = serve([(b"w", Describe(call_id=n)) for n in range(100)], rounds=100, seconds_a_round=0.1)
    assert 5 <= len(service.idled) <= 15


def test_who_holds_a_lease_for_long_is_looked_after_now_and_then():
    """One that died loses its leases within seconds, though nothing is to be sent to it; one that lives keeps them."""
    listener, service = serve([], rounds=100, seconds_a_round=0.1, holders=frozenset({b"gone", b"w"}))
    assert service.dropped == [b"gone"]
    assert {message for _, message in listener.sent} == {StillHeld()}
    assert 5 <= len(listener.sent) <= 15
