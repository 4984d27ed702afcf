"""The step loop: receive → choose → step → report. One thread runs it and owns scheduler, engine and prefix cache.

Knows no MLX, no ZeroMQ, no sampling detail. An exception out of the engine leaves `run`: the worker must end, since
after an error the device's state is unknown.
"""

import queue
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, assert_never

import structlog

from protocol.failures import Failure, FailureKind
from protocol.generation import (
    Cancel,
    ChosenLogprob,
    Delta,
    Drain,
    Failed,
    Finished,
    FinishReason,
    Ping,
    Pong,
    Prefilling,
    Timings,
    Usage,
    WorkerEvent,
)
from protocol.ids import BLOCK_TOKENS, BlockKey, RequestId
from worker.detokenizer import Detokenizer
from worker.engine import Drawn, Engine
from worker.messages import BlockDurable, BlocksFetched, InboxMessage
from worker.output import StopStrings
from worker.prefix_cache import PrefixCache
from worker.scheduler import Decode, Idle, Open, Prefill, Scheduler
from worker.sequence import BooksDoNotAddUp, Prepared, Sequence

Payload = TypeVar("Payload")

FETCH_DEADLINE_SECONDS = 5.0
"""How long a request waits for blocks from disk before it is computed without them."""

_REMEMBERED_CANCELS = 1024

log = structlog.get_logger()


@dataclass
class _Row:
    """A request's text side: what it drew, and what of it the client has."""

    prepared: Prepared
    detokenizer: Detokenizer
    stops: StopStrings
    touched: tuple[BlockKey, ...] = ()
    kept_until: int = 0
    drawn: int = 0
    unsent_tokens: int = 0
    unsent_logprobs: tuple[ChosenLogprob, ...] = ()


