"""The step loop of a worker that embeds or reranks: receive → pack → run → report. One thread runs it.

Knows no MLX and no ZeroMQ. An exception out of the model leaves `run`: the worker must end.
"""

import contextlib
import queue
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, assert_never

from protocol.failures import Failure, FailureKind
from protocol.generation import (
    Cancel,
    Drain,
    Embed,
    Embedded,
    Failed,
    ForgetHot,
    Ping,
    Pong,
    Prefilling,
    Rerank,
    Reranked,
    SetBudget,
    Timings,
    Unpin,
    WorkerEvent,
)
from protocol.ids import RequestId
from protocol.model_kind import ModelKind
from worker.embedding.packing import Batch, Packer
from worker.embedding.rows import BatchModel, PreparedRows
from worker.embedding.vectors import cosine_scores, cut_vectors, score_of
from worker.neighbours import DeviceSharing, Hold, Load

EmbeddingMessage = PreparedRows | Cancel | Drain | Ping | Unpin | SetBudget | ForgetHot

BESIDE_ROWS_SECONDS = (0.1, 0.15, 0.2)
"""How long a batch may be expected to take beside rows of another model that decode, by their class."""

_SHORTEST_SLICE_TOKENS = 64
"""However slow the device: shorter slices cost more than they give."""

_REMEMBERED_CANCELS = 1024
_BYTES_OF_FLOAT = 4


@dataclass
class _Job:
    """A request and what its rows have given so far. `began` is when a batch with the first of them did."""

    prepared: PreparedRows
    results: dict[int, bytes] = field(default_factory=dict[int, bytes])
    done_tokens: int = 0
    began: float | None = None
    batches: int = 0
    held: dict[str, float] = field(default_factory=dict[str, float])

    def timings(self, now: float) -> Timings:
        began = now if self.began is None else self.began
        return Timings(
            queue_seconds=began - self.prepared.arrived,
            prefill_seconds=now - began,
            decode_seconds=0.0,
            prefill_slices=self.batches,
            held_seconds=sum(self.held.values(), 0.0),
            held_by=max(self.held, key=self.held.__getitem__, default=""),
            held=dict(self.held),
        )


