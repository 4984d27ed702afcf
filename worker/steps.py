"""What the scheduler can say: the next step of this worker, as a value that the loop carries out."""

from dataclasses import dataclass

from protocol.ids import RequestId
from worker.sequence import Lane


@dataclass(frozen=True)
class Open:
    """Give this sequence its KV cache, filled with what is cached of its prefix."""

    request_id: RequestId


@dataclass(frozen=True)
class Prefill:
    """Run the next `tokens` of this prompt, on behalf of `lane`: its own, or that of a prompt that waits for it."""

    request_id: RequestId
    tokens: int
    lane: Lane = Lane.STANDARD


@dataclass(frozen=True)
class Mixed:
    """As `Prefill`, and a decode step of all rows, in one pass."""

    request_id: RequestId
    tokens: int
    lane: Lane = Lane.STANDARD


@dataclass(frozen=True)
class Join:
    """This row's prompt is done: it takes part in decode from the next step on."""

    request_id: RequestId


@dataclass(frozen=True)
class Park:
    """Take this row out of the decode batch, keeping its KV."""

    request_id: RequestId


@dataclass(frozen=True)
class Preempt:
    """Take this row's KV, keeping it in the prefix cache: it waits, and is opened again with all its tokens."""

    request_id: RequestId


@dataclass(frozen=True)
class Decode:
    """Run one decode step of all rows."""


@dataclass(frozen=True)
class Idle:
    """Nothing can run before a message arrives, or before `until` (on the caller's clock) if there is one."""

    until: float | None = None


@dataclass(frozen=True)
class Rest:
    """Run nothing before a message arrives, or before `until`: somebody of a higher class is about to be able to."""

    until: float


Step = Open | Prefill | Mixed | Join | Park | Preempt | Decode | Rest | Idle
