"""What an ended request's line in the log says of it, and its answer where that is asked for. Decides only."""

from gateway.answer_timings import (
    HELD_BY_CLASS,
    HELD_BY_KEY,
    HELD_BY_RESTART,
    HELD_HERE,
    AnswerTimings,
    QueueParts,
    answer_timings,
    timing_fields,
    together,
)
from gateway.in_flight_request import InFlightRequest
from protocol.generation import Timings


def queue_parts(request: InFlightRequest, now: float) -> QueueParts:
    """What it waited for in the gateway."""
    turn_at = request.turn_at if request.turn_at is not None else now
    handed_over = request.handed_over if request.handed_over is not None else now
    restart_seconds = request.held.get(HELD_BY_RESTART, 0.0)
    return QueueParts(
        key_limit_seconds=request.held.get(HELD_BY_KEY, 0.0),
        class_limit_seconds=request.held.get(HELD_BY_CLASS, 0.0),
        model_seconds=max(0.0, handed_over - turn_at - request.lost_seconds - restart_seconds),
        lost_seconds=request.lost_seconds,
        restart_seconds=restart_seconds,
    )


def timings_of(request: InFlightRequest, now: float) -> AnswerTimings:
    """Of all of it: as its worker measured, if it ended well, else as far as it came by the gateway's clock."""
    if not request.is_finished:
        timings, tokens = _so_far(request, now), request.completion_tokens
    elif request.ends:
        timings = together([end.timings for end in request.ends.values()])
        tokens = sum(end.usage.completion_tokens for end in request.ends.values())
    else:
        timings, tokens = request.timings or _so_far(request, now), 0
    return answer_timings(timings, queue_parts(request, now), tokens)


def log_fields(request: InFlightRequest, now: float) -> dict[str, str | int | float]:
    """What the log's line of an ended request says of it: numbers and words of ours, nothing that a client wrote.

    `ended` is `finished`, `failed`, or `cancelled` when its client left; `phase` is how far it was.
    """
    fields: dict[str, str | int | float] = {
        "class": request.work_class,
        "ended": "finished" if request.is_finished else "cancelled" if request.failure is None else "failed",
        "phase": "finished" if request.is_finished else request.phase,
    }
    if request.failure is not None and not request.is_finished:
        fields["failure"] = request.failure.value
    if request.choices > 1:
        fields["choices"] = request.choices
    if request.is_finished and request.ends:
        prompts = [request.ends[name].usage for name in request.own_prompts]
        fields["prompt_tokens"] = sum(usage.prompt_tokens for usage in prompts)
        fields["cached_tokens"] = sum(usage.cached_tokens for usage in prompts)
        fields["completion_tokens"] = sum(end.usage.completion_tokens for end in request.ends.values())
    else:
        if request.prompt_tokens is not None:
            fields["prompt_tokens"] = request.prompt_tokens
        if request.counted_tokens is None:
            fields["completion_tokens"] = request.completion_tokens
    return fields | timing_fields(timings_of(request, now))


def _so_far(request: InFlightRequest, now: float) -> Timings:
    handed_over = request.handed_over if request.handed_over is not None else now
    decode_began = request.decode_began if request.decode_began is not None else now
    prefill_began = request.prefill_began if request.prefill_began is not None else decode_began
    held = {reason: seconds for reason, seconds in request.held.items() if reason not in HELD_HERE}
    return Timings(
        queue_seconds=max(0.0, prefill_began - handed_over),
        prefill_seconds=decode_began - prefill_began,
        decode_seconds=now - decode_began,
        prefill_slices=request.prefill_slices,
        held_seconds=float(sum(held.values())),
        held_by=max(held, key=held.__getitem__, default=""),
        held=held,
    )