class StepLoop(Generic[Payload]):
    """Give it messages through `inbox`; it reports through `send`. `run` returns when drained."""

    def __init__(
        self,
        *,
        engine: Engine[Payload],
        scheduler: Scheduler,
        cache: PrefixCache[Payload],
        make_detokenizer: Callable[[], Detokenizer],
        end_token_ids: frozenset[int],
        inbox: "queue.SimpleQueue[InboxMessage]",
        send: Callable[[WorkerEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._cache = cache
        self._make_detokenizer = make_detokenizer
        self._end_token_ids = end_token_ids
        self._inbox = inbox
        self._send = send
        self._clock = clock
        self._rows: dict[RequestId, _Row] = {}
        self._cancelled_early: OrderedDict[RequestId, None] = OrderedDict()
        self._steps = 0
        self._drain_until: float | None = None

    def run(self) -> None:
        """Step until drained."""
        while not self._is_drained():
            step = self._scheduler.next_step(self._clock())
            self._receive(step if isinstance(step, Idle) else None)
            if not self._is_drained():
                self._step()

    # --- messages --------------------------------------------------------------------------------------------------

    def _receive(self, idle: Idle | None) -> None:
        """Take all messages; block only when nothing can run before one comes."""
        if idle is not None:
            self._cache.check()
            self._scheduler.check()
            ends = [end for end in (idle.until, self._drain_until) if end is not None]
            timeout = max(0.0, min(ends) - self._clock()) if ends else None
            try:
                self._apply(self._inbox.get(timeout=timeout))
            except queue.Empty:
                return
        while True:
            try:
                self._apply(self._inbox.get_nowait())
            except queue.Empty:
                return

    def _apply(self, message: InboxMessage) -> None:
        match message:
            case Prepared():
                self._add(message)
            case Cancel(request_id=request_id):
                self._cancel(request_id)
            case BlocksFetched(request_id=request_id, blocks=blocks, miss_reason=reason):
                self._cache.fetched(blocks)
                if reason:
                    self._cache.missed(reason)
                self._scheduler.blocks_arrived(request_id)
            case BlockDurable(key=key):
                self._cache.became_durable(key)
            case Ping(nonce=nonce):
                self._send(self._pong(nonce))
            case Drain(deadline_seconds=seconds):
                until = self._clock() + seconds
                self._drain_until = until if self._drain_until is None else min(until, self._drain_until)
            case _:
                assert_never(message)

    def _add(self, prepared: Prepared) -> None:
        request_id = prepared.request_id
        if request_id in self._cancelled_early:
            del self._cancelled_early[request_id]
            self._fail(request_id, FailureKind.CANCELLED, "cancelled before it started")
            return
        if self._drain_until is not None:
            self._fail(request_id, FailureKind.SHUTTING_DOWN, "the model's process is stopping; send the request again")
            return
        stops = StopStrings(prepared.request.stop)
        self._rows[request_id] = _Row(prepared=prepared, detokenizer=self._make_detokenizer(), stops=stops)
        waits = self._cache.prefetch(prepared)
        self._scheduler.add(
            Sequence(
                request_id=request_id,
                prompt_tokens=len(prepared.token_ids),
                arrived=prepared.arrived,
                blocks_deadline=self._clock() + FETCH_DEADLINE_SECONDS if waits else None,
            )
        )

    def _cancel(self, request_id: RequestId) -> None:
        if request_id not in self._rows:
            # It may still be with the text thread.
            self._cancelled_early[request_id] = None
            while len(self._cancelled_early) > _REMEMBERED_CANCELS:
                self._cancelled_early.popitem(last=False)
            return
        self._fail(request_id, FailureKind.CANCELLED, "cancelled")
        self._forget([request_id])

    def _is_drained(self) -> bool:
        """Whether to leave now. Asked before each wait as well: the last row may have ended with the last step."""
        if self._drain_until is None or (not self._scheduler.is_empty and self._clock() < self._drain_until):
            return False
        for request_id in list(self._rows):
            self._fail(
                request_id, FailureKind.SHUTTING_DOWN, "the model's process stopped before the answer was complete"
            )
        self._forget(list(self._rows))
        return True

    def _pong(self, nonce: int) -> Pong:
        return Pong(
            nonce=nonce,
            steps=self._steps,
            running_rows=self._scheduler.running,
            waiting_requests=self._scheduler.waiting,
            active_bytes=self._engine.active_bytes,
            hot_cache_bytes=self._cache.size_bytes,
            hot_cache_blocks=self._cache.block_count,
            misses=dict(self._cache.misses),
        )

    # --- steps -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        started = self._clock()
        step = self._scheduler.next_step(started)
        match step:
            case Open(request_id=request_id):
                self._open(request_id)
            case Prefill():
                self._prefill(step, started)
            case Decode():
                drawn = self._engine.decode()
                self._scheduler.decoded(self._clock() - started)
                self._steps += 1
                ended = [request_id for token in drawn if (request_id := self._drew(token)) is not None]
                self._forget(ended)
            case Idle():
                pass
            case _:
                assert_never(step)

    def _open(self, request_id: RequestId) -> None:
        row = self._rows[request_id]
        match = self._cache.use(row.prepared)
        self._engine.open(row.prepared, match.uses)
        row.touched = match.touched
        row.kept_until = match.whole_blocks * BLOCK_TOKENS
        self._scheduler.opened(request_id, match.tokens, self._clock())
        self._report_prefill(request_id)

    def _prefill(self, step: Prefill, started: float) -> None:
        row = self._rows[step.request_id]
        if step.tokens:
            self._engine.prefill(step.request_id, step.tokens)
            self._steps += 1
        now = self._clock()
        self._scheduler.prefilled(step, now - started, now)
        sequence = self._sequence(step.request_id)
        # Whole blocks are kept after each slice, so that what a cancelled request computed is not lost; the tail once.
        end = sequence.prefilled if sequence.is_decoding else sequence.prefilled // BLOCK_TOKENS * BLOCK_TOKENS
        self._keep(row, end)
        if step.tokens:
            self._report_prefill(step.request_id)
        if sequence.is_decoding:
            self._engine.join(step.request_id)

    def _drew(self, token: Drawn) -> RequestId | None:
        """Take a row's next token. Returns its id when that ended it."""
        row = self._rows[token.request_id]
        request = row.prepared.request
        row.drawn += 1
        row.unsent_tokens += 1
        if token.token_id in self._end_token_ids or token.token_id in request.stop_token_ids:
            self._finish(row, self._rest(row), FinishReason.STOP)
            return token.request_id
        if token.logprob is not None:
            row.unsent_logprobs += (token.logprob,)
        emitted = row.stops.push(row.detokenizer.push(token.token_id))
        if emitted.matched is not None:
            self._finish(row, emitted.text, FinishReason.STOP, emitted.matched)
            return token.request_id
        if row.drawn >= row.prepared.max_tokens:
            self._finish(row, emitted.text + self._rest(row), FinishReason.LENGTH)
            return token.request_id
        self._send_delta(row, emitted.text)
        return None

    def _rest(self, row: _Row) -> str:
        """What was held back, at an end that is no stop string's."""
        last = row.stops.push(row.detokenizer.flush())
        return last.text if last.matched is not None else last.text + row.stops.flush()

    def _finish(self, row: _Row, text: str, reason: FinishReason, matched: str | None = None) -> None:
        request_id = row.prepared.request_id
        sequence = self._sequence(request_id)
        now = self._clock()
        prefill_started, decode_started = sequence.prefill_started or now, sequence.decode_started or now
        self._send_delta(row, text)
        self._keep(row, self._engine.tokens_held(request_id))
        self._send(
            Finished(
                request_id=request_id,
                reason=reason,
                usage=Usage(
                    prompt_tokens=sequence.prompt_tokens, completion_tokens=row.drawn, cached_tokens=sequence.cached
                ),
                timings=Timings(
                    queue_seconds=prefill_started - sequence.arrived,
                    prefill_seconds=decode_started - prefill_started,
                    decode_seconds=now - decode_started,
                    prefill_slices=sequence.slices,
                ),
                matched_stop=matched,
            )
        )

    def _sequence(self, request_id: RequestId) -> Sequence:
        sequence = self._scheduler.get(request_id)
        if sequence is None:
            raise BooksDoNotAddUp(f"the scheduler does not know {request_id}")
        return sequence

    # --- small things ----------------------------------------------------------------------------------------------

    def _keep(self, row: _Row, end: int) -> None:
        request_id = row.prepared.request_id
        token_ids = self._engine.token_ids(request_id)
        row.kept_until = self._cache.keep(
            row.prepared, token_ids, row.kept_until, lambda a, b: self._engine.cut(request_id, a, b), end=end
        )

    def _send_delta(self, row: _Row, text: str) -> None:
        if not text and not row.unsent_logprobs:
            return
        self._send(
            Delta(request_id=row.prepared.request_id, text=text, tokens=row.unsent_tokens, logprobs=row.unsent_logprobs)
        )
        row.unsent_tokens, row.unsent_logprobs = 0, ()

    def _report_prefill(self, request_id: RequestId) -> None:
        sequence = self._sequence(request_id)
        self._send(
            Prefilling(
                request_id=request_id,
                done_tokens=sequence.prefilled,
                total_tokens=sequence.prompt_tokens,
                cached_tokens=sequence.cached,
            )
        )

    def _fail(self, request_id: RequestId, kind: FailureKind, message: str) -> None:
        self._send(Failed(request_id=request_id, failure=Failure(kind=kind, message=message)))

    def _forget(self, request_ids: list[RequestId]) -> None:
        if not request_ids:
            return
        for request_id in request_ids:
            self._cache.used(self._rows.pop(request_id).touched)
            self._scheduler.remove(request_id)
        self._engine.drop(request_ids)