class EmbeddingLoop:
    """Give it messages through `inbox`; it reports through `send`. `run` returns when drained."""

    def __init__(
        self,
        *,
        model: BatchModel,
        kind: ModelKind,
        packer: Packer,
        inbox: "queue.SimpleQueue[EmbeddingMessage]",
        send: Callable[[WorkerEvent], None],
        clock: Callable[[], float],
        device: DeviceSharing,
        batch_seconds: float,
    ) -> None:
        """`batch_seconds` bounds what a batch is expected to take, so that a new request soon has its turn."""
        self._model = model
        self._kind: ModelKind = kind
        self._packer = packer
        self._inbox = inbox
        self._send = send
        self._clock = clock
        self._device = device
        self._batch_seconds = batch_seconds
        self._jobs: dict[RequestId, _Job] = {}
        self._cancelled_early: OrderedDict[RequestId, None] = OrderedDict()
        self._steps = 0
        self._rows_running = 0
        self._slice_began = 0.0
        self._busy_seconds = 0.0
        self._drain_until: float | None = None

    def run(self) -> None:
        """Run batches until drained."""
        while not self._is_drained():
            self._receive()
            if not self._is_drained() and not self._packer.is_empty:
                self._step()

    # --- messages ----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take all messages; block only when nothing waits to be run."""
        if self._packer.is_empty:
            self._device.idle(Load())
            timeout = None if self._drain_until is None else max(0.0, self._drain_until - self._clock())
            with contextlib.suppress(queue.Empty):
                self._apply(self._inbox.get(timeout=timeout))
        self._take_messages()

    def _take_messages(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._apply(self._inbox.get_nowait())

    def _apply(self, message: EmbeddingMessage) -> None:
        match message:
            case PreparedRows():
                self._add(message)
            case Cancel(request_id=request_id):
                self._cancel(request_id)
            case Ping(nonce=nonce):
                self._send(self._pong(nonce))
            case Drain(deadline_seconds=seconds):
                until = self._clock() + seconds
                self._drain_until = until if self._drain_until is None else min(until, self._drain_until)
            case Unpin() | SetBudget() | ForgetHot():
                pass  # there is no KV to keep
            case _:
                assert_never(message)

    def _add(self, prepared: PreparedRows) -> None:
        request_id = prepared.request_id
        if request_id in self._cancelled_early:
            del self._cancelled_early[request_id]
            self._fail(request_id, FailureKind.CANCELLED, "cancelled before it started")
            return
        if self._drain_until is not None:
            self._fail(request_id, FailureKind.SHUTTING_DOWN, "the model's process is stopping; send the request again")
            return
        job = self._jobs[request_id] = _Job(prepared)
        self._packer.add(
            request_id,
            [len(row.token_ids) for row in prepared.rows],
            latency_class=prepared.request.latency_class,
            tenant=prepared.request.tenant,
            tenant_weight=prepared.request.tenant_weight,
        )
        if not prepared.rows:
            self._finish(job)

    def _cancel(self, request_id: RequestId) -> None:
        if request_id not in self._jobs:
            # It may still be with the text thread.
            self._cancelled_early[request_id] = None
            while len(self._cancelled_early) > _REMEMBERED_CANCELS:
                self._cancelled_early.popitem(last=False)
            return
        self._fail(request_id, FailureKind.CANCELLED, "cancelled")
        self._forget(request_id)

    def _is_drained(self) -> bool:
        if self._drain_until is None or (self._jobs and not self._is_over_time()):
            return False
        for request_id in list(self._jobs):
            self._fail(
                request_id, FailureKind.SHUTTING_DOWN, "the model's process stopped before the answer was complete"
            )
            self._forget(request_id)
        return True

    def _is_over_time(self) -> bool:
        return self._drain_until is not None and self._clock() >= self._drain_until

    def _pong(self, nonce: int) -> Pong:
        return Pong(
            nonce=nonce,
            steps=self._steps,
            running_rows=0 if self._packer.is_empty else self._rows_running,
            waiting_requests=len(self._jobs),
            active_bytes=self._model.active_bytes,
            hot_cache_bytes=0,
            hot_cache_blocks=0,
            hot_cache_budget_bytes=0,
            prefill_tokens_per_second=self._packer.tokens_per_second or 0.0,
        )

    # --- batches -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        batch = self._packer.next_batch(self._most_seconds())
        if batch is None:
            return
        held = self._hold(batch)
        if held is not None:
            self._wait(held)
            return
        self._rows_running = len(batch.rows)
        self._busy_seconds = 0.0
        for job in {row.request_id: self._jobs[row.request_id] for row in batch.rows}.values():
            job.batches += 1
            if job.began is None:
                job.began = self._clock()
        self._slice_starts()
        outputs = self._model.run(
            [self._jobs[row.request_id].prepared.rows[row.index] for row in batch.rows],
            slice_tokens=max(_SHORTEST_SLICE_TOKENS, self._packer.most_tokens(self._most_seconds())),
            between=lambda: self._between(batch),
        )
        if outputs is not None:
            self._slice_ends()
            self._packer.ran(batch, self._busy_seconds)
            self._take(batch, outputs)

    def _between(self, batch: Batch) -> Literal["go_on", "stop"]:
        """Between two slices of a long row: messages are heard, and other models have their share of the device."""
        self._slice_ends()
        while True:
            self._take_messages()
            if not any(row.request_id in self._jobs for row in batch.rows) or self._is_over_time():
                return "stop"
            held = self._hold(batch)
            if held is None:
                self._slice_starts()
                return "go_on"
            self._wait(held)

    def _slice_starts(self) -> None:
        self._slice_began = self._clock()
        self._device.slice_started()

    def _slice_ends(self) -> None:
        self._device.slice_ended()
        self._busy_seconds += self._clock() - self._slice_began
        self._steps += 1

    def _hold(self, batch: Batch) -> Hold | None:
        return self._device.ask(Load(active_rank=self._packer.highest_rank), batch.rank).prefill

    def _most_seconds(self) -> float:
        elsewhere = self._device.rows_elsewhere()
        if elsewhere is None:
            return self._batch_seconds
        return min(self._batch_seconds, BESIDE_ROWS_SECONDS[min(elsewhere, len(BESIDE_ROWS_SECONDS) - 1)])

    def _wait(self, held: Hold) -> None:
        """All that is here gives way."""
        began, jobs = self._clock(), tuple(self._jobs.values())
        with contextlib.suppress(queue.Empty):
            self._apply(self._inbox.get(timeout=max(0.0, held.until - began)))
        seconds = self._clock() - began
        for job in jobs:
            job.held[held.held_by] = job.held.get(held.held_by, 0.0) + seconds

    def _take(self, batch: Batch, outputs: list[bytes]) -> None:
        touched: dict[RequestId, _Job] = {}
        for row, output in zip(batch.rows, outputs, strict=True):
            job = self._jobs.get(row.request_id)
            if job is None:
                continue  # cancelled between two slices
            touched[row.request_id] = job
            job.results[row.index] = output
            job.done_tokens += row.tokens
        for job in touched.values():
            if len(job.results) == len(job.prepared.rows):
                self._finish(job)
            else:
                self._report(job)

    def _report(self, job: _Job) -> None:
        total = job.prepared.prompt_tokens
        rate = self._packer.tokens_per_second
        self._send(
            Prefilling(
                request_id=job.prepared.request_id,
                done_tokens=job.done_tokens,
                total_tokens=total,
                cached_tokens=0,
                eta_seconds=None if rate is None else (total - job.done_tokens) / rate,
            )
        )

    def _finish(self, job: _Job) -> None:
        request, tokens = job.prepared.request, job.prepared.prompt_tokens
        timings = job.timings(self._clock())
        results = [job.results[index] for index in range(len(job.prepared.rows))]
        match request:
            case Embed(request_id=request_id):
                size = len(results[0]) // _BYTES_OF_FLOAT if results else 0
                vectors = cut_vectors(results, request.dimensions)
                dimensions = request.dimensions or size
                self._send(
                    Embedded(
                        request_id=request_id,
                        dimensions=dimensions,
                        vectors=vectors,
                        prompt_tokens=tokens,
                        timings=timings,
                    )
                )
            case Rerank(request_id=request_id):
                if self._kind in ("cross_encoder", "decoder_reranker"):
                    scores = tuple(score_of(result) for result in results)
                else:
                    scores = cosine_scores(results[0], results[1:])
                self._send(Reranked(request_id=request_id, scores=scores, prompt_tokens=tokens, timings=timings))
            case _:
                assert_never(request)
        self._forget(request.request_id)

    # --- small things ------------------------------------------------------------------------------------------------

    def _forget(self, request_id: RequestId) -> None:
        self._jobs.pop(request_id, None)
        self._packer.remove(request_id)

    def _fail(self, request_id: RequestId, kind: FailureKind, message: str) -> None:
        self._send(Failed(request_id=request_id, failure=Failure(kind=kind, message=message)))
