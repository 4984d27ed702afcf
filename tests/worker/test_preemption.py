"""A row that is preempted goes on as if nothing had happened: in its words, its counts, its logprobs and its stops."""

import itertools
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from protocol.failures import FailureKind
from protocol.generation import Cancel, Delta, Drain, Failed, Finished, Ping, Pong, Prefilling, WorkerEvent
from protocol.ids import RequestId
from protocol.kv_storage import KVQuantization
from protocol.latency import LatencyClass
from protocol.sampling import Sampling
from tests.worker.engine_parts import Model, PlainTokenizer, prompt
from tests.worker.parts import GREEDY, prepared
from tests.worker.test_prefix_cache import RecordingDisk
from tests.worker.tiny_models import CONFIGS, VOCABULARY, make_tiny_model
from worker.engine import nothing
from worker.live_kv import LiveKV
from worker.loop import StepLoop
from worker.mlx_engine import MlxEngine
from worker.mlx_model import LoadedModel, load_model
from worker.pacing import SchedulerSettings
from worker.prefix_cache import PrefixCache
from worker.prefix_index import PrefixIndex
from worker.scheduler import Scheduler
from worker.sequence import Prepared

Load = Callable[[str], LoadedModel]
PENALTIES = Sampling(temperature=0.9, seed=7, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2)
PROMPT_TOKENS, ANSWER_TOKENS = 150, 60
SLICE_TOKENS = 2048
"""The longest slice: what a window may hold beyond its size until the next pass is scratch, not live KV."""


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Each family is made and loaded once."""

    @cache
    def loaded(family: str) -> LoadedModel:
        path = make_tiny_model(family, tmp_path_factory.mktemp("models") / family)
        return load_model(path, lambda _done, _total: None)

    return loaded


class TokenWords:
    """Token 7 is `<7>`."""

    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


class Inbox:
    """Everybody at once, or one after another at set reads; a ping at the end, then drained."""

    def __init__(self, arrivals: Sequence[tuple[int, Prepared | Cancel]]) -> None:
        self._arrivals = list(arrivals)
        self._last: list[Any] = [Ping(nonce=1), Drain(deadline_seconds=0.0)]
        self._reads = 0

    def get_nowait(self) -> Any:
        self._reads += 1
        if self._arrivals and self._arrivals[0][0] <= self._reads:
            return self._arrivals.pop(0)[1]
        raise queue.Empty

    def get(self, timeout: float | None = None) -> Any:
        del timeout
        return self._arrivals.pop(0)[1] if self._arrivals else self._last.pop(0)


class Told(NamedTuple):
    """What one client got."""

    text: str
    tokens: int
    logprobs: tuple[float, ...]
    finished: Finished


class Watched(MlxEngine):
    """Notes the most that rows' caches ever took."""

    most_bytes = 0

    def _look(self) -> None:
        self.most_bytes = max(self.most_bytes, self.live_kv_bytes)

    def prefill(
        self, request_id: RequestId, tokens: int, parts: int = 1, before_each: Callable[[], None] = nothing
    ) -> None:
        super().prefill(request_id, tokens, parts, before_each)
        self._look()

    def join(self, request_id: RequestId) -> None:
        super().join(request_id)
        self._look()

    def decode(self) -> list[Any]:
        drawn = super().decode()
        self._look()
        return drawn


class Run:
    """One loop over a real engine, to its end."""

    def __init__(
        self,
        loaded: LoadedModel,
        arrivals: Sequence[tuple[int, Prepared | Cancel]],
        *,
        row_tokens: int | None = None,
        hot_bytes: int = 10**9,
        slice_tokens: int = SLICE_TOKENS,
        kv: KVQuantization | None = None,
    ) -> None:
        """`row_tokens`: the budget is that of two rows of so many tokens, of one where rows are not batched."""
        self.engine = Watched(loaded, PlainTokenizer(), kv)
        footprint = self.engine.kv_footprint
        rows = 2 if self.engine.is_batchable else 1
        self.budget_bytes = None if row_tokens is None else rows * footprint.row_bytes(row_tokens)
        self.scheduler = Scheduler(
            SchedulerSettings(
                max_rows=4 if self.engine.is_batchable else 1,
                ceiling_tokens=slice_tokens,
                slices="mixed" if self.engine.mixes else "apart",
                live_kv=LiveKV(footprint=footprint, budget_bytes=self.budget_bytes),
            )
        )
        index: PrefixIndex[Any] = PrefixIndex(hot_bytes, "states" if self.engine.keeps_states else "any_token")
        reason = self.engine.prefix_reuse.reason
        self.events: list[WorkerEvent] = []
        StepLoop(
            engine=self.engine,
            scheduler=self.scheduler,
            cache=PrefixCache(index, RecordingDisk(), "off", reuse_off_reason=reason),
            make_detokenizer=TokenWords,
            end_token_ids=frozenset(),
            inbox=Inbox(arrivals),  # pyright: ignore[reportArgumentType]
            send=self.events.append,
            clock=itertools.count(1000.0, 0.001).__next__,  # time passes: costs are measured
        ).run()

    def told(self, name: str) -> Told:
        mine = [event for event in self.events if getattr(event, "request_id", None) == name]
        deltas = [event for event in mine if isinstance(event, Delta)]
        finished = mine[-1]
        assert isinstance(finished, Finished), finished
        first = mine.index(deltas[0])
        assert not any(isinstance(event, Prefilling) for event in mine[first:]), "a prompt again, after it was answered"
        return Told(
            "".join(delta.text for delta in deltas),
            sum(delta.tokens for delta in deltas),
            tuple(each.chosen.logprob for delta in deltas for each in delta.logprobs),
            finished,
        )

    @property
    def pong(self) -> Pong:
        return next(event for event in self.events if isinstance(event, Pong))


