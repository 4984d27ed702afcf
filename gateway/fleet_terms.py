"""The words of `gateway.fleet`: what state a model's process is in, what can happen to it, what is to be done."""

from typing import Literal

from msgspec import Struct

from gateway.residency import MemoryTerms
from protocol import generation
from protocol.failures import Failure
from protocol.handshake import Hello, Refused, Welcome
from protocol.ids import Incarnation, ModelName
from protocol.model_kind import ModelKind


class FleetSettings(Struct, frozen=True, kw_only=True):
    """How patient the fleet is. The two `per_gib` figures make big models' deadlines longer by their weight."""

    start_timeout_seconds: float = 300.0
    start_seconds_per_gib: float = 2.0
    stable_seconds: float = 60.0
    backoff_first_seconds: float = 1.0
    backoff_longest_seconds: float = 30.0
    crash_window_seconds: float = 300.0
    crash_limit: int = 3
    given_up_seconds: float = 60.0
    hang_seconds: float = 60.0
    ping_working_seconds: float = 2.0
    ping_idle_seconds: float = 10.0
    drain_seconds: float = 30.0
    terminate_grace_seconds: float = 10.0
    stop_seconds_per_gib: float = 0.1
    kill_grace_seconds: float = 10.0
    late_seconds: float = 5.0
    memory: MemoryTerms = MemoryTerms()


# --- states --------------------------------------------------------------------------------------------------------

StartKind = Literal["normal", "half_open"]
"""`half_open` is the one attempt after giving up: its first crash gives up again."""

StopPurpose = Literal["unload", "shutdown", "lost", "start_timed_out", "refused"]
"""Why a process is being stopped, which decides what follows its exit. `lost`: stuck, unreachable or babbling."""

Rung = Literal["drain", "terminate", "kill", "stranded"]
"""How far up the ladder a stop is. `stranded`: even SIGKILL has not ended it, and nothing more can be done."""


class Absent(Struct, frozen=True, kw_only=True, tag=True):
    """No process, and nobody needs one."""


class WaitingForMemory(Struct, frozen=True, kw_only=True, tag=True):
    """Wanted, and there is no room yet. After `until` those who wait are told."""

    since: float
    until: float
    waits_for: tuple[ModelName, ...]
    kind: StartKind = "normal"


class Starting(Struct, frozen=True, kw_only=True, tag=True):
    """A process loads the model. At `next_look_at` the fleet looks whether somebody holds it; for `suspended_at` see
    Ready."""

    incarnation: Incarnation
    since: float
    deadline: float
    next_look_at: float
    kind: StartKind = "normal"
    suspended_at: float | None = None


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """A process serves. `progress_at` is when its step loop last proved to move, or to have been idle.

    `idle_since` is when its last work ended; it means nothing while there are open requests. `suspended_at` is when it
    was first seen stopped by a signal or a debugger: somebody holds it, so its silence is no fault of its own, and who
    wants the model meanwhile waits until it goes on.
    """

    incarnation: Incarnation
    since: float
    limits: generation.Ready
    progress_at: float
    next_ping_at: float
    idle_since: float
    kind: StartKind = "normal"
    open_requests: int = 0
    steps: int = 0
    suspended_at: float | None = None


class Draining(Struct, frozen=True, kw_only=True, tag=True):
    """A process is being stopped. `failure` is what the model is given up with after its exit, if it is."""

    incarnation: Incarnation
    since: float
    deadline: float
    purpose: StopPurpose
    rung: Rung
    failure: Failure | None = None
    weight_bytes: int = 0


class BackingOff(Struct, frozen=True, kw_only=True, tag=True):
    """The process crashed and the next one starts at `until`."""

    since: float
    until: float
    attempts: int


class GivenUp(Struct, frozen=True, kw_only=True, tag=True):
    """Nothing starts before `until`; after it, one attempt when somebody asks."""

    since: float
    until: float
    failure: Failure


WorkerState = Absent | WaitingForMemory | Starting | Ready | Draining | BackingOff | GivenUp

# --- events --------------------------------------------------------------------------------------------------------


class ModelWanted(Struct, frozen=True, kw_only=True, tag=True):
    """A request waits for this model. Without `weight_bytes`, what was said of it before holds, `kind` too."""

    model: ModelName
    weight_bytes: int = 0
    kind: ModelKind = "generation"


class WaitersLeft(Struct, frozen=True, kw_only=True, tag=True):
    """The last request that waited for this model was cancelled."""

    model: ModelName


class WorkerHello(Struct, frozen=True, kw_only=True, tag=True):
    """A process introduced itself."""

    hello: Hello


