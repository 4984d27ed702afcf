"""One open generation: what was said of it, what phase it is in, what it waits for, what it costs. Decides only."""

from typing import Literal, assert_never

from msgspec import Struct, field

from gateway.admission import KeyLimits
from gateway.answer_timings import HELD_BY_RESTART
from gateway.handed_over import HandedOver
from gateway.latency_class import WorkClass
from gateway.request_tallies import Dialect, KindTallies, count_tokens, count_warm
from protocol.failures import FailureKind
from protocol.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    Checked,
    Delta,
    Detokenized,
    Embedded,
    Failed,
    Finished,
    Prefilling,
    Queued,
    Reasoning,
    RequestEvent,
    Reranked,
    Timings,
    Tokenized,
    Waiting,
    Warmed,
)
from protocol.ids import ModelName, RequestId

Phase = Literal["waiting_for_model", "queued", "prefilling", "decoding"]
"""`waiting_for_model`: its process has not accepted it yet, mostly since it is loading."""

HELD_BY_ROWS = "rows"
"""What a worker says of a request that waits for a row, as in `protocol.generation.Waiting`."""

_RUNNING: tuple[Phase, ...] = ("prefilling", "decoding")


class InFlightRequest(Struct, kw_only=True):
    """One open request. Only `InFlight` and `advance` change it. Moments are by the monotonic clock.

    It may have several `choices`, of one or of several prompts: `prompt_tokens` are of all of these that are known,
    `completion_tokens` of all choices, `ends` of those that ended well. `counted_tokens` is the bill of what ended well
    and generated nothing. `tallies` are its kind's. `held` are the seconds of each reason that `held_by` had, as far
    as they are over. `handed_over` is when the process got it that has it now, `lost_seconds` how long those had it
    that died over it, `first_worked_on` when the first of all these began with its prompt. `has_common_run`: equal
    requests share its run, which is counted for all of them elsewhere.
    """

    request_id: RequestId
    key_name: str
    limits: KeyLimits
    model: ModelName
    work_class: WorkClass
    arrived: float
    dialect: Dialect = "chat"
    tallies: KindTallies = field(default_factory=KindTallies)
    choices: int = 0
    has_common_run: bool = False
    turn_at: float | None = None
    handed_over: float | None = None
    lost_seconds: float = 0.0
    first_worked_on: float | None = None
    phase: Phase = "waiting_for_model"
    prompt_tokens: int | None = None
    ahead: int | None = None
    eta_seconds: float | None = None
    held_by: str = ""
    held_since: float = 0.0
    held: dict[str, float] = field(default_factory=dict)
    prefilling: Prefilling | None = None
    prefill_began: float | None = None
    prefill_slices: int = 0
    decode_began: float | None = None
    completion_tokens: int = 0
    ends: dict[RequestId, Finished] = field(default_factory=dict)
    own_prompts: dict[RequestId, int] = field(default_factory=dict)
    timings: Timings | None = None
    counted_tokens: int | None = None
    failure: FailureKind | None = None
    last_token_at: float | None = None
    left: float | None = None

    @property
    def has_turn(self) -> bool:
        return self.turn_at is not None

    @property
    def is_running(self) -> bool:
        return self.phase in _RUNNING

    @property
    def is_finished(self) -> bool:
        """Whether all of it ended well."""
        return self.counted_tokens is not None or (bool(self.ends) and len(self.ends) == self.choices)

    @property
    def outcome(self) -> str:
        """How it ends if it ends now: its first answer's reason, `done` without one, its failure's kind, or
        cancelled."""
        if self.counted_tokens is not None:
            return "done"
        if self.is_finished:
            return self.ends[min(self.ends)].reason.value
        return FailureKind.CANCELLED.value if self.failure is None else self.failure.value

    @property
    def has_cost(self) -> bool:
        """Whether a model worked on it."""
        return self.is_running or self.prefilling is not None or bool(self.ends) or self.counted_tokens is not None

    @property
    def tokens(self) -> int:
        """What it has used so far, or will surely use: its bill, once it has finished."""
        if self.counted_tokens is not None:
            return self.counted_tokens
        if self.is_finished:
            prompts = sum(self.ends[name].usage.prompt_tokens for name in self.own_prompts)
            return prompts + sum(end.usage.completion_tokens for end in self.ends.values())
        return (self.prompt_tokens or 0) + self.completion_tokens


