"""Memory: one ledger, nobody with work is asked to leave, and whoever waits gets what others free, in order."""

from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.fleet import Fleet
from gateway.fleet_terms import (
    Absent,
    Draining,
    Effect,
    FailWaiting,
    FleetEvent,
    FleetSettings,
    ModelWanted,
    Ready,
    Starting,
    StartWorker,
    StopWorker,
    TimerFired,
    WaitersLeft,
    WaitingForMemory,
    WakeAt,
    WorkChanged,
    WorkerExited,
    WorkerReady,
    WorkerSeen,
)
from gateway.residency import Fits, FitsAfter, MemoryTerms, NeverFits, Resident, Verdict, need_of, room_for
from protocol import generation
from protocol.failures import FailureKind
from protocol.generation import PrefixReuse
from protocol.ids import ModelName

LIMIT = MemoryTerms(limit_bytes=100)


def resident(name: str, need_bytes: int, **fields: Any) -> Resident:
    fields.setdefault("state", "serving")
    return Resident(model=ModelName(name), need_bytes=need_bytes, **fields)


@pytest.mark.parametrize(
    ("residents", "need_bytes", "verdict"),
    [
        ([], 100, Fits()),
        ([resident("a", 60)], 40, Fits()),
        ([resident("a", 60, idle_since=5.0)], 41, FitsAfter(evict=("a",), waits_for=("a",))),
        ([resident("a", 60)], 41, FitsAfter(evict=(), waits_for=("a",))),
        ([resident("a", 60, state="leaving")], 41, FitsAfter(evict=(), waits_for=("a",))),
        ([resident("a", 60, state="loading")], 41, FitsAfter(evict=(), waits_for=("a",))),
        (
            [resident("a", 40, idle_since=5.0), resident("b", 40, idle_since=3.0)],
            50,
            FitsAfter(evict=("b",), waits_for=("b",)),
        ),
        (
            [resident("a", 40, idle_since=5.0), resident("b", 40)],
            70,
            FitsAfter(evict=(), waits_for=("a", "b")),
        ),
        (
            [resident("a", 40, idle_since=5.0, is_pinned=True), resident("b", 40, idle_since=9.0)],
            50,
            FitsAfter(evict=("b",), waits_for=("b",)),
        ),
        ([resident("a", 60, state="waiting")], 50, FitsAfter(evict=(), waits_for=("a",))),
        ([resident("a", 60, state="waiting")], 40, Fits()),
    ],
)
def test_who_has_to_leave(residents: list[Resident], need_bytes: int, verdict: Verdict) -> None:
    """Room is taken if it is there; else the longest idle go, as few as are enough, and none for nothing."""
    assert room_for(ModelName("new"), need_bytes, residents, LIMIT) == verdict


def test_what_never_fits_says_so_with_its_numbers() -> None:
    """A model over the limit, alone or beside pinned ones, is the client's mistake and not worth waiting for."""
    for residents in ([], [resident("p", 2 * 1024**3, is_pinned=True, idle_since=0.0)]):
        terms = MemoryTerms(limit_bytes=3 * 1024**3)
        verdict = room_for(ModelName("big"), 4 * 1024**3 - len(residents) * 2 * 1024**3 + 1, residents, terms)
        assert isinstance(verdict, NeverFits)
        assert verdict.failure.kind is FailureKind.INVALID_REQUEST
        assert verdict.failure.param == "model"
        assert "3.0 GiB" in verdict.failure.message
        assert ("pinned" in verdict.failure.message) == bool(residents)


def test_what_a_model_is_counted_with() -> None:
    """Weights, prefixes, and working memory that grows with the weights; an embedder keeps no prefixes."""
    terms = MemoryTerms(hot_cache_bytes=30, live_kv_bytes=20, working_bytes=7, working_share=0.1)
    assert need_of(100, terms).total_bytes == 100 + 30 + 20 + 7 + 10
    assert need_of(100, terms, "embedder").total_bytes == 100 + 7 + 10


