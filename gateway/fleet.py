"""The life of every worker process, decided: events in, effects out. Owned by the dispatch task.

One process per model, however many ask. A crash costs one restart; crashes in a row cost patience; too many of them
close the model for a while. A process is asked to go before it is told, and killed only when it has proved deaf.
"""

from typing import Literal, assert_never

from msgspec import Struct
from msgspec.structs import replace

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
    Rung,
    ShutdownAsked,
    Starting,
    StartKind,
    StartWorker,
    StopAsked,
    StopPurpose,
    StopWorker,
    TimerFired,
    WaitersLeft,
    WaitingForMemory,
    WakeAt,
    WorkChanged,
    WorkerExited,
    WorkerHello,
    WorkerLost,
    WorkerReady,
    WorkerState,
    WorkerStuck,
)
from gateway.residency import Fits, FitsAfter, NeverFits, Resident, need_of, room_for, waited_too_long
from protocol.failures import Failure, FailureKind
from protocol.handshake import Refused, Welcome, answer_hello
from protocol.ids import Incarnation, ModelName
from protocol.model_kind import ModelKind

_GIB = 1024**3

_HOPELESS = frozenset({FailureKind.MODEL_UNAVAILABLE, FailureKind.UNSUPPORTED})
"""Last words of a load that the next load would repeat: the folder is broken, or the model is not known."""


class _Life(Struct, kw_only=True):
    """What the fleet remembers of one model, whatever process it has."""

    state: WorkerState = Absent()
    weight_bytes: int = 0
    kind: ModelKind = "generation"
    waiting_since: float | None = None
    crashes: list[float] = []
    attempts: int = 0
    restarts: int = 0


