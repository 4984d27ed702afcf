"""Where a request's time went, from its admission to its last token: what its answer and the log say of it.

Decides only. The gateway measures what comes before the worker by its own clock, the worker the rest by its own: each
part lies inside one process.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from protocol.generation import Timings

HELD_BY_KEY = "key_limit"
"""The key's other requests have to end first (`max_running`)."""

HELD_BY_CLASS = "class_limit"
"""Other requests of the class have to end first (`max_running_<class>`)."""

HELD_BY_MEMORY = "memory"
"""Its model waits until others have left. A worker says it, too, of whose KV has no room."""


HELD_BY_RESTART = "restart"
"""Its process is being replaced, and the next one begins it from the start."""

HELD_HERE = (HELD_BY_KEY, HELD_BY_CLASS, HELD_BY_RESTART)
"""What no worker measures."""


class QueueParts(Struct, frozen=True, kw_only=True):
    """What `queue_seconds` is made of: for other requests of the key, of the class; for the model to be loaded and to
    have room in its queue; in processes that died over it (`lost`), and until another one got it (`restart`); in the
    process that answered, before the prompt was first worked on."""

    key_limit_seconds: float = 0.0
    class_limit_seconds: float = 0.0
    model_seconds: float = 0.0
    lost_seconds: float = 0.0
    restart_seconds: float = 0.0
    worker_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        here = self.key_limit_seconds + self.class_limit_seconds + self.model_seconds
        return here + self.lost_seconds + self.restart_seconds + self.worker_seconds


class AnswerTimings(Timings, frozen=True, kw_only=True):
    """A worker's timings and what came before them: `queue_seconds` and `held` have both in them.

    `tokens_per_second` is that of decode; 0 when nothing was decoded.
    """

    queue: QueueParts
    tokens_per_second: float = 0.0


def answer_timings(timings: Timings, waits: QueueParts, completion_tokens: int) -> AnswerTimings:
    """A worker's timings with what the gateway measured before it: `waits` know nothing of the worker yet."""
    queue = replace(waits, worker_seconds=timings.queue_seconds)
    waited = (queue.key_limit_seconds, queue.class_limit_seconds, queue.restart_seconds)
    here = zip(HELD_HERE, waited, strict=True)
    held = timings.held | {reason: seconds for reason, seconds in here if seconds > 0}
    rate = completion_tokens / timings.decode_seconds if timings.decode_seconds > 0 else 0.0
    return AnswerTimings(
        queue_seconds=queue.seconds,
        queue=queue,
        prefill_seconds=timings.prefill_seconds,
        decode_seconds=timings.decode_seconds,
        prefill_slices=timings.prefill_slices,
        held_seconds=float(sum(held.values())),
        held_by=max(held, key=held.__getitem__, default=""),
        held=held,
        preemptions=timings.preemptions,
        tokens_per_second=rate,
    )


def together(ends: Sequence[Timings]) -> Timings:
    """Of several choices of one request, which ran beside each other: times are the longest, counts are sums."""
    if len(ends) == 1:
        return ends[0]
    held: dict[str, float] = {}
    for end in ends:
        for reason, seconds in end.held.items():
            held[reason] = max(seconds, held.get(reason, 0.0))
    return Timings(
        queue_seconds=max(end.queue_seconds for end in ends),
        prefill_seconds=max(end.prefill_seconds for end in ends),
        decode_seconds=max(end.decode_seconds for end in ends),
        prefill_slices=sum(end.prefill_slices for end in ends),
        held_seconds=float(sum(held.values())),
        held_by=max(held, key=held.__getitem__, default=""),
        held=held,
        preemptions=sum(end.preemptions for end in ends),
    )


def timing_fields(timings: AnswerTimings) -> dict[str, str | int | float]:
    """For the log: every number by a name of its own."""
    queue = timings.queue
    return {
        "queue_seconds": round(timings.queue_seconds, 4),
        "queue_key_limit_seconds": round(queue.key_limit_seconds, 4),
        "queue_class_limit_seconds": round(queue.class_limit_seconds, 4),
        "queue_model_seconds": round(queue.model_seconds, 4),
        "queue_lost_seconds": round(queue.lost_seconds, 4),
        "queue_restart_seconds": round(queue.restart_seconds, 4),
        "queue_worker_seconds": round(queue.worker_seconds, 4),
        "prefill_seconds": round(timings.prefill_seconds, 4),
        "prefill_slices": timings.prefill_slices,
        "held_seconds": round(timings.held_seconds, 4),
        "held_by": timings.held_by or "-",
        **{f"held_{reason}_seconds": round(seconds, 4) for reason, seconds in sorted(timings.held.items())},
        "preemptions": timings.preemptions,
        "decode_seconds": round(timings.decode_seconds, 4),
        "tokens_per_second": round(timings.tokens_per_second, 2),
    }
