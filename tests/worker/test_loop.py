"""The step loop, with an engine that plays a script: every request ends exactly once, whatever happens when."""

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.failures import FailureKind
from protocol.generation import (
    Cancel,
    Delta,
    Drain,
    Failed,
    Finished,
    FinishReason,
    ForgetHot,
    Pin,
    Ping,
    Pong,
    Prefilling,
    SetBudget,
    Unpin,
    Waiting,
    Warmed,
    WorkerEvent,
)
from protocol.ids import BLOCK_TOKENS, BlockKey, RequestId
from protocol.latency import LatencyClass
from tests.fakes.scripted_engine import LetterDetokenizer, ManualClock, ScriptedEngine, saying
from tests.worker.parts import chain_of_blocks, prepared
from worker.loop import FETCH_DEADLINE_SECONDS, LEAST_FETCH_SECONDS, StepLoop
from worker.messages import BlocksFetched, InboxMessage
from worker.neighbours import Alone, DeviceSharing, Load, Permits
from worker.pacing import SchedulerSettings
from worker.prefix_cache import Fetch as PrefixFetch
from worker.prefix_cache import FetchOutcome, PrefixCache
from worker.prefix_index import Block, PrefixIndex
from worker.scheduler import Scheduler
from worker.sequence import Prepared

Kv = tuple[int, ...]
END = 0


class ScriptedInbox:
    """Plays the messages of a list, in order; None is a moment without one. At its end it drains the loop.

    A loop that blocks gets the next message at once, or, when there is none, the clock moves on by its timeout.
    """

    def __init__(self, clock: ManualClock, messages: list[InboxMessage | None]) -> None:
        self._clock = clock
        self._messages = messages
        self._has_drained = False

    def get_nowait(self) -> InboxMessage:
        message = self._messages.pop(0) if self._messages else None
        if message is None:
            raise queue.Empty
        return message

    def get(self, timeout: float | None = None) -> InboxMessage:
        while self._messages:
            if (message := self._messages.pop(0)) is not None:
                return message
        if timeout is not None:
            self._clock.advance(timeout)
            raise queue.Empty
        assert not self._has_drained, "idle for ever, although drained"
        self._has_drained = True
        return Drain(deadline_seconds=0.0)


@dataclass
class Disk:
    fetches: list[str] = field(default_factory=list[str])
    stored: list[BlockKey] = field(default_factory=list[BlockKey])

    pinned: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    read_bytes_per_second = 1e9

    def fetch(self, fetch: PrefixFetch[Kv]) -> None:
        self.fetches.append(fetch.prepared.request_id)

    def store(self, block: Block[Kv]) -> bool:
        self.stored.append(block.key)
        return True

    def pin(self, keys: Sequence[BlockKey], owner: str, pin: Pin) -> None:
        self.pinned.append((owner, pin.name))

    def unpin(self, owner: str, name: str) -> None:
        self.pinned = [pinned for pinned in self.pinned if pinned != (owner, name)]

    def is_storing(self, key: BlockKey) -> bool:
        return key in self.stored

    def forget(self, owner: str | None) -> None:
        self.stored.clear()


class Run:
    """One loop, run to its end over these messages."""

    def __init__(
        self,
        messages: Sequence[InboxMessage | None],
        says: Mapping[str, str],
        *,
        reads_disk: str = "no",
        max_rows: int = 4,
        budget_bytes: int = 10**9,
        device: DeviceSharing | None = None,
        slices: Literal["apart", "mixed"] = "apart",
    ) -> None:
        self.clock = ManualClock()
        self.engine = ScriptedEngine(self.clock, saying(says, END), mixes=slices == "mixed")
        self.events: list[WorkerEvent] = []
        self.messages: list[InboxMessage | None] = list(messages)
        self.disk = Disk()
        self.scheduler = Scheduler(SchedulerSettings(max_rows=max_rows, slices=slices))
        self.index: PrefixIndex[Kv] = PrefixIndex(budget_bytes)
        self.cache: PrefixCache[Kv] = PrefixCache(
            self.index, self.disk, "off" if reads_disk == "no" else "second-touch"
        )
        self.loop: StepLoop[Kv] = StepLoop(
            engine=self.engine,
            scheduler=self.scheduler,
            cache=self.cache,
            make_detokenizer=LetterDetokenizer,
            end_token_ids=frozenset([END]),
            inbox=ScriptedInbox(self.clock, self.messages),  # pyright: ignore[reportArgumentType]
            send=self.events.append,
            clock=self.clock,
            device=device,
        )
        self.loop.run()

    def of(self, name: str) -> list[Any]:
        return [event for event in self.events if getattr(event, "request_id", None) == name]

    def text(self, name: str) -> str:
        return "".join(event.text for event in self.of(name) if isinstance(event, Delta))

    def end(self, name: str) -> Finished | Failed:
        ends = [event for event in self.of(name) if isinstance(event, Finished | Failed)]
        assert len(ends) == 1, f"{name} ended {len(ends)} times"
        assert self.of(name)[-1] is ends[0], "something was said after the end"
        return ends[0]

    def finished(self, name: str) -> Finished:
        end = self.end(name)
        assert isinstance(end, Finished), end
        return end

    def failed(self, name: str) -> FailureKind:
        end = self.end(name)
        assert isinstance(end, Failed), end
        return end.failure.kind