@given(
    st.lists(
        st.builds(
            resident,
            st.sampled_from("abcdef"),
            st.integers(1, 60),
            idle_since=st.none() | st.floats(0, 9),
            is_pinned=st.booleans(),
            state=st.sampled_from(["loading", "serving", "leaving", "waiting"]),
        ),
        unique_by=lambda one: one.model,
    ),
    st.integers(1, 120),
)
def test_room_is_never_promised_twice(residents: list[Resident], need_bytes: int) -> None:
    """Fits means that all together stay within the limit; evicting means that it does afterwards, and harms nobody."""
    verdict = room_for(ModelName("new"), need_bytes, residents, LIMIT)
    used = sum(one.need_bytes for one in residents)
    match verdict:
        case Fits():
            assert used + need_bytes <= 100
        case FitsAfter(evict=evict):
            assert used + need_bytes > 100
            chosen = [one for one in residents if one.model in evict]
            assert all(one.state == "serving" and one.idle_since is not None and not one.is_pinned for one in chosen)
            if evict:
                gone = sum(one.need_bytes for one in residents if one.model in evict or one.state == "leaving")
                assert used - gone + need_bytes <= 100
        case NeverFits():
            assert need_bytes + sum(one.need_bytes for one in residents if one.is_pinned) > 100


# --- in the fleet ----------------------------------------------------------------------------------------------------

WEIGHTS = {ModelName("a"): 60, ModelName("b"): 50, ModelName("c"): 30, ModelName("p"): 20}
SETTINGS = FleetSettings(
    hang_seconds=1e6,  # these processes answer no pings
    memory=MemoryTerms(limit_bytes=100, pinned=frozenset({ModelName("p")}), unload_after_seconds=500.0),
)


class House:
    """A fleet with its clock, and processes that do what they are told when the test says so."""

    def __init__(self) -> None:
        self.fleet = Fleet(SETTINGS)
        self.now = 0.0
        self.wake_at: float | None = None
        self.effects: list[Effect] = []

    def tell(self, event: FleetEvent) -> list[Effect]:
        effects = self.fleet.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, WakeAt):
                self.wake_at = effect.when
        self.effects += effects
        return effects

    def want(self, name: str) -> list[Effect]:
        model = ModelName(name)
        return self.tell(ModelWanted(model=model, weight_bytes=WEIGHTS[model]))

    def ready(self, name: str) -> list[Effect]:
        model = ModelName(name)
        incarnation = self.fleet.incarnation(model)
        assert incarnation is not None
        limits = generation.Ready(
            context_tokens=1,
            max_rows=1,
            weight_bytes=WEIGHTS[model],
            load_seconds=0.0,
            prefix_reuse=PrefixReuse(available=True),
            fingerprint="f",
        )
        return [*self.tell(WorkerReady(model=model, incarnation=incarnation, limits=limits)), *self.work(name, 0)]

    def work(self, name: str, open_requests: int) -> list[Effect]:
        incarnation = self.fleet.incarnation(ModelName(name))
        assert incarnation is not None
        event = WorkChanged(model=ModelName(name), incarnation=incarnation, open_requests=open_requests)
        return self.tell(event)

    def see(self, name: str, condition: Literal["suspended", "continued"]) -> None:
        incarnation = self.fleet.incarnation(ModelName(name))
        assert incarnation is not None
        self.tell(WorkerSeen(model=ModelName(name), incarnation=incarnation, condition=condition))

    def exit(self, name: str) -> list[Effect]:
        incarnation = self.fleet.incarnation(ModelName(name))
        assert incarnation is not None
        return self.tell(WorkerExited(model=ModelName(name), incarnation=incarnation, exit_code=0))

    def state(self, name: str) -> object:
        return self.fleet.state(ModelName(name))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.wake_at is not None and self.wake_at <= end:
            self.now, self.wake_at = max(self.now, self.wake_at), None
            self.tell(TimerFired())
        self.now = end


def started(effects: list[Effect]) -> list[str]:
    return [effect.model for effect in effects if isinstance(effect, StartWorker)]


def test_two_loads_do_not_race_for_the_same_bytes() -> None:
    """E02: the first load is reserved before it reads a byte; the second waits, and gets the room when it is free."""
    house = House()
    assert started(house.want("a")) == ["a"]
    assert started(house.want("b")) == []
    assert isinstance(house.state("b"), WaitingForMemory)
    house.ready("a")  # it has no work, so it leaves
    assert isinstance(house.state("a"), Draining)
    assert started(house.exit("a")) == ["b"]


def test_whoever_works_stays() -> None:
    """A model with open requests is not asked to go; when its last one has ended it is, at once."""
    house = House()
    house.want("a")
    house.ready("a")
    house.work("a", 2)
    house.want("b")
    assert isinstance(house.state("a"), Ready)
    house.work("a", 1)
    assert isinstance(house.state("a"), Ready)
    stops = [effect for effect in house.work("a", 0) if isinstance(effect, StopWorker)]
    assert [stop.how for stop in stops] == ["drain"]


