"""The step loop: receive → choose → step → report. One thread runs it and owns scheduler, engine and prefix cache.

Knows no MLX, no ZeroMQ, no sampling detail. An exception out of the engine leaves `run`: the worker must end, since
after an error the device's state is unknown.
"""

import contextlib
import queue
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar, assert_never

import structlog

from protocol.failures import Failure, FailureKind
from protocol.generation import (
    CacheReport,
    Cancel,
    Drain,
    Failed,
    Finished,
    FinishReason,
    ForgetHot,
    Ping,
    Pong,
    Prefilling,
    SetBudget,
    Unpin,
    Usage,
    Waiting,
    WorkerEvent,
)
from protocol.ids import BLOCK_TOKENS, BlockKey, RequestId
from worker.answers.parts import AnswerEnd
from worker.detokenizer import Detokenizer
from worker.engine import Drawn, Engine
from worker.messages import BlocksFetched, BlockStored, InboxMessage
from worker.neighbours import Alone, DeviceSharing, Hold, Load
from worker.output import StopStrings
from worker.prefix_cache import PrefixCache
from worker.row_answer import RowAnswer
from worker.scheduler import Scheduler
from worker.sequence import BooksDoNotAddUp, Lane, Prepared, Sequence, lane_of, resumed, timings
from worker.steps import Decode, Idle, Join, Mixed, Open, Park, Preempt, Prefill, Rest, Step
from worker.warming import STORE_SECONDS, Warming, WarmingPrefixes

Payload = TypeVar("Payload")

LEAST_FETCH_SECONDS = 0.5
FETCH_DEADLINE_SECONDS = 5.0
"""A request waits for blocks from disk about as long as it takes to compute it, but so long at least and at most."""

DISK_ANSWER_SECONDS = 0.02
"""The cachestore says what it has in about a millisecond; beside writes, in less than ten."""

WAITING_REPORT_SECONDS = 1.0
"""How often at most a request that waits is told where it stands."""

_REMEMBERED_CANCELS = 1024

log = structlog.get_logger()


@dataclass
class _Row:
    """A request's text side: what it drew, and what of it the client has."""

    prepared: Prepared
    detokenizer: Detokenizer
    stops: StopStrings
    answer: RowAnswer
    is_open: bool = False
    touched: tuple[BlockKey, ...] = ()
    report: CacheReport = field(default_factory=CacheReport)
    kept_until: int = 0
    drawn: int = 0
    told: Waiting | None = None
    told_at: float = 0.0


def new_call_id() -> str:
    """Looks as clients expect, and is used once."""
    return f"call_{secrets.token_hex(12)}"