def asks(name: str, tokens: int = 10, **more: Any) -> Prepared:
    return prepared(name, list(range(1, tokens + 1)), max_tokens=more.pop("max_tokens", 50), **more)


QUIET: list[InboxMessage | None] = [None] * 200
"""Enough moments for everything to run to its end."""


# --- ways to end ----------------------------------------------------------------------------------------------------


def test_the_end_of_a_turn() -> None:
    """Text, then Finished(stop); the end's token counts and is not shown."""
    run = Run([asks("r"), *QUIET], {"r": "hello"})

    assert run.text("r") == "hello"
    end = run.finished("r")
    assert end.reason is FinishReason.STOP
    assert end.matched_stop is None
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (10, 6, 0)
    assert run.engine.rows == {}


def test_a_stop_token_of_the_request() -> None:
    """As the model's own."""
    run = Run([asks("r", stop_token_ids=(ord("l"),)), *QUIET], {"r": "hello"})

    assert run.text("r") == "he"
    assert run.finished("r").reason is FinishReason.STOP


@pytest.mark.parametrize(("limit", "text"), [(1, "h"), (3, "hel"), (5, "hello")])
def test_the_length(limit: int, text: str) -> None:
    """Exactly as many tokens as asked for."""
    run = Run([asks("r", max_tokens=limit), *QUIET], {"r": "hello"})

    assert run.text("r") == text
    end = run.finished("r")
    assert end.reason is FinishReason.LENGTH
    assert end.usage.completion_tokens == limit


def test_an_answer_that_ends_where_its_limit_is() -> None:
    """The end of the turn is a stop, not a cut."""
    run = Run([asks("r", max_tokens=6), *QUIET], {"r": "hello"})

    assert run.finished("r").reason is FinishReason.STOP


def test_a_stop_string() -> None:
    """B02: never in any delta, generation really ends, and which one it was is said."""
    run = Run([asks("r", stop=("lo w",)), *QUIET], {"r": "hello world, and much more"})

    assert run.text("r") == "hel"
    end = run.finished("r")
    assert (end.reason, end.matched_stop) == (FinishReason.STOP, "lo w")
    assert end.usage.completion_tokens == 7


@pytest.mark.parametrize("limit", [4, 5])
def test_text_held_back_for_a_stop_comes_at_the_end(limit: int) -> None:
    """A beginning of a stop string is text after all."""
    run = Run([asks("r", stop=("lo!",), max_tokens=limit), *QUIET], {"r": "hello"})

    assert run.text("r") == "hello"[:limit]


def test_every_tokens_logprob_comes_once() -> None:
    """Also of tokens whose text is held back, or empty."""
    run = Run([asks("r", stop=("lo!",), top_logprobs=0), *QUIET], {"r": "hello"})

    deltas = [event for event in run.of("r") if isinstance(event, Delta)]
    assert "".join(chosen.chosen.token for delta in deltas for chosen in delta.logprobs) == "hello"
    assert sum(delta.tokens for delta in deltas) == 6


def test_progress_and_timings_add_up() -> None:
    """Prefilling rises to all but the last token; the times cover the life of the request."""
    run = Run([asks("r", 700, max_tokens=4), *QUIET], {"r": "hello"})

    progress = [event for event in run.of("r") if isinstance(event, Prefilling)]
    assert [event.done_tokens for event in progress] == sorted({event.done_tokens for event in progress})
    assert progress[-1].done_tokens == 699
    assert {event.total_tokens for event in progress} == {700}
    timings = run.finished("r").timings
    assert timings.prefill_seconds == pytest.approx(0.699)
    assert timings.decode_seconds == pytest.approx(5 * 0.02)
    assert timings.prefill_slices == len(progress) - 1


def test_a_prompt_of_one_token() -> None:
    """Nothing to prefill: it joins and decodes."""
    run = Run([asks("r", 1), *QUIET], {"r": "hi"})

    assert run.text("r") == "hi"


