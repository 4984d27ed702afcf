"""The loop on a model of arithmetic: every request ends once, between batches everything else is heard."""

import queue
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.failures import FailureKind
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
    TextPrompt,
    WorkerEvent,
)
from protocol.ids import RequestId
from protocol.latency import LatencyClass
from protocol.model_kind import ModelKind
from worker.embedding.loop import BESIDE_ROWS_SECONDS, EmbeddingLoop
from worker.embedding.packing import Packer, PackingSettings
from worker.embedding.rows import BetweenSlices, PreparedRows, TokenRow
from worker.neighbours import Alone, Hold, Load, Permits


@dataclass
class Arithmetic:
    """A row's vector is (its first token, 1); its score the first token's hundredth. `before` is called in each run."""

    gives: str = "vectors"
    slices: int = 1
    before: Callable[[], None] = lambda: None
    ran: list[list[int]] = field(default_factory=list[list[int]])

    def run(self, rows: Sequence[TokenRow], *, slice_tokens: int, between: BetweenSlices) -> list[bytes] | None:
        self.before()
        firsts = [row.token_ids[0] for row in rows]
        for _ in range(self.slices - 1):
            if between() == "stop":
                return None
        self.ran.append(firsts)
        if self.gives == "scores":
            return [struct.pack("<f", first / 100) for first in firsts]
        return [struct.pack("<2f", first, 1.0) for first in firsts]

    @property
    def active_bytes(self) -> int:
        return 77


class Rig:
    """A loop whose clock moves by a millisecond with each look at it."""

    def __init__(self, model: Arithmetic, kind: ModelKind = "embedder", device: Any = None) -> None:
        self.now = 100.0
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent: list[WorkerEvent] = []
        self.model = model
        self.loop = EmbeddingLoop(
            model=model,
            kind=kind,
            packer=Packer(PackingSettings(first_batch_tokens=4, most_rows=2)),
            inbox=self.inbox,
            send=self.sent.append,
            clock=self._clock,
            device=device or Alone(),
            batch_seconds=10.0,
        )

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def run(self, *messages: Any, drain_seconds: float = 1000.0) -> list[WorkerEvent]:
        """Hand these in, then drain; everything that was said."""
        for message in (*messages, Drain(deadline_seconds=drain_seconds)):
            self.inbox.put(message)
        self.loop.run()
        return self.sent

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.sent if isinstance(event, kind)]


def embed(name: str, *firsts: int, dimensions: int | None = None, **more: Any) -> PreparedRows:
    inputs = tuple(TextPrompt(text=str(first)) for first in firsts)
    request = Embed(request_id=RequestId(name), inputs=inputs, dimensions=dimensions, **more)
    rows = tuple(TokenRow(token_ids=(first, 1)) for first in firsts)
    return PreparedRows(request=request, rows=rows, arrived=0.0)


def rerank(name: str, *firsts: int, documents: int) -> PreparedRows:
    request = Rerank(request_id=RequestId(name), query="q", documents=("d",) * documents)
    return PreparedRows(request=request, rows=tuple(TokenRow(token_ids=(first, 1)) for first in firsts), arrived=0.0)


def test_vectors_come_in_the_order_of_the_inputs() -> None:
    """Whatever order they ran in, with progress in between and the tokens counted."""
    rig = Rig(Arithmetic())
    rig.run(embed("r", 3, 1, 2))
    (embedded,) = rig.of(Embedded)
    assert struct.unpack("<6f", embedded.vectors) == (3, 1, 1, 1, 2, 1)
    assert (embedded.dimensions, embedded.prompt_tokens) == (2, 6)
    (progress,) = rig.of(Prefilling)
    assert (progress.done_tokens, progress.total_tokens) == (4, 6)


def test_cut_vectors_have_unit_length() -> None:
    """And say how many numbers they have."""
    rig = Rig(Arithmetic())
    rig.run(embed("r", 3, -2, dimensions=1))
    (embedded,) = rig.of(Embedded)
    assert (embedded.dimensions, struct.unpack("<2f", embedded.vectors)) == (1, (1.0, -1.0))


def test_scores_of_either_kind() -> None:
    """A reranker's own; else the cosine with the first row, from 0 to 1. No document, no score."""
    rig = Rig(Arithmetic("scores"), "cross_encoder")
    rig.run(rerank("pairs", 25, 75, documents=2), rerank("none", documents=0))
    assert {event.request_id: event.scores for event in rig.of(Reranked)} == {"pairs": (0.25, 0.75), "none": ()}

    rig = Rig(Arithmetic())
    rig.run(rerank("vectors", 1, 1, -1, documents=2))
    (reranked,) = rig.of(Reranked)
    assert [round(score, 6) for score in reranked.scores] == [1.0, 0.5]


