"""The life of every worker process, as a machine: tables of single steps, then a model-based test of its laws."""

from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from gateway.fleet import Fleet
from gateway.fleet_crashes import backoff_seconds
from gateway.fleet_terms import (
    Absent,
    AdmissionClosed,
    AnswerHello,
    BackingOff,
    CrashRecorded,
    Draining,
    Effect,
    FailOpen,
    FailWaiting,
    FleetEvent,
    FleetSettings,
    GaveUp,
    GivenUp,
    ModelWanted,
    PingWorker,
    PongReceived,
    Ready,
    ReleaseWaiting,
    ShutdownAsked,
    Starting,
    StartWorker,
    StopAsked,
    StopWorker,
    TimerFired,
    WaitersLeft,
    WakeAt,
    WorkChanged,
    WorkerExited,
    WorkerHello,
    WorkerLost,
    WorkerReady,
    WorkerSeen,
    WorkerStuck,
)
from protocol import generation
from protocol.failures import Failure, FailureKind
from protocol.generation import PrefixReuse
from protocol.handshake import PROTOCOL_VERSION, Hello, Refused, Welcome
from protocol.ids import Incarnation, ModelName

SETTINGS = FleetSettings()
MODEL = ModelName("org/model")
OTHER = ModelName("other")
LIMITS = generation.Ready(
    context_tokens=4096,
    max_rows=4,
    weight_bytes=0,
    load_seconds=1.0,
    prefix_reuse=PrefixReuse(available=True),
    fingerprint="f",
)


class Clockwork:
    """A fleet with a clock that fires its timers on time."""

    def __init__(self, settings: FleetSettings = SETTINGS) -> None:
        self.fleet = Fleet(settings)
        self.now = 0.0
        self.wake_at: float | None = None
        self.seen: list[Effect] = []

    def tell(self, event: FleetEvent) -> list[Effect]:
        effects = self.fleet.handle(event, self.now)
        for released in [effect for effect in effects if isinstance(effect, ReleaseWaiting)]:
            # As dispatch does: how much there was to release. These tests' requests are over at once.
            over = WorkChanged(model=released.model, incarnation=released.incarnation, open_requests=0)
            effects += self.fleet.handle(over, self.now)
        for effect in effects:
            if isinstance(effect, WakeAt):
                self.wake_at = effect.when
        told = [effect for effect in effects if not isinstance(effect, WakeAt)]
        self.seen += told
        return told

    def pass_time(self, seconds: float) -> list[Effect]:
        end = self.now + seconds
        effects: list[Effect] = []
        while self.wake_at is not None and self.wake_at <= end:
            self.now = max(self.now, self.wake_at)
            self.wake_at = None
            effects += self.tell(TimerFired())
        self.now = end
        return effects

    def live(self, model: ModelName = MODEL) -> Incarnation:
        incarnation = self.fleet.incarnation(model)
        assert incarnation is not None
        return incarnation

    def start(self, model: ModelName = MODEL) -> Incarnation:
        self.tell(ModelWanted(model=model))
        self.tell(WorkerReady(model=model, incarnation=self.live(model), limits=LIMITS))
        return self.live(model)

    def crash(self, model: ModelName = MODEL) -> list[Effect]:
        return self.tell(exited(self.live(model), model))

    def state(self, model: ModelName = MODEL) -> object:
        return self.fleet.state(model)


def exited(incarnation: Incarnation, model: ModelName = MODEL, last_words: Failure | None = None) -> WorkerExited:
    return WorkerExited(
        model=model, incarnation=incarnation, signal=9, stderr_tail=("first", "segfault"), last_words=last_words
    )