def test_rows_do_not_mix() -> None:
    """H02: each row as alone, joined and ended at different steps."""
    says = {f"r{i}": f"answer of {i} " * (i + 1) for i in range(6)}
    messages: list[InboxMessage | None] = []
    for i in range(6):
        messages += [asks(f"r{i}", 10 + 100 * i), None, None]
    run = Run([*messages, *QUIET], says, max_rows=3)

    for name, text in says.items():
        assert run.text(name) == text[:50]


# --- who waits for whom ---------------------------------------------------------------------------------------------


def test_a_question_does_not_wait_for_a_long_prompt() -> None:
    """It is answered between two slices of it; the tokens that a row has drawn come before a slice, not after it."""
    long = prepared("long", range(5000, 25_000), max_tokens=1)
    run = Run(
        [asks("stream", 5), *[None] * 8, long, *[None] * 20, asks("q", 10, max_tokens=1), *QUIET, *QUIET],
        {"stream": "x" * 49, "long": "y", "q": "z"},
    )

    ends = [event.request_id for event in run.events if isinstance(event, Finished)]
    assert ends.index("q") < ends.index("long")
    assert run.finished("q").timings.queue_seconds < 30


def test_rows_of_the_batch_class_give_way() -> None:
    """Parked with their KV, and not one token different; what they waited is told and counted."""
    batch = asks("b", 40, latency_class=LatencyClass.BATCH)
    person = prepared("p", range(100, 120), max_tokens=50, latency_class=LatencyClass.INTERACTIVE)
    run = Run([batch, *[None] * 20, person, *QUIET], {"b": "work" * 11, "p": "a person's answer"}, max_rows=1)

    assert (run.text("b"), run.text("p")) == ("work" * 11, "a person's answer")
    ends = [event.request_id for event in run.events if isinstance(event, Finished)]
    assert ends == ["p", "b"]
    assert "park b" in run.engine.log
    timings = run.finished("b").timings
    assert timings.held_by == "rows"
    assert 0.3 < timings.held_seconds < 1
    assert run.finished("p").timings.held_seconds == 0


def test_who_waits_is_told_where_it_stands() -> None:
    """When that changes, at most once a second, with the reason; a request that runs at once hears nothing."""
    run = Run(
        [asks("a", 5), *[None] * 5, asks("b", 200), asks("c", 300), *QUIET],
        {"a": "x" * 49, "b": "y" * 40, "c": "z"},
        max_rows=1,
    )
    waits = {name: [event for event in run.of(name) if isinstance(event, Waiting)] for name in "abc"}

    assert waits["a"] == []
    assert [(event.ahead, event.held_by) for event in waits["b"]] == [(0, "rows")]
    assert [(event.ahead, event.held_by) for event in waits["c"]] == [(1, "rows"), (0, "rows")]


def test_progress_says_when_it_will_be_done() -> None:
    """By what slices took so far; at its end, no more."""
    run = Run([asks("r", 3000), *QUIET], {"r": "x"})
    progress = [event for event in run.of("r") if isinstance(event, Prefilling)]

    assert progress[-1].eta_seconds == 0
    for event in progress[1:]:
        assert event.eta_seconds == pytest.approx((2999 - event.done_tokens) * 0.001, abs=0.2)


def test_a_prefix_in_flight_is_computed_once() -> None:
    """The second waits for the first, and finds what they share."""
    run = Run([asks("a", 2000), asks("b", 2100), *QUIET], {"a": "x", "b": "y"})

    assert run.finished("b").usage.cached_tokens >= 1999 // BLOCK_TOKENS * BLOCK_TOKENS


# --- cancel ---------------------------------------------------------------------------------------------------------


def test_cancel_before_the_prompt_is_rendered() -> None:
    """The Cancel overtakes the Prepared: nothing of it runs."""
    run = Run([Cancel(request_id=RequestId("r")), None, asks("r"), *QUIET], {"r": "hello"})

    assert run.failed("r") is FailureKind.CANCELLED
    assert run.engine.log == []


@pytest.mark.parametrize("moments", range(1, 12))
def test_cancel_in_every_phase(moments: int) -> None:
    """B07: within one step or slice the row is gone, its KV too, and another row goes on untouched."""
    cancel = Cancel(request_id=RequestId("r"))
    run = Run(
        [asks("r", 900), *[None] * moments, cancel, cancel, asks("other", 5), *QUIET], {"r": "x" * 40, "other": "fine"}
    )

    assert run.failed("r") is FailureKind.CANCELLED
    assert run.text("other") == "fine"
    assert run.engine.rows == {}
    assert run.scheduler.is_empty


