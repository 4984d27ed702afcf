"""Nobody waits without end, however many others come: rows that are full and prompts without end, in every lane."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from protocol.ids import RequestId
from tests.worker.parts import everybody
from worker.pacing import SchedulerSettings
from worker.rows import due_after_seconds
from worker.scheduler import Scheduler
from worker.sequence import Lane, Sequence
from worker.steps import Decode, Idle, Join, Mixed, Open, Park, Preempt, Prefill

I, S, BATCH, WARM = Lane  # noqa: E741 - the lanes in their order
LATECOMER = RequestId("latecomer")


@dataclass(frozen=True)
class Crowd:
    """Prompts of one kind without end: a few wait at any time."""

    lane: Lane
    prompt_tokens: int
    answer_tokens: int
    backlog: int = 3


@dataclass(frozen=True)
class Late:
    """Who comes when the rows are full already."""

    lane: Lane
    prompt_tokens: int
    answer_tokens: int


@dataclass
class Room:
    """Crowds and one latecomer before the real scheduler, on a machine with these costs. Watches what was promised."""

    crowds: list[Crowd]
    late: Late
    settings: SchedulerSettings
    token_seconds: float
    step_seconds: float
    row_seconds: float
    now: float = 0.0
    came: int = 0
    rows_given: int = 0
    left: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    ended: Counter[RequestId] = field(default_factory=Counter[RequestId])
    starts: Counter[Lane] = field(default_factory=Counter[Lane])
    due_at_row: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    """By when (in rows given) who is due has one."""
    waits_since: dict[RequestId, float] = field(default_factory=dict[RequestId, float])
    """Of the highest class, while lower ones have rows: since when, with no other of it before."""
    slices_of_others: int = 0
    """Since the latecomer's last, while its prompt was the oldest of its lane in prefill."""
    longest_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.settings)

    def come(self, name: RequestId, lane: Lane, prompt_tokens: int, answer_tokens: int) -> None:
        self.left[name] = answer_tokens
        self.scheduler.add(
            Sequence(
                request_id=name,
                prompt_tokens=prompt_tokens,
                arrived=self.now,
                lane=lane,
                tenant="late" if name == LATECOMER else "crowd",
                max_tokens=answer_tokens,
            )
        )

    def fill(self) -> None:
        waiting = Counter(s.lane for s in everybody(self.scheduler) if not s.is_open)
        for crowd in self.crowds:
            for _ in range(crowd.backlog - waiting[crowd.lane]):
                self.came += 1
                self.come(RequestId(str(self.came)), crowd.lane, crowd.prompt_tokens, crowd.answer_tokens)

    def spend(self, seconds: float) -> None:
        self.now += seconds
        self.longest_seconds = max(self.longest_seconds, seconds)

    def decoding(self) -> list[Sequence]:
        return [*self.scheduler.places.decoding.values()]

    def parked(self) -> list[Sequence]:
        waits = (s for s in everybody(self.scheduler) if s.is_open and s.prefill_left == 0)
        return [s for s in waits if s.request_id not in self.scheduler.places.decoding]

    def step(self) -> None:
        made = self.scheduler
        self.watch_slices()
        rows = [s.request_id for s in self.decoding()]
        step_seconds = self.step_seconds + self.row_seconds * len(rows)
        match step := made.next_step(self.now):
            case Open(request_id=name):
                self.starts[self.sequence(name).lane] += 1
                made.opened(name, 0, self.now)
            case Prefill(request_id=name, tokens=tokens):
                self.slices_of_others = 0 if name == LATECOMER else self.slices_of_others + 1
                seconds = tokens * self.token_seconds
                self.spend(seconds)
                made.prefilled(step, seconds, self.now)
            case Mixed(request_id=name, tokens=tokens):
                self.slices_of_others = 0 if name == LATECOMER else self.slices_of_others + 1
                seconds = tokens * self.token_seconds + step_seconds
                self.spend(seconds)
                made.mixed(step, seconds, self.now)
                self.drew(rows)
            case Decode():
                self.spend(step_seconds)
                made.decoded(step_seconds, len(rows))
                self.drew(rows)
            case Join(request_id=name):
                made.joined(name, self.now)
                self.rows_given += 1
                self.due_at_row.pop(name, None)
                self.waits_since.clear()
            case Park(request_id=name):
                made.parked(name, self.now)
            case Preempt() | Idle():
                raise AssertionError(f"there is memory, and always somebody to serve: {step}")
        made.check()

    def sequence(self, name: RequestId) -> Sequence:
        known = self.scheduler.get(name)
        assert known is not None
        return known

    def drew(self, rows: list[RequestId]) -> None:
        for name in rows:
            self.left[name] -= 1
            self.scheduler.drew(name)
            if self.left[name] <= 0:
                self.scheduler.remove(name)
                self.ended[name] += 1

    def watch_rows(self) -> None:
        """Who is due has a row when two were given for each that could be due before it; and one of the highest class
        does not wait for a stint and a step for a row that a lower class has."""
        parked, decoding = self.parked(), self.decoding()
        for sequence in parked:
            name = sequence.request_id
            if self.now - sequence.parked_since >= due_after_seconds(self.settings, sequence.lane):
                self.due_at_row.setdefault(name, self.rows_given + 2 * (len(parked) + len(decoding)))
                assert self.rows_given <= self.due_at_row[name], f"{name} was due and others got rows"
        highest = min((s.lane for s in parked), default=WARM)
        if any(s.lane > highest for s in decoding):
            for sequence in parked:
                if sequence.lane is highest:
                    since = self.waits_since.setdefault(sequence.request_id, self.now)
                    allowed = self.settings.stint_seconds + 2 * self.longest_seconds
                    assert self.now - since <= allowed, "a lower class keeps its row"
        else:
            self.waits_since.clear()

    def watch_slices(self) -> None:
        """Of a lane that can run slices every seventeenth is its own, and of these every fourth its oldest prompt's. A
        third class takes one of eighteen."""
        in_prefill = [s for s in everybody(self.scheduler) if s.is_open and s.prefill_left > 0]
        oldest = min((s for s in in_prefill if s.lane is self.late.lane), key=lambda s: s.arrived, default=None)
        if oldest is None or oldest.request_id != LATECOMER:
            self.slices_of_others = 0
        allowed = (self.settings.lower_lane_every + 2) * self.settings.oldest_every
        assert self.slices_of_others <= allowed, "it has begun, and gets no slice"

    def run_until_the_latecomer_ends(self, *, most_steps: int) -> None:
        for _ in range(60):  # until rows are full
            self.fill()
            self.step()
        self.come(LATECOMER, self.late.lane, self.late.prompt_tokens, self.late.answer_tokens)
        before = self.starts[self.late.lane]
        older = sum(s.lane is self.late.lane and not s.is_open for s in everybody(self.scheduler))
        for _ in range(most_steps):
            self.fill()
            self.step()
            self.watch_rows()
            latecomer = self.scheduler.get(LATECOMER)
            if latecomer is None:
                break
            if not latecomer.is_open:
                started = self.starts[self.late.lane] - before
                assert started < older * self.settings.oldest_every, "its lane starts others for ever"
        assert self.ended[LATECOMER] == 1, f"it waits since {most_steps} steps"
        assert set(self.ended.values()) == {1}