def test_who_waits_too_long_is_told_for_whom() -> None:
    """A load that finds no room ends as a failure that names who has it and when to come back."""
    house = House()
    house.want("a")
    house.ready("a")
    house.work("a", 1)
    house.want("b")
    house.pass_time(SETTINGS.memory.wait_seconds - 1)
    assert isinstance(house.state("b"), WaitingForMemory)
    house.pass_time(2)
    (failure,) = [effect.failure for effect in house.effects if isinstance(effect, FailWaiting)]
    assert "which a had in use" in failure.message
    assert failure.retry_after_seconds
    assert isinstance(house.state("b"), Absent)


def test_an_idle_model_leaves_after_its_time_and_a_pinned_one_never() -> None:
    """E03: time counts from the end of the last work, not from its start."""
    house = House()
    for name in ("c", "p"):
        house.want(name)
        house.ready(name)
    house.work("c", 1)
    house.pass_time(2000)
    house.work("c", 0)
    house.pass_time(499)
    assert isinstance(house.state("c"), Ready)
    house.pass_time(2)
    assert isinstance(house.state("c"), Draining)
    assert isinstance(house.state("p"), Ready)


def test_whoever_is_held_stays() -> None:
    """Neither its idle time nor another model's need asks a process to go that would not hear it, and be killed. When
    it goes on it has rested as long as before; who needs its memory gets it then."""
    house = House()
    house.want("c")
    house.ready("c")
    house.pass_time(100)
    house.see("c", "suspended")
    for _ in range(20):
        house.pass_time(100)
        house.see("c", "suspended")
    assert isinstance(house.state("c"), Ready)
    house.see("c", "continued")
    house.pass_time(399)
    assert isinstance(house.state("c"), Ready)
    house.see("c", "suspended")
    house.want("a")
    house.want("p")
    assert isinstance(house.state("p"), WaitingForMemory)
    assert isinstance(house.state("c"), Ready)
    house.see("c", "continued")
    assert isinstance(house.state("c"), Draining)


def test_nobody_wants_it_any_more() -> None:
    """When the last one who waited leaves, the wait for memory is over and nothing is loaded later."""
    house = House()
    house.want("a")
    house.ready("a")
    house.work("a", 1)
    house.want("b")
    house.tell(WaitersLeft(model=ModelName("b")))
    house.work("a", 0)
    assert isinstance(house.state("a"), Ready)


class Machine(RuleBasedStateMachine):
    """Any order of wants, loads, work and exits."""

    def __init__(self) -> None:
        super().__init__()
        self.house = House()
        self.open: dict[str, int] = {}

    @rule(name=st.sampled_from("abcp"))
    def want(self, name: str) -> None:
        self.house.want(name)

    @precondition(lambda self: self.loading())
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.house.ready(data.draw(st.sampled_from(self.loading())))

    @precondition(lambda self: self.serving())
    @rule(data=st.data(), count=st.integers(0, 2))
    def work(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(self.serving()))
        self.open[name] = count
        self.house.work(name, count)

    @precondition(lambda self: self.leaving())
    @rule(data=st.data())
    def exit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.leaving()))
        self.open.pop(name, None)
        self.house.exit(name)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.house.pass_time(seconds)

    def loading(self) -> list[str]:
        return [name for name in "abcp" if isinstance(self.house.state(name), Starting)]

    def serving(self) -> list[str]:
        return [name for name in "abcp" if isinstance(self.house.state(name), Ready)]

    def leaving(self) -> list[str]:
        return [name for name in "abcp" if isinstance(self.house.state(name), Draining)]

    @invariant()
    def within_the_limit(self) -> None:
        """Processes never hold more than the machine has, counted from before their load to after their exit."""
        holding = {*self.loading(), *self.serving(), *self.leaving()}
        assert sum(WEIGHTS[ModelName(name)] for name in holding) <= 100

    @invariant()
    def nobody_who_works_is_sent_away(self) -> None:
        """Only those without work leave."""
        assert not any(self.open.get(name) for name in self.leaving())

    def teardown(self) -> None:
        """When all work ends and all who leave have left, nobody waits for memory."""
        for _ in range(12):
            for name in self.serving():
                self.house.work(name, 0)
                self.open[name] = 0
            for name in self.leaving():
                self.house.exit(name)
            for name in self.loading():
                self.house.ready(name)
        waiting = [name for name in "abcp" if isinstance(self.house.state(name), WaitingForMemory)]
        assert waiting == []


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