def test_cancel_while_it_waits_for_the_disk() -> None:
    """Its blocks come later, and are kept for others."""
    request = asks("r", 300)
    blocks = tuple(chain_of_blocks(request.token_ids[:BLOCK_TOKENS]))
    late = BlocksFetched(request.request_id, blocks)
    run = Run(
        [request, Cancel(request_id=request.request_id), late, asks("next", 300), *QUIET],
        {"next": "x"},
        reads_disk="yes",
    )

    assert run.failed("r") is FailureKind.CANCELLED
    assert run.finished("next").usage.cached_tokens == BLOCK_TOKENS


def test_cancelling_what_is_over_or_unknown_is_fine() -> None:
    """Idempotent, and forgotten in the end."""
    cancels = [Cancel(request_id=RequestId(f"u{i}")) for i in range(2000)]
    run = Run(
        [asks("r"), *[None] * 60, Cancel(request_id=RequestId("r")), *cancels, asks("s"), *QUIET], {"r": "a", "s": "b"}
    )

    assert run.finished("r")
    assert run.finished("s")


def test_what_a_cancelled_prompt_computed_is_not_lost() -> None:
    """Its whole blocks are hot already."""
    run = Run(
        [asks("r", 3000), *[None] * 5, Cancel(request_id=RequestId("r")), asks("again", 3000), *QUIET],
        {"r": "x", "again": "y"},
    )

    assert run.failed("r") is FailureKind.CANCELLED
    assert run.finished("again").usage.cached_tokens >= BLOCK_TOKENS


# --- slices that stop -------------------------------------------------------------------------------------------------

BATCH = LatencyClass.BATCH
INTERACTIVE = LatencyClass.INTERACTIVE


def unlike(name: str, tokens: int, **more: Any) -> Prepared:
    """A prompt that begins as no other: who shares a prefix with a slice that stopped waits for it."""
    return prepared(name, [10_000 * len(name) + ord(name[-1]), *range(2, tokens + 1)], max_tokens=50, **more)


def test_a_question_does_not_wait_for_the_end_of_a_batch_slice() -> None:
    """It comes in the midst of one, and has its first tokens before that ends; both get all of theirs."""
    batch = asks("batch", 3000, latency_class=BATCH)
    question = asks("question", 12, latency_class=INTERACTIVE)
    run = Run([batch, None, None, question, *QUIET, *QUIET], {"batch": "b" * 20, "question": "q" * 20})

    log = run.engine.log
    slices = [at for at, line in enumerate(log) if line.startswith("prefill batch")]
    assert log.index("open question 0") < slices[0]
    assert "decode" in log[log.index("join question") : slices[0]]
    assert (run.text("batch"), run.text("question")) == ("b" * 20, "q" * 20)
    assert run.finished("question").timings.queue_seconds < 0.05
    assert run.finished("batch").usage.prompt_tokens == 3000


def test_a_slice_that_stopped_is_counted_without_what_it_let_by() -> None:
    """Or prompts would look slow, and slices shrink."""
    batch = asks("batch", 3000, latency_class=BATCH)
    question = asks("question", 12, latency_class=INTERACTIVE)
    run = Run([batch, None, None, question, *QUIET, *QUIET], {"batch": "b", "question": "q" * 40})
    assert run.scheduler.rate_tokens_per_second == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize("moments", range(1, 8))
def test_cancel_of_a_slice_that_stopped(moments: int) -> None:
    """B07: what it computed is kept, as of any other; who was let by never notices."""
    batch = asks("batch", 3000, latency_class=BATCH)
    question = asks("question", 12, latency_class=INTERACTIVE)
    messages = [batch, None, None, question, *[None] * moments, Cancel(request_id=RequestId("batch")), *QUIET]
    run = Run([*messages, asks("again", 3000), *QUIET], {"batch": "b", "question": "q" * 20, "again": "a"})

    assert run.failed("batch") is FailureKind.CANCELLED
    assert run.text("question") == "q" * 20
    assert run.text("again") == "a"
    computed = sum(int(line.split()[2]) for line in run.engine.log if line.startswith("prefill batch"))
    assert run.finished("again").usage.cached_tokens == computed > 0
    assert run.engine.rows == {}
    ends = [event.request_id for event in run.events if isinstance(event, Failed | Finished)]
    assert ends == ["batch", "question", "again"], "nobody waits for the slice any more, so it is soon over"


