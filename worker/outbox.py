"""Events on their way from this worker's threads to its socket: in order, and not one lost.

A gateway that reads nothing for a while (a laptop that sleeps, a stopped process) fills the socket's queue. An event
dropped then would be text that a client never gets, or an end that it waits for in vain: so they are kept here, and
whoever makes more of them waits.
"""

import threading
from collections import deque
from collections.abc import Callable

from protocol.generation import WorkerEvent
from protocol.sockets import PeerGone

MOST_EVENTS = 20_000
"""Beside those in the socket's own queue: minutes of tokens of a full batch."""


class Outbox:
    """Any thread may `put`; the thread that owns the socket calls `send`."""

    def __init__(self, wake: Callable[[], None], *, most_events: int = MOST_EVENTS) -> None:
        """`wake` makes the owner of the socket call `send` soon."""
        self._wake = wake
        self._most_events = most_events
        self._events: deque[WorkerEvent] = deque()
        self._room = threading.Condition()

    def put(self, event: WorkerEvent) -> None:
        """Add an event, when there is room for it."""
        with self._room:
            self._room.wait_for(lambda: len(self._events) < self._most_events)
            self._events.append(event)
        self._wake()

    def send(self, send: Callable[[WorkerEvent], None]) -> int:
        """Hand on what the other side takes. Gives how many events are left."""
        while self._events:
            try:
                send(self._events[0])
            except PeerGone:
                break
            with self._room:
                self._events.popleft()
                self._room.notify()
        return len(self._events)
