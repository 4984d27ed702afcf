"""Every generation that is open at this gateway, what phase it is in and what it waits for. Decides only.

The book follows what workers say; it changes nothing about when a request runs, except that it holds back what is over
its key's `max_running`.
"""

from collections.abc import Iterable
from typing import Literal, assert_never

from msgspec import Struct, field

from gateway.admission import KeyLimits
from gateway.request_tallies import Dialect, KindTallies, count_tokens
from protocol.failures import FailureKind
from protocol.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    Delta,
    Detokenized,
    Embedded,
    Failed,
    Finished,
    Loading,
    Prefilling,
    Queued,
    Reasoning,
    RequestEvent,
    Reranked,
    Tokenized,
    Waiting,
    Warmed,
)
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass

HELD_BY_KEY = "key_limit"
"""The key's other requests have to end first (`max_running`)."""

HELD_BY_RESTART = "restart"
"""Its process is being replaced, and the next one begins it from the start."""

Phase = Literal["waiting_for_model", "queued", "prefilling", "decoding"]
"""`waiting_for_model`: its process has not accepted it yet, mostly since it is loading."""

_RUNNING: tuple[Phase, ...] = ("prefilling", "decoding")


class InFlightRequest(Struct, kw_only=True):
    """One open request. Only `InFlight` changes it. Moments are by the monotonic clock.

    `counted_tokens` is the bill of what ended well and generated nothing. `tallies` are its kind's.
    """

    request_id: RequestId
    key_name: str
    limits: KeyLimits
    model: ModelName
    latency_class: LatencyClass
    arrived: float
    dialect: Dialect = "chat"
    tallies: KindTallies = field(default_factory=KindTallies)
    has_turn: bool = False
    phase: Phase = "waiting_for_model"
    prompt_tokens: int | None = None
    ahead: int | None = None
    eta_seconds: float | None = None
    held_by: str = ""
    prefilling: Prefilling | None = None
    prefill_began: float | None = None
    completion_tokens: int = 0
    finished: Finished | None = None
    failed: FailureKind | None = None
    counted_tokens: int | None = None
    last_token_at: float | None = None

    @property
    def is_running(self) -> bool:
        return self.phase in _RUNNING

    @property
    def outcome(self) -> str:
        """How it ends if it ends now: its answer's reason, `done` without one, its failure's kind, or cancelled."""
        if self.finished is not None:
            return self.finished.reason.value
        if self.counted_tokens is not None:
            return "done"
        return FailureKind.CANCELLED.value if self.failed is None else self.failed.value

    @property
    def tokens(self) -> int:
        """What it has used so far, or will surely use: its bill, once it has finished."""
        if self.finished is not None:
            return self.finished.usage.prompt_tokens + self.finished.usage.completion_tokens
        if self.counted_tokens is not None:
            return self.counted_tokens
        return (self.prompt_tokens or 0) + self.completion_tokens


class PromptProgress(Struct, frozen=True, kw_only=True):
    """How far a prompt is; `cached_tokens` of `total_tokens` need no work."""

    done_tokens: int
    total_tokens: int
    cached_tokens: int


class RequestView(Struct, frozen=True, kw_only=True, rename={"latency_class": "class"}):
    """One open request as its owner and the operator see it. What is not known is null; `held_by` is empty then.

    `ahead` requests go first. `eta_seconds` is until the first token. `loading_percent` is how far the model is read.
    """

    id: RequestId
    key: str
    model: ModelName
    latency_class: LatencyClass
    phase: Phase
    seconds: float
    ahead: int | None = None
    eta_seconds: float | None = None
    held_by: str = ""
    loading_percent: int | None = None
    prompt_tokens: int | None = None
    progress: PromptProgress | None = None
    completion_tokens: int = 0


class RequestViews(Struct, frozen=True, kw_only=True):
    """A list of them, the oldest first."""

    data: tuple[RequestView, ...]
    object: Literal["list"] = "list"