def test_between_two_batches_a_cancel_and_a_ping_are_heard() -> None:
    """A cancelled request ends once, at the next batch's edge, and its rows run no more."""
    rig = Rig(Arithmetic())
    said = [Cancel(request_id=RequestId("gone")), Ping(nonce=5), ForgetHot(), Cancel(request_id=RequestId("gone"))]
    rig.model.before = lambda: [rig.inbox.put(message) for message in said] and said.clear()
    rig.run(embed("gone", *range(1, 10)), embed("kept", 50))
    (failed,) = rig.of(Failed)
    assert (failed.request_id, failed.failure.kind) == ("gone", FailureKind.CANCELLED)
    (pong,) = rig.of(Pong)
    assert (pong.nonce, pong.steps, pong.active_bytes, pong.waiting_requests) == (5, 1, 77, 1)
    assert [event.request_id for event in rig.of(Embedded)] == ["kept"]
    assert sum(len(batch) for batch in rig.model.ran) == 3


def test_a_cancel_that_overtakes_its_request() -> None:
    """It was still with the text thread: nothing of it runs."""
    rig = Rig(Arithmetic())
    rig.run(Cancel(request_id=RequestId("early")), embed("early", 1), embed("other", 2))
    assert [(event.request_id, event.failure.kind) for event in rig.of(Failed)] == [("early", FailureKind.CANCELLED)]
    assert rig.model.ran == [[2]]


def test_an_urgent_request_goes_between_two_batches() -> None:
    """Though the one before it has rows left."""
    rig = Rig(Arithmetic())
    late = [embed("urgent", 50, latency_class=LatencyClass.INTERACTIVE)]
    rig.model.before = lambda: [rig.inbox.put(message) for message in late] and late.clear()
    rig.run(embed("heap", *range(1, 10)))
    # the drain came before it: what comes later is refused
    assert [event.failure.kind for event in rig.of(Failed)] == [FailureKind.SHUTTING_DOWN]

    rig = Rig(Arithmetic())
    rig.run(embed("heap", *range(1, 10)), embed("urgent", 50, latency_class=LatencyClass.INTERACTIVE))
    assert rig.model.ran[0] == [50]


def test_a_drain_has_an_end() -> None:
    """What runs may finish until its deadline, the rest fails, and the loop returns."""
    rig = Rig(Arithmetic())
    rig.run(embed("done", 1), embed("late", *range(2, 12)), drain_seconds=0.011)
    ends = [event.request_id for event in rig.sent if isinstance(event, Embedded | Failed)]
    assert sorted(ends) == ["done", "late"]
    assert isinstance(rig.sent[-1], Failed)
    assert rig.sent[-1].failure.kind is FailureKind.SHUTTING_DOWN


class OneDevice(Alone):
    """Holds the first two asks; another model's rows of the highest class decode all the time."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.holds = 2

    def ask(self, load: Load, prefill_rank: int | None) -> Permits:
        assert load.active_rank == prefill_rank == LatencyClass.STANDARD.rank
        if self.holds:
            self.holds -= 1
            self.log.append("held")
            return Permits(prefill=Hold(held_by="other_model", until=0.0))
        return Permits()

    def rows_elsewhere(self) -> int | None:
        return LatencyClass.INTERACTIVE.rank

    def slice_started(self) -> None:
        self.log.append("started")

    def slice_ended(self) -> None:
        self.log.append("ended")


def test_a_batch_is_a_slice_to_other_models() -> None:
    """It waits while it is held, is announced before and after, and is short beside rows that decode."""
    device = OneDevice()
    rig = Rig(Arithmetic(), device=device)
    rig.run(embed("r", 1))
    assert device.log == ["held", "held", "started", "ended"]
    assert rig.loop._most_seconds() == BESIDE_ROWS_SECONDS[0]
    assert [event.request_id for event in rig.of(Embedded)] == ["r"]


def test_between_two_slices_messages_are_heard() -> None:
    """A long row stops no Ping, shows that it gets on, and ends at the next slice when nobody wants it any more."""
    rig = Rig(Arithmetic(slices=4))
    rig.model.before = lambda: rig.inbox.put(Ping(nonce=1))
    rig.run(embed("long", 1))
    (pong,) = rig.of(Pong)
    assert (pong.steps, pong.running_rows) == (1, 1)
    assert [event.request_id for event in rig.of(Embedded)] == ["long"]

    rig = Rig(Arithmetic(slices=4))
    rig.model.before = lambda: rig.inbox.put(Cancel(request_id=RequestId("long")))
    rig.run(embed("long", 1), embed("next", 2))
    assert [(event.request_id, event.failure.kind) for event in rig.of(Failed)] == [("long", FailureKind.CANCELLED)]
    assert [event.request_id for event in rig.of(Embedded)] == ["next"]


def test_a_drain_does_not_wait_for_a_long_row() -> None:
    """Past its deadline the row is given up between two slices."""
    rig = Rig(Arithmetic(slices=1_000_000))
    rig.run(embed("endless", 1), drain_seconds=0.1)
    assert [event.failure.kind for event in rig.of(Failed)] == [FailureKind.SHUTTING_DOWN]
