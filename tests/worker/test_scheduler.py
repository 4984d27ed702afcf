"""Which step comes next: bounded slices, decode time that is paid back, nobody forgotten."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import BLOCK_TOKENS, RequestId
from worker.scheduler import Decode, Idle, Open, Prefill, Scheduler, SchedulerSettings, Step
from worker.sequence import BooksDoNotAddUp, Sequence

A, B, C = (RequestId(name) for name in "abc")


def sequence(name: RequestId, prompt_tokens: int, *, blocks_deadline: float | None = None) -> Sequence:
    return Sequence(request_id=name, prompt_tokens=prompt_tokens, arrived=0.0, blocks_deadline=blocks_deadline)


def scheduler(*sequences: Sequence, max_rows: int = 4, rate: float = 1000.0) -> Scheduler:
    made = Scheduler(SchedulerSettings(max_rows=max_rows, first_rate_tokens_per_second=rate))
    for each in sequences:
        made.add(each)
    return made


def start_decoding(made: Scheduler, name: RequestId) -> None:
    """Run one added sequence until it decodes, in no time."""
    made.opened(name, 0, 0.0)
    while isinstance(step := made.next_step(0.0), Prefill):
        made.prefilled(step, 0.0, 0.0)
        if (known := made.get(name)) is not None and known.is_decoding:
            return


# --- tables ---------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_idle() -> None:
    """And waits without a limit."""
    assert scheduler().next_step(0.0) == Idle(None)
    assert scheduler().is_empty


def test_a_sequences_way() -> None:
    """Opened, prefilled up to its last token, then decoded until removed."""
    made = scheduler(sequence(A, 101))
    assert made.next_step(0.0) == Open(A)

    made.opened(A, 0, 1.0)
    assert made.next_step(1.0) == Prefill(A, 100)

    made.prefilled(Prefill(A, 100), 0.1, 1.1)
    assert made.next_step(1.1) == Decode()
    assert (made.waiting, made.running) == (0, 1)

    removed = made.remove(A)
    assert removed is not None
    assert removed.slices == 1
    assert made.remove(A) is None
    assert made.next_step(2.0) == Idle(None)


@pytest.mark.parametrize(("prompt_tokens", "cached"), [(1, 0), (257, 256), (17, 16)])
def test_with_nothing_left_to_prefill_the_row_only_joins(prompt_tokens: int, cached: int) -> None:
    """K01: a full hit, or a prompt of one token; the last token is decode's."""
    made = scheduler(sequence(A, prompt_tokens))
    made.opened(A, cached, 0.0)

    assert made.next_step(0.0) == Prefill(A, 0)
    made.prefilled(Prefill(A, 0), 0.0, 0.0)
    assert made.next_step(0.0) == Decode()
    known = made.get(A)
    assert known is not None
    assert known.slices == 0


def test_one_that_waits_for_the_disk_lets_others_by() -> None:
    """Until its blocks came, or its deadline passed."""
    made = scheduler(sequence(A, 50, blocks_deadline=5.0), sequence(B, 50))
    assert made.next_step(0.0) == Open(B)
    made.remove(B)
    assert made.next_step(0.0) == Idle(5.0)
    assert made.next_step(5.0) == Open(A)

    made.blocks_arrived(RequestId("unknown"))
    made.blocks_arrived(A)
    assert made.next_step(0.0) == Open(A)


def test_a_started_prompt_goes_on_before_another_starts() -> None:
    """Half-done prompts hold memory and help nobody."""
    made = scheduler(sequence(A, 5000, blocks_deadline=9.0), sequence(B, 5000))
    made.opened(B, 0, 0.0)
    made.blocks_arrived(A)

    step = made.next_step(0.0)

    assert isinstance(step, Prefill)
    assert step.request_id == B


def test_no_prompt_starts_without_a_free_row() -> None:
    """It would hold its KV and wait."""
    made = scheduler(sequence(A, 2), sequence(B, 2), max_rows=1)
    start_decoding(made, A)

    assert made.next_step(0.0) == Decode()
    made.remove(A)
    assert made.next_step(0.0) == Open(B)