class InFlight:
    """The book, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, InFlightRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def enter(self, request: InFlightRequest) -> None:
        """A request was admitted."""
        self._requests[request.request_id] = request

    def leave(self, request_id: RequestId) -> InFlightRequest | None:
        """It ended, whichever way. None when it had left already."""
        return self._requests.pop(request_id, None)

    def find(self, request_id: RequestId) -> InFlightRequest | None:
        return self._requests.get(request_id)

    def of_key(self, key_name: str) -> tuple[InFlightRequest, ...]:
        return tuple(request for request in self._requests.values() if request.key_name == key_name)

    def everything(self) -> tuple[InFlightRequest, ...]:
        return tuple(self._requests.values())

    def queued_of_class(self, latency_class: LatencyClass) -> int:
        return sum(
            request.latency_class is latency_class and not request.is_running for request in self._requests.values()
        )

    def grant_turns(self, key_name: str) -> tuple[RequestId, ...]:
        """Let as many of this key's requests go on as may run, those first that came first. Gives the new ones."""
        granted: list[RequestId] = []
        requests = self.of_key(key_name)
        running = sum(request.has_turn for request in requests)
        for request in requests:
            if request.has_turn:
                continue
            if request.limits.max_running is not None and running >= request.limits.max_running:
                request.phase, request.held_by = "queued", HELD_BY_KEY
                continue
            request.has_turn, request.phase, request.held_by = True, "waiting_for_model", ""
            granted.append(request.request_id)
            running += 1
        return tuple(granted)

    def advance(self, event: RequestEvent, now: float) -> None:
        """A worker said something of a request; nothing happens if that is not open here any more."""
        request = self._requests.get(event.request_id)
        if request is None:
            return
        match event:
            case Queued():
                request.phase, request.prompt_tokens, request.held_by = "queued", event.prompt_tokens, ""
            case Waiting(held_by=held_by) if held_by == HELD_BY_RESTART:
                request.phase, request.held_by = "waiting_for_model", held_by
                request.ahead, request.eta_seconds = None, None
                request.prefilling, request.prefill_began = None, None
            case Waiting():
                request.ahead, request.held_by = event.ahead, event.held_by
                request.eta_seconds = event.eta_seconds
                if request.phase == "waiting_for_model":
                    request.phase = "queued"
            case Prefilling():
                if request.prefill_began is None:
                    request.prefill_began = now
                    request.tallies.queue.add(now - request.arrived)
                request.phase, request.prefilling = "prefilling", event
                request.ahead, request.held_by, request.eta_seconds = None, "", event.eta_seconds
            case Delta() | Reasoning() | CallArguments():
                request.phase = "decoding"
                request.ahead, request.held_by, request.eta_seconds = None, "", None
                request.completion_tokens += event.tokens
                _time_tokens(request, event.tokens, now)
            case CallStarted() | CallEnded():
                request.phase = "decoding"
            case Finished():
                request.finished = event
                count_tokens(request.tallies, event)
            case Embedded(prompt_tokens=tokens) | Reranked(prompt_tokens=tokens) | Warmed(prompt_tokens=tokens):
                request.prompt_tokens = request.counted_tokens = tokens
                request.tallies.prompt_tokens += tokens
            case Failed(failure=failure):
                request.failed = failure.kind
            case Tokenized() | Detokenized():
                pass
            case _:
                assert_never(event)

    def view(self, request: InFlightRequest, *, loading: Loading | None, now: float) -> RequestView:
        """How it stands. `loading` is its model's, while that is read."""
        waits = request.phase == "waiting_for_model"
        return RequestView(
            id=request.request_id,
            key=request.key_name,
            model=request.model,
            latency_class=request.latency_class,
            phase=request.phase,
            seconds=round(now - request.arrived, 3),
            ahead=self._before(request) if waits or request.held_by == HELD_BY_KEY else request.ahead,
            eta_seconds=request.eta_seconds,
            held_by=request.held_by,
            loading_percent=_percent(loading) if waits and loading is not None else None,
            prompt_tokens=request.prompt_tokens,
            progress=_progress(request.prefilling) if request.phase == "prefilling" else None,
            completion_tokens=request.completion_tokens,
        )

    def _before(self, request: InFlightRequest) -> int:
        """How many wait for the same thing and came first."""
        rivals = self.of_key(request.key_name) if request.held_by == HELD_BY_KEY else self._of_model(request.model)
        return sum(
            other.arrived < request.arrived and other.phase == request.phase and other.held_by == request.held_by
            for other in rivals
        )

    def _of_model(self, model: ModelName) -> Iterable[InFlightRequest]:
        return (request for request in self._requests.values() if request.model == model)


def log_fields(request: InFlightRequest) -> dict[str, str | int | float]:
    """What the log's line of an ended request says of it: numbers and words of ours, nothing that a client wrote."""
    fields: dict[str, str | int | float] = {"class": request.latency_class.value, "phase": request.phase}
    if request.prompt_tokens is not None:
        fields["prompt_tokens"] = request.prompt_tokens
    finished = request.finished
    if request.counted_tokens is not None:
        return fields | {"phase": "finished"}
    if finished is None:
        return fields | {"completion_tokens": request.completion_tokens}
    timings, usage = finished.timings, finished.usage
    rate = usage.completion_tokens / timings.decode_seconds if timings.decode_seconds > 0 else 0.0
    return fields | {
        "phase": "finished",
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "queue_seconds": round(timings.queue_seconds, 4),
        "prefill_seconds": round(timings.prefill_seconds, 4),
        "prefill_slices": timings.prefill_slices,
        "held_seconds": round(timings.held_seconds, 4),
        "held_by": timings.held_by or "-",
        "preemptions": timings.preemptions,
        "decode_seconds": round(timings.decode_seconds, 4),
        "tokens_per_second": round(rate, 2),
    }


def _time_tokens(request: InFlightRequest, tokens: int, now: float) -> None:
    """Tokens whose text was held back came one by one all the same."""
    if not tokens:
        return
    if request.last_token_at is None:
        request.tallies.first_token.add(now - request.arrived)
    else:
        request.tallies.between_tokens.add((now - request.last_token_at) / tokens, tokens)
    request.last_token_at = now


def _progress(prefilling: Prefilling | None) -> PromptProgress | None:
    if prefilling is None:
        return None
    return PromptProgress(
        done_tokens=prefilling.done_tokens,
        total_tokens=prefilling.total_tokens,
        cached_tokens=prefilling.cached_tokens,
    )


def _percent(loading: Loading) -> int:
    return min(100, 100 * loading.done_bytes // max(1, loading.total_bytes))