def crowd(sampling: Sampling = GREEDY, **more: Any) -> list[tuple[int, Prepared]]:
    """Two batch rows, then two interactive ones that want their room."""
    return [
        (
            at,
            prepared(
                name,
                prompt(seed, PROMPT_TOKENS),
                max_tokens=ANSWER_TOKENS,
                sampling=sampling,
                latency_class=latency_class,
                arrived=1000.0 + seed,
                **more,
            ),
        )
        for seed, (at, name, latency_class) in enumerate(
            [
                (0, "b1", LatencyClass.BATCH),
                (0, "b2", LatencyClass.BATCH),
                (30, "i1", LatencyClass.INTERACTIVE),
                (35, "i2", LatencyClass.INTERACTIVE),
            ]
        )
    ]


def assert_undisturbed(run: Run, alone: Run) -> None:
    """Everybody was told what he is told when there is room for all."""
    for name in ("b1", "b2", "i1", "i2"):
        told, expected = run.told(name), alone.told(name)
        assert told.text == expected.text
        assert told.tokens == expected.tokens
        assert told.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        assert told.finished.reason == expected.finished.reason
        assert told.finished.usage == expected.finished.usage
    assert run.pong.live_kv_bytes == 0
    assert run.pong.live_kv_budget_bytes == run.budget_bytes
    assert run.pong.preemptions == sum(run.told(name).finished.timings.preemptions for name in ("b1", "b2", "i1", "i2"))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_text_is_that_of_an_undisturbed_run(load: Load, family: str) -> None:
    """Every kind of cache: two interactive rows take the room of two batch rows, which go on afterwards letter for
    letter, from what was kept or computed anew; and the caches never take more than the budget."""
    loaded = load(family)
    alone = Run(loaded, crowd())
    run = Run(loaded, crowd(), row_tokens=PROMPT_TOKENS + ANSWER_TOKENS)
    assert_undisturbed(run, alone)
    if run.engine.kv_footprint.bytes_per_token:
        assert run.told("b1").finished.timings.preemptions
        assert not run.told("i1").finished.timings.preemptions
    windows = sum(SLICE_TOKENS * window.bytes_per_token for window in run.engine.kv_footprint.windows)
    assert run.budget_bytes is not None
    assert run.engine.most_bytes <= run.budget_bytes + 4 * windows


@pytest.mark.parametrize("family", ["llama kv8", "llama kv4", "gemma3_text kv8", "lfm2 kv4"])
def test_quantized_rows_go_on_too(model_of: Callable[[str], Model], family: str) -> None:
    """Within the smaller budget that their own footprint gives."""
    model = model_of(family)
    run = Run(model.loaded, crowd(), row_tokens=PROMPT_TOKENS + ANSWER_TOKENS, kv=model.kv)
    assert run.told("b1").finished.timings.preemptions
    assert_undisturbed(run, Run(model.loaded, crowd(), kv=model.kv))
    windows = sum(SLICE_TOKENS * window.bytes_per_token for window in run.engine.kv_footprint.windows)
    assert run.budget_bytes is not None
    assert run.engine.most_bytes <= run.budget_bytes + 4 * windows


def test_draws_go_on_by_their_seed_and_counts(load: Load) -> None:
    """Seeded draws with all penalties, and logprobs: a row's position, counts and seen tokens survive."""
    loaded = load("llama")
    run = Run(loaded, crowd(PENALTIES, top_logprobs=2), row_tokens=PROMPT_TOKENS + ANSWER_TOKENS)
    assert run.pong.preemptions
    assert len(run.told("b1").logprobs) == ANSWER_TOKENS
    assert_undisturbed(run, Run(loaded, crowd(PENALTIES, top_logprobs=2)))