def kinds(effects: Sequence[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


# --- starting --------------------------------------------------------------------------------------------------------


def test_however_many_ask_one_process_starts() -> None:
    """The first want starts a process, further ones wait for it, readiness releases them together."""
    clockwork = Clockwork()
    assert clockwork.tell(ModelWanted(model=MODEL)) == [StartWorker(model=MODEL, incarnation=Incarnation(1))]
    assert clockwork.tell(ModelWanted(model=MODEL)) == []
    ready = WorkerReady(model=MODEL, incarnation=Incarnation(1), limits=LIMITS)
    assert clockwork.tell(ready) == [ReleaseWaiting(model=MODEL, incarnation=Incarnation(1))]
    assert kinds(clockwork.tell(ModelWanted(model=MODEL))) == ["ReleaseWaiting"]


def test_incarnations_are_unique_across_models() -> None:
    """One counter names all processes, because it names their sockets."""
    clockwork = Clockwork()
    assert {clockwork.start(MODEL), clockwork.start(OTHER)} == {1, 2}


def test_a_start_that_takes_too_long_gives_up_and_climbs_the_ladder() -> None:
    """Waiters fail at the timeout; the process is told to go, then killed; the model is closed for a while."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    effects = clockwork.pass_time(SETTINGS.start_timeout_seconds)
    assert kinds(effects) == ["WorkerStuck", "FailWaiting", "StopWorker"]
    assert kinds(clockwork.tell(ModelWanted(model=MODEL))) == ["FailWaiting"]
    [stop] = clockwork.pass_time(SETTINGS.terminate_grace_seconds)
    assert isinstance(stop, StopWorker)
    assert stop.how == "kill"
    assert kinds(clockwork.crash()) == ["FailOpen", "GaveUp"]
    assert isinstance(clockwork.state(), GivenUp)


def test_a_heavy_model_gets_more_time() -> None:
    """The start timeout grows with the weights."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL, weight_bytes=100 * 1024**3))
    assert clockwork.pass_time(SETTINGS.start_timeout_seconds + 199) == []
    assert "FailWaiting" in kinds(clockwork.pass_time(2))


def test_another_protocol_version_gives_up_at_once_and_names_both() -> None:
    """No crash loop: the same program would say the same again."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    hello = Hello(protocol_version=PROTOCOL_VERSION + 1, model=MODEL, incarnation=Incarnation(1), pid=1)
    answer, failed = clockwork.tell(WorkerHello(hello=hello))
    assert isinstance(answer, AnswerHello)
    assert isinstance(answer.answer, Refused)
    assert isinstance(failed, FailWaiting)
    assert str(PROTOCOL_VERSION + 1) in failed.failure.message
    assert str(PROTOCOL_VERSION) in failed.failure.message
    assert kinds(clockwork.crash()) == ["FailOpen", "GaveUp"]


def test_the_right_hello_is_welcomed_and_a_strangers_is_refused() -> None:
    """Only the live incarnation of a model may join; a stranger changes nothing."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    before = clockwork.state()
    hello = Hello(protocol_version=PROTOCOL_VERSION, model=MODEL, incarnation=Incarnation(1), pid=1)
    assert clockwork.tell(WorkerHello(hello=hello)) == [AnswerHello(incarnation=Incarnation(1), answer=Welcome())]
    [answer] = clockwork.tell(WorkerHello(hello=replace(hello, incarnation=Incarnation(7))))
    assert isinstance(answer, AnswerHello)
    assert isinstance(answer.answer, Refused)
    assert clockwork.state() == before


def test_hopeless_last_words_of_a_load_give_up_at_once() -> None:
    """A broken folder stays broken: no second attempt, and the reason is passed on."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    words = Failure(kind=FailureKind.MODEL_UNAVAILABLE, message="no config.json")
    effects = clockwork.tell(exited(Incarnation(1), last_words=words))
    assert kinds(effects) == ["FailOpen", "CrashRecorded", "GaveUp", "FailWaiting"]
    assert "no config.json" in next(e for e in effects if isinstance(e, FailWaiting)).failure.message


# --- crashing --------------------------------------------------------------------------------------------------------


def test_a_stable_worker_restarts_at_once_by_itself() -> None:
    """The first crash after a stable time costs no back-off, and nobody need ask."""
    clockwork = Clockwork()
    clockwork.start()
    clockwork.pass_time(SETTINGS.stable_seconds)
    assert kinds(clockwork.crash()) == ["FailOpen", "CrashRecorded", "StartWorker"]
    assert clockwork.fleet.restarts(MODEL) == 1


def test_a_worker_that_nobody_waits_for_and_never_served_stays_away() -> None:
    """A load is only repeated for somebody."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    clockwork.tell(WaitersLeft(model=MODEL))
    assert kinds(clockwork.crash()) == ["FailOpen", "CrashRecorded"]
    assert clockwork.state() == Absent()


def test_crashes_in_a_row_back_off_and_the_third_gives_up() -> None:
    """While backing off requests wait; when given up they fail with a time to come back."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    assert clockwork.crash()[-1] == CrashRecorded(
        model=MODEL, incarnation=Incarnation(1), crashes_in_window=1, then="backs_off"
    )
    assert clockwork.tell(ModelWanted(model=MODEL)) == []
    assert clockwork.pass_time(1.0) == [StartWorker(model=MODEL, incarnation=Incarnation(2))]
    clockwork.crash()
    assert clockwork.pass_time(1.9) == []
    assert kinds(clockwork.pass_time(0.2)) == ["StartWorker"]
    effects = clockwork.crash()
    assert kinds(effects) == ["FailOpen", "CrashRecorded", "GaveUp", "FailWaiting"]
    failure = next(effect for effect in effects if isinstance(effect, FailWaiting)).failure
    assert failure.kind is FailureKind.MODEL_UNAVAILABLE
    assert "signal 9" in failure.message
    assert "segfault" not in failure.message  # what it printed may name the server's files
    clockwork.pass_time(20)
    [refusal] = clockwork.tell(ModelWanted(model=MODEL))
    assert isinstance(refusal, FailWaiting)
    assert refusal.failure.retry_after_seconds == pytest.approx(40)


def test_crashes_far_apart_do_not_add_up() -> None:
    """Only crashes within the window count towards giving up."""
    clockwork = Clockwork()
    clockwork.start()
    for _ in range(10):
        clockwork.pass_time(SETTINGS.crash_window_seconds / 2 + 1)
        assert "StartWorker" in kinds(clockwork.crash())
        clockwork.tell(WorkerReady(model=MODEL, incarnation=clockwork.live(), limits=LIMITS))


def test_given_up_is_half_open_after_its_time() -> None:
    """One attempt when somebody asks; its crash gives up again at once, its success forgives."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    for _ in range(2):
        clockwork.crash()
        clockwork.pass_time(2.1)
    clockwork.crash()
    assert clockwork.pass_time(SETTINGS.crash_window_seconds + 1) == []
    assert kinds(clockwork.tell(ModelWanted(model=MODEL))) == ["StartWorker"]
    assert "GaveUp" in kinds(clockwork.crash())
    clockwork.pass_time(SETTINGS.given_up_seconds)
    incarnation = clockwork.start()
    clockwork.pass_time(SETTINGS.crash_window_seconds + 1)
    assert clockwork.live() == incarnation
    assert "StartWorker" in kinds(clockwork.crash())


def test_an_operators_stop_lets_a_given_up_model_start_again() -> None:
    """The crash record is the operator's to clear."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    for _ in range(3):
        clockwork.crash()
        clockwork.pass_time(2.1)
    assert isinstance(clockwork.state(), GivenUp)
    clockwork.tell(StopAsked(model=MODEL))
    assert kinds(clockwork.tell(ModelWanted(model=MODEL))) == ["StartWorker"]
    assert "GaveUp" not in kinds(clockwork.crash())


def test_events_of_an_older_process_are_dropped() -> None:
    """Nothing that a dead process said or did changes its successor."""
    clockwork = Clockwork()
    old = clockwork.start()
    clockwork.pass_time(SETTINGS.stable_seconds)
    clockwork.crash()
    before = clockwork.state()
    stale: list[FleetEvent] = [
        exited(old),
        WorkerReady(model=MODEL, incarnation=old, limits=LIMITS),
        PongReceived(model=MODEL, incarnation=old, steps=99),
        WorkChanged(model=MODEL, incarnation=old, open_requests=3),
        WorkerLost(model=MODEL, incarnation=old, reason="old"),
    ]
    for event in stale:
        assert clockwork.tell(event) == []
    assert clockwork.state() == before


@pytest.mark.parametrize("attempts", range(1, 200))
def test_back_off_doubles_within_its_bounds(attempts: int) -> None:
    """Never shorter than before, between the first and the longest."""
    seconds = backoff_seconds(attempts, SETTINGS)
    assert 1.0 <= seconds <= 30.0
    assert backoff_seconds(attempts + 1, SETTINGS) >= seconds


# --- hanging ---------------------------------------------------------------------------------------------------------


def work(clockwork: Clockwork) -> Incarnation:
    incarnation = clockwork.start()
    clockwork.tell(WorkChanged(model=MODEL, incarnation=incarnation, open_requests=1))
    return incarnation


def test_no_step_within_the_limit_is_a_wedge() -> None:
    """What has begun to answer fails at once and all else goes to the next process; it gets SIGTERM, and SIGKILL after
    the grace; then the model restarts."""
    clockwork = Clockwork()
    incarnation = work(clockwork)
    effects = [e for e in clockwork.pass_time(SETTINGS.hang_seconds) if not isinstance(e, PingWorker)]
    assert kinds(effects) == ["WorkerStuck", "FailOpen", "StopWorker"]
    assert [effect.unanswered for effect in effects if isinstance(effect, FailOpen)] == ["retry"]
    assert clockwork.fleet.stuck_reason(MODEL, clockwork.now) is not None
    [kill] = clockwork.pass_time(SETTINGS.terminate_grace_seconds)
    assert kill == StopWorker(model=MODEL, incarnation=incarnation, how="kill", within_seconds=10.0)
    assert "StartWorker" in kinds(clockwork.crash()) + kinds(clockwork.pass_time(1.0))


def test_steps_keep_a_worker_alive_and_answers_without_steps_do_not() -> None:
    """A loop that answers but does not step is as stuck as a silent one."""
    clockwork = Clockwork()
    incarnation = work(clockwork)
    for steps in range(1, 10):
        clockwork.pass_time(SETTINGS.hang_seconds - 1)
        clockwork.tell(PongReceived(model=MODEL, incarnation=incarnation, steps=steps))
    assert isinstance(clockwork.state(), Ready)
    for _ in range(10):
        clockwork.pass_time(SETTINGS.hang_seconds / 10)
        clockwork.tell(PongReceived(model=MODEL, incarnation=incarnation, steps=9))
    assert isinstance(clockwork.state(), Draining)


def test_an_idle_worker_is_pinged_and_never_stuck() -> None:
    """Idle for a day is fine; the clock of a hang starts with the work."""
    clockwork = Clockwork()
    incarnation = clockwork.start()
    effects = clockwork.pass_time(86_400)
    assert set(kinds(effects)) == {"PingWorker"}
    assert len(effects) == 8640
    clockwork.tell(WorkChanged(model=MODEL, incarnation=incarnation, open_requests=1))
    assert set(kinds(clockwork.pass_time(SETTINGS.hang_seconds - 1))) == {"PingWorker"}


def test_a_gateway_that_slept_blames_nobody() -> None:
    """E07: after a long sleep of the whole machine, silence proves nothing; a wedge after it is still found."""
    clockwork = Clockwork()
    work(clockwork)
    clockwork.now += 3600
    assert kinds(clockwork.tell(TimerFired())) == ["PingWorker"]
    assert isinstance(clockwork.state(), Ready)
    assert "WorkerStuck" in kinds(clockwork.pass_time(SETTINGS.hang_seconds + 1))


def look(clockwork: Clockwork, condition: Literal["suspended", "continued"]) -> list[str]:
    """What dispatch says of the live process before a timer, and what the log gets of it."""
    seen = WorkerSeen(model=MODEL, incarnation=clockwork.live(), condition=condition)
    return kinds(clockwork.tell(seen))


def pass_held(clockwork: Clockwork, seconds: float) -> list[str]:
    """Time in which the process is stopped: it is looked at before each timer, and sends nothing."""
    end = clockwork.now + seconds
    found: list[str] = []
    while clockwork.wake_at is not None and clockwork.wake_at <= end:
        clockwork.now = clockwork.wake_at
        found += look(clockwork, "suspended") + kinds(clockwork.tell(TimerFired()))
    clockwork.now = end
    return found


def test_a_process_that_somebody_holds_is_left_alone_however_long() -> None:
    """Held for a day: said once, no ping, no stop, and the status says why. Continued: it has its whole limit anew, and
    is a wedge only after that."""
    clockwork = Clockwork()
    work(clockwork)
    clockwork.pass_time(SETTINGS.hang_seconds - 1)
    assert pass_held(clockwork, 86_400) == ["SuspensionNoted"]
    reason = clockwork.fleet.stuck_reason(MODEL, clockwork.now)
    assert reason is not None
    assert "SIGCONT" in reason
    assert look(clockwork, "continued") == ["SuspensionNoted"]
    assert look(clockwork, "continued") == []
    assert clockwork.fleet.stuck_reason(MODEL, clockwork.now) is None
    assert set(kinds(clockwork.pass_time(SETTINGS.hang_seconds - 1))) == {"PingWorker"}
    assert "WorkerStuck" in kinds(clockwork.pass_time(1))


def test_a_load_that_somebody_holds_has_its_time_anew() -> None:
    """The clock of a load stands still while its process does, and begins again with it."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    assert pass_held(clockwork, 86_400) == ["SuspensionNoted"]
    assert isinstance(clockwork.state(), Starting)
    assert look(clockwork, "continued") == ["SuspensionNoted"]
    assert clockwork.pass_time(SETTINGS.start_timeout_seconds - 1) == []
    assert "WorkerStuck" in kinds(clockwork.pass_time(1))


def test_a_load_that_is_held_within_its_time_has_it_anew() -> None:
    """It is looked at long before its deadline: a hold is known while it lasts, and given back when it is over."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    clockwork.pass_time(10.0)
    assert pass_held(clockwork, SETTINGS.ping_working_seconds) == ["SuspensionNoted"]
    assert "SIGCONT" in (clockwork.fleet.held_reason(MODEL, clockwork.now) or "")
    assert clockwork.fleet.stuck_reason(MODEL, clockwork.now) is not None
    pass_held(clockwork, SETTINGS.start_timeout_seconds / 2)
    assert look(clockwork, "continued") == ["SuspensionNoted"]
    assert clockwork.pass_time(SETTINGS.start_timeout_seconds - 1) == []
    assert "WorkerStuck" in kinds(clockwork.pass_time(1))


def test_who_wants_a_held_process_waits_until_it_goes_on() -> None:
    """Nothing is sent to it meanwhile. While nobody wants it, it is held and not stuck."""
    clockwork = Clockwork()
    clockwork.start()
    assert look(clockwork, "suspended") == ["SuspensionNoted"]
    assert clockwork.fleet.stuck_reason(MODEL, clockwork.now) is None
    assert clockwork.fleet.held_reason(MODEL, clockwork.now) is not None
    assert clockwork.tell(ModelWanted(model=MODEL)) == []
    assert clockwork.fleet.stuck_reason(MODEL, clockwork.now) is not None
    clockwork.tell(WaitersLeft(model=MODEL))
    assert clockwork.fleet.stuck_reason(MODEL, clockwork.now) is None
    clockwork.tell(ModelWanted(model=MODEL))
    assert pass_held(clockwork, 3600) == []
    assert look(clockwork, "continued") == ["SuspensionNoted", "ReleaseWaiting"]
    assert clockwork.fleet.held_reason(MODEL, clockwork.now) is None


def test_one_that_gets_ready_and_is_held_gets_nobody() -> None:
    """What it said before it was stopped may be read after that was seen."""
    clockwork = Clockwork()
    clockwork.tell(ModelWanted(model=MODEL))
    look(clockwork, "suspended")
    assert clockwork.tell(WorkerReady(model=MODEL, incarnation=clockwork.live(), limits=LIMITS)) == []
    assert look(clockwork, "suspended") == []
    assert look(clockwork, "continued") == ["SuspensionNoted", "ReleaseWaiting"]


def test_who_waits_for_a_held_process_that_dies_gets_the_next() -> None:
    """And who waits for one that is unloaded: nobody is forgotten behind it."""
    for how in ("killed", "unloaded"):
        clockwork = Clockwork()
        clockwork.start()
        look(clockwork, "suspended")
        clockwork.tell(ModelWanted(model=MODEL))
        if how == "unloaded":
            clockwork.tell(StopAsked(model=MODEL))
        assert "StartWorker" in kinds(clockwork.crash())
        ready = WorkerReady(model=MODEL, incarnation=clockwork.live(), limits=LIMITS)
        assert kinds(clockwork.tell(ready)) == ["ReleaseWaiting"]


def test_a_held_process_is_not_spared_by_a_stop() -> None:
    """An unload climbs the ladder to its end, for a stopped process obeys nothing but SIGKILL."""
    clockwork = Clockwork()
    work(clockwork)
    assert look(clockwork, "suspended") == ["SuspensionNoted"]
    clockwork.tell(StopAsked(model=MODEL))
    assert pass_held(clockwork, 3600) == ["FailOpen", "StopWorker", "StopWorker", "WorkerStuck"]
    assert [effect.how for effect in clockwork.seen if isinstance(effect, StopWorker)] == ["drain", "terminate", "kill"]


def test_a_process_that_survives_sigkill_is_reported_and_not_replaced() -> None:
    """Two processes never hold one model, so its requests are refused instead."""
    clockwork = Clockwork()
    work(clockwork)
    clockwork.pass_time(SETTINGS.hang_seconds)
    clockwork.tell(ModelWanted(model=MODEL))
    effects = clockwork.pass_time(3600)
    assert kinds(effects) == ["StopWorker", "WorkerStuck", "FailWaiting"]
    assert kinds(clockwork.tell(ModelWanted(model=MODEL))) == ["FailWaiting"]


def test_an_unreachable_worker_is_replaced_and_its_unanswered_requests_retried() -> None:
    """What it never answered may go to the next process."""
    clockwork = Clockwork()
    incarnation = clockwork.start()
    stuck, failed, stop = clockwork.tell(WorkerLost(model=MODEL, incarnation=incarnation, reason="no socket"))
    assert isinstance(stuck, WorkerStuck)
    assert isinstance(failed, FailOpen)
    assert failed.unanswered == "retry"
    assert isinstance(stop, StopWorker)


# --- stopping --------------------------------------------------------------------------------------------------------


def test_unload_drains_and_a_want_meanwhile_loads_again() -> None:
    """An unload is no crash; who comes during it waits for the next process."""
    clockwork = Clockwork()
    incarnation = clockwork.start()
    [drain] = clockwork.tell(StopAsked(model=MODEL))
    assert drain == StopWorker(model=MODEL, incarnation=incarnation, how="drain", within_seconds=30.0)
    assert clockwork.tell(StopAsked(model=MODEL)) == []
    assert clockwork.tell(ModelWanted(model=MODEL)) == []
    assert kinds(clockwork.crash()) == ["FailOpen", "StartWorker"]
    assert clockwork.fleet.restarts(MODEL) == 0


def test_the_ladder_has_three_rungs_in_order() -> None:
    """Asked, told, killed: each only after the one before had its time."""
    clockwork = Clockwork()
    clockwork.start()
    clockwork.tell(StopAsked(model=MODEL))
    clockwork.pass_time(1000)
    hows = [effect.how for effect in clockwork.seen if isinstance(effect, StopWorker)]
    assert hows == ["drain", "terminate", "kill"]


def test_closing_fails_who_waits_and_lets_finish_who_runs() -> None:
    """After AdmissionClosed nothing starts, whatever crashes or is wanted."""
    clockwork = Clockwork()
    running = clockwork.start()
    clockwork.tell(ModelWanted(model=OTHER))
    assert kinds(clockwork.tell(AdmissionClosed())) == ["FailWaiting", "StopWorker"]
    assert isinstance(clockwork.state(), Ready)
    assert kinds(clockwork.tell(ModelWanted(model=MODEL))) == ["FailWaiting"]
    [drain] = clockwork.tell(ShutdownAsked(drain_seconds=5.0))
    assert drain == StopWorker(model=MODEL, incarnation=running, how="drain", within_seconds=5.0)
    [died] = clockwork.crash()
    assert isinstance(died, FailOpen)
    assert died.failure.kind is FailureKind.SHUTTING_DOWN
    assert clockwork.state() == Absent()


# --- laws ------------------------------------------------------------------------------------------------------------


class FleetMachine(RuleBasedStateMachine):
    """Any order of events at any pace. The world outside is modelled: which processes live, who waits."""

    models = (MODEL, OTHER)

    def __init__(self) -> None:
        super().__init__()
        self.clockwork = Clockwork()
        self.alive: dict[Incarnation, ModelName] = {}
        self.waiting: set[ModelName] = set()
        self.crashes: dict[ModelName, list[float]] = {model: [] for model in self.models}
        self.excused: set[ModelName] = set()
        self.closing = False
        self.checked = 0

    def settle(self) -> None:
        """Carry out what was decided since the last look."""
        news, self.checked = self.clockwork.seen[self.checked :], len(self.clockwork.seen)
        for effect in news:
            match effect:
                case StartWorker(model=model, incarnation=incarnation):
                    assert model not in self.alive.values(), "a second process of one model"
                    assert not self.closing
                    self.alive[incarnation] = model
                case ReleaseWaiting(model=model, incarnation=incarnation):
                    assert self.alive.get(incarnation) == model
                    self.waiting.discard(model)
                case FailWaiting(model=model):
                    self.waiting.discard(model)
                case StopWorker(model=model, incarnation=incarnation):
                    assert self.alive.get(incarnation) == model
                case GaveUp(model=model):
                    recent = [at for at in self.crashes[model] if self.clockwork.now - at < 300]
                    assert len(recent) >= 3 or model in self.excused
                case _:
                    pass

    def tell(self, event: FleetEvent) -> None:
        self.clockwork.tell(event)
        self.settle()

    @rule(model=st.sampled_from(models))
    def want(self, model: ModelName) -> None:
        state = self.clockwork.fleet.state(model)
        if isinstance(state, GivenUp):
            self.excused.add(model)  # a half-open attempt may give up at its first crash
        self.waiting.add(model)
        self.tell(ModelWanted(model=model))

    @rule(model=st.sampled_from(models))
    def leave(self, model: ModelName) -> None:
        self.waiting.discard(model)
        self.tell(WaitersLeft(model=model))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), version=st.sampled_from([PROTOCOL_VERSION] * 3 + [0]))
    def say_hello(self, data: st.DataObject, version: int) -> None:
        incarnation = data.draw(st.sampled_from(sorted(self.alive)))
        model = self.alive[incarnation]
        if version != PROTOCOL_VERSION:
            self.excused.add(model)
        hello = Hello(protocol_version=version, model=model, incarnation=incarnation, pid=1)
        self.tell(WorkerHello(hello=hello))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def get_ready(self, data: st.DataObject) -> None:
        incarnation = data.draw(st.sampled_from(sorted(self.alive)))
        self.tell(WorkerReady(model=self.alive[incarnation], incarnation=incarnation, limits=LIMITS))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), steps=st.integers(0, 5), count=st.integers(0, 2))
    def report(self, data: st.DataObject, steps: int, count: int) -> None:
        incarnation = data.draw(st.sampled_from(sorted(self.alive)))
        model = self.alive[incarnation]
        self.tell(WorkChanged(model=model, incarnation=incarnation, open_requests=count))
        self.tell(PongReceived(model=model, incarnation=incarnation, steps=steps))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), how=st.sampled_from(["crash", "crash", "lost"]))
    def go_wrong(self, data: st.DataObject, how: Literal["crash", "lost"]) -> None:
        incarnation = data.draw(st.sampled_from(sorted(self.alive)))
        model = self.alive[incarnation]
        if how == "lost":
            self.tell(WorkerLost(model=model, incarnation=incarnation, reason="gone"))
            return
        del self.alive[incarnation]
        self.crashes[model].append(self.clockwork.now)
        self.tell(exited(incarnation, model))

    @rule(incarnation=st.integers(1, 30), model=st.sampled_from(models))
    def hear_of_the_dead(self, incarnation: int, model: ModelName) -> None:
        if self.alive.get(Incarnation(incarnation)) != model:
            before = self.clockwork.fleet.state(model)
            self.tell(exited(Incarnation(incarnation), model))
            assert self.clockwork.fleet.state(model) == before

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), condition=st.sampled_from(["suspended", "continued"]))
    def be_held(self, data: st.DataObject, condition: Literal["suspended", "continued"]) -> None:
        incarnation = data.draw(st.sampled_from(sorted(self.alive)))
        self.tell(WorkerSeen(model=self.alive[incarnation], incarnation=incarnation, condition=condition))

    @rule(model=st.sampled_from(models))
    def unload(self, model: ModelName) -> None:
        self.tell(StopAsked(model=model))

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0, 31.0, 61.0, 301.0]))
    def pass_time(self, seconds: float) -> None:
        self.clockwork.pass_time(seconds)
        for model in self.models:
            state = self.clockwork.fleet.state(model)
            if isinstance(state, Draining) and state.purpose == "start_timed_out":
                self.excused.add(model)
        self.settle()

    @rule(chance=st.integers(0, 20))
    def close(self, chance: int) -> None:
        if chance == 0:
            self.tell(AdmissionClosed())
            self.closing = True

    @invariant()
    def whoever_waits_is_waited_on_by_somebody(self) -> None:
        """A request waits only for something that is bound to happen: an exit, a readiness, a timer; or for whoever
        holds its process."""
        for model in self.waiting:
            is_held = self.clockwork.fleet.is_suspended(model)
            assert is_held or isinstance(self.clockwork.fleet.state(model), (Starting, BackingOff, Draining))
            assert self.clockwork.wake_at is not None or isinstance(self.clockwork.fleet.state(model), Draining)

    @invariant()
    def the_fleet_knows_every_live_process(self) -> None:
        for incarnation, model in self.alive.items():
            assert self.clockwork.fleet.incarnation(model) == incarnation

    @invariant()
    def no_timer_is_in_the_past(self) -> None:
        assert self.clockwork.wake_at is None or self.clockwork.wake_at >= self.clockwork.now

    @invariant()
    def back_off_grows_with_the_attempts(self) -> None:
        for model in self.models:
            state = self.clockwork.fleet.state(model)
            if isinstance(state, BackingOff):
                assert state.until - state.since == pytest.approx(backoff_seconds(state.attempts, SETTINGS))

    def teardown(self) -> None:
        """Everybody gets an answer in the end: when every process ends and time passes, nobody waits."""
        self.clockwork.tell(AdmissionClosed())
        self.closing = True
        self.clockwork.tell(ShutdownAsked(drain_seconds=1.0))
        for incarnation, model in tuple(self.alive.items()):
            self.clockwork.tell(exited(incarnation, model))
        self.alive.clear()
        self.settle_ended()
        assert not self.waiting
        assert self.clockwork.pass_time(10_000) == []

    def settle_ended(self) -> None:
        for effect in self.clockwork.seen[self.checked :]:
            assert not isinstance(effect, StartWorker)
            if isinstance(effect, FailWaiting):
                self.waiting.discard(effect.model)


TestFleetLaws = FleetMachine.TestCase
TestFleetLaws.settings = hypothesis_settings(max_examples=100, stateful_step_count=40, deadline=None)