class Fleet:
    """Every model's process. `handle` is the only way in; the properties are for whoever reports."""

    def __init__(self, settings: FleetSettings, first_incarnation: int = 1) -> None:
        self._settings = settings
        self._next_incarnation = Incarnation(first_incarnation)
        self._lives: dict[ModelName, _Life] = {}
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
        return _incarnation(self.state(model))

    def residents(self) -> tuple[Resident, ...]:
        """Who has memory, or waits for it."""
        found = (self._resident(model, life, None) for model, life in self._lives.items())
        return tuple(resident for resident in found if resident is not None)

    def stuck_reason(self, model: ModelName, now: float) -> str | None:
        """Why this model's work does not move, in words, when it has not moved for half of its limit or longer."""
        match self.state(model):
            case Ready(open_requests=count, progress_at=at) if count and now - at >= self._settings.hang_seconds / 2:
                return (
                    f"{count} open request(s), no engine step for {now - at:.0f} s; "
                    f"the process is restarted at {self._settings.hang_seconds:.0f} s"
                )
            case Draining(purpose="lost", since=since):
                return f"the process hung and is being stopped since {now - since:.0f} s"
            case Draining(rung="stranded"):
                return "the process does not die, even by SIGKILL; restarting the machine frees its memory"
            case _:
                return None

    # --- deciding --------------------------------------------------------------------------------------------------

    def handle(self, event: FleetEvent, now: float) -> list[Effect]:
        """What follows from one event. Events of a process that is not the model's live one have no effect."""
        effects = [*self._decide(event, now), *self._give_memory(now)]
        wake_at = min(
            (due for model, life in self._lives.items() if (due := self._due(model, life)) is not None), default=None
        )
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
            case WorkChanged():
                return self._work_changed(event, now)
            case PongReceived():
                return self._pong(event, now)
            case WorkerLost(model=model, incarnation=incarnation, reason=reason):
                life = self._live(model, incarnation)
                if life is None or isinstance(life.state, Draining):
                    return []
                return self._lose(model, life, incarnation, reason, "retry", now)
            case WorkerExited():
                return self._exited(event, now)
            case TimerFired():
                return self._timer(now)
            case StopAsked(model=model):
                return self._stop_asked(model, now)
            case AdmissionClosed():
                self._closing = True
                return [effect for model, life in self._lives.items() for effect in self._close(model, life, now)]
            case ShutdownAsked(drain_seconds=drain_seconds):
                self._closing = True
                return [
                    effect
                    for model, life in self._lives.items()
                    for effect in (
                        *self._close(model, life, now),
                        *self._drain(model, life, "shutdown", drain_seconds, now),
                    )
                ]
            case _:
                assert_never(event)

    # --- one event each --------------------------------------------------------------------------------------------

    def _wanted(self, event: ModelWanted, now: float) -> list[Effect]:
        model = event.model
        life = self._lives.setdefault(model, _Life())
        if event.weight_bytes:
            life.weight_bytes, life.kind = event.weight_bytes, event.kind
        if self._closing:
            return [FailWaiting(model=model, failure=shutting_down())]
        match life.state:
            case Absent():
                life.waiting_since = now
                return self._start(model, life, "normal", now)
            case Ready(incarnation=incarnation):
                self._has_work(life, life.state.open_requests or 1, now)  # the exact number follows its release
                return [ReleaseWaiting(model=model, incarnation=incarnation)]
            case GivenUp(until=until) if now >= until:
                life.waiting_since = now
                return self._start(model, life, "half_open", now)
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

    def _hello(self, event: WorkerHello, now: float) -> list[Effect]:
        hello = event.hello
        answer = answer_hello(hello, expected=self.incarnation(hello.model))
        effects: list[Effect] = [AnswerHello(incarnation=hello.incarnation, answer=answer)]
        life = self._live(hello.model, hello.incarnation)
        if isinstance(answer, Welcome) or life is None or not isinstance(life.state, (Starting, Ready)):
            return effects
        # It would say the same after every restart, so it is no crash to be retried.
        effects += self._refuse(hello.model, life, answer, now)
        return effects

    def _refuse(self, model: ModelName, life: _Life, refused: Refused, now: float) -> list[Effect]:
        failure = Failure(
            kind=FailureKind.MODEL_UNAVAILABLE,
            message=f"model {model} cannot be started: {refused.reason}; the operator must restart mlxd",
            retry_after_seconds=self._settings.given_up_seconds,
        )
        incarnation = _incarnation(life.state)
        if incarnation is None:
            return []
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
        return self._fail_waiting(model, life, failure)

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
        )
        life.weight_bytes = event.limits.weight_bytes
        life.waiting_since = None
        self._has_work(life, 1, now)  # until those who waited were released, it must not leave again
        return [ReleaseWaiting(model=event.model, incarnation=event.incarnation)]

    def _work_changed(self, event: WorkChanged, now: float) -> list[Effect]:
        life = self._live(event.model, event.incarnation)
        if life is not None:
            self._has_work(life, event.open_requests, now)
        return []

    def _has_work(self, life: _Life, open_requests: int, now: float) -> None:
        state = life.state
        if not isinstance(state, Ready):
            return
        began = state.open_requests == 0 and open_requests > 0
        life.state = replace(
            state,
            open_requests=open_requests,
            idle_since=now,
            progress_at=now if began else state.progress_at,
            next_ping_at=min(state.next_ping_at, now + self._settings.ping_working_seconds)
            if open_requests
            else state.next_ping_at,
        )

    def _pong(self, event: PongReceived, now: float) -> list[Effect]:
        life = self._live(event.model, event.incarnation)
        if life is not None and isinstance(life.state, Ready) and event.steps > life.state.steps:
            life.state = replace(life.state, steps=event.steps, progress_at=now)
        return []

    def _exited(self, event: WorkerExited, now: float) -> list[Effect]:
        model = event.model
        life = self._live(model, event.incarnation)
        if life is None:
            return []
        state = life.state
        failure = shutting_down() if self._closing else _died(event)
        died = FailOpen(model=model, incarnation=event.incarnation, failure=failure)
        if self._closing:
            life.state = Absent()
            return [died, *self._fail_waiting(model, life, shutting_down())]
        match state:
            case Draining(purpose="refused" | "start_timed_out", failure=Failure() as failure):
                return [died, *self._give_up(model, life, failure, now)]
            case Draining(purpose="unload" | "shutdown"):
                life.state = Absent()
                if life.waiting_since is None:
                    return [died]
                return [died, *self._start(model, life, "normal", now)]
            case _:
                return [replace(died, unanswered="retry"), *self._crashed(event, life, now)]

    def _crashed(self, event: WorkerExited, life: _Life, now: float) -> list[Effect]:
        model, state, settings = event.model, life.state, self._settings
        if isinstance(state, Ready) and now - state.since >= settings.stable_seconds:
            life.attempts = 0
        half_open = isinstance(state, Starting) and state.kind == "half_open"
        half_open |= isinstance(state, Ready) and state.kind == "half_open" and life.attempts > 0
        served = isinstance(state, (Ready, Draining))
        life.crashes = [at for at in life.crashes if now - at < settings.crash_window_seconds] + [now]
        life.attempts += 1
        count = len(life.crashes)
        hopeless = isinstance(state, Starting) and event.last_words is not None and event.last_words.kind in _HOPELESS
        recorded = CrashRecorded(
            model=model, incarnation=event.incarnation, crashes_in_window=count, then="stays_absent"
        )
        if half_open or hopeless or count >= settings.crash_limit:
            failure = self._crash_failure(event, count)
            return [replace(recorded, then="gives_up"), *self._give_up(model, life, failure, now)]
        if life.waiting_since is None and not served:
            life.state = Absent()
            return [recorded]
        if life.attempts == 1 and served:
            life.restarts += 1
            return [replace(recorded, then="restarts"), *self._start(model, life, "normal", now)]
        delay = backoff_seconds(life.attempts, settings)
        life.state = BackingOff(since=now, until=now + delay, attempts=life.attempts)
        return [replace(recorded, then="backs_off")]

    def _crash_failure(self, event: WorkerExited, count: int) -> Failure:
        settings = self._settings
        what = f"its process ended {count} time(s) within {settings.crash_window_seconds:.0f} s, last by {_how(event)}"
        if event.last_words is not None:
            what += f": {event.last_words.message}"
        return Failure(
            kind=FailureKind.MODEL_UNAVAILABLE,
            message=f"model {event.model} is not available: {what}. It is tried again when asked for after "
            f"{settings.given_up_seconds:.0f} s; the server's owner sees more with `mlxd status`",
            retry_after_seconds=settings.given_up_seconds,
        )

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
                return self._fail_waiting(model, life, _unloaded(model))
            case Draining():
                return []
            case Starting(incarnation=incarnation):
                return [
                    *self._fail_waiting(model, life, _unloaded(model)),
                    self._climb(model, life, incarnation, "unload", "terminate", now),
                ]
            case Ready():
                return self._drain(model, life, "unload", self._settings.drain_seconds, now)
            case _:
                assert_never(life.state)

    def _close(self, model: ModelName, life: _Life, now: float) -> list[Effect]:
        """Admission is closed: a process that serves may go on, everything else about this model ends."""
        effects = self._fail_waiting(model, life, shutting_down())
        match life.state:
            case Starting(incarnation=incarnation):
                # It has no work and nothing to save, so it is not asked to drain.
                effects.append(self._climb(model, life, incarnation, "shutdown", "terminate", now))
            case BackingOff() | GivenUp() | WaitingForMemory():
                life.state = Absent()
            case Absent() | Ready() | Draining():
                pass
            case _:
                assert_never(life.state)
        return effects

    def _drain(
        self, model: ModelName, life: _Life, purpose: StopPurpose, drain_seconds: float, now: float
    ) -> list[Effect]:
        if isinstance(life.state, Draining) and life.state.rung == "drain":
            life.state = replace(life.state, deadline=min(life.state.deadline, now + drain_seconds))
        if not isinstance(life.state, Ready):
            return []
        incarnation = life.state.incarnation
        life.state = Draining(
            incarnation=incarnation,
            since=now,
            deadline=now + drain_seconds,
            purpose=purpose,
            rung="drain",
            weight_bytes=life.weight_bytes,
        )
        return [StopWorker(model=model, incarnation=incarnation, how="drain", within_seconds=drain_seconds)]

    # --- time ------------------------------------------------------------------------------------------------------

    def _due(self, model: ModelName, life: _Life) -> float | None:
        match life.state:
            case Absent() | GivenUp():
                return None
            case Starting(deadline=deadline):
                return deadline
            case Ready(next_ping_at=next_ping_at, progress_at=progress_at) if life.state.open_requests:
                return min(next_ping_at, progress_at + self._settings.hang_seconds)
            case Ready(next_ping_at=next_ping_at):
                return min(next_ping_at, self._unload_at(model, life.state) or next_ping_at)
            case WaitingForMemory(until=until):
                return until
            case Draining(rung="stranded"):
                return None
            case Draining(deadline=deadline):
                return deadline
            case BackingOff(until=until):
                return until
            case _:
                assert_never(life.state)

    def _timer(self, now: float) -> list[Effect]:
        late = now - self._wake_at if self._wake_at is not None else 0.0
        if late > self._settings.late_seconds:
            # We slept (a lid, a SIGSTOP), so the processes probably slept too: silence in that time proves nothing.
            for life in self._lives.values():
                life.state = _postponed(life.state, late)
        effects: list[Effect] = []
        for model, life in self._lives.items():
            due = self._due(model, life)
            if due is not None and now >= due:
                effects += self._overdue(model, life, now)
        return effects

    def _overdue(self, model: ModelName, life: _Life, now: float) -> list[Effect]:
        state = life.state
        match state:
            case Starting(incarnation=incarnation, since=since):
                failure = Failure(
                    kind=FailureKind.MODEL_UNAVAILABLE,
                    message=f"model {model} was not ready {now - since:.0f} s after its start; "
                    "if it only loads slowly, the operator can raise load_timeout_seconds in mlxd.toml",
                    retry_after_seconds=self._settings.given_up_seconds,
                )
                stop = self._climb(model, life, incarnation, "start_timed_out", "terminate", now, failure)
                stuck = WorkerStuck(model=model, incarnation=incarnation, reason=failure.message)
                return [stuck, *self._fail_waiting(model, life, failure), stop]
            case Ready(open_requests=count) if count and now >= state.progress_at + self._settings.hang_seconds:
                reason = f"no engine step for {now - state.progress_at:.0f} s with {count} open request(s)"
                return self._lose(model, life, state.incarnation, reason, "fail", now)
            case Ready() if (unload_at := self._unload_at(model, state)) is not None and now >= unload_at:
                return self._drain(model, life, "unload", self._settings.drain_seconds, now)
            case Ready():
                settings = self._settings
                interval = settings.ping_working_seconds if state.open_requests else settings.ping_idle_seconds
                life.state = replace(state, next_ping_at=now + interval)
                return [PingWorker(model=model, incarnation=state.incarnation)]
            case Draining():
                return self._next_rung(model, life, state, now)
            case BackingOff():
                life.restarts += 1
                return self._start(model, life, "normal", now)
            case WaitingForMemory(since=since, waits_for=waits_for):
                life.state = Absent()
                return self._fail_waiting(model, life, waited_too_long(model, waits_for, now - since))
            case Absent() | GivenUp():
                return []
            case _:
                assert_never(state)

    # --- memory ----------------------------------------------------------------------------------------------------

    def _start(self, model: ModelName, life: _Life, kind: StartKind, now: float) -> list[Effect]:
        """Start a process, at once or when there is room for it."""
        terms = self._settings.memory
        need = need_of(life.weight_bytes, terms, life.kind)
        verdict = room_for(model, need.total_bytes, self._residents(model, life), terms)
        match verdict:
            case Fits():
                return [self._spawn(model, life, kind, now)]
            case FitsAfter(evict=evict, waits_for=waits_for):
                since = life.state.since if isinstance(life.state, WaitingForMemory) else now
                until = since + terms.wait_seconds
                life.state = WaitingForMemory(since=since, until=until, waits_for=waits_for, kind=kind)
                drain_seconds = self._settings.drain_seconds
                return [
                    effect
                    for other in evict
                    for effect in self._drain(other, self._lives[other], "unload", drain_seconds, now)
                ]
            case NeverFits(failure=failure):
                life.state = Absent()
                return self._fail_waiting(model, life, failure)
            case _:
                assert_never(verdict)

    def _give_memory(self, now: float) -> list[Effect]:
        """What was freed goes to those who wait, in the order in which they came."""
        waiting: list[tuple[float, ModelName]] = [
            (life.state.since, model) for model, life in self._lives.items() if isinstance(life.state, WaitingForMemory)
        ]
        effects: list[Effect] = []
        for _, model in sorted(waiting):
            life = self._lives[model]
            if isinstance(life.state, WaitingForMemory):
                effects += self._start(model, life, life.state.kind, now)
        return effects

    def _residents(self, model: ModelName, life: _Life) -> list[Resident]:
        """Who has memory, or waits for it and came before this one."""
        since = life.state.since if isinstance(life.state, WaitingForMemory) else None
        return [
            resident
            for other, its in self._lives.items()
            if other != model and (resident := self._resident(other, its, since)) is not None
        ]

    def _resident(self, model: ModelName, life: _Life, before: float | None) -> Resident | None:
        terms = self._settings.memory
        resident = Resident(
            model=model,
            need_bytes=need_of(life.weight_bytes, terms, life.kind).total_bytes,
            state="loading",
            is_pinned=model in terms.pinned,
        )
        match life.state:
            case Starting():
                return resident
            case Ready(open_requests=0, idle_since=idle_since):
                return replace(resident, state="serving", idle_since=idle_since)
            case Ready():
                return replace(resident, state="serving")
            case Draining():
                return replace(resident, state="leaving")
            case WaitingForMemory(since=since) if before is None or since < before:
                return replace(resident, state="waiting")
            case WaitingForMemory() | Absent() | BackingOff() | GivenUp():
                return None
            case _:
                assert_never(life.state)

    def _unload_at(self, model: ModelName, state: Ready) -> float | None:
        """When a model without work leaves by itself."""
        terms = self._settings.memory
        if terms.unload_after_seconds is None or state.open_requests or model in terms.pinned:
            return None
        return state.idle_since + terms.unload_after_seconds

    # --- the ladder ------------------------------------------------------------------------------------------------

    def _next_rung(self, model: ModelName, life: _Life, state: Draining, now: float) -> list[Effect]:
        match state.rung:
            case "drain":
                effects: list[Effect] = []
                if state.purpose == "unload":
                    failure = _unloaded(model)
                    effects.append(FailOpen(model=model, incarnation=state.incarnation, failure=failure))
                stop = self._climb(model, life, state.incarnation, state.purpose, "terminate", now, state.failure)
                return [*effects, stop]
            case "terminate":
                return [self._climb(model, life, state.incarnation, state.purpose, "kill", now, state.failure)]
            case "kill":
                life.state = replace(state, rung="stranded")
                stuck = WorkerStuck(model=model, incarnation=state.incarnation, reason="SIGKILL did not end it")
                return [stuck, *self._fail_waiting(model, life, stranded(model))]
            case "stranded":
                return []
            case _:
                assert_never(state.rung)

    def _climb(
        self,
        model: ModelName,
        life: _Life,
        incarnation: Incarnation,
        purpose: StopPurpose,
        rung: Rung,
        now: float,
        failure: Failure | None = None,
    ) -> StopWorker:
        """Put the process on a rung. SIGKILL can strand wired memory on macOS, so SIGTERM has long to work."""
        settings = self._settings
        if rung == "kill":
            patience = settings.kill_grace_seconds
        else:
            patience = settings.terminate_grace_seconds + settings.stop_seconds_per_gib * life.weight_bytes / _GIB
        since = life.state.since if isinstance(life.state, Draining) else now
        life.state = Draining(
            incarnation=incarnation,
            since=since,
            deadline=now + patience,
            purpose=purpose,
            rung=rung,
            failure=failure,
            weight_bytes=life.weight_bytes,
        )
        how = "kill" if rung == "kill" else "terminate"
        return StopWorker(model=model, incarnation=incarnation, how=how, within_seconds=patience)

    def _lose(
        self,
        model: ModelName,
        life: _Life,
        incarnation: Incarnation,
        reason: str,
        unanswered: Literal["retry", "fail"],
        now: float,
    ) -> list[Effect]:
        """Its step loop is deaf, so there is no point in asking it to drain; its clients have waited long enough."""
        if isinstance(life.state, Ready) and now - life.state.since >= self._settings.stable_seconds:
            life.attempts = 0
        stop = self._climb(model, life, incarnation, "lost", "terminate", now)
        failure = Failure(
            kind=FailureKind.WORKER_DIED,
            message=f"the process of model {model} stopped working on this request and is being replaced: "
            "send the request again",
            retry_after_seconds=1.0,
        )
        return [
            WorkerStuck(model=model, incarnation=incarnation, reason=reason),
            FailOpen(model=model, incarnation=incarnation, failure=failure, unanswered=unanswered),
            stop,
        ]

    # --- small steps -----------------------------------------------------------------------------------------------

    def _live(self, model: ModelName, incarnation: Incarnation) -> _Life | None:
        life = self._lives.get(model)
        return life if life is not None and _incarnation(life.state) == incarnation else None

    def _spawn(self, model: ModelName, life: _Life, kind: StartKind, now: float) -> StartWorker:
        incarnation = self._next_incarnation
        self._next_incarnation = Incarnation(incarnation + 1)
        settings = self._settings
        patience = settings.start_timeout_seconds + settings.start_seconds_per_gib * life.weight_bytes / _GIB
        life.state = Starting(incarnation=incarnation, since=now, deadline=now + patience, kind=kind)
        return StartWorker(model=model, incarnation=incarnation)

    def _give_up(self, model: ModelName, life: _Life, failure: Failure, now: float) -> list[Effect]:
        life.state = GivenUp(since=now, until=now + self._settings.given_up_seconds, failure=failure)
        return [GaveUp(model=model, failure=failure), *self._fail_waiting(model, life, failure)]

    def _fail_waiting(self, model: ModelName, life: _Life, failure: Failure) -> list[Effect]:
        if life.waiting_since is None:
            return []
        life.waiting_since = None
        return [FailWaiting(model=model, failure=failure)]