@pytest.mark.parametrize(
    ("prefilled", "left", "rate", "expected"),
    [
        (0, 10_000, 1000.0, 200),  # target 0.2 s; no grid line inside
        (0, 10_000, 1500.0, 256),  # 300 → the grid, which costs 44
        (0, 10_000, 2000.0, 256),  # 400 → 144 beyond is less than half of 400
        (0, 10_000, 2600.0, 512),  # 520
        (0, 10_000, 2550.0, 256),  # 510: the grid costs 254, just under the half
        (200, 10_000, 1000.0, 200),  # ends at 400: 144 beyond would cost too much
        (200, 10_000, 500.0, 56),  # ends at 300: 44 beyond of 100
        (0, 30, 1000.0, 30),  # all that is left
        (0, 10_000, 1.0, 16),  # the floor
        (0, 100_000, 1e9, 2048),  # the ceiling
    ],
)
def test_slices(prefilled: int, left: int, rate: float, expected: int) -> None:
    """Seconds times rate, ending on the block grid where that is cheap, between floor and ceiling."""
    made = scheduler(sequence(A, 2), sequence(B, prefilled + left + 1), rate=rate)
    start_decoding(made, A)
    made.opened(B, prefilled, 0.0)

    assert made.next_step(0.0) == Prefill(B, expected)


def test_a_slice_that_delays_nobody_may_be_longer() -> None:
    """The target beside decoding rows is 0.2 s, alone 1 s."""
    made = scheduler(sequence(A, 10_000), rate=100.0)
    made.opened(A, 0, 0.0)

    assert made.next_step(0.0) == Prefill(A, 100)


def test_a_slice_is_paid_back_in_decode_time() -> None:
    """Share one half: as many seconds of decode as the slice took, before the next slice."""
    made = scheduler(sequence(A, 2), sequence(B, 10_000))
    start_decoding(made, A)
    made.opened(B, 0, 0.0)
    step = made.next_step(0.0)
    assert isinstance(step, Prefill)
    made.prefilled(step, 0.2, 0.2)

    seconds = 0.0
    while made.next_step(1.0) == Decode():
        made.decoded(0.03)
        seconds += 0.03

    assert seconds == pytest.approx(0.21)
    assert made.debt_seconds == 0


def test_a_debt_to_nobody_is_no_debt() -> None:
    """The last decoding row is gone: the next slice comes at once."""
    made = scheduler(sequence(A, 2), sequence(B, 10_000))
    start_decoding(made, A)
    made.opened(B, 0, 0.0)
    made.prefilled(Prefill(B, 100), 9.0, 9.0)
    made.remove(A)

    assert isinstance(made.next_step(9.0), Prefill)


def test_next_step_changes_nothing() -> None:
    """It may be asked twice."""
    made = scheduler(sequence(A, 700), sequence(B, 30))
    assert [made.next_step(0.0) for _ in range(3)] == [Open(A)] * 3


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_a_clock_that_stood_still_breaks_nothing(seconds: float) -> None:
    """A slice of no measurable time says nothing about the rate."""
    made = scheduler(sequence(A, 10_000))
    made.opened(A, 0, 0.0)
    made.prefilled(Prefill(A, 100), seconds, 0.0)

    step = made.next_step(0.0)
    assert isinstance(step, Prefill)
    assert 0 < step.tokens <= 2048


def test_broken_books_are_noticed() -> None:
    """`check` names the law."""
    made = scheduler(sequence(A, 10))
    known = made.get(A)
    assert known is not None
    known.prefilled = 11

    with pytest.raises(BooksDoNotAddUp, match="waiting means"):
        made.check()


# --- a simulated machine --------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Costs: seconds of a prefill token (growing with the context), of a decode step."""

    token_seconds: float
    context_factor: float
    decode_seconds: float

    def prefill(self, tokens: int, context: int) -> float:
        return tokens * self.token_seconds * (1 + self.context_factor * context / 1000)


@dataclass
class Arrival:
    at_step: int
    prompt_tokens: int
    cached_part: float
    answer_tokens: int
    waits_seconds: float | None
    cancelled_at_step: int | None


MACHINES = st.builds(
    Machine,
    token_seconds=st.floats(1e-5, 5e-2),
    context_factor=st.floats(0, 1),
    decode_seconds=st.floats(1e-3, 0.3),
)
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 60),
        prompt_tokens=st.integers(1, 3000),
        cached_part=st.sampled_from([0, 0.3, 0.9, 1]),
        answer_tokens=st.integers(1, 30),
        waits_seconds=st.none() | st.floats(0, 5),
        cancelled_at_step=st.none() | st.integers(0, 200),
    ),
    max_size=8,
)


