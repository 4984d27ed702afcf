"""Where a generation is admitted, waits its turn, and is followed to its end: the book of `in_flight` with a clock.

Used on the event loop only.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from gateway.admission import (
    ClassLimits,
    DayTokens,
    KeyLimits,
    Load,
    RecentEnds,
    day_left_seconds,
    rate_headers,
    refusal,
)
from gateway.answer_timings import HELD_BY_MEMORY, AnswerTimings, answer_timings
from gateway.caller import Caller
from gateway.handed_over import HandedOver
from gateway.in_flight import InFlight, PromptOf, RequestView
from gateway.in_flight_log import log_fields, queue_parts
from gateway.in_flight_request import InFlightRequest, advance
from gateway.latency_class import WorkClass
from gateway.replies import Reply
from gateway.request_tallies import Dialect, RequestTallies, count_warm
from gateway.status import ModelState, ModelStatus, StatusSource
from protocol.failures import Failure
from protocol.generation import RequestEvent, Timings, Warmed
from protocol.ids import ModelName, RequestId

RateWords = Callable[[Load, KeyLimits], tuple[tuple[bytes, bytes], ...]]

_ID_PREFIXES = ("req_", "chatcmpl-", "cmpl-", "msg_", "resp_", "rerank-")


class FrontDesk:
    """Admits requests and knows those that are open."""

    def __init__(
        self,
        *,
        class_limits: ClassLimits,
        tokens: DayTokens,
        status_source: StatusSource,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        tallies: RequestTallies | None = None,
    ) -> None:
        self.tallies = tallies or RequestTallies()
        self._class_limits = class_limits
        self._tokens = tokens
        self._status_source = status_source
        self._clock = clock
        self._unix_clock = unix_clock
        self._book = InFlight(class_limits)
        self._key_ends = RecentEnds()
        self._class_ends = RecentEnds()
        self._turns: dict[RequestId, asyncio.Event] = {}

    def enter(
        self,
        caller: Caller,
        *,
        request_id: RequestId,
        model: ModelName,
        work_class: WorkClass,
        dialect: Dialect = "chat",
    ) -> "Place | Failure":
        """Decide whether it may come in. Whoever gets a place must leave it, whatever happens."""
        refused = refusal(
            self._load(caller, work_class),
            key_name=caller.key_name,
            limits=caller.limits,
            work_class=work_class,
            class_limits=self._class_limits,
        )
        if refused is not None:
            self.tallies.reject(refused.kind)
            return refused
        request = InFlightRequest(
            request_id=request_id,
            key_name=caller.key_name,
            limits=caller.limits,
            model=model,
            work_class=work_class,
            arrived=self._clock(),
            dialect=dialect,
            tallies=self.tallies.of(model, work_class),
        )
        self._book.enter(request)
        self._turns[request_id] = asyncio.Event()
        self._grant_turns()
        return Place(self, request)

    def headers(
        self, caller: Caller, work_class: WorkClass, words: RateWords = rate_headers
    ) -> tuple[tuple[bytes, bytes], ...]:
        """What a limited key has left, in a dialect's own headers. Ask after `enter`."""
        return words(self._load(caller, work_class), caller.limits)

    def views(self, *, key_name: str | None = None) -> tuple[RequestView, ...]:
        """What is open: all of it, or one key's."""
        requests = self._book.everything() if key_name is None else self._book.of_key(key_name)
        models = self._models()
        now = self._clock()
        return tuple(self._view(request, models.get(request.model), now) for request in requests)

    def standings(self) -> tuple[InFlightRequest, ...]:
        """Everybody's open requests, to be counted and not changed."""
        return self._book.everything()

    def find(self, asked_id: str, *, key_name: str | None) -> RequestView | None:
        """The open request with this id: the header's or the answer's. None for what is not this key's, if one is
        named."""
        bare = asked_id
        for prefix in _ID_PREFIXES:
            bare = bare.removeprefix(prefix)
        request = self._book.find(RequestId(f"req_{bare}"))
        return None if request is None or key_name not in (None, request.key_name) else self.view(request)

    # --- for Place -------------------------------------------------------------------------------------------------

    async def turn(self, request: InFlightRequest) -> None:
        await self._turns[request.request_id].wait()

    def follow(self, request: InFlightRequest, choice_id: RequestId, prompt: PromptOf) -> None:
        self._book.follow(request, choice_id, prompt)

    def advance(self, request: InFlightRequest, event: RequestEvent | HandedOver) -> None:
        advance(request, event, self._clock())

    def view(self, request: InFlightRequest) -> RequestView:
        model = self._models().get(request.model) if request.phase == "waiting_for_model" else None
        return self._view(request, model, self._clock())

    def model_state(self, request: InFlightRequest) -> ModelState | None:
        model = self._models().get(request.model)
        return None if model is None else model.state

    def prefill_seconds(self, request: InFlightRequest) -> float:
        return 0.0 if request.prefill_began is None else self._clock() - request.prefill_began

    def timings(self, request: InFlightRequest, timings: Timings, completion_tokens: int) -> AnswerTimings:
        return answer_timings(timings, queue_parts(request, self._clock()), completion_tokens)

    def log_fields(self, request: InFlightRequest) -> dict[str, str | int | float]:
        return log_fields(request, self._clock() if request.left is None else request.left)

    def leave(self, request: InFlightRequest) -> None:
        now = self._clock()
        if self._book.leave(request, now) == "had left":
            return
        del self._turns[request.request_id]
        request.tallies.whole.add(now - request.arrived)
        self.tallies.end(
            model=request.model,
            work_class=request.work_class,
            dialect=request.dialect,
            outcome=request.outcome,
        )
        if request.has_cost:
            # What was refused, or left before its turn, says nothing of how long those take that run.
            if request.work_class != "warm":
                self._key_ends.ended(request.key_name, seconds=now - request.arrived, now=now)
            self._class_ends.ended(request.work_class, seconds=now - request.arrived, now=now)
            self._tokens.charge(request.key_name, request.work_class, request.tokens, unix_now=self._unix_clock())
        self._grant_turns()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _grant_turns(self) -> None:
        for request_id in self._book.grant_turns(self._clock()):
            self._turns[request_id].set()

    def _load(self, caller: Caller, work_class: WorkClass) -> Load:
        now, unix_now = self._clock(), self._unix_clock()
        mine, of_class = self._book.of_key(caller.key_name), self._book.of_class(work_class)
        answers = [request for request in mine if request.work_class != "warm"]
        return Load(
            key_open=len(answers),
            key_queued=sum(not request.is_running for request in answers),
            class_queued=sum(not request.is_running for request in of_class),
            key_tokens_today=self._tokens.used(caller.key_name, unix_now=unix_now)
            + sum(request.tokens for request in mine),
            class_tokens_today=self._tokens.used_by_class(work_class, unix_now=unix_now)
            + sum(request.tokens for request in of_class),
            key_next_seconds=self._key_ends.next_of(caller.key_name, now),
            class_next_seconds=self._class_ends.next_of(work_class, now),
            day_left_seconds=day_left_seconds(unix_now),
            unix_now=unix_now,
        )

    def _models(self) -> dict[ModelName, ModelStatus]:
        return {model.name: model for model in self._status_source.status().models}

    def _view(self, request: InFlightRequest, model: ModelStatus | None, now: float) -> RequestView:
        if model is None:
            return self._book.view(request, loading=None, now=now)
        return self._book.view(
            request,
            loading=model.loading,
            loaded_in_seconds=model.loaded_in_seconds,
            model_held_by=HELD_BY_MEMORY if model.state == "waiting_for_memory" else "",
            now=now,
        )


