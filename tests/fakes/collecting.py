"""An answer's events as `gateway.answering` collects them, in one call."""

from collections.abc import Iterable

from gateway.answer_parts import Collected, Parts
from protocol.generation import AnswerEvent, Finished, Queued, Warmed


def collect(events: Iterable[AnswerEvent], end: Finished | Warmed, queued: Queued | None = None) -> Collected:
    """The same of a whole row of events."""
    parts = Parts()
    for event in events:
        parts.add(event)
    return parts.collected(end, queued)