def test_a_stop_string_across_a_preemption(load: Load) -> None:
    """Text that a stop string holds back when its row is preempted is not lost, and a stop that ends later matches."""
    loaded = load("llama")
    words = Run(loaded, crowd()).told("b1").text.split("><")
    for at in range(20, 50, 10):
        stop = "><".join(words[at : at + 6])
        run = Run(loaded, crowd(stop=(stop,)), row_tokens=PROMPT_TOKENS + ANSWER_TOKENS)
        alone = Run(loaded, crowd(stop=(stop,)))
        assert run.told("b1").text == alone.told("b1").text
        assert run.told("b1").finished.matched_stop == alone.told("b1").finished.matched_stop == stop


def test_without_a_hot_tier_it_is_computed_again(load: Load) -> None:
    """Nothing was kept: the row's tokens, its own among them, are computed anew, and it says the same."""
    loaded = load("llama")
    run = Run(loaded, crowd(), row_tokens=PROMPT_TOKENS + ANSWER_TOKENS, hot_bytes=0)
    assert run.pong.preemptions
    assert_undisturbed(run, Run(loaded, crowd()))


@pytest.mark.parametrize("family", ["gemma3_text", "internlm2", "lfm2", "llama", "qwen3_next"])
def test_a_prompt_that_is_half_done_goes_on(load: Load, family: str) -> None:
    """Batch prompts that are preempted between two short slices, before they have said a word: what was kept of them
    is taken up where that can be, and they say what they say undisturbed."""
    loaded = load(family)
    early = [(2 + at // 6, each) for at, each in crowd()]
    run = Run(loaded, early, row_tokens=PROMPT_TOKENS + ANSWER_TOKENS, slice_tokens=20)
    assert run.pong.preemptions
    assert_undisturbed(run, Run(loaded, early, slice_tokens=20))


class OneTokenAfterAnother:
    """A grammar with one sentence: after n tokens only (7 n + start) is allowed."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._consumed = 0

    def allowed(self, at: int) -> int:
        return (7 * at + self._start) % VOCABULARY

    @property
    def binds(self) -> bool:
        return True

    def consume(self, token_id: int) -> None:
        assert token_id == self.allowed(self._consumed)
        self._consumed += 1

    def next_mask(self) -> bytes:
        return (1 << self.allowed(self._consumed)).to_bytes(-(-VOCABULARY // 8), "little")


def test_a_grammar_goes_on_where_it_was(load: Load) -> None:
    """A constrained row's matcher sees each token once, in order, preempted or not."""
    arrivals = [(at, replace(each, matcher=OneTokenAfterAnother(start))) for start, (at, each) in enumerate(crowd())]
    run = Run(load("llama"), arrivals, row_tokens=PROMPT_TOKENS + ANSWER_TOKENS)
    assert run.pong.preemptions
    for start, name in enumerate(("b1", "b2", "i1", "i2")):
        sentence = [OneTokenAfterAnother(start).allowed(at) for at in range(ANSWER_TOKENS)]
        assert run.told(name).text == "".join(f"<{token}>" for token in sentence)


# --- cancelled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("reads", [4, 9, 16])
def test_who_gives_up_and_asks_again_gets_ahead(load: Load, family: str, reads: int) -> None:
    """What a cancelled row computed is kept with its state, in prefill or while it answers: the same prompt goes on
    from there, and says what it says cold."""
    token_ids = prompt(3, 400)
    boundary = 384  # as the text plane sets it: the end of the last turn, in whole grains
    asked = [
        replace(prepared(name, token_ids, max_tokens=12), boundaries=(boundary,)) for name in ("gone", "again", "cold")
    ]
    cancelled = Run(
        load(family), [(0, asked[0]), (reads, Cancel(request_id=RequestId("gone"))), (reads, asked[1])], slice_tokens=48
    )
    cold = Run(load(family), [(0, asked[2])], slice_tokens=48)

    ends = [event for event in cancelled.events if isinstance(event, Failed)]
    assert [(end.request_id, end.failure.kind) for end in ends] == [("gone", FailureKind.CANCELLED)]
    progress = [event for event in cancelled.events if isinstance(event, Prefilling) and event.request_id == "gone"]
    assert progress[-1].done_tokens > 0
    again = cancelled.told("again")
    # Once it answers, the state is behind the prompt's end: the same prompt goes on from its last boundary.
    assert again.finished.usage.cached_tokens >= min(progress[-1].done_tokens, boundary)
    assert again.text == cold.told("cold").text