class Place:
    """One admitted request's place in the book, from admission to its last byte."""

    def __init__(self, desk: FrontDesk, request: InFlightRequest) -> None:
        self._desk = desk
        self._request = request
        self._replies: list[Reply] = []

    async def turn(self) -> None:
        """Return when the key's limits let it go on to its model."""
        await self._desk.turn(self._request)

    def follow(self, reply: Reply, prompt: Literal["own", "shared"] = "shared") -> None:
        """It is on its way to its model. Of several choices, each: their tokens are one bill. `prompt` says whether it
        brings a prompt along, or shares that of the choice before it."""
        self._replies.append(reply)
        self._desk.follow(self._request, reply.request_id, prompt)
        reply.watch(self.advance)

    def advance(self, event: RequestEvent | HandedOver) -> None:
        """Something was said of it."""
        self._desk.advance(self._request, event)

    def watch_shared(self, choice_id: RequestId) -> Callable[[RequestEvent | HandedOver], None]:
        """What is to be told of a run that it shares with others, which is theirs to cancel."""
        self._desk.follow(self._request, choice_id, "common")
        return lambda event: self.advance(replace(event, request_id=self._request.request_id))

    def count_run(self, end: Warmed) -> None:
        """A run ended well that it shares with others, or shared: counted once, though each has it on its bill."""
        count_warm(self._request.tallies, end)

    def timings(self, timings: Timings, completion_tokens: int) -> AnswerTimings:
        """A worker's timings with those of the gateway."""
        return self._desk.timings(self._request, timings, completion_tokens)

    @property
    def has_turn(self) -> bool:
        """Whether the key's limits let it go on already."""
        return self._request.has_turn

    @property
    def model_state(self) -> ModelState | None:
        """Where its model's process is in its life; None when that never had one."""
        return self._desk.model_state(self._request)

    @property
    def view(self) -> RequestView:
        """How it stands now."""
        return self._desk.view(self._request)

    @property
    def prefill_seconds(self) -> float:
        """Since its prompt was first worked on."""
        return self._desk.prefill_seconds(self._request)

    def log_fields(self) -> dict[str, str | int | float]:
        """What the log may say of it."""
        return self._desk.log_fields(self._request)

    def leave(self) -> None:
        """Its last byte was sent, or nobody reads it any more. Idempotent."""
        for reply in self._replies:
            reply.cancel()
        self._desk.leave(self._request)