def test_messages_are_heard_while_a_slice_lets_others_by() -> None:
    """Also those that come when it has stopped for somebody long: a ping for a minute unheard ended a healthy worker,
    and prompts were read for clients that had gone."""
    warm = warms("w", 3000)
    asked = unlike("long", 6000, latency_class=INTERACTIVE)
    messages = [warm, None, None, asked, None, None, None, Ping(nonce=7), Cancel(request_id=RequestId("long"))]
    run = Run([*messages, asks("next", 5, latency_class=INTERACTIVE), *QUIET, *QUIET], {"long": "x", "next": "n"})

    log = run.engine.log
    end_of_slice = next(at for at, line in enumerate(log) if line.startswith("prefill w"))
    assert run.failed("long") is FailureKind.CANCELLED
    assert log.index("open next 0") < end_of_slice
    names = [getattr(event, "request_id", type(event).__name__) for event in run.events]
    assert names.index("Pong") < names.index("next")


def test_a_slice_that_stopped_ends_at_the_drains_deadline() -> None:
    """However much there is that could go before it; everybody hears that the process stops."""
    crowd = [unlike(f"i{i}", 5000, latency_class=INTERACTIVE) for i in range(4)]
    run = Run([asks("batch", 3000, latency_class=BATCH), None, None, *crowd, Drain(deadline_seconds=2.0), *QUIET], {})
    kinds = {run.failed(name) for name in ("batch", *(f"i{i}" for i in range(4)))}
    assert kinds == {FailureKind.SHUTTING_DOWN}
    assert run.clock.now < 1000 + 2.0 + 2 * 1.0 + 0.3  # a slice that had begun, and the rest of the one that stopped


class Company(Alone):
    """Another worker is at work: from the beginning, or since the slice began."""

    def __init__(self, since: str) -> None:
        super().__init__()
        self.since = since

    def ask(self, load: Load, prefill_rank: int | None) -> Permits:
        del load, prefill_rank
        return Permits(company=self.since == "the beginning")

    def has_company(self, load: Load) -> bool:
        del load
        return True


@pytest.mark.parametrize("since", ["the beginning", "the slice"])
def test_beside_another_model_at_work_slices_stop_for_nobody(since: str) -> None:
    """It waits for this one to end, and owes what it took."""
    batch = asks("batch", 3000, latency_class=BATCH)
    question = asks("question", 12, latency_class=INTERACTIVE)
    run = Run([batch, None, None, question, *QUIET], {"batch": "b", "question": "q"}, device=Company(since))
    log = run.engine.log
    begun = log.index("open question 0")
    assert log[begun - 1].startswith("prefill batch")
    assert (run.text("batch"), run.text("question")) == ("b", "q")


def test_slices_of_three_classes_stop_for_each_other() -> None:
    """One within the other; each gets its own text."""
    messages = [
        asks("batch", 3000, latency_class=BATCH), None, None,
        unlike("standard", 2000), None, None,
        unlike("question", 500, latency_class=INTERACTIVE), *QUIET, *QUIET,
    ]  # fmt: skip
    run = Run(messages, {"batch": "b" * 9, "standard": "s" * 9, "question": "q" * 9})
    ends = [event.request_id for event in run.events if isinstance(event, Finished)]
    assert ends == ["question", "standard", "batch"]
    assert [run.text(name) for name in ends] == ["q" * 9, "s" * 9, "b" * 9]


# --- prefix cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 16, 255, 256, 257, 511, 512, 513])
def test_the_same_prompt_again_recomputes_its_last_token(tokens: int) -> None:
    """K01, K09: cached tokens are what was really skipped, at most all but one."""
    run = Run([asks("r", tokens), *[None] * 80, asks("again", tokens), *QUIET], {"r": "hello", "again": "hello"})

    assert run.finished("r").usage.cached_tokens == 0
    assert run.finished("again").usage.cached_tokens == tokens - 1
    assert run.text("again") == run.text("r")


def test_the_next_turn_reuses_prompt_and_answer() -> None:
    """All of this turn, the end-of-turn token too."""
    first = asks("r", 300)
    turn = [*first.token_ids, *map(ord, "hello"), END]
    run = Run([first, *[None] * 80, prepared("next", [*turn, 5, 6, 7]), *QUIET], {"r": "hello", "next": "x"})

    assert run.finished("next").usage.cached_tokens == len(turn)


def test_blocks_from_disk_are_waited_for() -> None:
    """And counted as cached."""
    request = asks("r", 700)
    fetched = BlocksFetched(request.request_id, tuple(chain_of_blocks(request.token_ids[:640])))
    run = Run([request, None, None, fetched, *QUIET], {"r": "hi"}, reads_disk="yes")

    assert run.finished("r").usage.cached_tokens == 640