class StepLoop(Generic[Payload]):
    """Give it messages through `inbox`; it reports through `send`. `run` returns when drained."""

    def __init__(  # noqa: PLR0913 - the parts that it joins
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
        device: DeviceSharing | None = None,
        new_call_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`device` knows the other workers on it; without one, this worker behaves as if it were alone."""
        self._new_call_id = new_call_id
        self._shared_device = self._device = device or Alone()
        self._engine = engine
        self._scheduler = scheduler
        self._cache = cache
        self._make_detokenizer = make_detokenizer
        self._end_token_ids = end_token_ids
        self._inbox = inbox
        self._send = send
        self._clock = clock
        self._rows: dict[RequestId, _Row] = {}
        self._warming: WarmingPrefixes[Payload] = WarmingPrefixes()
        self._cancelled_early: OrderedDict[RequestId, None] = OrderedDict()
        self._stopped: dict[RequestId, Literal["goes on", "cancelled"]] = {}
        self._steps = 0
        self._launched_seconds = 0.0
        self._standings_due = 0.0
        self._drain_until: float | None = None

    def run(self) -> None:
        """Step until drained."""
        while not self._is_drained():
            step = self._scheduler.next_step(self._clock())
            self._attend(step if isinstance(step, Idle) else None)
            if self._is_drained():
                return
            self._step()

    def hear(self, seconds: float) -> None:
        """After `run`: wait so long at most for a message, and do what it says. Blocks may still be on their way to
        disk, and whoever wants them forgotten waits for an answer behind that order."""
        with contextlib.suppress(queue.Empty):
            self._apply(self._inbox.get(timeout=seconds))

    # --- messages --------------------------------------------------------------------------------------------------

    def _attend(self, idle: Idle | None) -> None:
        """Hear messages, and do what has become due."""
        self._receive(idle)
        self._cache.expire_pins(self._clock())
        self._answer_warmed()
        if self._clock() >= self._standings_due:
            self._report_standings()

    def _receive(self, idle: Idle | None) -> None:
        """Take all messages; block only when nothing can run before one comes."""
        if idle is not None:
            self._device.idle(self._load())
            self._cache.check()
            self._scheduler.check()
            self._report_standings()
            ends = [end for end in (idle.until, self._drain_until, *self._warming.deadlines) if end is not None]
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
            case BlocksFetched(request_id=request_id, blocks=blocks, outcome=outcome):
                self._cache.fetched(request_id, blocks, outcome)
                self._scheduler.blocks_arrived(request_id)
            case BlockStored(key=key, outcome=outcome, refusal=refusal):
                if outcome == "durable":
                    self._cache.became_durable(key)
                else:
                    self._cache.was_refused(key, refusal)
                self._warming.stored(key)
            case Unpin(owner=owner, name=name):
                self._cache.unpin(owner, name)
            case SetBudget(hot_cache_bytes=budget_bytes):
                self._cache.set_budget(budget_bytes)
            case ForgetHot(owner=owner):
                self._cache.forget(owner)
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
        answer = RowAnswer(request_id, prepared.answer.parser(), self._new_call_id)
        detokenizer = self._make_detokenizer()
        self._rows[request_id] = _Row(prepared=prepared, detokenizer=detokenizer, stops=stops, answer=answer)
        blocks_deadline = self._prefetch(prepared)
        self._scheduler.add(
            Sequence(
                request_id=request_id,
                prompt_tokens=len(prepared.token_ids),
                max_tokens=0 if prepared.warm is not None else prepared.max_tokens,
                arrived=prepared.arrived,
                blocks_deadline=blocks_deadline,
                answer_due=self._clock() + DISK_ANSWER_SECONDS,
                boundaries=prepared.boundaries if self._engine.keeps_states else (),
                lane=lane_of(prepared),
                tenant=prepared.request.tenant,
                tenant_weight=prepared.request.tenant_weight,
                grains=prepared.grains if self._cache.is_on else (),
            )
        )

    def _prefetch(self, prepared: Prepared) -> float | None:
        """Ask the disk for what RAM lacks of this. Until when to wait for it, if there is anything to wait for."""
        costs = self._scheduler.costs
        if not self._cache.prefetch(prepared, costs.prefill):
            return None
        compute_seconds = costs.prefill_seconds(len(prepared.token_ids), 0)
        return self._clock() + min(max(compute_seconds, LEAST_FETCH_SECONDS), FETCH_DEADLINE_SECONDS)

    def _cancel(self, request_id: RequestId) -> None:
        if self._warming.cancel(request_id):
            self._fail(request_id, FailureKind.CANCELLED, "cancelled; what was computed is kept")
            return
        if request_id in self._stopped:
            self._stopped[request_id] = "cancelled"
            return
        if request_id not in self._rows:
            # It may still be with the text thread.
            self._cancelled_early[request_id] = None
            while len(self._cancelled_early) > _REMEMBERED_CANCELS:
                self._cancelled_early.popitem(last=False)
            return
        self._fail(request_id, FailureKind.CANCELLED, "cancelled")
        if self._rows[request_id].is_open:
            # With the state of layers that cannot be cut: who timed out and asks again goes on from here.
            self._keep_all(self._rows[request_id])
        self._forget([request_id])

    def _is_drained(self) -> bool:
        """Whether to leave now. Asked before each wait as well: the last row may have ended with the last step."""
        is_busy = bool(self._warming) or not self._scheduler.is_empty
        if self._drain_until is None or (is_busy and self._clock() < self._drain_until):
            return False
        for request_id in [*self._rows, *self._warming.request_ids]:
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
            hot_cache_budget_bytes=self._cache.budget_bytes,
            live_kv_bytes=self._engine.live_kv_bytes,
            live_kv_budget_bytes=self._scheduler.live_kv_budget_bytes,
            preemptions=self._scheduler.preemptions,
            prefill_tokens_per_second=self._scheduler.rate_tokens_per_second,
            read_bytes_per_second=self._cache.read_bytes_per_second,
            pins=self._cache.pins(self._clock()),
            misses=dict(self._cache.misses),
            not_written=dict(self._cache.not_written),
        )

    # --- steps -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._run(self._permitted(self._scheduler.next_step(self._clock())))

    def _run(self, step: Step | Hold) -> None:
        started = self._clock()
        match step:
            case Hold(until=until):
                self._wait(until)
            case Open(request_id=request_id):
                self._open(request_id)
            case Prefill():
                self._read()
                self._prefill(step)
            case Mixed(request_id=request_id):
                self._read()
                # What was read may have ended the last row.
                if self._scheduler.is_decoding:
                    self._mixed(step)
            case Join(request_id=request_id):
                self._engine.join(request_id)
                self._scheduler.joined(request_id, self._clock())
            case Park(request_id=request_id):
                self._read()
                if request_id in self._rows:
                    self._engine.park(request_id)
                    self._scheduler.parked(request_id, self._clock())
            case Preempt(request_id=request_id):
                self._read()
                # What was read may have ended a row, and with it the need.
                if self._scheduler.next_step(self._clock()) == step:
                    self._preempt(request_id)
            case Decode():
                drawn = self._engine.decode()
                self._steps += 1
                self._decoded(drawn, started, "step")
            case Rest(until=until):
                self._wait(until)
            case Idle():
                pass
            case _:
                assert_never(step)

    def _permitted(self, step: Step) -> Step | Hold:
        """What of this may run now, beside other models on the device. Rows go on while a slice is held, and a slice
        while they rest."""
        if not isinstance(step, Prefill | Mixed | Decode):
            return step
        permits = self._device.ask(self._load(), None if isinstance(step, Decode) else step.lane)
        rows_elsewhere = self._device.rows_elsewhere()
        self._scheduler.beside(
            None if rows_elsewhere is None else Lane(rows_elsewhere),
            permits.prefill.held_by if permits.prefill else "",
            slices="run through" if permits.company else "stop",
        )
        if not isinstance(step, Decode):
            if permits.prefill is None:
                is_alone = isinstance(step, Mixed) and permits.decode is not None
                return Prefill(step.request_id, step.tokens, step.lane) if is_alone else step
            if not self._scheduler.is_decoding:
                return permits.prefill
        return permits.decode or Decode()

    def _wait(self, until: float) -> None:
        """Held back with nothing else to run. Not `_receive`, which checks the books each time."""
        started = self._clock()
        with contextlib.suppress(queue.Empty):
            self._apply(self._inbox.get(timeout=max(0.0, until - started)))
        self._scheduler.waited(self._clock() - started)

    def _load(self) -> Load:
        places = self._scheduler.places
        return Load(active_rank=places.highest, decoding_rank=places.highest_row, decoding_rows=len(places.decoding))

    def _read(self) -> None:
        """Before the device does something long: what it has decoded already is on its way to the clients."""
        if self._scheduler.is_decoding:
            started = self._clock()
            self._decoded(self._engine.read(), started, "read")

    def _decoded(self, drawn: list[Drawn], started: float, what: Literal["step", "read"]) -> None:
        seconds = self._clock() - started
        launched, self._launched_seconds = self._launched_seconds, 0.0
        if what == "step" and not drawn:
            self._launched_seconds = seconds
        # What was launched while the step before it was read is read at once: that says nothing of what a step takes.
        rows = len(drawn) if what == "step" or launched else 0
        self._scheduler.decoded(seconds, rows, launched_seconds=launched)
        if drawn:
            self._device.decoded()
        self._take_drawn(drawn)

    def _take_drawn(self, drawn: list[Drawn]) -> None:
        ended = [request_id for token in drawn if (request_id := self._drew(token)) is not None]
        self._forget(ended)

    def _open(self, request_id: RequestId) -> None:
        row = self._rows[request_id]
        if self._sequence(request_id).blocks_deadline is not None:
            self._cache.gave_up_waiting(request_id)
        match, report = self._cache.use(row.prepared)
        self._engine.open(row.prepared, match.uses)
        sequence = self._sequence(request_id)
        if not sequence.preemptions:  # else it finds what it made itself, mostly: no news to its client nor to the disk
            row.report, row.touched = report, match.touched
        row.is_open = True
        row.kept_until = match.whole_blocks * BLOCK_TOKENS
        self._scheduler.opened(request_id, match.tokens, self._clock())
        self._report_prefill(sequence)
        if sequence.prefill_left == 0:
            self._prompt_done(row, sequence)

    def _preempt(self, request_id: RequestId) -> None:
        """Nothing of it is unread. It goes on as if it had been asked with all its tokens."""
        row = self._rows[request_id]
        self._keep_all(row)
        row.prepared = resumed(row.prepared, self._engine.token_ids(request_id), row.drawn)
        row.is_open = False
        self._engine.drop([request_id])
        self._scheduler.preempted(request_id, self._prefetch(row.prepared))

    def _prefill(self, step: Prefill) -> None:
        row, sequence = self._rows[step.request_id], self._sequence(step.request_id)
        before_last, since = 0.0, self._clock()

        def let_others_by() -> None:
            nonlocal before_last, since
            seconds = self._clock() - since
            before_last += seconds
            self._scheduler.stopped(step, seconds)
            self._let_by(step)
            since = self._clock()

        self._stopped[step.request_id] = "goes on"
        self._device.slice_started()
        self._engine.prefill(step.request_id, step.tokens, self._scheduler.parts_of(step), let_others_by)
        self._device.slice_ended()
        self._steps += 1
        now = self._clock()
        self._scheduler.prefilled(step, before_last + now - since, now, told_seconds=before_last)
        self._advanced(row, sequence)
        if self._stopped.pop(step.request_id) == "cancelled":
            self._cancel(step.request_id)

    def _let_by(self, stopped: Prefill) -> None:
        """A slice has stopped between two layers: those of higher lanes who came meanwhile begin, and their rows get
        what it owes them. It goes on at once when nobody wants it any more, or another model is at work, for which all
        of this is one slice, in which it must wait."""
        device, self._device = self._device, Alone()
        while not self._must_go_on(stopped):
            step = self._scheduler.next_before(stopped.lane, self._stopped, self._clock())
            if step is None:
                break
            self._run(step)
        self._read()
        self._device = device

    def _must_go_on(self, stopped: Prefill) -> bool:
        self._attend(None)
        is_late = self._drain_until is not None and self._clock() >= self._drain_until
        is_cancelled = self._stopped[stopped.request_id] == "cancelled"
        return is_late or is_cancelled or self._shared_device.has_company(self._load())

    def _mixed(self, step: Mixed) -> None:
        row, sequence = self._rows[step.request_id], self._sequence(step.request_id)
        started = self._clock()
        self._device.slice_started()
        drawn = self._engine.prefill_and_decode(step.request_id, step.tokens)
        self._device.slice_ended()
        self._device.decoded()
        self._steps += 1
        now = self._clock()
        self._scheduler.mixed(step, now - started, now)
        # Rows before blocks: clients wait for these tokens.
        self._take_drawn(drawn)
        self._advanced(row, sequence)

    def _advanced(self, row: _Row, sequence: Sequence) -> None:
        """More of this prompt has its KV in the row's cache."""
        # Whole blocks are kept after each slice, so that what a cancelled request computed is not lost; the tail once.
        is_boundary = sequence.prefilled in sequence.boundaries
        is_done = sequence.prefill_left == 0
        end = sequence.prefilled if is_done or is_boundary else sequence.prefilled // BLOCK_TOKENS * BLOCK_TOKENS
        self._keep(row, end)
        if is_boundary:
            self._keep_state(row, end)
        self._report_prefill(sequence)
        if is_done:
            self._prompt_done(row, sequence)

    def _prompt_done(self, row: _Row, sequence: Sequence) -> None:
        """What was to be answered waits for its row now."""
        if sequence.lane is Lane.WARM:
            self._warmed(row, sequence)

    def _warmed(self, row: _Row, sequence: Sequence) -> None:
        """A prefix was computed to be kept. Its answer waits for the disk, for a while."""
        if self._engine.keeps_states:
            self._keep_state(row, sequence.prefilled)
        request_id = row.prepared.request_id
        blocks = self._cache.warmed(row.prepared, self._clock())
        now = self._clock()
        self._warming.add(
            Warming(
                prepared=row.prepared,
                sequence=sequence,
                timings=timings(sequence, now),
                report=row.report,
                blocks=blocks,
                storing={block.key for block in blocks if self._cache.is_storing(block.key)},
                deadline=now + STORE_SECONDS,
            )
        )
        self._forget([request_id])

    def _answer_warmed(self) -> None:
        for warming in self._warming.take_due(self._clock()):
            prepared = warming.prepared
            if prepared.warm is not None and prepared.warm.pin is not None:
                self._cache.pin_on_disk(warming.blocks, prepared.request.cache.owner, prepared.warm.pin)
            self._send(warming.answer)

    def _drew(self, token: Drawn) -> RequestId | None:
        """Take a row's next token. Returns its id when that ended it."""
        row = self._rows[token.request_id]
        request = row.prepared.request
        row.drawn += 1
        self._scheduler.drew(token.request_id)
        row.answer.drew()
        is_end = token.token_id in self._end_token_ids and request.ignore_end == "no"
        if is_end or token.token_id in request.stop_token_ids:
            self._finish(row, self._rest(row), "stop")
            return token.request_id
        if token.logprob is not None:
            row.answer.scored(token.logprob)
        emitted = row.stops.push(row.detokenizer.push(token.token_id))
        if emitted.matched is not None:
            self._finish(row, emitted.text, "stop_string", emitted.matched)
            return token.request_id
        if row.drawn >= row.prepared.max_tokens:
            self._finish(row, emitted.text + self._rest(row), "length")
            return token.request_id
        for event in row.answer.push(emitted.text):
            self._send(event)
        row.told = None  # whoever parks it again says so again
        if row.answer.is_over:
            self._finish(row, "", "stop")
            return token.request_id
        return None

    def _rest(self, row: _Row) -> str:
        """What was held back, at an end that is no stop string's."""
        last = row.stops.push(row.detokenizer.flush())
        return last.text if last.matched is not None else last.text + row.stops.flush()

    def _finish(self, row: _Row, text: str, end: AnswerEnd, matched: str | None = None) -> None:
        request_id = row.prepared.request_id
        sequence = self._sequence(request_id)
        for event in row.answer.finish(text, end):
            self._send(event)
        self._keep_all(row)
        self._send(
            Finished(
                request_id=request_id,
                reason=_reason(end, row.answer),
                usage=Usage(
                    prompt_tokens=sequence.prompt_tokens,
                    completion_tokens=row.drawn,
                    cached_tokens=sequence.cached,
                    reasoning_tokens=row.answer.reasoning_tokens,
                ),
                timings=timings(sequence, self._clock()),
                cache=row.report,
                matched_stop=matched,
                warnings=(*row.prepared.warnings, *row.answer.warnings),
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

    def _keep_all(self, row: _Row) -> None:
        """Of whatever it holds."""
        held = self._engine.tokens_held(row.prepared.request_id)
        self._keep(row, held)
        if self._engine.keeps_states and held:
            self._keep_state(row, held)

    def _keep_state(self, row: _Row, position: int) -> None:
        if not self._cache.is_on:
            return
        request_id = row.prepared.request_id
        state = self._engine.state(request_id)
        token_ids = self._engine.token_ids(request_id)
        self._cache.keep_state(
            row.prepared, token_ids, position, state, lambda a, b: self._engine.cut(request_id, a, b)
        )

    def _report_prefill(self, sequence: Sequence) -> None:
        self._rows[sequence.request_id].told = None  # what it was told before is over
        if sequence.drawn:  # its answer has begun: that it was preempted is nothing to its client
            return
        self._send(
            Prefilling(
                request_id=sequence.request_id,
                done_tokens=sequence.prefilled,
                total_tokens=sequence.prompt_tokens,
                cached_tokens=sequence.cached,
                eta_seconds=self._scheduler.eta_seconds(sequence.request_id),
            )
        )

    def _report_standings(self) -> None:
        """Tell those who wait where they stand, if that changed."""
        now = self._clock()
        self._standings_due = now + WAITING_REPORT_SECONDS
        self._scheduler.look_at_room()
        for standing in self._scheduler.standings(now):
            row = self._rows[standing.request_id]
            eta_seconds = None if standing.eta_seconds is None else round(standing.eta_seconds, 1)
            waiting = Waiting(
                request_id=standing.request_id, ahead=standing.ahead, eta_seconds=eta_seconds, held_by=standing.held_by
            )
            if waiting != row.told and now - row.told_at >= WAITING_REPORT_SECONDS:
                row.told, row.told_at = waiting, now
                self._send(waiting)

    def _fail(self, request_id: RequestId, kind: FailureKind, message: str) -> None:
        self._send(Failed(request_id=request_id, failure=Failure(kind=kind, message=message)))

    def _forget(self, request_ids: list[RequestId]) -> None:
        if not request_ids:
            return
        for request_id in request_ids:
            row = self._rows.pop(request_id)
            self._scheduler.remove(request_id)
            token_ids = self._engine.token_ids(request_id) if row.is_open else ()
            self._cache.request_over(row.prepared, token_ids, row.touched)
        self._engine.drop(request_ids)


def _reason(end: AnswerEnd, answer: RowAnswer) -> FinishReason:
    match end:
        case "stop":
            return FinishReason.TOOL_CALLS if answer.has_whole_call else FinishReason.STOP
        case "stop_string":
            return FinishReason.STOP
        case "length":
            return FinishReason.LENGTH
        case _:
            assert_never(end)