class WorkerReady(Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded."""

    model: ModelName
    incarnation: Incarnation
    limits: generation.Ready


class WorkChanged(Struct, frozen=True, kw_only=True, tag=True):
    """How many requests a process has in its hands now."""

    model: ModelName
    incarnation: Incarnation
    open_requests: int


class PongReceived(Struct, frozen=True, kw_only=True, tag=True):
    """The step loop answered; `steps` counts its engine steps."""

    model: ModelName
    incarnation: Incarnation
    steps: int


class WorkerLost(Struct, frozen=True, kw_only=True, tag=True):
    """A process that may well live cannot be worked with: a send failed, or its messages make no sense."""

    model: ModelName
    incarnation: Incarnation
    reason: str


class WorkerExited(Struct, frozen=True, kw_only=True, tag=True):
    """A process ended, or could not be started (then both codes are None and `stderr_tail` says why)."""

    model: ModelName
    incarnation: Incarnation
    exit_code: int | None = None
    signal: int | None = None
    stderr_tail: tuple[str, ...] = ()
    last_words: Failure | None = None


class WorkerSeen(Struct, frozen=True, kw_only=True, tag=True):
    """What the system says of a process: somebody has it stopped, or not any more. Told before each timer for as long
    as it is suspended, and once after."""

    model: ModelName
    incarnation: Incarnation
    condition: Literal["suspended", "continued"]


class TimerFired(Struct, frozen=True, kw_only=True, tag=True):
    """The moment of the latest WakeAt has come."""


class StopAsked(Struct, frozen=True, kw_only=True, tag=True):
    """An operator, or residency, wants this model out of memory. Also forgets its crashes."""

    model: ModelName


class AdmissionClosed(Struct, frozen=True, kw_only=True, tag=True):
    """The service is about to stop: nothing starts any more, what runs may finish."""


class ShutdownAsked(Struct, frozen=True, kw_only=True, tag=True):
    """Every process is to end; each has `drain_seconds` to save what it wants to save."""

    drain_seconds: float


FleetEvent = (
    ModelWanted
    | WaitersLeft
    | WorkerHello
    | WorkerReady
    | WorkChanged
    | PongReceived
    | WorkerLost
    | WorkerExited
    | WorkerSeen
    | TimerFired
    | StopAsked
    | AdmissionClosed
    | ShutdownAsked
)

# --- effects -------------------------------------------------------------------------------------------------------


class StartWorker(Struct, frozen=True, kw_only=True, tag=True):
    """Spawn a process. Its exit must come back as WorkerExited, even when it cannot be spawned."""

    model: ModelName
    incarnation: Incarnation


class StopWorker(Struct, frozen=True, kw_only=True, tag=True):
    """`drain` is a message, `terminate` SIGTERM, `kill` SIGKILL. `within_seconds` is when the next rung follows."""

    model: ModelName
    incarnation: Incarnation
    how: Literal["drain", "terminate", "kill"]
    within_seconds: float


class AnswerHello(Struct, frozen=True, kw_only=True, tag=True):
    """Send the answer to whoever said Hello under that incarnation."""

    incarnation: Incarnation
    answer: Welcome | Refused


class PingWorker(Struct, frozen=True, kw_only=True, tag=True):
    """Ask the step loop how far it is."""

    model: ModelName
    incarnation: Incarnation


class ReleaseWaiting(Struct, frozen=True, kw_only=True, tag=True):
    """Send every request that waits for this model to this process."""

    model: ModelName
    incarnation: Incarnation


class FailWaiting(Struct, frozen=True, kw_only=True, tag=True):
    """End every request that waits for this model."""

    model: ModelName
    failure: Failure


class FailOpen(Struct, frozen=True, kw_only=True, tag=True):
    """End every request that this process had in its hands.

    `unanswered` is for those that have no piece of their answer yet: the next process may try them once.
    """

    model: ModelName
    incarnation: Incarnation
    failure: Failure
    unanswered: Literal["retry", "fail"] = "fail"


class WakeAt(Struct, frozen=True, kw_only=True, tag=True):
    """Fire one timer then; replaces the one asked for before. None: no timer is needed."""

    when: float | None


class CrashRecorded(Struct, frozen=True, kw_only=True, tag=True):
    """Worth a log line: a process ended that should not have. `then` says what follows."""

    model: ModelName
    incarnation: Incarnation
    crashes_in_window: int
    then: Literal["restarts", "backs_off", "gives_up", "stays_absent"]


class WorkerStuck(Struct, frozen=True, kw_only=True, tag=True):
    """Worth a log line: a process is being stopped because it cannot be worked with."""

    model: ModelName
    incarnation: Incarnation
    reason: str


class SuspensionNoted(Struct, frozen=True, kw_only=True, tag=True):
    """Worth a log line, once: a process is held from outside, or was for `seconds` and goes on."""

    model: ModelName
    incarnation: Incarnation
    change: Literal["suspended", "continued"]
    seconds: float = 0.0


class GaveUp(Struct, frozen=True, kw_only=True, tag=True):
    """Worth a log line: requests for this model are refused for a while."""

    model: ModelName
    failure: Failure


Effect = (
    StartWorker
    | StopWorker
    | AnswerHello
    | PingWorker
    | ReleaseWaiting
    | FailWaiting
    | FailOpen
    | WakeAt
    | CrashRecorded
    | WorkerStuck
    | SuspensionNoted
    | GaveUp
)