def test_a_disk_that_does_not_answer_delays_no_longer_than_its_deadline() -> None:
    """Then the prompt is computed; meanwhile others run. A short one waits for half a second at most."""
    request = asks("r", 1800)
    run = Run([request, asks("s", 3), *QUIET], {"r": "hi", "s": "x"}, reads_disk="yes")

    assert run.disk.fetches == ["r"]
    assert run.finished("s").timings.queue_seconds < 0.1
    assert run.finished("r").timings.queue_seconds == pytest.approx(FETCH_DEADLINE_SECONDS, abs=0.1)

    run = Run([asks("r", 100), *QUIET], {"r": "hi"}, reads_disk="yes")
    assert run.finished("r").timings.queue_seconds == pytest.approx(LEAST_FETCH_SECONDS, abs=0.1)


def test_a_miss_is_counted_with_its_reason() -> None:
    """K06, K09: and the row runs as cold."""
    request = asks("r", 300)
    run = Run(
        [request, BlocksFetched(request.request_id, (), FetchOutcome("integrity")), *QUIET, Ping(nonce=1)],
        {"r": "hi"},
        reads_disk="yes",
    )

    assert run.finished("r").usage.cached_tokens == 0
    (pong,) = [event for event in run.events if isinstance(event, Pong)]
    assert pong.misses == {"integrity": 1}


# --- ping, drain ----------------------------------------------------------------------------------------------------


def test_a_ping_is_answered_between_steps() -> None:
    """By the loop itself, with its books."""
    run = Run([asks("a", 700), asks("b", 5), *[None] * 20, Ping(nonce=7), *QUIET], {"a": "x" * 30, "b": "y" * 30})

    (pong,) = [event for event in run.events if isinstance(event, Pong)]
    assert pong.nonce == 7
    assert pong.steps > 0
    assert (pong.running_rows, pong.waiting_requests) in [(1, 1), (2, 0)]
    assert pong.active_bytes > 0
    assert pong.hot_cache_bytes == pong.hot_cache_blocks * BLOCK_TOKENS * 10 or pong.hot_cache_blocks > 0


def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    """Each of them ends once."""
    run = Run([asks("r"), None, Drain(deadline_seconds=100.0), asks("late"), *QUIET], {"r": "hello"})

    assert run.text("r") == "hello"
    assert run.finished("r")
    assert run.failed("late") is FailureKind.SHUTTING_DOWN
    assert run.clock.now < 1001.0  # it leaves with its last row, not at its deadline


def test_a_drains_deadline_cuts_what_still_runs() -> None:
    """With an end that says so; the earliest of several deadlines counts."""
    run = Run(
        [asks("r"), asks("s"), None, Drain(deadline_seconds=100.0), Drain(deadline_seconds=0.2), *QUIET],
        {"r": "x" * 49, "s": "y" * 49},
    )

    assert run.failed("r") is FailureKind.SHUTTING_DOWN
    assert run.failed("s") is FailureKind.SHUTTING_DOWN
    assert 0 < len(run.text("r")) < 49
    assert run.engine.rows == {}


def test_what_comes_after_the_last_step_is_heard() -> None:
    """Blocks may still be on their way to disk: an order to forget them is obeyed, its asker answered behind it, and
    what comes too late is refused; in silence the time passes."""
    run = Run([asks("r", 300), None], {"r": "hello"}, reads_disk="yes")
    assert run.cache.store_everything() == 2
    run.messages += [ForgetHot(), Ping(nonce=7), asks("late")]
    before = len(run.events)
    started = run.clock()
    for _ in range(4):
        run.loop.hear(0.5)

    pong, refusal = run.events[before:]
    assert isinstance(pong, Pong)
    assert (pong.nonce, pong.hot_cache_blocks, run.disk.stored) == (7, 0, [])
    assert isinstance(refusal, Failed)
    assert (refusal.request_id, refusal.failure.kind) == ("late", FailureKind.SHUTTING_DOWN)
    assert run.clock() - started == pytest.approx(0.5)


def test_a_drain_waits_for_the_disk_no_longer_than_its_deadline() -> None:
    """A request that only waits for blocks does not hold the process."""
    run = Run([asks("r", 300), Drain(deadline_seconds=1.0)], {"r": "x"}, reads_disk="yes")

    assert run.failed("r") is FailureKind.SHUTTING_DOWN
    assert run.clock.now <= 1001.1


