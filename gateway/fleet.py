"""The life of every worker process, decided: events in, effects out. Owned by the dispatch task.

One process per model, however many ask. A crash costs one restart; crashes in a row cost patience; too many of them
close the model for a while. A process is asked to go before it is told, and killed only when it has proved deaf.

What follows from each event stands here. Its parts: `fleet_starts` (who has room), `fleet_stops` (the ladder),
`fleet_crashes` (what a crash costs), `fleet_suspensions` (who is held from outside), `fleet_deadlines` (when to look
again), `fleet_failures` (what clients hear), `fleet_life` (what is remembered of one model).
"""

from typing import assert_never

from msgspec.structs import replace

from gateway.fleet_crashes import crashed, give_up
from gateway.fleet_deadlines import due_at, held_reason, postponed, stuck_reason, unload_at
from gateway.fleet_failures import (
    died,
    not_ready_in_time,
    refused_at_hello,
    shutting_down,
    stranded,
    unloaded,
)
from gateway.fleet_life import Life, fail_waiting, incarnation_of, note_work, release_waiting
from gateway.fleet_starts import FleetStarts
from gateway.fleet_stops import climb, drain, lose, next_rung
from gateway.fleet_suspensions import note_continued, note_suspended, suspended_at
from gateway.fleet_terms import (
    Absent,
    AdmissionClosed,
    AnswerHello,
    BackingOff,
    Draining,
    Effect,
    FailOpen,
    FailWaiting,
    FleetEvent,
    FleetSettings,
    GivenUp,
    ModelWanted,
    PingWorker,
    PongReceived,
    Ready,
    ShutdownAsked,
    Starting,
    StopAsked,
    TimerFired,
    WaitersLeft,
    WaitingForMemory,
    WakeAt,
    WorkChanged,
    WorkerExited,
    WorkerHello,
    WorkerLost,
    WorkerReady,
    WorkerSeen,
    WorkerState,
    WorkerStuck,
)
from gateway.residency import Resident, waited_too_long
from protocol.failures import Failure
from protocol.handshake import Refused, Welcome, answer_hello
from protocol.ids import Incarnation, ModelName


