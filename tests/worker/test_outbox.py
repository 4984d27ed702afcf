"""Events reach the gateway whole and in order, however long it reads nothing."""

import threading
import time
from pathlib import Path

from protocol.generation import Delta, WorkerCommand, WorkerEvent
from protocol.ids import RequestId
from protocol.sockets import Listener, Peer, PeerGone
from worker.outbox import Outbox

EVENTS = 30_000  # more than the socket's queues on both sides hold


def delta(number: int) -> Delta:
    return Delta(request_id=RequestId("r"), text=str(number), tokens=1)


def test_nothing_is_lost_while_the_gateway_does_not_read(runtime_directory: Path) -> None:
    """Every event arrives, in order, when the other side goes on reading after its queue was full."""
    path = runtime_directory / "s"
    with Listener[WorkerEvent, WorkerCommand](path, WorkerEvent) as listener:
        peer: Peer[WorkerCommand, WorkerEvent] = Peer(path, b"w1", WorkerCommand)
        outbox = Outbox(peer.wake, most_events=EVENTS)
        for number in range(EVENTS):
            outbox.put(delta(number))
        left = outbox.send(peer.send)
        assert left > 0, "the queue was never full, so this proves nothing"
        texts: list[str] = []
        deadline = time.monotonic() + 30
        while len(texts) < EVENTS and time.monotonic() < deadline:
            outbox.send(peer.send)
            while (received := listener.receive(0.0)) is not None:
                assert isinstance(received[1], Delta)
                texts.append(received[1].text)
        assert texts == [str(number) for number in range(EVENTS)]
        peer.close()


def test_who_makes_more_waits() -> None:
    """The outbox is bounded: a thread that adds to a full one goes on when something was sent."""
    outbox = Outbox(lambda: None, most_events=2)
    sent: list[WorkerEvent] = []

    def refuse(_event: WorkerEvent) -> None:
        raise PeerGone("full")

    outbox.put(delta(0))
    outbox.put(delta(1))
    producer = threading.Thread(target=outbox.put, args=(delta(2),), daemon=True)
    producer.start()
    assert outbox.send(refuse) == 2
    assert producer.is_alive()
    deadline = time.monotonic() + 10
    while (outbox.send(sent.append) or producer.is_alive()) and time.monotonic() < deadline:
        pass
    outbox.send(sent.append)
    assert [event.text for event in sent if isinstance(event, Delta)] == ["0", "1", "2"]