def backoff_seconds(attempts: int, settings: FleetSettings) -> float:
    """How long to wait after the `attempts`-th crash in a row: doubling, bounded."""
    doublings = min(attempts - 1, 30)  # bounded, so that the power cannot overflow
    return min(settings.backoff_longest_seconds, settings.backoff_first_seconds * 2.0**doublings)


def shutting_down() -> Failure:
    """The failure of a request that meets a service about to stop."""
    return Failure(
        kind=FailureKind.SHUTTING_DOWN,
        message="the service is stopping; send the request again in a while",
        retry_after_seconds=10.0,
    )


def _incarnation(state: WorkerState) -> Incarnation | None:
    match state:
        case Starting(incarnation=incarnation) | Ready(incarnation=incarnation) | Draining(incarnation=incarnation):
            return incarnation
        case Absent() | WaitingForMemory() | BackingOff() | GivenUp():
            return None
        case _:
            assert_never(state)


def _postponed(state: WorkerState, seconds: float) -> WorkerState:
    match state:
        case Starting() | Draining():
            return replace(state, deadline=state.deadline + seconds)
        case Ready():
            return replace(state, progress_at=state.progress_at + seconds, idle_since=state.idle_since + seconds)
        case WaitingForMemory():
            return replace(state, until=state.until + seconds)
        case Absent() | BackingOff() | GivenUp():
            return state
        case _:
            assert_never(state)


def _how(event: WorkerExited) -> str:
    if event.signal is not None:
        return f"signal {event.signal}"
    return "a failed start" if event.exit_code is None else f"exit code {event.exit_code}"


def _died(event: WorkerExited) -> Failure:
    return Failure(
        kind=FailureKind.WORKER_DIED,
        message=f"the process of model {event.model} ended ({_how(event)}) while it served this request; "
        "it restarts by itself: send the request again",
        retry_after_seconds=1.0,
    )


def _unloaded(model: ModelName) -> Failure:
    return Failure(
        kind=FailureKind.MODEL_UNAVAILABLE,
        message=f"model {model} was unloaded by the operator; send the request again to load it",
        retry_after_seconds=1.0,
    )


def stranded(model: ModelName) -> Failure:
    """The failure of whoever wants a model whose last process survived SIGKILL."""
    return Failure(
        kind=FailureKind.MODEL_UNAVAILABLE,
        message=f"the last process of model {model} does not end, so no new one starts; "
        "the operator must restart the machine",
        retry_after_seconds=60.0,
    )