ANSWERED = st.sampled_from([I, S, BATCH])
CROWDS = st.lists(
    st.builds(
        Crowd,
        lane=ANSWERED,
        prompt_tokens=st.sampled_from([2, 50, 400, 1500]),
        answer_tokens=st.integers(1, 60),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda crowd: crowd.lane,
)
LATECOMERS = st.builds(Late, lane=ANSWERED, prompt_tokens=st.integers(1, 600), answer_tokens=st.integers(1, 20))


@given(
    CROWDS,
    LATECOMERS,
    st.integers(1, 4),
    st.sampled_from(["apart", "mixed"]),
    st.sampled_from([1e-4, 1e-3]),
    st.sampled_from([0.05, 0.2]),
    st.sampled_from([0.0, 0.05]),
)
@example([Crowd(I, 50, 60)], Late(BATCH, 500, 10), 4, "mixed", 1e-3, 0.05, 0.0)
@example([Crowd(S, 50, 60)], Late(BATCH, 500, 10), 1, "apart", 1e-3, 0.05, 0.0)
@example([Crowd(I, 50, 60), Crowd(S, 50, 60)], Late(BATCH, 500, 10), 2, "mixed", 1e-3, 0.05, 0.0)
@example([Crowd(S, 1500, 20)], Late(S, 30_000, 10), 1, "mixed", 1e-3, 0.05, 0.0)
@example([Crowd(I, 1500, 1)], Late(BATCH, 1, 1), 1, "mixed", 1e-3, 0.05, 0.05)
def test_however_many_others_come_everybody_ends(
    crowds: list[Crowd],
    late: Late,
    max_rows: int,
    slices: str,
    token_seconds: float,
    step_seconds: float,
    row_seconds: float,
) -> None:
    """Endless prompts of any lanes, rows that are always full: who comes then starts, gets rows and ends, once; each
    that is due gets its row; a class does not wait for a lower one's rows but for a stint."""
    room = Room(
        crowds,
        late,
        SchedulerSettings(
            max_rows=max_rows,
            slices="mixed" if slices == "mixed" else "apart",
            first_rate_tokens_per_second=1 / token_seconds,
        ),
        token_seconds,
        step_seconds,
        row_seconds,
    )
    room.run_until_the_latecomer_ends(most_steps=20_000)
