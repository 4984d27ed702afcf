"""Every generation that is open at this gateway, what phase it is in and what it waits for. Decides only.

The book follows what workers say; it changes nothing about when a request runs, except that it holds back what is over
the `max_running` of its key or its class.
"""

from collections import Counter
from typing import Literal

from msgspec import Struct

from gateway.admission import ClassLimits
from gateway.answer_timings import HELD_BY_CLASS, HELD_BY_KEY
from gateway.in_flight_request import InFlightRequest, Phase, hold
from gateway.latency_class import WorkClass
from gateway.turn_etas import RunTimes, turn_eta
from protocol.generation import Loading, Prefilling
from protocol.ids import ModelName, RequestId

PromptOf = Literal["own", "shared", "common"]
"""Whose a choice's prompt is: `shared` with the choice before it; `common` to equal requests that share one run, of
which each has it on its bill."""


class PromptProgress(Struct, frozen=True, kw_only=True):
    """How far a prompt is; `cached_tokens` of `total_tokens` need no work."""

    done_tokens: int
    total_tokens: int
    cached_tokens: int


class RequestView(Struct, frozen=True, kw_only=True, rename={"latency_class": "class"}):
    """One open request as its owner and the operator see it. What is not known is null; `held_by` is empty then.

    `ahead` requests go first. `eta_seconds` is until the first token, as far as a worker can tell; of what no worker
    has yet until it has its turn, by `held_by`, or until its model is loaded. `loading_percent` is how far that is
    read.
    """

    id: RequestId
    key: str
    model: ModelName
    latency_class: WorkClass
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
    """The book, in order of arrival. `limits` are the classes'; a key's come with each of its requests."""

    def __init__(self, limits: ClassLimits | None = None) -> None:
        self._limits = limits or ClassLimits()
        self._requests: dict[RequestId, InFlightRequest] = {}
        self._without_turn: dict[RequestId, InFlightRequest] = {}
        self._turns_of_key: Counter[str] = Counter()
        self._turns_of_class: Counter[WorkClass] = Counter()
        self._runs_of_key, self._runs_of_class = RunTimes(), RunTimes()

    def __len__(self) -> int:
        return len(self._requests)

    def enter(self, request: InFlightRequest) -> None:
        """A request was admitted."""
        self._requests[request.request_id] = self._without_turn[request.request_id] = request

    def leave(self, request: InFlightRequest, now: float) -> Literal["left", "had left"]:
        """It ended, whichever way."""
        if self._requests.pop(request.request_id, None) is None:
            return "had left"
        self._without_turn.pop(request.request_id, None)
        if request.has_turn:
            self._turns_of_class[request.work_class] -= 1
            if request.work_class != "warm":
                self._turns_of_key[request.key_name] -= 1
        if request.turn_at is not None and request.has_cost:
            # What was refused, or left before it was worked on, says nothing of how long others will run.
            self._runs_of_class.ended(request.work_class, seconds=now - request.turn_at, now=now)
            if request.work_class != "warm":
                self._runs_of_key.ended(request.key_name, seconds=now - request.turn_at, now=now)
        hold(request, "", now)
        request.left = now
        return "left"

    def find(self, request_id: RequestId) -> InFlightRequest | None:
        return self._requests.get(request_id)

    def of_key(self, key_name: str) -> tuple[InFlightRequest, ...]:
        return tuple(request for request in self._requests.values() if request.key_name == key_name)

    def of_class(self, work_class: WorkClass) -> tuple[InFlightRequest, ...]:
        return tuple(request for request in self._requests.values() if request.work_class == work_class)

    def everything(self) -> tuple[InFlightRequest, ...]:
        return tuple(self._requests.values())

    def grant_turns(self, now: float) -> tuple[RequestId, ...]:
        """Let as many go on as their keys and classes may have running, those first that came first. Gives the new
        ones. What only warms takes no turn of its key's: it must not keep the answers waiting that it hastens."""
        granted: list[RequestId] = []
        for request in tuple(self._without_turn.values()):
            held_by = self._over_limit(request)
            if held_by:
                request.phase = "queued"
                hold(request, held_by, now)
                continue
            hold(request, "", now)
            request.turn_at, request.phase = now, "waiting_for_model"
            self._turns_of_class[request.work_class] += 1
            if request.work_class != "warm":
                self._turns_of_key[request.key_name] += 1
            del self._without_turn[request.request_id]
            granted.append(request.request_id)
        return tuple(granted)

    def _over_limit(self, request: InFlightRequest) -> str:
        of_key, of_class = request.limits.max_running, self._limits.of(request.work_class).max_running
        if of_key is not None and request.work_class != "warm" and self._turns_of_key[request.key_name] >= of_key:
            return HELD_BY_KEY
        if of_class is not None and self._turns_of_class[request.work_class] >= of_class:
            return HELD_BY_CLASS
        return ""

    def follow(self, request: InFlightRequest, choice_id: RequestId, prompt: PromptOf) -> None:
        """One more choice of it is handed to its model. `prompt` says whether it brings a prompt along."""
        request.choices += 1
        request.has_common_run = prompt == "common"
        if prompt != "shared":
            request.own_prompts[choice_id] = 0

    def view(
        self,
        request: InFlightRequest,
        *,
        loading: Loading | None,
        now: float,
        loaded_in_seconds: float | None = None,
        model_held_by: str = "",
    ) -> RequestView:
        """How it stands. `loading` is its model's, while that is read, `loaded_in_seconds` how long that will take
        still, if that is known, and `model_held_by` what that waits for before."""
        waits = request.phase == "waiting_for_model"
        is_over_limit = request.held_by in (HELD_BY_KEY, HELD_BY_CLASS)
        ahead = self._before(request) if waits or is_over_limit else request.ahead
        eta_seconds = request.eta_seconds
        if is_over_limit:
            eta_seconds = self._turn_eta(request, ahead or 0, now)
        elif waits:
            eta_seconds = loaded_in_seconds
        return RequestView(
            id=request.request_id,
            key=request.key_name,
            model=request.model,
            latency_class=request.work_class,
            phase=request.phase,
            seconds=round(now - request.arrived, 3),
            ahead=ahead,
            eta_seconds=None if eta_seconds is None else round(eta_seconds, 1),
            held_by=request.held_by or (model_held_by if waits else ""),
            loading_percent=_percent(loading) if waits and loading is not None else None,
            prompt_tokens=request.prompt_tokens,
            progress=_progress(request.prefilling) if request.phase == "prefilling" else None,
            completion_tokens=request.completion_tokens,
        )

    def _turn_eta(self, request: InFlightRequest, ahead: int, now: float) -> float | None:
        if request.held_by == HELD_BY_KEY:
            usual_seconds = self._runs_of_key.of(request.key_name, now)
            rivals = (other for other in self.of_key(request.key_name) if other.work_class != "warm")
        else:
            usual_seconds = self._runs_of_class.of(request.work_class, now)
            rivals = iter(self.of_class(request.work_class))
        running_seconds = [now - other.turn_at for other in rivals if other.turn_at is not None]
        return turn_eta(running_seconds, usual_seconds, ahead=ahead)

    def _before(self, request: InFlightRequest) -> int:
        """How many wait for the same thing and came first."""
        if request.held_by == HELD_BY_KEY:
            rivals = self.of_key(request.key_name)
        elif request.held_by == HELD_BY_CLASS:
            rivals = self.of_class(request.work_class)
        else:
            rivals = tuple(other for other in self._requests.values() if other.model == request.model)
        return sum(
            other.arrived < request.arrived and other.phase == request.phase and other.held_by == request.held_by
            for other in rivals
        )


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