def advance(request: InFlightRequest, event: RequestEvent | HandedOver, now: float) -> None:
    """The gateway, or a worker, said something of one of its choices. How far it is, its first choice tells."""
    if request.left is not None:
        return
    match event:
        case Delta() | Reasoning() | CallArguments():
            _decodes(request, now)
            request.completion_tokens += event.tokens
            if event.request_id == request.request_id:  # choices beside it are no measure of its pace
                _time_tokens(request, event.tokens, now)
            return
        case CallStarted() | CallEnded():
            _decodes(request, now)
            return
        case Finished():
            request.ends[event.request_id] = event
            count_tokens(request.tallies, event, "own" if event.request_id in request.own_prompts else "shared")
            return
        case Failed(failure=failure):
            request.failure = failure.kind
            return
        case Queued(prompt_tokens=tokens) if event.request_id in request.own_prompts:
            request.own_prompts[event.request_id] = tokens
            request.prompt_tokens = sum(request.own_prompts.values())
        case _:
            pass
    if event.request_id == request.request_id:
        _advance_first(request, event, now)


def _advance_first(
    request: InFlightRequest,
    event: Queued
    | Waiting
    | Prefilling
    | Embedded
    | Reranked
    | Warmed
    | Tokenized
    | Detokenized
    | Checked
    | HandedOver,
    now: float,
) -> None:
    if isinstance(event, Waiting) and event.held_by == HELD_BY_RESTART:
        _begin_anew(request, now)
        return
    if request.handed_over is None or isinstance(event, HandedOver):
        request.handed_over = now
        if request.held_by == HELD_BY_RESTART:
            hold(request, "", now)
    match event:
        case Queued():
            request.phase = "queued"
            hold(request, "", now)
        case Waiting():
            request.ahead, request.eta_seconds = event.ahead, event.eta_seconds
            hold(request, event.held_by, now)
            if request.phase == "waiting_for_model" or (event.held_by == HELD_BY_ROWS and _prompt_is_done(request)):
                request.phase = "queued"
        case Prefilling():
            if request.prefill_began is None:
                request.prefill_began = now
            if request.first_worked_on is None:
                request.first_worked_on = now
                request.tallies.queue.add(now - request.arrived)
            if event.done_tokens > (request.prefilling.done_tokens if request.prefilling else event.cached_tokens):
                request.prefill_slices += 1
            request.phase, request.prefilling = "prefilling", event
            request.ahead, request.eta_seconds = None, event.eta_seconds
            hold(request, "", now)
        case Embedded(prompt_tokens=tokens) | Reranked(prompt_tokens=tokens) | Warmed(prompt_tokens=tokens):
            request.prompt_tokens = request.counted_tokens = tokens
            request.timings = event.timings
            if not isinstance(event, Warmed):
                request.tallies.prompt_tokens += tokens
            elif not request.has_common_run:
                count_warm(request.tallies, event)
        case HandedOver() | Tokenized() | Detokenized() | Checked():
            pass
        case _:
            assert_never(event)


def _begin_anew(request: InFlightRequest, now: float) -> None:
    """Its process is lost, and what that did of it. The next one gets it as if it were new."""
    if request.handed_over is not None:
        request.lost_seconds += now - request.handed_over
        request.handed_over = None
    request.phase = "waiting_for_model"
    request.ahead = request.eta_seconds = None
    request.prefilling, request.prefill_began, request.prefill_slices = None, None, 0
    hold(request, HELD_BY_RESTART, now)


def hold(request: InFlightRequest, held_by: str, now: float) -> None:
    """From now on it waits for this, or for nobody."""
    if request.held_by:
        request.held[request.held_by] = request.held.get(request.held_by, 0.0) + now - request.held_since
    request.held_by, request.held_since = held_by, now


def _prompt_is_done(request: InFlightRequest) -> bool:
    """Whether it is between its prompt and its first token. The last token is read by the step that draws."""
    progress = request.prefilling
    return request.phase == "prefilling" and progress is not None and progress.done_tokens >= progress.total_tokens - 1


def _decodes(request: InFlightRequest, now: float) -> None:
    if request.decode_began is None:
        request.decode_began = now
    request.phase = "decoding"
    request.ahead = request.eta_seconds = None
    if request.held_by:
        hold(request, "", now)


def _time_tokens(request: InFlightRequest, tokens: int, now: float) -> None:
    """Tokens whose text was held back came one by one all the same."""
    if not tokens:
        return
    if request.last_token_at is None:
        request.tallies.first_token.add(now - request.arrived)
    else:
        request.tallies.between_tokens.add((now - request.last_token_at) / tokens, tokens)
    request.last_token_at = now