def simulate(
    machine: Machine, arrivals: list[Arrival], max_rows: int, watch: Callable[[Scheduler, Step], None]
) -> set[int]:
    """Run to the end; returns who finished. Raises when a step is no progress."""
    made = scheduler(max_rows=max_rows, rate=256.0)
    now, steps = 0.0, 0
    left = {i: arrival.answer_tokens for i, arrival in enumerate(arrivals)}
    todo = sorted(enumerate(arrivals), key=lambda pair: pair[1].at_step)
    finished: set[int] = set()
    gone: set[int] = set()
    while True:
        while todo and (todo[0][1].at_step <= steps or made.is_empty):
            index, arrival = todo.pop(0)
            deadline = None if arrival.waits_seconds is None else now + arrival.waits_seconds
            made.add(sequence(RequestId(str(index)), arrival.prompt_tokens, blocks_deadline=deadline))
        for index, arrival in enumerate(arrivals):
            is_cancelled = arrival.cancelled_at_step == steps and index not in finished
            if is_cancelled and made.remove(RequestId(str(index))) is not None:
                gone.add(index)
        if made.is_empty and not todo:
            return finished | gone
        step = made.next_step(now)
        watch(made, step)
        made.check()
        match step:
            case Open(request_id=name):
                known = made.get(name)
                assert known is not None
                made.opened(name, int(known.prefill_total * arrivals[int(name)].cached_part), now)
            case Prefill(request_id=name, tokens=tokens):
                known = made.get(name)
                assert known is not None
                seconds = machine.prefill(tokens, known.prefilled)
                now += seconds
                made.prefilled(step, seconds, now)
            case Decode():
                now += machine.decode_seconds
                made.decoded(machine.decode_seconds)
                for name in [each.request_id for each in made.sequences() if each.is_decoding]:
                    left[int(name)] -= 1
                    if left[int(name)] == 0:
                        made.remove(name)
                        finished.add(int(name))
            case Idle(until=until):
                assert until is not None or made.is_empty, "idle for ever with work to do"
                now = max(now, until or now)
        steps += 1
        assert steps < 20_000


@given(MACHINES, ARRIVALS, st.integers(1, 4))
def test_everybody_gets_to_the_end(machine: Machine, arrivals: list[Arrival], max_rows: int) -> None:
    """Whatever the costs and the order, every sequence that was not cancelled is decoded to its end."""
    done = simulate(machine, arrivals, max_rows, lambda *_: None)

    assert done == set(range(len(arrivals)))


@given(MACHINES, ARRIVALS, st.integers(1, 4))
def test_a_slice_is_what_the_target_allows(machine: Machine, arrivals: list[Arrival], max_rows: int) -> None:
    """At most target times rate tokens (or the floor), inside the prompt; on the grid where that costs under a half."""

    def watch(made: Scheduler, step: Step) -> None:
        if not isinstance(step, Prefill):
            return
        known = made.get(step.request_id)
        assert known is not None
        target = 0.2 if made.running else 1.0
        allowed = min(max(16, int(target * made._rate)), 2048)
        assert 0 <= step.tokens <= min(allowed, known.prefill_left)
        assert step.tokens > 0 or known.prefill_left == 0
        if step.tokens < known.prefill_left and step.tokens != allowed:
            assert (known.prefilled + step.tokens) % BLOCK_TOKENS == 0
            assert step.tokens > allowed / 2

    simulate(machine, arrivals, max_rows, watch)


@given(MACHINES, ARRIVALS, st.integers(1, 4))
def test_neither_prefill_nor_decode_starves(machine: Machine, arrivals: list[Arrival], max_rows: int) -> None:
    """Between two slices lie at most as many decode steps as the debt buys, and after a slice beside decoding rows at
    least one."""
    decodes = 0
    last: Step | None = None
    owed = 0.0

    def watch(made: Scheduler, step: Step) -> None:
        nonlocal decodes, last, owed
        assert made.debt_seconds >= 0
        startable = [s for s in made.sequences() if s.has_started and not s.is_decoding]
        if isinstance(step, Decode):
            decodes += 1
            if startable and made.running < max_rows:
                assert made.debt_seconds > 0, "a started prompt waits although nothing is owed"
                assert decodes <= owed / machine.decode_seconds + 1
        elif isinstance(step, Prefill):
            if isinstance(last, Prefill) and made.running:
                assert made.debt_seconds == 0
            owed, decodes = 0.0, 0
        if not isinstance(step, Prefill):
            owed = max(owed, made.debt_seconds)
        last = step

    simulate(machine, arrivals, max_rows, watch)
