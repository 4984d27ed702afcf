"""Live KV keeps to its budget: who comes in, who gives way, and that everybody ends all the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import RequestId
from tests.worker.parts import everybody
from worker.live_kv import BUFFER_STEP_TOKENS, KVFootprint, LiveKV, Window, is_overdue, overdue_first
from worker.pacing import SchedulerSettings
from worker.scheduler import Scheduler
from worker.sequence import STINT_TOKENS, Lane, Sequence
from worker.steps import Decode, Idle, Join, Mixed, Open, Park, Preempt, Prefill, Step

PLAIN = KVFootprint(bytes_per_token=10)
I, S, BATCH, WARM = Lane  # noqa: E741 - the lanes in their order


def room(tokens: int, *, rows: int = 1) -> int:
    """Bytes for so many rows of so many tokens."""
    return rows * (tokens + BUFFER_STEP_TOKENS) * PLAIN.bytes_per_token


def sequence(name: str, tokens: int, lane: Lane = S, *, max_tokens: int = 10, **more: Any) -> Sequence:
    return Sequence(
        request_id=RequestId(name),
        prompt_tokens=tokens,
        max_tokens=max_tokens,
        lane=lane,
        arrived=more.pop("arrived", 0.0),
        **more,
    )


def live(name: str, tokens: int, lane: Lane = S, **more: Any) -> Sequence:
    return sequence(name, tokens, lane, is_open=True, prefill_started=0.0, **more)


@pytest.mark.parametrize(
    ("footprint", "tokens", "expected"),
    [
        (PLAIN, 100, 3560),
        (KVFootprint(windows=(Window(300, 2),)), 100, 600),
        (KVFootprint(windows=(Window(1000, 2),)), 100, 712),
        (KVFootprint(fixed_bytes=7), 100_000, 7),
        (KVFootprint(bytes_per_token=1, windows=(Window(10, 2), Window(20, 3)), fixed_bytes=5), 100, 356 + 80 + 5),
    ],
)
def test_what_a_row_takes(footprint: KVFootprint, tokens: int, expected: int) -> None:
    """Growing layers by their tokens and a step of spare room, windows up to their size, states whatever the length."""
    assert footprint.row_bytes(tokens) == expected


def test_a_batch_is_padded_to_its_longest() -> None:
    """Rows that will decode together take what the longest takes, each; one that only warms takes its own; rows that
    never decode together do, too."""
    rows = [live("a", 1000), live("b", 10, BATCH), live("w", 20, WARM)]
    apart = KVFootprint(bytes_per_token=10, rows="apart")
    assert LiveKV(footprint=PLAIN).size_bytes(rows) == room(1000, rows=2) + room(20)
    assert LiveKV(footprint=apart).size_bytes(rows) == room(1000) + room(10) + room(20)


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9)), max_size=3),
    st.integers(0, 10**5),
    st.integers(0, 10**6),
    st.integers(1, 5000),
)
def test_most_tokens(per_token: int, windows: list[tuple[int, int]], fixed: int, budget: int, limit: int) -> None:
    """A row of that length fits and of one token more does not, unless the limit is reached."""
    footprint = KVFootprint(
        bytes_per_token=per_token, windows=tuple(Window(*window) for window in windows), fixed_bytes=fixed
    )
    most = footprint.most_tokens(budget, limit)
    assert most == 0 or footprint.row_bytes(most) <= budget
    assert most == limit or footprint.row_bytes(most + 1) > budget


def test_the_lowest_class_gives_way_the_youngest_first() -> None:
    """Of rows that outgrow their budget; a row alone goes on in any case; and one that was preempted and has not gone
    on since is the last of its class."""
    rows = [live("a", 500, I, arrived=9), live("b", 500, BATCH, arrived=1), live("c", 500, BATCH, arrived=2)]
    kv = LiveKV(footprint=PLAIN, budget_bytes=room(500, rows=3))
    assert [each.request_id for each in [kv.victim(rows)] if each] == ["c"]
    rows[2].preemptions = 1
    assert [each.request_id for each in [kv.victim(rows)] if each] == ["b"]
    rows[2].drawn = STINT_TOKENS
    assert [each.request_id for each in [kv.victim(rows)] if each] == ["c"]
    assert LiveKV(footprint=PLAIN, budget_bytes=room(600, rows=3)).victim(rows) is None
    assert LiveKV(footprint=PLAIN, budget_bytes=10).victim(rows[:1]) is None
    assert LiveKV(footprint=PLAIN).victim(rows) is None


@pytest.mark.parametrize(
    ("candidate", "beside", "entry"),
    [
        (sequence("x", 100), [], "free"),
        (sequence("x", 10_000), [], "free"),
        (sequence("x", 90), [live("a", 90)], "free"),
        (sequence("x", 91), [live("a", 90)], "none"),  # all grow by ten
        (sequence("x", 91), [live("a", 90, BATCH)], "by_preempting"),
        (sequence("x", 91, BATCH), [live("a", 90)], "none"),
        (sequence("x", 91), [live("a", 90, BATCH, preemptions=1)], "none"),  # it has not gone on
        (sequence("x", 91), [live("a", 30, BATCH, preemptions=1, replayed=9, drawn=STINT_TOKENS + 9)], "by_preempting"),
        (sequence("x", 91), [live("a", 90), live("w", 10, WARM)], "none"),  # that would not be enough
    ],
)
def test_who_comes_in(candidate: Sequence, beside: list[Sequence], entry: str) -> None:
    """Whoever fits; who does not takes the room of lower classes if that is enough, but of none that was preempted
    and has not gone on."""
    kv = LiveKV(footprint=PLAIN, budget_bytes=room(100, rows=2))
    assert kv.entrance(beside).entry(candidate) == entry
    assert (kv.gives_way(candidate, beside) is not None) == (entry == "by_preempting")


def test_a_row_that_was_preempted_comes_in_with_more_room() -> None:
    """Each time it waits for a reserve four times as large, up to all that rows may still draw."""
    kv = LiveKV(footprint=PLAIN, budget_bytes=room(1000 + 256, rows=2))
    beside = [live("a", 1000, max_tokens=5000)]
    for preemptions, entry in ((0, "free"), (1, "none")):
        again = sequence("x", 10, max_tokens=5000, preemptions=preemptions)
        assert kv.entrance(beside).entry(again) == entry
    short = [live("a", 1000, max_tokens=256)]
    assert kv.entrance(short).entry(sequence("x", 10, preemptions=9)) == "free"


def test_who_waits_long_for_memory_goes_first() -> None:
    """Ten seconds of an interactive prompt, two minutes of a batch one; what only warms the cache waits for ever."""
    waiting = [
        sequence("a", 1, I, held={"memory": 9.0}),
        sequence("b", 1, BATCH, held={"memory": 119.0}),
        sequence("w", 1, WARM, held={"memory": 1e6}),
    ]
    assert not any(map(is_overdue, waiting))
    waiting[1].held["memory"] = 121.0
    assert [each.request_id for each in overdue_first(waiting)] == ["b"]
    waiting[0].held["memory"] = 11.0
    assert [each.request_id for each in overdue_first(waiting)] == ["b", "a"]
    waiting[0].held["memory"] = 9.0
    waiting[1].memory_held_before = 100.0
    assert not any(map(is_overdue, waiting))


def test_asking_changes_nothing() -> None:
    """What is asked between two events does not decide what comes next, also at the moment at which somebody becomes
    overdue and keeps all others out."""
    kv = LiveKV(footprint=PLAIN, budget_bytes=room(1000, rows=2))
    made = Scheduler(SchedulerSettings(max_rows=4, live_kv=kv))
    made.add(sequence("a", 900, I))
    made.opened(RequestId("a"), 899, 0.0)
    made.joined(RequestId("a"), 0.0)
    made.drew(RequestId("a"))
    made.add(sequence("x", 1500, I))
    made.add(sequence("y", 1400, I))
    made.add(sequence("b", 100, I))
    seen = [made.next_step(0.0)]
    for now in range(1, 240):
        made.decoded(0.05, 1)
        seen.append(made.next_step(now * 0.05))
        made.standings(now * 0.05)
        made.get(RequestId("y"))
        made.eta_seconds(RequestId("b"))
        assert made.next_step(now * 0.05) == seen[-1]
    assert seen[0] == Open(RequestId("b"))
    assert seen[-1] == Decode()


def test_nobody_waits_for_one_who_waited_too_long_and_left() -> None:
    """Who is overdue keeps all others out; when it is cancelled, the next may start, also if nothing runs any more."""
    kv = LiveKV(footprint=PLAIN, budget_bytes=room(1000, rows=2))
    made = Scheduler(SchedulerSettings(max_rows=4, live_kv=kv))
    made.add(sequence("a", 900, I))
    made.opened(RequestId("a"), 899, 0.0)
    made.joined(RequestId("a"), 0.0)
    made.add(sequence("x", 1500, I))
    made.add(sequence("b", 100, I))
    for _ in range(12):
        made.decoded(1.0, 1)
    assert made.next_step(12.0) == Decode()
    assert {told.request_id: told.held_by for told in made.standings(12.0)} == {"x": "memory", "b": "memory"}
    made.remove(RequestId("x"))
    made.remove(RequestId("a"))
    assert made.next_step(12.0) == Open(RequestId("b"))


# --- the scheduler, over whole lives --------------------------------------------------------------------------------


@dataclass
class Life:
    at_step: int
    prompt_tokens: int
    lane: Lane
    answer_tokens: int
    spare_tokens: int
    restored_part: float
    cancelled_at_step: int | None


LIVES = st.lists(
    st.builds(
        Life,
        at_step=st.integers(0, 60),
        prompt_tokens=st.integers(1, 1500),
        lane=st.sampled_from(Lane),
        answer_tokens=st.integers(1, 600),
        spare_tokens=st.sampled_from([0, 1, 5000]),
        restored_part=st.sampled_from([0, 0.5, 1]),
        cancelled_at_step=st.none() | st.integers(0, 400),
    ),
    max_size=9,
)


@dataclass
class House:
    """Plays the loop and an engine, and counts for itself what the rows hold."""

    lives: list[Life]
    scheduler: Scheduler
    budget_bytes: int
    footprint: KVFootprint
    watch: Callable[["House", Step], None]
    over: list[int] = field(default_factory=list[int])
    now: float = 0.0
    steps: int = 0

    def run(self) -> None:
        todo = sorted(enumerate(self.lives), key=lambda pair: pair[1].at_step)
        while todo or not self.scheduler.is_empty:
            while todo and (todo[0][1].at_step <= self.steps or self.scheduler.is_empty):
                index, life = todo.pop(0)
                most = self.footprint.most_tokens(self.budget_bytes, 10**6) - life.prompt_tokens
                max_tokens = 0 if life.lane is WARM else min(life.answer_tokens + life.spare_tokens, most)
                self.scheduler.add(
                    sequence(str(index), life.prompt_tokens, life.lane, max_tokens=max_tokens, arrived=self.now)
                )
            for index, life in enumerate(self.lives):
                if life.cancelled_at_step == self.steps and self.scheduler.remove(RequestId(str(index))):
                    self.over.append(index)
            if not self.scheduler.is_empty:
                self._step()
            self.steps += 1
            assert self.steps < 30_000

    def held(self, each: Sequence) -> int:
        return each.tokens if each in self.rows() else each.prefilled

    def rows(self) -> list[Sequence]:
        return [*self.scheduler.places.decoding.values()]

    def live(self) -> list[Sequence]:
        return [each for each in everybody(self.scheduler) if each.is_open]

    def size_bytes(self) -> int:
        rows = self.rows()
        alone = [each for each in self.live() if each not in rows]
        longest = max((each.tokens for each in rows), default=0)
        return len(rows) * self.footprint.row_bytes(longest) * bool(rows) + sum(
            self.footprint.row_bytes(self.held(each)) for each in alone
        )

    def _step(self) -> None:
        step = self.scheduler.next_step(self.now)
        self.watch(self, step)
        match step:
            case Open(request_id=name):
                known = self.scheduler.get(name)
                assert known is not None
                restored = known.furthest if known.preemptions else known.prefill_total
                self.scheduler.opened(name, int(restored * self.lives[int(name)].restored_part), self.now)
                self._warmed(name, known)
            case Prefill(request_id=name, tokens=tokens) | Mixed(request_id=name, tokens=tokens):
                known = self.scheduler.get(name)
                assert known is not None
                self.now += tokens / 1000
                if isinstance(step, Mixed):
                    self.scheduler.mixed(step, tokens / 1000, self.now)
                    self._drew()
                else:
                    self.scheduler.prefilled(step, tokens / 1000, self.now)
                self._warmed(name, known)
            case Decode():
                self.now += 0.02
                self.scheduler.decoded(0.02, len(self.rows()))
                self._drew()
            case Join(request_id=name):
                self.scheduler.joined(name, self.now)
            case Park(request_id=name):
                self.scheduler.parked(name, self.now)
            case Preempt(request_id=name):
                self.scheduler.preempted(name)
            case Idle():
                raise AssertionError("idle with work to do")
        self.scheduler.check()
        assert self.size_bytes() <= self.budget_bytes

    def _drew(self) -> None:
        for each in self.rows():
            self.scheduler.drew(each.request_id)
            if each.drawn == min(self.lives[int(each.request_id)].answer_tokens, each.max_tokens):
                self._end(each.request_id)

    def _warmed(self, name: RequestId, known: Sequence) -> None:
        if known.lane is WARM and self.scheduler.get(name) is None:
            self.over.append(int(name))

    def _end(self, name: RequestId) -> None:
        self.scheduler.remove(name)
        self.over.append(int(name))


def house(lives: list[Life], room_tokens: int, rows: int, slices: Any, watch: Callable[[House, Step], None]) -> House:
    budget_bytes = room(room_tokens)
    kv = LiveKV(footprint=PLAIN, budget_bytes=budget_bytes)
    settings = SchedulerSettings(max_rows=rows, live_kv=kv, slices=slices, first_rate_tokens_per_second=1000.0)
    return House(lives, Scheduler(settings), budget_bytes, PLAIN, watch)


ROOMS = st.sampled_from([2200, 3000, 5000, 20_000])


@given(LIVES, ROOMS, st.integers(1, 5), st.sampled_from(["apart", "mixed"]))
def test_everybody_ends_within_the_budget(lives: list[Life], room_tokens: int, rows: int, slices: str) -> None:
    """Whoever comes when, with however little room: at no step do the rows' caches, counted one by one as an engine
    has them, take more than the budget; each sequence ends exactly once; and who is preempted is of the lowest class
    that lives, the youngest of those that have gone on."""

    def watch(of: House, step: Step) -> None:
        if not isinstance(step, Preempt):
            return
        victim = of.scheduler.get(step.request_id)
        assert victim is not None
        others = [each for each in of.live() if each is not victim]
        assert others or any(not each.is_open for each in everybody(of.scheduler))
        assert victim.lane == max(each.lane for each in of.live() if each is victim or each.has_gone_on)
        if not victim.has_gone_on:
            assert all(each.lane < victim.lane or not each.has_gone_on for each in others)

    made = house(lives, room_tokens, rows, slices, watch)
    made.run()
    assert sorted(made.over) == list(range(len(lives)))


def test_batch_work_under_endless_interactive_work_ends() -> None:
    """Interactive prompts that come for ever and fill the memory: a batch row is preempted, waits, and ends all the
    same, since who has waited long enough is let in first."""
    lives = [Life(0, 1000, BATCH, 50, 0, 1.0, None)] + [
        Life(5 + 40 * i, 900, I, 100, 500, 1.0, None) for i in range(400)
    ]
    waited: list[int] = []

    def watch(of: House, step: Step) -> None:
        if isinstance(step, Preempt):
            waited.append(of.steps)

    made = house(lives, 3500, 4, "apart", watch)
    made.run()
    assert waited
    assert made.over.index(0) < len(lives) - 50