class Fleet:
    """Every model's process. `handle` is the only way in; the properties are for whoever reports."""

    def __init__(self, settings: FleetSettings, first_incarnation: int = 1) -> None:
        self._settings = settings
        self._lives: dict[ModelName, Life] = {}
        self._starts = FleetStarts(settings, self._lives, first_incarnation)
        self._closing = False
        self._wake_at: float | None = None

    # --- reading ---------------------------------------------------------------------------------------------------

    @property
    def models(self) -> tuple[ModelName, ...]:
        """The models that were ever asked for."""
        return tuple(self._lives)

    def state(self, model: ModelName) -> WorkerState:
        life = self._lives.get(model)
        return life.state if life else Absent()

    def restarts(self, model: ModelName) -> int:
        """How many processes were started because the one before crashed."""
        life = self._lives.get(model)
        return life.restarts if life else 0

    def incarnation(self, model: ModelName) -> Incarnation | None:
        """The live process of this model, if there is one."""
        return incarnation_of(self.state(model))

    def is_suspended(self, model: ModelName) -> bool:
        """Whether this model's process was stopped from outside when last looked at."""
        return suspended_at(self.state(model)) is not None

    def residents(self) -> tuple[Resident, ...]:
        """Who has memory, or waits for it."""
        return self._starts.residents()

    def stuck_reason(self, model: ModelName, now: float) -> str | None:
        """Why this model's work does not move, in words: it is held, or has not moved for half of its limit. None while
        it has no work."""
        life = self._lives.get(model)
        return None if life is None else stuck_reason(life, self._settings, now)

    def held_reason(self, model: ModelName, now: float) -> str | None:
        """That somebody holds this model's process, in words, whether it has work or not."""
        return held_reason(self.state(model), now)

    # --- deciding --------------------------------------------------------------------------------------------------

    def handle(self, event: FleetEvent, now: float) -> list[Effect]:
        """What follows from one event. Events of a process that is not the model's live one have no effect."""
        effects = [*self._decide(event, now), *self._starts.give_freed_memory(now)]
        dues = (due_at(life, self._settings) for life in self._lives.values())
        wake_at = min((due for due in dues if due is not None), default=None)
        if wake_at != self._wake_at or isinstance(event, TimerFired):
            self._wake_at = wake_at
            effects.append(WakeAt(when=wake_at))
        return effects

    def _decide(self, event: FleetEvent, now: float) -> list[Effect]:
        match event:
            case ModelWanted():
                return self._wanted(event, now)
            case WaitersLeft(model=model):
                self._waiters_left(model)
                return []
            case WorkerHello():
                return self._hello(event, now)
            case WorkerReady():
                return self._ready(event, now)
            case WorkChanged(model=model, incarnation=incarnation, open_requests=open_requests):
                life = self._live(model, incarnation)
                if life is not None:
                    note_work(life, open_requests, self._settings, now)
                return []
            case PongReceived():
                return self._pong(event, now)
            case WorkerLost(model=model, incarnation=incarnation, reason=reason):
                life = self._live(model, incarnation)
                return [] if life is None else lose(life, incarnation, reason, self._settings, now)
            case WorkerExited():
                return self._exited(event, now)
            case WorkerSeen():
                return self._seen(event, now)
            case TimerFired():
                return self._timer(now)
            case StopAsked(model=model):
                return self._stop_asked(model, now)
            case AdmissionClosed():
                self._closing = True
                return [effect for life in self._lives.values() for effect in self._close(life, now)]
            case ShutdownAsked(drain_seconds=drain_seconds):
                self._closing = True
                return [
                    effect
                    for life in self._lives.values()
                    for effect in (*self._close(life, now), *drain(life, "shutdown", drain_seconds, now))
                ]
            case _:
                assert_never(event)

    # --- a model is wanted, or no longer ---------------------------------------------------------------------------

    def _wanted(self, event: ModelWanted, now: float) -> list[Effect]:
        model = event.model
        life = self._lives.setdefault(model, Life(model=model))
        if event.weight_bytes:
            life.weight_bytes, life.kind = event.weight_bytes, event.kind
        if self._closing:
            return [FailWaiting(model=model, failure=shutting_down())]
        match life.state:
            case Absent():
                life.waiting_since = now
                return self._starts.start(life, "normal", now)
            case Ready():
                life.waiting_since = now if life.waiting_since is None else life.waiting_since
                return release_waiting(life, self._settings, now)
            case GivenUp(until=until) if now >= until:
                life.waiting_since = now
                return self._starts.start(life, "half_open", now)
            case GivenUp(until=until, failure=failure):
                return [FailWaiting(model=model, failure=replace(failure, retry_after_seconds=until - now))]
            case Draining(failure=Failure() as failure):
                return [FailWaiting(model=model, failure=failure)]
            case Draining(rung="stranded"):
                return [FailWaiting(model=model, failure=stranded(model))]
            case Starting() | BackingOff() | Draining() | WaitingForMemory():
                life.waiting_since = now if life.waiting_since is None else life.waiting_since
                return []
            case _:
                assert_never(life.state)

    def _waiters_left(self, model: ModelName) -> None:
        life = self._lives.get(model)
        if life is None:
            return
        life.waiting_since = None
        if isinstance(life.state, WaitingForMemory):
            life.state = Absent()

    def _stop_asked(self, model: ModelName, now: float) -> list[Effect]:
        life = self._lives.get(model)
        if life is None:
            return []
        match life.state:
            case Absent():
                return []
            case BackingOff() | GivenUp() | WaitingForMemory():
                life.state = Absent()
                life.crashes, life.attempts = [], 0
                return fail_waiting(life, unloaded(model))
            case Draining():
                return []
            case Starting(incarnation=incarnation):
                return [
                    *fail_waiting(life, unloaded(model)),
                    climb(life, incarnation, "unload", "terminate", self._settings, now),
                ]
            case Ready():
                return drain(life, "unload", self._settings.drain_seconds, now)
            case _:
                assert_never(life.state)

    def _close(self, life: Life, now: float) -> list[Effect]:
        """Admission is closed: a process that serves may go on, everything else about this model ends."""
        effects = fail_waiting(life, shutting_down())
        match life.state:
            case Starting(incarnation=incarnation):
                # It has no work and nothing to save, so it is not asked to drain.
                effects.append(climb(life, incarnation, "shutdown", "terminate", self._settings, now))
            case BackingOff() | GivenUp() | WaitingForMemory():
                life.state = Absent()
            case Absent() | Ready() | Draining():
                pass
            case _:
                assert_never(life.state)
        return effects

    # --- a process speaks ------------------------------------------------------------------------------------------

    def _hello(self, event: WorkerHello, now: float) -> list[Effect]:
        hello = event.hello
        answer = answer_hello(hello, expected=self.incarnation(hello.model))
        effects: list[Effect] = [AnswerHello(incarnation=hello.incarnation, answer=answer)]
        life = self._live(hello.model, hello.incarnation)
        if isinstance(answer, Welcome) or life is None or not isinstance(life.state, (Starting, Ready)):
            return effects
        # It would say the same after every restart, so it is no crash to be retried.
        effects += self._refuse(life, hello.incarnation, answer, now)
        return effects

    def _refuse(self, life: Life, incarnation: Incarnation, refused: Refused, now: float) -> list[Effect]:
        failure = refused_at_hello(life.model, refused, self._settings)
        # No StopWorker yet: the refusal itself asks the process to go. The ladder follows if it stays.
        life.state = Draining(
            incarnation=incarnation,
            since=now,
            deadline=now + self._settings.terminate_grace_seconds,
            purpose="refused",
            rung="drain",
            failure=failure,
            weight_bytes=life.weight_bytes,
        )
        return fail_waiting(life, failure)

    def _ready(self, event: WorkerReady, now: float) -> list[Effect]:
        life = self._live(event.model, event.incarnation)
        if life is None or not isinstance(life.state, Starting):
            return []
        life.state = Ready(
            incarnation=event.incarnation,
            since=now,
            limits=event.limits,
            progress_at=now,
            next_ping_at=now + self._settings.ping_idle_seconds,
            idle_since=now,
            kind=life.state.kind,
            suspended_at=life.state.suspended_at,  # it may have said so just before
        )
        life.weight_bytes = event.limits.weight_bytes
        if life.state.suspended_at is None and life.waiting_since is None:
            life.waiting_since = now  # checks wait without anybody's having said so
        return release_waiting(life, self._settings, now)

    def _pong(self, event: PongReceived, now: float) -> list[Effect]:
        life = self._live(event.model, event.incarnation)
        if life is not None and isinstance(life.state, Ready) and event.steps > life.state.steps:
            life.state = replace(life.state, steps=event.steps, progress_at=now)
        return []

    def _seen(self, event: WorkerSeen, now: float) -> list[Effect]:
        life = self._live(event.model, event.incarnation)
        if life is None:
            return []
        note = note_suspended if event.condition == "suspended" else note_continued
        return note(life, self._settings, now)

    # --- a process ends --------------------------------------------------------------------------------------------

    def _exited(self, event: WorkerExited, now: float) -> list[Effect]:
        model = event.model
        life = self._live(model, event.incarnation)
        if life is None:
            return []
        failure = shutting_down() if self._closing else died(event)
        ended = FailOpen(model=model, incarnation=event.incarnation, failure=failure)
        if self._closing:
            life.state = Absent()
            return [ended, *fail_waiting(life, shutting_down())]
        match life.state:
            case Draining(purpose="refused" | "start_timed_out", failure=Failure() as failure):
                return [ended, *give_up(life, failure, self._settings, now)]
            case Draining(purpose="unload" | "shutdown"):
                life.state = Absent()
                if life.waiting_since is None:
                    return [ended]
                return [ended, *self._starts.start(life, "normal", now)]
            case _:
                return [replace(ended, unanswered="retry"), *crashed(event, life, self._starts, self._settings, now)]

    # --- time passes -----------------------------------------------------------------------------------------------

    def _timer(self, now: float) -> list[Effect]:
        late = now - self._wake_at if self._wake_at is not None else 0.0
        if late > self._settings.late_seconds:
            # We slept (a lid, a SIGSTOP), so the processes probably slept too: silence in that time proves nothing.
            for life in self._lives.values():
                life.state = postponed(life.state, late)
        effects: list[Effect] = []
        for life in self._lives.values():
            due = due_at(life, self._settings)
            if due is not None and now >= due:
                effects += self._overdue(life, now)
        return effects

    def _overdue(self, life: Life, now: float) -> list[Effect]:
        state, settings = life.state, self._settings
        match state:
            case Starting(deadline=deadline) if now < deadline:
                life.state = replace(state, next_look_at=now + settings.ping_working_seconds)
                return []
            case Starting(incarnation=incarnation, since=since):
                failure = not_ready_in_time(life.model, now - since, settings)
                stop = climb(life, incarnation, "start_timed_out", "terminate", settings, now, failure)
                stuck = WorkerStuck(model=life.model, incarnation=incarnation, reason=failure.message)
                return [stuck, *fail_waiting(life, failure), stop]
            case Ready(open_requests=count) if count and now >= state.progress_at + settings.hang_seconds:
                reason = f"no engine step for {now - state.progress_at:.0f} s with {count} open request(s)"
                return lose(life, state.incarnation, reason, settings, now)
            case Ready() if (leaves_at := unload_at(life, state, settings)) is not None and now >= leaves_at:
                return drain(life, "unload", settings.drain_seconds, now)
            case Ready():
                if state.suspended_at is not None:  # it reads nothing, and would find them all when it goes on
                    life.state = replace(state, next_ping_at=now + settings.ping_working_seconds)
                    return []
                interval = settings.ping_working_seconds if state.open_requests else settings.ping_idle_seconds
                life.state = replace(state, next_ping_at=now + interval)
                return [PingWorker(model=life.model, incarnation=state.incarnation)]
            case Draining():
                return next_rung(life, state, settings, now)
            case BackingOff():
                life.restarts += 1
                return self._starts.start(life, "normal", now)
            case WaitingForMemory(since=since, waits_for=waits_for):
                life.state = Absent()
                return fail_waiting(life, waited_too_long(life.model, waits_for, now - since))
            case Absent() | GivenUp():
                return []
            case _:
                assert_never(state)

    def _live(self, model: ModelName, incarnation: Incarnation) -> Life | None:
        life = self._lives.get(model)
        return life if life is not None and incarnation_of(life.state) == incarnation else None
