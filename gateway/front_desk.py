"""Where a generation is admitted, waits its turn, and is followed to its end: the book of `in_flight` with a clock.

Used on the event loop only.
"""

import asyncio
from collections.abc import Callable
from typing import Literal

from gateway.admission import (
    ClassLimits,
    DayTokens,
    KeyLimits,
    Load,
    RecentEnds,
    day_left_seconds,
    day_refusal,
    rate_headers,
    refusal,
)
from gateway.caller import Caller
from gateway.in_flight import InFlight, InFlightRequest, RequestView, log_fields
from gateway.replies import Reply
from gateway.request_tallies import Dialect, RequestTallies, count_tokens
from gateway.status import StatusSource
from protocol.failures import Failure
from protocol.generation import Finished, Loading, RequestEvent
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass

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
        self._book = InFlight()
        self._key_ends = RecentEnds()
        self._class_ends = RecentEnds()
        self._turns: dict[RequestId, asyncio.Event] = {}

    def enter(
        self,
        caller: Caller,
        *,
        request_id: RequestId,
        model: ModelName,
        latency_class: LatencyClass,
        dialect: Dialect = "chat",
    ) -> "Place | Failure":
        """Decide whether it may come in. Whoever gets a place must leave it, whatever happens."""
        refused = refusal(
            self._load(caller, latency_class),
            key_name=caller.key_name,
            limits=caller.limits,
            latency_class=latency_class,
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
            latency_class=latency_class,
            arrived=self._clock(),
            dialect=dialect,
            tallies=self.tallies.of(model, latency_class),
        )
        self._book.enter(request)
        self._turns[request_id] = asyncio.Event()
        self._grant_turns(caller.key_name)
        return Place(self, request)

    def day_refusal(self, caller: Caller) -> Failure | None:
        """For work that takes no place, such as a warm, and is nevertheless paid for with the day's tokens."""
        load = self._load(caller, LatencyClass.BATCH)
        return day_refusal(load, key_name=caller.key_name, limits=caller.limits)

    def charge(self, caller: Caller, tokens: int) -> None:
        """The same work is done."""
        self.charge_key(caller.key_name, tokens)

    def charge_key(self, key_name: str, tokens: int) -> None:
        """The same, by the key's name."""
        self._tokens.charge(key_name, tokens, unix_now=self._unix_clock())

    def headers(
        self, caller: Caller, latency_class: LatencyClass, words: RateWords = rate_headers
    ) -> tuple[tuple[bytes, bytes], ...]:
        """What a limited key has left, in a dialect's own headers. Ask after `enter`."""
        return words(self._load(caller, latency_class), caller.limits)

    def views(self, *, key_name: str | None = None) -> tuple[RequestView, ...]:
        """What is open: all of it, or one key's."""
        requests = self._book.everything() if key_name is None else self._book.of_key(key_name)
        loading = self._loading()
        now = self._clock()
        return tuple(self._book.view(request, loading=loading.get(request.model), now=now) for request in requests)

    def standings(self) -> tuple[InFlightRequest, ...]:
        """Everybody's open requests, to be counted and not changed."""
        return self._book.everything()

    def find(self, asked_id: str, *, key_name: str) -> RequestView | None:
        """The open request with this id: the header's or the answer's. None for what is not this key's."""
        bare = asked_id
        for prefix in _ID_PREFIXES:
            bare = bare.removeprefix(prefix)
        request = self._book.find(RequestId(f"req_{bare}"))
        return None if request is None or request.key_name != key_name else self.view(request)

    # --- for Place -------------------------------------------------------------------------------------------------

    async def turn(self, request: InFlightRequest) -> None:
        await self._turns[request.request_id].wait()

    def advance(self, event: RequestEvent) -> None:
        self._book.advance(event, self._clock())

    def view(self, request: InFlightRequest) -> RequestView:
        loading = self._loading().get(request.model) if request.phase == "waiting_for_model" else None
        return self._book.view(request, loading=loading, now=self._clock())

    def prefill_seconds(self, request: InFlightRequest) -> float:
        return 0.0 if request.prefill_began is None else self._clock() - request.prefill_began

    def leave(self, request: InFlightRequest) -> None:
        if self._book.leave(request.request_id) is None:
            return
        now = self._clock()
        del self._turns[request.request_id]
        request.tallies.whole.add(now - request.arrived)
        self.tallies.end(
            model=request.model,
            latency_class=request.latency_class,
            dialect=request.dialect,
            outcome=request.outcome,
        )
        self._key_ends.ended(request.key_name, seconds=now - request.arrived, now=now)
        self._class_ends.ended(request.latency_class, seconds=now - request.arrived, now=now)
        if request.finished is not None or request.counted_tokens is not None or request.is_running:
            self._tokens.charge(request.key_name, request.tokens, unix_now=self._unix_clock())
        self._grant_turns(request.key_name)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _grant_turns(self, key_name: str) -> None:
        for request_id in self._book.grant_turns(key_name):
            self._turns[request_id].set()

    def _load(self, caller: Caller, latency_class: LatencyClass) -> Load:
        now, unix_now = self._clock(), self._unix_clock()
        mine = self._book.of_key(caller.key_name)
        return Load(
            key_open=len(mine),
            key_queued=sum(not request.is_running for request in mine),
            class_queued=self._book.queued_of_class(latency_class),
            key_tokens_today=self._tokens.used(caller.key_name, unix_now=unix_now)
            + sum(request.tokens for request in mine),
            key_next_seconds=self._key_ends.next_of(caller.key_name, now),
            class_next_seconds=self._class_ends.next_of(latency_class, now),
            day_left_seconds=day_left_seconds(unix_now),
            unix_now=unix_now,
        )

    def _loading(self) -> dict[ModelName, Loading]:
        models = self._status_source.status().models
        return {model.name: model.loading for model in models if model.loading is not None}


class Place:
    """One admitted request's place in the book, from admission to its last byte."""

    def __init__(self, desk: FrontDesk, request: InFlightRequest) -> None:
        self._desk = desk
        self._request = request
        self._replies: list[Reply] = []
        self._with_own_prompt: set[RequestId] = set()

    async def turn(self) -> None:
        """Return when the key's limits let it go on to its model."""
        await self._desk.turn(self._request)

    def follow(self, reply: Reply, prompt: Literal["own", "shared"] = "shared") -> None:
        """It was handed to its model. Of several choices, each: their tokens are one bill, and so is a prompt's that
        several share. `prompt` says whether this one's is the first choice's."""
        self._replies.append(reply)
        if prompt == "own":
            self._with_own_prompt.add(reply.request_id)
        reply.watch(self._advance)

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
        return log_fields(self._request)

    def leave(self) -> None:
        """Its last byte was sent, or nobody reads it any more. Idempotent."""
        for reply in self._replies:
            reply.cancel()
        self._desk.leave(self._request)

    def _advance(self, event: RequestEvent) -> None:
        if event.request_id == self._request.request_id:
            self._desk.advance(event)
        elif isinstance(event, Finished):
            is_own = event.request_id in self._with_own_prompt
            count_tokens(self._request.tallies, event, "own" if is_own else "shared")
            prompt_tokens = event.usage.prompt_tokens if is_own else 0
            self._desk.charge_key(self._request.key_name, prompt_tokens + event.usage.completion_tokens)