def test_an_engine_that_raises_ends_the_loop() -> None:
    """Its state is unknown: the process must end, and say so."""

    class Broken(ScriptedEngine):
        def decode(self) -> Any:
            raise RuntimeError("device lost")

    clock = ManualClock()
    cache: PrefixCache[Kv] = PrefixCache(PrefixIndex(0), Disk(), "off")
    loop: StepLoop[Kv] = StepLoop(
        engine=Broken(clock, saying({"r": "x"})),
        scheduler=Scheduler(SchedulerSettings(max_rows=1)),
        cache=cache,
        make_detokenizer=LetterDetokenizer,
        end_token_ids=frozenset(),
        inbox=ScriptedInbox(clock, [asks("r"), *QUIET]),  # pyright: ignore[reportArgumentType]
        send=lambda _: None,
        clock=clock,
    )

    with pytest.raises(RuntimeError, match="device lost"):
        loop.run()


# --- any order ------------------------------------------------------------------------------------------------------


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[InboxMessage | None], dict[str, str]]:
    """Requests with their cancels, disk answers, pings and perhaps a drain, in any order."""
    messages: list[InboxMessage | None] = [None] * draw(st.integers(0, 40))
    says: dict[str, str] = {}

    def put(message: InboxMessage, after: int = 0) -> int:
        at = draw(st.integers(after, len(messages)))
        messages.insert(at, message)
        return at

    for i in range(draw(st.integers(1, 6))):
        name = f"r{i}"
        says[name] = draw(st.text("ab", min_size=0, max_size=12))
        request = asks(
            name,
            draw(st.sampled_from([1, 2, 16, 40, 256, 257, 700])),
            max_tokens=draw(st.integers(1, 15)),
            stop=draw(st.sampled_from([(), ("ab",), ("bb", "aba")])),
            top_logprobs=draw(st.sampled_from([None, 0])),
            latency_class=draw(st.sampled_from(LatencyClass)),
        )
        at = put(request)
        if draw(st.booleans()):
            put(Cancel(request_id=request.request_id))
        if draw(st.booleans()):
            count = draw(st.integers(0, len(request.token_ids) // 16)) * 16
            put(BlocksFetched(request.request_id, tuple(chain_of_blocks(request.token_ids[:count]))), at + 1)
    if draw(st.booleans()):
        put(Ping(nonce=1))
    if draw(st.booleans()):
        put(Drain(deadline_seconds=draw(st.floats(0, 2))))
    return messages, says


@given(
    stories(),
    st.sampled_from(["no", "yes"]),
    st.integers(1, 3),
    st.sampled_from([0, 3000, 10**9]),
    st.sampled_from([0, 300]),
    st.sampled_from(["apart", "mixed"]),
)
def test_each_request_ends_exactly_once(
    story: tuple[list[InboxMessage | None], dict[str, str]],
    reads_disk: str,
    max_rows: int,
    budget_bytes: int,
    quiet: int,
    slices: Literal["apart", "mixed"],
) -> None:
    """Whatever the order: one end for each that arrived, nothing after it, and only its own text."""
    messages, says = story
    run = Run(
        [*messages, *[None] * quiet],
        says,
        reads_disk=reads_disk,
        max_rows=max_rows,
        budget_bytes=budget_bytes,
        slices=slices,
    )
    run.cache.check()
    run.scheduler.check()
    drained_at = next((i for i, m in enumerate(messages) if isinstance(m, Drain)), len(messages))
    for message in messages[:drained_at]:
        if isinstance(message, Prepared):
            end = run.end(message.request_id)
            text = run.text(message.request_id)
            assert says[message.request_id].startswith(text)
            if isinstance(end, Finished):
                assert end.usage.completion_tokens <= message.max_tokens
                assert end.usage.cached_tokens < end.usage.prompt_tokens
                assert not any(stop in text for stop in message.request.stop)
            progress = [event for event in run.of(message.request_id) if isinstance(event, Prefilling)]
            assert all(event.done_tokens < event.total_tokens for event in progress)
    assert run.engine.rows == {}
    assert run.scheduler.is_empty


# --- mixed passes -----------------------------------------------------------------------------------------------------


def test_rows_ride_along_with_a_prompt() -> None:
    """Each pass gives the row one token and the prompt a slice, nothing is lost or said twice, and what is computed is
    kept as after any slice."""
    long = asks("long", 2500)
    run = Run(
        [asks("row"), *[None] * 6, long, *QUIET, asks("long2", 2500), *QUIET],
        {"row": "a" * 30, "long": "b", "long2": "c"},
        slices="mixed",
    )
    mixed = [line for line in run.engine.log if line.startswith("mixed")]

    assert run.text("row") == "a" * 30
    assert (run.text("long"), run.text("long2")) == ("b", "c")
    assert len(mixed) >= 3
    assert not any(line.startswith("prefill long ") for line in run.engine.log)
    assert sum(int(line.split()[2]) for line in mixed) + run.finished("long").usage.cached_tokens == 2499
    assert run.finished("long").timings.prefill_slices == len(mixed)
    assert run.finished("long2").usage.cached_tokens == 2499


@pytest.mark.parametrize("moments", range(8, 16))
def test_cancel_between_mixed_passes(moments: int) -> None:
    """B07: the prompt goes, or the row goes and the prompt is read on alone; the other one never notices."""
    for name, other in (("long", "row"), ("row", "long")):
        messages = [asks("row"), *[None] * 6, asks("long", 2000), *[None] * (moments - 6)]
        run = Run(
            [*messages, Cancel(request_id=RequestId(name)), *QUIET], {"row": "a" * 45, "long": "bcd"}, slices="mixed"
        )
        assert run.failed(name) is FailureKind.CANCELLED
        assert run.text(other) == {"row": "a" * 45, "long": "bcd"}[other]
        assert run.engine.rows == {}


def test_a_row_that_ends_in_a_mixed_pass() -> None:
    """By a stop string, by its end, by its length: the passes go on without it."""
    rows = [asks("stop", stop=("b",)), asks("end"), asks("length", max_tokens=9), asks("stays")]
    says = {"stop": "aaaaaaaab-never", "end": "ccccccccccc", "length": "d" * 40, "stays": "e" * 40, "long": "f"}
    run = Run([*rows, *[None] * 14, asks("long", 3000), *QUIET], says, max_rows=5, slices="mixed")

    assert {name: run.text(name) for name in says} == {
        "stop": "a" * 8,
        "end": "c" * 11,
        "length": "d" * 9,
        "stays": "e" * 40,
        "long": "f",
    }
    assert [run.finished(name).reason for name in ("stop", "end", "length")] == [
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]
    assert any(line.startswith("mixed") for line in run.engine.log)


# --- warming ----------------------------------------------------------------------------------------------------------


def warms(name: str, tokens: int, **more: Any) -> Prepared:
    return prepared(name, list(range(1, tokens + 1)), pin=Pin(name=name, **more))


def test_a_warm_fills_the_cache_and_draws_nothing() -> None:
    """The next request finds it; the warm's own answer says what is kept, and waits for the disk."""
    absent = BlocksFetched(RequestId("w"), (), FetchOutcome("absent"))
    messages = [warms("w", 600), absent, *QUIET, asks("r", 700, max_tokens=1), *QUIET]
    run = Run(messages, {"r": "x"}, reads_disk="yes")

    (warmed,) = [event for event in run.events if isinstance(event, Warmed)]
    assert (warmed.prompt_tokens, warmed.blocks, warmed.cached_tokens) == (600, 3, 0)
    assert run.disk.stored[:2] == [block.key for block in chain_of_blocks(list(range(1, 601)))][:2]
    assert run.text("w") == ""
    assert run.finished("r").usage.cached_tokens == 599


def test_a_warm_gives_way() -> None:
    """A request that comes while a warm is prefilled goes first, and the warm goes on after it."""
    run = Run([warms("w", 3000), None, None, asks("r", 20), *QUIET], {"r": "hi"})
    names = [event.request_id for event in run.events if isinstance(event, Finished | Warmed)]

    assert names == ["r", "w"]


def test_a_warm_is_cancelled_like_anything_else() -> None:
    """What it computed is kept."""
    run = Run([warms("w", 5000), None, None, None, Cancel(request_id=RequestId("w")), *QUIET], {})

    assert run.failed("w") is FailureKind.CANCELLED
    assert run.engine.rows == {}
    assert run.index.size_bytes > 0


def test_a_pinned_prefix_is_in_the_books_until_it_is_unpinned() -> None:
    """By owner and name."""
    run = Run(
        [warms("w", 300), *QUIET, Ping(nonce=1), None, Unpin(owner="", name="w"), Ping(nonce=2), None, *QUIET], {}
    )
    before, after = [event.pins for event in run.events if isinstance(event, Pong)]

    assert [(pin.name, pin.tokens) for pin in before] == [("w", 299)]
    assert after == ()


def test_a_smaller_budget_holds_at_once() -> None:
    """Set at run time."""
    run = Run([asks("r", 900), *QUIET, SetBudget(hot_cache_bytes=3000), None, Ping(nonce=1), *QUIET], {"r": "x"})
    (pong,) = [event for event in run.events if isinstance(event, Pong)]

    assert pong.hot_cache_budget_bytes == 3000
    assert pong.hot_cache_bytes <= 3000


def test_forgetting_empties_the_hot_tier() -> None:
    """And a running row is not disturbed."""
    run = Run([asks("r", 900), None, None, ForgetHot(), *QUIET], {"r": "hello"})

    assert run.text("r") == "hello"
