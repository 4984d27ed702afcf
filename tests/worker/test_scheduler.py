"""Which step comes next: who goes first, slices that are bounded, decode time that is paid back, nobody forgotten."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.ids import BLOCK_TOKENS, Grain, RequestId
from tests.worker.parts import everybody
from worker import pacing
from worker.pacing import SchedulerSettings
from worker.scheduler import Scheduler
from worker.sequence import BooksDoNotAddUp, Lane, Sequence, shared_tokens
from worker.standings import Standing
from worker.steps import Decode, Idle, Join, Mixed, Open, Park, Prefill, Rest, Step

A, B, C, D = (RequestId(name) for name in "abcd")
I, S, BATCH, WARM = Lane  # noqa: E741 - the lanes in their order
ANY_TOKENS: Any = ANY


def sequence(name: RequestId, prompt_tokens: int, lane: Lane = S, **more: Any) -> Sequence:
    return Sequence(request_id=name, prompt_tokens=prompt_tokens, lane=lane, arrived=more.pop("arrived", 0.0), **more)


Slices = Literal["apart", "mixed"]


def scheduler(
    *sequences: Sequence, max_rows: int = 4, rate: float = 1000.0, slices: Slices = "apart", **more: Any
) -> Scheduler:
    made = Scheduler(SchedulerSettings(max_rows=max_rows, first_rate_tokens_per_second=rate, slices=slices, **more))
    for each in sequences:
        made.add(each)
    return made


def play(made: Scheduler, step: Step, now: float = 0.0, seconds: float = 0.0) -> None:
    """What the loop and an engine that takes `seconds` would do."""
    match step:
        case Open(request_id=name):
            made.opened(name, 0, now)
        case Prefill():
            made.prefilled(step, seconds, now)
        case Mixed():
            made.mixed(step, seconds, now)
        case Join(request_id=name):
            made.joined(name, now)
        case Park(request_id=name):
            made.parked(name, now)
        case Decode():
            made.decoded(seconds, made.running)
        case Rest() | Idle():
            pass


def start_decoding(made: Scheduler, added: Sequence, now: float = 0.0) -> None:
    """Add one and run it until it decodes and has drawn a token, in no time."""
    made.add(added)
    name = added.request_id
    made.opened(name, 0, now)
    while added.prefill_left:
        made.prefilled(Prefill(name, min(512, added.prefill_left), added.lane), 0.0, now)
    made.joined(name, now)
    made.drew(name)


def order_of_prompts(made: Scheduler, seconds_per_token: float = 0.001) -> list[RequestId]:
    """The prompts in the order in which they are done; nothing is decoded."""
    done: list[RequestId] = []
    now = 0.0
    while made.waiting:
        step = made.next_step(now)
        seconds = step.tokens * seconds_per_token if isinstance(step, Prefill) else 0.0
        now += seconds
        play(made, step, now, seconds)
        if isinstance(step, Prefill | Open) and step.request_id not in {s.request_id for s in made.places.waiting()}:
            done.append(step.request_id)
            made.remove(step.request_id)
    return done


# --- a sequence's way -----------------------------------------------------------------------------------------------


def test_nothing_to_do_is_idle() -> None:
    """And waits without a limit."""
    assert scheduler().next_step(0.0) == Idle(None)
    assert scheduler().is_empty


def test_a_sequences_way() -> None:
    """Opened, prefilled up to its last token, joined, then decoded until removed."""
    made = scheduler(sequence(A, 101))
    assert made.next_step(0.0) == Open(A)
    made.opened(A, 0, 1.0)
    assert made.next_step(1.0) == Prefill(A, 100, S)
    made.prefilled(Prefill(A, 100, S), 0.1, 1.1)
    assert made.next_step(1.1) == Join(A)
    made.joined(A, 1.1)
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

    assert made.next_step(0.0) == Join(A)
    known = made.get(A)
    assert known is not None
    assert known.slices == 0


def test_one_that_waits_for_the_disk_lets_others_by() -> None:
    """Until its blocks came, or its deadline passed."""
    made = scheduler(sequence(A, 50, blocks_deadline=5.0), sequence(B, 60))
    assert made.next_step(0.0) == Open(B)
    made.remove(B)
    assert made.next_step(0.0) == Idle(5.0)
    assert made.next_step(5.0) == Open(A)

    made.blocks_arrived(RequestId("unknown"))
    made.blocks_arrived(A)
    assert made.next_step(0.0) == Open(A)


def test_what_only_warms_is_gone_when_its_prompt_is_done() -> None:
    """It takes no row."""
    made = scheduler(sequence(A, 101, WARM))
    play(made, made.next_step(0.0))
    play(made, made.next_step(0.0))

    assert made.is_empty


def test_next_step_changes_nothing() -> None:
    """It may be asked twice."""
    made = scheduler(sequence(A, 700), sequence(B, 30))
    assert [made.next_step(0.0) for _ in range(3)] == [Open(B)] * 3


def test_broken_books_are_noticed() -> None:
    """`check` names the law."""
    made = scheduler(sequence(A, 10))
    known = made.get(A)
    assert known is not None
    known.prefilled = 11

    with pytest.raises(BooksDoNotAddUp, match="waiting means"):
        made.check()


# --- who goes first -------------------------------------------------------------------------------------------------


def test_a_higher_lane_goes_first() -> None:
    """Whatever its length and arrival; what only warms goes last."""
    made = scheduler(
        sequence(D, 20, WARM), sequence(C, 30, BATCH), sequence(B, 3000, S, arrived=1), sequence(A, 9000, I, arrived=2)
    )

    assert order_of_prompts(made) == [A, B, C, D]


def test_a_ten_token_question_goes_between_two_slices_of_a_long_prompt() -> None:
    """Of its own lane, too."""
    made = scheduler(sequence(A, 50_000))
    play(made, made.next_step(0.0))
    play(made, made.next_step(0.0), seconds=0.5)
    made.add(sequence(B, 10, arrived=1.0))

    assert made.next_step(1.0) == Open(B)
    made.opened(B, 0, 1.0)
    assert made.next_step(1.0) == Prefill(B, 9, S)


def test_short_questions_without_end_do_not_starve_a_long_prompt() -> None:
    """Every fourth slice of a lane is its oldest prompt's."""
    made = scheduler(sequence(A, 50_000))
    slices = {"a": 0, "others": 0}
    for i in range(400):
        name = RequestId(f"q{i}")
        made.add(sequence(name, 600, arrived=1.0 + i))
        while made.get(name) is not None:
            step = made.next_step(float(i))
            play(made, step, float(i), 0.1)
            if isinstance(step, Prefill):
                slices["a" if step.request_id == A else "others"] += 1
            if isinstance(step, Join):
                made.remove(step.request_id)
        if made.get(A) is None:
            break

    assert slices["a"] * 3.2 >= slices["others"]


@pytest.mark.parametrize("lane", [S, BATCH])
def test_a_lower_lane_gets_one_slice_in_seventeen(lane: Lane) -> None:
    """However many prompts of a higher lane there are: the bound of its wait."""
    made = scheduler(sequence(A, 50_000, lane), *[sequence(RequestId(f"i{i}"), 50_000, I) for i in range(3)])
    lanes: list[Lane] = []
    for _ in range(120):
        step = made.next_step(0.0)
        play(made, step, seconds=0.1)
        if isinstance(step, Prefill):
            lanes.append(step.lane)
    at = [i for i, each in enumerate(lanes) if each is lane]

    assert max(b - a for a, b in zip([0, *at], at, strict=False)) <= 18
    assert lanes.count(lane) <= 120 / 16


def test_what_only_warms_waits_for_all() -> None:
    """It has no claim."""
    made = scheduler(sequence(A, 5000, WARM), sequence(B, 200_000, BATCH))
    for _ in range(60):
        step = made.next_step(0.0)
        assert not isinstance(step, Open | Prefill) or step.request_id == B
        play(made, step, seconds=0.1)


def test_tenants_share_a_lane() -> None:
    """Who had more of the device waits for who had less, of prompts that are alike."""
    made = scheduler(*[sequence(RequestId(f"a{i}"), 1000, tenant="a", arrived=i) for i in range(4)])
    for i in range(4):
        made.add(sequence(RequestId(f"b{i}"), 1000, tenant="b", arrived=9.0))

    order = order_of_prompts(made)
    assert sorted(name[0] for name in order[:6]).count("b") >= 2, order


def test_a_tenants_lead_is_forgiven_in_the_end() -> None:
    """It counts as five seconds of work at most: a short question still goes before a long prompt."""
    made = scheduler(sequence(A, 2, tenant="busy"))
    made._tenants.charge("busy", 1000.0)
    made.add(sequence(B, 4000, tenant="other"))
    made._tenants._served["other"] = 0.0
    assert made.next_step(0.0) == Open(B)

    made.add(sequence(C, 9000, tenant="other"))
    made.remove(B)
    assert made.next_step(0.0) == Open(A)


def test_a_prompt_that_shares_with_one_in_prefill_waits_for_it() -> None:
    """A prefix in flight is computed once: the turn goes to the one that computes it, also out of a lower lane."""
    chain = tuple(Grain(bytes([i, j])) for i in range(8) for j in range(16))
    made = scheduler(sequence(A, 5001, BATCH, grains=chain))
    play(made, made.next_step(0.0))
    play(made, made.next_step(0.0), seconds=0.5)
    known = made.get(A)
    assert known is not None
    made.add(sequence(B, 1100, I, grains=(*chain[:60], *map(Grain, [b"x"] * 8))))

    served: list[Step] = []
    while not isinstance(step := made.next_step(0.0), Open):
        assert isinstance(step, Prefill)
        served.append(step)
        play(made, step, seconds=step.tokens / 1000)
    assert step == Open(B)
    assert 960 <= known.prefilled < 3000  # the blocks that hold the 960 tokens they share
    assert all(isinstance(each, Prefill) and each.lane is I for each in served)


def test_a_prefix_that_was_hot_is_not_waited_for() -> None:
    """The other one computes only what is its own."""
    chain = tuple(Grain(bytes([i])) for i in range(64))
    made = scheduler(sequence(A, 3000, grains=chain))
    made.opened(A, 1024, 0.0)
    made.add(sequence(B, 1100, grains=chain))

    assert made.next_step(0.0) == Open(B)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_shared_tokens(common: int, one: int, other: int) -> None:
    """In whole grains, up to where the chains part."""
    head = [Grain(bytes([0, i])) for i in range(common)]
    first = (*head, *[Grain(bytes([1, i])) for i in range(one)])
    second = (*head, *[Grain(bytes([2, i])) for i in range(other)])

    assert shared_tokens(first, second) == common * 16


def test_no_more_prompts_in_prefill_than_allowed() -> None:
    """Four of a lane: each holds memory. Ever shorter ones come, each of which would go first."""
    made = scheduler(max_rows=16)
    for i in range(6):
        made.add(sequence(RequestId(f"p{i}"), 60_000 - 9000 * i))
        for _ in range(2):
            play(made, made.next_step(0.0), seconds=0.1)
    started = [s.request_id for s in everybody(made) if s.is_open]

    assert started == ["p0", "p1", "p2", "p3"]


# --- rows -----------------------------------------------------------------------------------------------------------


def test_no_prompt_starts_without_a_free_row() -> None:
    """It would hold its KV and wait."""
    made = scheduler(max_rows=1)
    start_decoding(made, sequence(A, 2))
    made.add(sequence(B, 2))

    assert made.next_step(0.0) == Decode()
    assert made.standings(0.0) == [Standing(B, 0, None, "rows")]
    made.remove(A)
    assert made.next_step(0.0) == Open(B)


def test_a_batch_row_gives_way_when_rows_are_full() -> None:
    """With its KV; it comes back when a row is free."""
    made = scheduler(max_rows=1)
    start_decoding(made, sequence(A, 10, BATCH))
    made.add(sequence(B, 10, I))
    for expected in (Open(B), Prefill(B, 9, I), Park(A), Join(B), Decode()):
        step = made.next_step(1.0)
        assert step == expected
        play(made, step, 1.0)
    assert made.standings(1.0) == [Standing(A, 0, None, "rows")]

    made.remove(B)
    assert made.next_step(1.0) == Join(A)


def finish_prompt(made: Scheduler, added: Sequence, now: float) -> None:
    """Add one, of less than a slice, whose prompt is done at `now`: it waits for a row since."""
    made.add(added)
    made.opened(added.request_id, 0, now)
    made.prefilled(Prefill(added.request_id, added.prefill_left, added.lane), 0.0, now)


def test_a_standard_row_gives_way_to_an_interactive_prompt() -> None:
    """The one that joined last, and a batch row before it."""
    made = scheduler(max_rows=3)
    for name, lane in ((A, S), (B, BATCH), (C, S)):
        start_decoding(made, sequence(name, 10, lane))
    for name, victim in (("i1", B), ("i2", C), ("i3", A)):
        finish_prompt(made, sequence(RequestId(name), 10, I, arrived=1.0), 1.0)
        assert made.next_step(1.0) == Park(victim)
        play(made, Park(victim), 1.0)
        assert made.next_step(1.0) == Join(RequestId(name))
        play(made, Join(RequestId(name)), 1.0)
    finish_prompt(made, sequence(D, 10, I, arrived=1.0), 1.0)
    assert made.next_step(1.0) == Decode()


def test_of_two_rows_one_is_for_who_is_due() -> None:
    """And for the first that was; the other is for the highest class, who waits for one stint and not for several."""
    made = scheduler(max_rows=1)
    finish_prompt(made, sequence(A, 10, S), 0.0)
    finish_prompt(made, sequence(B, 10, BATCH), 0.5)
    finish_prompt(made, sequence(C, 10, S, arrived=1.0), 1.0)
    finish_prompt(made, sequence(D, 10, I, arrived=61.0), 61.0)
    seen: list[Step] = []
    for now, seconds in ((61.0, 0.0), (61.1, 0.1), (61.6, 0.0), (61.6, 0.0), (61.7, 0.1)):
        seen.append(made.next_step(now))
        play(made, seen[-1], now, seconds)
        if isinstance(seen[-1], Decode):
            made.drew(next(iter(made.places.decoding)))
    assert seen == [Join(A), Decode(), Park(A), Join(D), Decode()]
    made.remove(D)
    assert made.next_step(62.0) == Join(B)


def test_who_is_due_in_a_high_class_does_not_take_all_rows() -> None:
    """A row that it has as one of the highest class is not taken for the one of who is due first."""
    made = scheduler(max_rows=1)
    for i, (name, lane) in enumerate(((A, S), (B, BATCH), (C, S), (D, S))):
        finish_prompt(made, sequence(name, 10, lane, arrived=i), float(i))
    order: list[RequestId] = []
    while not made.is_empty:
        step = made.next_step(70.0)
        assert isinstance(step, Join)
        play(made, step, 70.0)
        made.remove(step.request_id)
        order.append(step.request_id)
    assert order == [A, C, B, D]


def test_a_stay_that_was_no_stint_does_not_count() -> None:
    """Who is parked again soon is due when it would have been."""
    made = scheduler(max_rows=1)
    finish_prompt(made, sequence(A, 10, S), 0.0)
    play(made, Join(A), 9.0)
    finish_prompt(made, sequence(B, 10, I, arrived=9.2), 9.2)
    assert made.next_step(9.2) == Park(A)
    play(made, Park(A), 9.2)
    play(made, made.next_step(9.2), 9.2)
    finish_prompt(made, sequence(C, 10, I, arrived=9.3), 9.3)
    made.remove(B)
    assert made.next_step(10.0) == Join(A)


def test_every_fourth_start_is_the_oldests() -> None:
    """Also where one row is free at a time, and whatever the number of slices is by then."""
    made = scheduler(max_rows=1)
    made.add(sequence(A, 30_000))
    starts: list[RequestId] = []
    for i in range(8):
        made.add(sequence(RequestId(f"q{i}"), 300, arrived=1.0 + i))
        while not isinstance(step := made.next_step(0.0), Join):
            if isinstance(step, Open):
                starts.append(step.request_id)
            play(made, step, 0.0, 0.1)
        made.remove(step.request_id)
        if A in starts:
            break
    assert 0 < starts.index(A) <= 3


def test_a_lower_lane_starts_where_higher_ones_have_all_rows() -> None:
    """One prompt every ten seconds, and no more than there are rows."""
    made = scheduler(max_rows=2)
    for name in (A, B):
        start_decoding(made, sequence(name, 2, I), now=0.0)
    started: list[float] = []
    for i in range(5):
        made.add(sequence(RequestId(f"b{i}"), 10, BATCH))
    for now in range(40):
        while not isinstance(step := made.next_step(float(now)), Decode):
            if isinstance(step, Open):
                started.append(now)
            play(made, step, float(now), 0.0)
        play(made, step, float(now), 0.5)
    assert started == [0, 10]


def test_mixed_passes_of_one_class_pay_what_another_owes() -> None:
    """Where they owe nothing themselves no step runs alone: a batch prompt waited for ever for one, once it owed."""
    made = beside_rows(I, I, step_seconds=0.3)
    made.add(sequence(C, 200_000, BATCH))
    made.opened(C, 0, 0.0)
    since, longest = 0, 0
    for _ in range(2000):
        step = made.next_step(0.0)
        is_its = isinstance(step, Prefill) and step.request_id == C
        since = 0 if is_its else since + 1
        longest = max(longest, since)
        play(made, step, 0.0, 0.3 + step.tokens * 0.002 if isinstance(step, Mixed | Prefill) else 0.3)
        known = made.get(B)
        assert known is not None
        known.prefilled = min(known.prefilled, 5000)
    assert longest <= 40


def learn_steps(made: Scheduler, *seconds: float) -> None:
    """A step of one row takes the first, of two the second, …"""
    for rows, each in enumerate(seconds, 1):
        made.costs.stepped(rows, each)


def test_batch_rows_that_stretch_a_higher_rows_steps_are_parked() -> None:
    """Here each row costs as much as the first: none stays beside an interactive one, and after a minute each has its
    stint."""
    made = scheduler(max_rows=4)
    learn_steps(made, 0.02, 0.04, 0.06, 0.08)
    start_decoding(made, sequence(A, 10, BATCH))
    start_decoding(made, sequence(B, 10, BATCH))
    start_decoding(made, sequence(C, 10, I))
    parked = [made.next_step(1.0)]
    play(made, parked[0], 1.0)
    parked.append(made.next_step(1.0))
    play(made, parked[1], 1.0)
    assert parked == [Park(B), Park(A)]
    assert made.next_step(59.0) == Decode()

    assert made.next_step(61.0) == Join(B)
    play(made, Join(B), 61.0)
    assert made.next_step(61.0) == Join(A)
    play(made, Join(A), 61.0)
    assert made.next_step(61.4) == Decode()
    play(made, Decode(), 61.4, 0.08)
    assert made.next_step(61.6) == Park(A)


def test_batch_rows_leave_before_a_higher_row_joins() -> None:
    """Those that would make its steps too long: it does not wait for a step with them, nor is its KV joined to
    theirs. Those that it can bear stay."""
    made = scheduler(max_rows=8)
    learn_steps(made, 0.020, 0.021, 0.022, 0.030, 0.040)
    for name in (B, C, D, RequestId("e")):
        start_decoding(made, sequence(name, 10, BATCH))
    finish_prompt(made, sequence(A, 10, I, arrived=1.0), 1.0)
    steps: list[Step] = []
    while A not in made.places.decoding:
        steps.append(made.next_step(1.0))
        play(made, steps[-1], 1.0)
    assert steps == [Park(RequestId("e")), Park(D), Join(A)]
    assert made.next_step(1.0) == Decode()


@pytest.mark.parametrize(("row_seconds", "comes"), [(0.002, False), (0.0002, True)])
def test_a_batch_row_comes_beside_higher_ones_where_it_costs_nothing(*, row_seconds: float, comes: bool) -> None:
    """While one decodes, and while one's prompt runs. When nobody is there it comes in any case."""
    made = scheduler(max_rows=8)
    learn_steps(made, *(0.02 + row_seconds * row for row in range(8)))
    start_decoding(made, sequence(A, 10, I))
    finish_prompt(made, sequence(B, 10, BATCH), 1.0)
    assert made.next_step(1.0) == (Join(B) if comes else Decode())
    made.remove(A)
    made.add(sequence(C, 100, I, arrived=1.0))
    assert made.next_step(1.0) == (Join(B) if comes else Open(C))
    made.opened(C, 0, 1.0)
    assert isinstance(made.next_step(1.0), Join if comes else Prefill)
    made.remove(C)
    assert made.next_step(1.0) == Join(B)


def test_batch_rows_are_few_for_ten_seconds_after_somebody_higher() -> None:
    """Whoever comes waits for a step of theirs to end: it is not much longer than one of a row alone."""
    made = scheduler(max_rows=8)
    learn_steps(made, 0.020, 0.022, 0.030)
    start_decoding(made, sequence(A, 10, I))
    made.decoded(0.02, 1)
    made.remove(A)
    for name in (B, C, D):
        finish_prompt(made, sequence(name, 10, BATCH), 1.0)
    for name in (B, C):
        assert made.next_step(1.0) == Join(name)
        play(made, Join(name), 1.0)
    made.decoded(9.9, 0)
    assert made.next_step(1.0) == Decode()
    made.decoded(0.2, 0)
    assert made.next_step(1.0) == Join(D)


def test_batch_rows_come_while_a_higher_prompt_is_held_by_another_model() -> None:
    """It cannot run, so it waits for nobody here."""
    made = scheduler(max_rows=8)
    learn_steps(made, 0.02, 0.03, 0.04)
    finish_prompt(made, sequence(B, 10, BATCH), 1.0)
    made.add(sequence(C, 100, I, arrived=1.0))
    made.opened(C, 0, 1.0)
    assert isinstance(made.next_step(1.0), Prefill)
    made.beside(I, "another model")
    assert made.next_step(1.0) == Join(B)


def due_batch_row_beside_an_interactive_one() -> Scheduler:
    """A, which makes steps of C twice as long, has just joined for its stint, at 61 s."""
    made = scheduler(max_rows=4)
    learn_steps(made, 0.02, 0.04)
    start_decoding(made, sequence(A, 10, BATCH))
    start_decoding(made, sequence(C, 10, I))
    play(made, Park(A), 1.0)
    play(made, made.next_step(61.0), 61.0)
    assert A in made.places.decoding
    return made


def test_a_read_is_no_stint() -> None:
    """What a launch or a read takes is told without rows: who joined before it has not had a token for it."""
    made = due_batch_row_beside_an_interactive_one()
    made.decoded(0.001, 0)
    assert made.next_step(63.0) == Decode()


def test_the_step_after_a_row_came_says_nothing_of_steps() -> None:
    """But for the first of so many rows."""
    made = scheduler(max_rows=4)
    learn_steps(made, 0.02, 0.021)
    start_decoding(made, sequence(A, 10, S))
    start_decoding(made, sequence(B, 10, S))
    made.decoded(0.5, 2)
    assert made.costs.step_seconds(2) == 0.021
    made.decoded(0.5, 2)
    assert made.costs.step_seconds(2) > 0.021
    start_decoding(made, sequence(C, 10, S))
    made.decoded(0.5, 3)
    assert made.costs.step_seconds(3) == 0.5


def test_a_batch_row_waits_for_the_disks_answer_to_a_higher_prompt_and_not_for_its_blocks() -> None:
    """Those may take seconds to read."""
    made = scheduler()
    finish_prompt(made, sequence(B, 10, BATCH), 0.0)
    fetching = sequence(C, 100, I, arrived=1.0)
    fetching.blocks_deadline, fetching.answer_due = 6.0, 1.02
    made.add(fetching)
    assert made.next_step(1.0) == Idle(1.02)
    assert made.next_step(1.02) == Join(B)


def test_what_rows_hold_counts_when_batch_rows_stretch_steps() -> None:
    """Steps of the interactive row alone were measured when it held much; beside what a short one takes, the same step
    with a batch row is far too long."""
    made = scheduler(max_rows=4)
    for held in (1000, 60_000, 2000, 30_000, 5000, 60_000):
        for _ in range(5):
            made.costs.stepped(1, 0.02 + held * 1e-6, held)
    for _ in range(9):
        made.costs.stepped(1, 0.08, 60_000)
        made.costs.stepped(2, 0.04, 1000)
    start_decoding(made, sequence(A, 500, BATCH))
    start_decoding(made, sequence(C, 500, I))
    assert made.next_step(1.0) == Park(A)

    made = scheduler(max_rows=4)
    for _ in range(9):
        made.costs.stepped(1, 0.08)
        made.costs.stepped(2, 0.04)
    start_decoding(made, sequence(A, 500, BATCH))
    start_decoding(made, sequence(C, 500, I))
    assert made.next_step(1.0) == Decode()


def test_a_stint_is_at_least_a_step() -> None:
    """Whatever else took the time of a stint (a slice on a slow device), the row that came back draws a token first."""
    made = due_batch_row_beside_an_interactive_one()
    assert made.next_step(63.0) == Decode()
    play(made, Decode(), 63.0, 0.04)
    assert made.next_step(63.1) == Park(A)


def test_batch_rows_that_cost_nothing_stay() -> None:
    """On a device whose steps take as long with them as without."""
    made = scheduler(max_rows=4)
    learn_steps(made, 0.02, 0.021, 0.022)
    start_decoding(made, sequence(A, 10, BATCH))
    start_decoding(made, sequence(C, 10, I))

    assert made.next_step(100.0) == Decode()


# --- slices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefilled", "left", "rate", "expected"),
    [
        (0, 10_000, 952.9, 200),  # target 0.21 s; no grid line inside
        (0, 10_000, 1429.0, 256),  # 300 → the grid, which costs 44
        (0, 10_000, 1905.2, 256),  # 400 → 144 beyond is less than half of 400
        (0, 10_000, 2476.7, 512),  # 520
        (0, 10_000, 2429.0, 256),  # 510: the grid costs 254, just under the half
        (200, 10_000, 952.9, 200),  # ends at 400: 144 beyond would cost too much
        (200, 10_000, 476.7, 56),  # ends at 300: 44 beyond of 100
        (0, 30, 1000.0, 30),  # all that is left
        (0, 10_000, 1.0, 16),  # the floor
        (0, 100_000, 1e9, 2048),  # the ceiling
    ],
)
def test_slices(prefilled: int, left: int, rate: float, expected: int) -> None:
    """Seconds times rate, ending on the block grid where that is cheap, between floor and ceiling."""
    made = scheduler(rate=rate)
    start_decoding(made, sequence(A, 2))
    made.add(sequence(B, prefilled + left + 1))
    made.opened(B, prefilled, 0.0)

    step = made.next_step(0.0)
    assert isinstance(step, Prefill)
    assert step.tokens == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("rows", "prompt", "seconds"),
    [(I, I, 0.15), (I, S, 0.1), (S, I, 0.21), (S, S, 0.21), (BATCH, I, 1.0)],
)
def test_a_gap_is_as_long_as_the_classes_allow(rows: Lane, prompt: Lane, seconds: float) -> None:
    """A gap is a slice and the step after it."""
    made = scheduler(rate=200.0)
    learn_steps(made, 0.02)
    start_decoding(made, sequence(A, 2, rows))
    made.add(sequence(B, 10_000, prompt))
    made.opened(B, 0, 0.0)

    step = made.next_step(0.0)
    assert isinstance(step, Prefill)
    assert step.tokens == pytest.approx((seconds - 0.02) * 200, abs=1)


@pytest.mark.parametrize(("lane", "tokens"), [(I, 100), (S, 100), (BATCH, 25), (WARM, 25)])
def test_a_slice_that_delays_nobody_may_be_longer(lane: Lane, tokens: int) -> None:
    """But the lower the lane, the sooner it has to let a higher one by."""
    made = scheduler(sequence(A, 10_000, lane), rate=100.0)
    made.opened(A, 0, 0.0)

    step = made.next_step(0.0)
    assert isinstance(step, Prefill)
    assert step.tokens == pytest.approx(tokens, abs=1)


# --- debt -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "prompt", "share"),
    [(I, I, 0.54), (I, S, 0.9), (I, BATCH, 0.9), (S, S, 0.15), (S, I, 0.15), (BATCH, S, 0.1)],
)
def test_a_slice_is_paid_back_in_decode_time(rows: Lane, prompt: Lane, share: float) -> None:
    """The decoding rows keep their share of the time."""
    made = scheduler()
    start_decoding(made, sequence(A, 2, rows))
    made.add(sequence(B, 100_000, prompt))
    made.opened(B, 0, 0.0)
    step = made.next_step(0.0)
    play(made, step, seconds=0.2)

    seconds = 0.0
    while made.next_step(1.0) == Decode():
        made.decoded(0.002, 1)
        seconds += 0.002

    assert seconds == pytest.approx(0.2 * share / (1 - share), abs=0.003)
    assert made.debt_seconds == 0


def test_a_debt_of_a_lower_lane_does_not_hold_a_higher_one() -> None:
    """A question does not wait for what a batch prompt owes."""
    made = scheduler()
    start_decoding(made, sequence(A, 2, I))
    made.add(sequence(B, 10_000, BATCH))
    made.opened(B, 0, 0.0)
    play(made, made.next_step(0.0), seconds=0.1)
    assert made.next_step(0.0) == Decode()
    made.add(sequence(C, 10, I))

    assert made.next_step(0.0) == Open(C)


def test_a_debt_to_nobody_is_no_debt() -> None:
    """The last decoding row is gone: the next slice comes at once."""
    made = scheduler()
    start_decoding(made, sequence(A, 2))
    made.add(sequence(B, 10_000))
    made.opened(B, 0, 0.0)
    made.prefilled(Prefill(B, 100), 9.0, 9.0)
    made.remove(A)

    assert isinstance(made.next_step(9.0), Prefill)


# --- mixed passes ---------------------------------------------------------------------------------------------------


def beside_rows(rows: Lane, prompt: Lane, *, step_seconds: float = 0.02, rate: float = 200.0, **more: Any) -> Scheduler:
    """A row of the one lane decodes, a long prompt of the other is in prefill, and passes can be mixed."""
    made = scheduler(rate=rate, slices="mixed", **more)
    learn_steps(made, step_seconds)
    start_decoding(made, sequence(A, 2, rows))
    made.add(sequence(B, 10_000, prompt))
    made.opened(B, 0, 0.0)
    return made


def run_mixed(made: Scheduler, device: Callable[[int, int], float], passes: int) -> list[float]:
    """The seconds that each mixed pass took, with decode steps of 0.02 s where they are owed."""
    seen: list[float] = []
    while len(seen) < passes:
        step = made.next_step(0.0)
        seconds = 0.02
        if isinstance(step, Mixed):
            known = made.get(step.request_id)
            assert known is not None
            seconds = device(step.tokens, known.prefilled)
            seen.append(seconds)
        play(made, step, 0.0, seconds)
    return seen


def test_a_slice_beside_rows_is_mixed() -> None:
    """Alone, it is not; nor before it is known what a step takes."""
    made = scheduler(sequence(B, 1000), slices="mixed")
    made.opened(B, 0, 0.0)
    assert isinstance(made.next_step(0.0), Prefill)
    start_decoding(made, sequence(A, 2))
    assert made.next_step(0.0) == Decode()
    made.decoded(0.02, 1)

    assert isinstance(made.next_step(0.0), Mixed)
    made.remove(A)
    assert isinstance(made.next_step(0.0), Prefill)


@pytest.mark.parametrize(
    ("rows", "prompt", "seconds"),
    [(I, I, 0.15), (I, S, 0.1), (S, I, 0.21), (S, S, 0.21), (BATCH, BATCH, 0.2)],
)
def test_a_mixed_pass_fills_the_gap(rows: Lane, prompt: Lane, seconds: float) -> None:
    """It is as long as the classes allow between two tokens, once such passes are known, on a growing context, too."""
    made = beside_rows(rows, prompt)
    seen = run_mixed(made, lambda tokens, context: 0.02 + tokens * (0.002 + 1e-7 * context) + 2e-6 * context, 40)

    assert max(seen) <= seconds * 1.02
    assert min(seen[10:]) >= seconds * 0.85


@pytest.mark.parametrize("came", [I, S])
def test_a_batch_prompt_stops_for_others_while_they_may_come_back(came: Lane) -> None:
    """For five minutes of the device after one of a higher class was served, and while he is here: its slices are not
    mixed, since such a pass stops for nobody. Then rows ride along."""
    made = beside_rows(BATCH, BATCH)
    assert isinstance(made.next_step(0.0), Mixed)
    made.add(sequence(C, 40, came))
    made.opened(C, 0, 0.0)
    made.prefilled(Prefill(C, 39, came), 0.2, 0.0)
    made.joined(C, 0.0)
    made.drew(C)
    step = next_slice(made)
    assert isinstance(step, Prefill)
    assert made.parts_of(step) > 1
    made.remove(C)
    for _ in range(10):
        step = next_slice(made)
        assert isinstance(step, Prefill)
        play(made, step, 0.0, 30.0)
    assert isinstance(next_slice(made), Mixed)


def next_slice(made: Scheduler) -> Step:
    """After the steps that are owed, which take no time that anybody counts."""
    while isinstance(step := made.next_step(0.0), Decode):
        made.costs.stepped(made.running, 0.02)
        made._debts.forgive()
    return step


@pytest.mark.parametrize(("lane", "seconds", "parts"), [(I, 0.5, 1), (S, 0.5, 25), (BATCH, 0.25, 25), (BATCH, 0.01, 1)])
def test_a_slice_that_others_go_before_has_parts(lane: Lane, seconds: float, parts: int) -> None:
    """Of some twenty milliseconds each, or ten for a batch prompt; nobody goes before an interactive one."""
    made = scheduler(sequence(A, 10_000, lane))
    made.opened(A, 0, 0.0)
    assert made.parts_of(Prefill(A, int(seconds * 1000), lane)) == parts


def stopped(lane: Lane, *, slices: Slices = "apart") -> Scheduler:
    """A slice of this lane, of the sequence A, has run for 0.02 s and stopped."""
    made = scheduler(sequence(A, 10_000, lane), slices=slices)
    made.opened(A, 0, 0.0)
    made.stopped(Prefill(A, 100, lane), 0.02)
    return made


@pytest.mark.parametrize(("lane", "other"), [(S, I), (BATCH, I), (BATCH, S), (WARM, BATCH)])
def test_a_slice_that_stopped_lets_a_higher_class_begin(lane: Lane, other: Lane) -> None:
    """Start, be prefilled and join; then its first steps go before the rest of the slice, and what that owes them."""
    made = stopped(lane)
    assert made.next_before(lane, {A}, 0.0) is None
    made.add(sequence(B, 101, other))
    seen: list[type[Step]] = []
    for _ in range(4):
        step = made.next_before(lane, {A}, 0.0)
        assert step is not None
        seen.append(type(step))
        play(made, step, 0.0, 0.01)
    assert seen == [Open, Prefill, Join, Decode]
    for _ in range(4):
        made.drew(B)
    assert made.next_before(lane, {A}, 0.0) is None
    made.stopped(Prefill(A, 100, lane), 0.02)  # beside his row now
    paid = 0.0
    while made.next_before(lane, {A}, 0.0) == Decode():
        play(made, Decode(), 0.0, 0.01)
        paid += 0.01
    share = pacing._SHARES[other].lower
    assert paid == pytest.approx(0.02 * share / (1 - share), abs=0.011)


@pytest.mark.parametrize("other", [S, BATCH, WARM])
def test_a_slice_that_stopped_goes_on_before_its_own_class_and_lower_ones(other: Lane) -> None:
    """However short they are."""
    made = stopped(S)
    made.add(sequence(B, 9, other))
    assert made.next_before(S, {A}, 0.0) is None
    start_decoding(made, sequence(C, 9, BATCH))
    assert made.next_before(S, {A}, 0.0) is None


def test_who_waits_for_the_prefix_of_a_slice_that_stopped_waits_for_it() -> None:
    """Rule 6: it is computed on his behalf, so it goes on."""
    grains = tuple(Grain(bytes([i])) for i in range(100))
    made = scheduler(sequence(A, 2000, BATCH, grains=grains))
    made.opened(A, 0, 0.0)
    made.add(sequence(B, 1000, I, grains=grains[:60]))
    assert made.next_step(0.0) == Prefill(A, ANY_TOKENS, I)
    assert made.next_before(BATCH, {A}, 0.0) is None


def test_rows_are_paid_once_for_a_slice_that_stopped() -> None:
    """What they got between its parts is not owed again at its end."""
    made = stopped(BATCH)
    start_decoding(made, sequence(B, 9, I))
    made.stopped(Prefill(A, 100, BATCH), 0.02)
    assert made.debt_seconds == pytest.approx(0.18)
    made.decoded(0.18, 1)
    made.prefilled(Prefill(A, 100, BATCH), 0.06, 0.0, told_seconds=0.04)
    assert made.debt_seconds == pytest.approx(0.18)


@pytest.mark.parametrize("rows", [I, S])
def test_a_batch_prompt_is_not_mixed_with_rows_of_a_higher_class(rows: Lane) -> None:
    """It goes on in parts between their steps."""
    assert isinstance(next_slice(beside_rows(rows, BATCH)), Prefill)


def test_batch_rows_do_not_ride_along_with_who_waits() -> None:
    """Nobody reads them, and each would make the pass longer. They are paid for it, and ride with their own class."""
    assert isinstance(beside_rows(BATCH, I).next_step(0.0), Prefill)
    assert isinstance(beside_rows(BATCH, S).next_step(0.0), Prefill)
    assert isinstance(beside_rows(BATCH, BATCH).next_step(0.0), Mixed)
    made = beside_rows(BATCH, I)
    start_decoding(made, sequence(C, 2, S))
    assert isinstance(made.next_step(0.0), Mixed)


@pytest.mark.parametrize("slices", ["mixed", "apart"])
@pytest.mark.parametrize(
    ("rows", "prompt", "goes_first"), [(I, I, "row"), (I, BATCH, "row"), (S, S, "row"), (S, I, "prompt")]
)
def test_a_first_token_goes_before_slices_of_its_lane(
    rows: Lane, prompt: Lane, goes_first: str, slices: Slices
) -> None:
    """One step alone, whose token its client waits for; then the prompt goes on."""
    made = scheduler(slices=slices)
    learn_steps(made, 0.02)
    made.add(sequence(B, 10_000, prompt))
    made.opened(B, 0, 0.0)
    made.add(sequence(A, 2, rows))
    made.opened(A, 1, 0.0)
    made.joined(A, 0.0)

    step = made.next_step(0.0)
    assert isinstance(step, Decode if goes_first == "row" else Prefill | Mixed)
    play(made, step, 0.0, 0.0)
    if isinstance(step, Decode):
        made.drew(A)
        assert isinstance(made.next_step(0.0), Prefill | Mixed)


def test_the_first_mixed_passes_are_short() -> None:
    """A first rate that is four times too high does not make anybody wait for that."""
    made = beside_rows(S, S, rate=2000.0)

    assert max(run_mixed(made, lambda tokens, _: 0.02 + tokens / 500, 20)) <= 0.5


def test_a_mixed_pass_is_not_nearly_all_step() -> None:
    """A step as long as the gap: two fifths of the pass are the prompt's nevertheless."""
    made = beside_rows(S, S, step_seconds=0.3)
    seen = run_mixed(made, lambda tokens, _: 0.3 + tokens / 200, 10)

    assert seen[-1] == pytest.approx(0.5, rel=0.1)


def test_a_mixed_pass_ends_with_the_prompt_or_its_boundary() -> None:
    """Whatever would fit."""
    made = beside_rows(S, S)
    known = made.get(B)
    assert known is not None
    known.boundaries = (16,)
    step = made.next_step(0.0)
    assert step == Mixed(B, 16, S)
    play(made, step, 0.0, 0.04)
    known.prefilled = known.prefill_total - 3
    assert made.next_step(0.0) == Mixed(B, 3, S)
    play(made, Mixed(B, 3, S), 0.0, 0.04)
    assert made.next_step(0.0) == Join(B)


@given(st.sampled_from(list(Lane)[:3]), st.sampled_from(Lane), st.floats(0.001, 2), st.floats(0, 1))
def test_rows_keep_their_share(rows: Lane, prompt: Lane, seconds: float, step_part: float) -> None:
    """Of the time of a pass and of what it owes, at least; at least half where the prompt's class is lower; a pass
    that gave as much already owes nothing."""
    decoded = step_part * seconds
    owed = pacing.owed_seconds(prompt, rows, seconds=seconds, decoded_seconds=decoded)
    share = (decoded + owed) / (seconds + owed)

    assert owed >= 0
    assert share >= pacing._SHARES[rows].of(prompt, rows) - 1e-9
    if prompt > rows:
        assert share >= 0.5 - 1e-9
    if owed:
        assert share == pytest.approx(pacing._SHARES[rows].of(prompt, rows))


def test_rows_of_a_higher_class_keep_nine_tenths() -> None:
    """Measured in what the machine did, over many passes."""
    made = beside_rows(I, S)
    tokens_drawn, now = 0, 0.0
    while now < 60:
        step = made.next_step(now)
        seconds = 0.02 + (step.tokens * 0.002 if isinstance(step, Mixed) else 0)
        now += seconds
        tokens_drawn += 1
        play(made, step, now, seconds)

    assert tokens_drawn * 0.02 / 60 == pytest.approx(0.9, abs=0.02)


def test_what_a_mixed_pass_owes_is_paid_in_whole_steps() -> None:
    """Interactive rows keep a bit more than half of their speed beside an interactive prompt: a small debt is left to
    grow."""
    made = beside_rows(I, I, step_seconds=0.06)
    steps, now = 0, 0.0
    while now < 20:
        step = made.next_step(now)
        seconds = 0.06 + (step.tokens * 0.002 if isinstance(step, Mixed) else 0)
        now += seconds
        steps += 1
        play(made, step, now, seconds)

    assert steps * 0.06 / 20 == pytest.approx(0.54, abs=0.02)


def test_who_waits_beside_rows_is_told_what_mixed_passes_take() -> None:
    """Within a fifth of what it then takes."""
    made = beside_rows(S, S)
    run_mixed(made, lambda tokens, _: 0.02 + tokens / 500, 10)
    told = made.eta_seconds(B)
    now = 0.0
    while made.waiting:
        step = made.next_step(now)
        seconds = 0.02 + (step.tokens / 500 if isinstance(step, Mixed) else 0)
        now += seconds
        play(made, step, now, seconds)

    assert told == pytest.approx(now, rel=0.2)


def test_a_pass_that_is_slow_for_another_reason_does_not_starve_its_prompt() -> None:
    """Passes that take a step's time more than a step and their tokens: what they take is laid to their tokens, which
    must not end in passes of one token. (A soak saw that: an interactive prompt of 620 tokens took 160 s.)"""
    made = scheduler(slices="mixed", max_rows=8)
    for name in (A, B):
        start_decoding(made, sequence(name, 9, I))
    now = 0.0
    for _ in range(6):
        passes = 0
        made.add(sequence(C, 620, I, arrived=now))
        while C not in made.places.decoding:
            step = made.next_step(now)
            tokens = step.tokens if isinstance(step, Mixed) else 0
            seconds = 0.1 + (0.1 + 0.006 * tokens if tokens else 0.0) if isinstance(step, Mixed | Decode) else 0.0
            now += seconds
            passes += tokens > 0
            play(made, step, now, seconds)
        assert passes <= 80  # of 8 tokens at least
        made.remove(C)


# --- what those who wait are told -----------------------------------------------------------------------------------


def test_standings() -> None:
    """In the order in which they go, with the time until each is done, and whom they wait for."""
    made = scheduler(sequence(A, 1001), sequence(B, 501), sequence(C, 11, BATCH), sequence(D, 9, blocks_deadline=3.0))

    assert made.standings(0.0) == [
        Standing(D, 0, None, "disk"),
        Standing(B, 1, pytest.approx(0.508), ""),
        Standing(A, 2, pytest.approx(1.508), ""),
        Standing(C, 3, pytest.approx(1.518), "higher_class"),
    ]
    assert made.eta_seconds(A) == pytest.approx(1.508)
    assert made.eta_seconds(RequestId("unknown")) == 0


def test_who_waits_for_a_row_is_told_when_one_gets_free() -> None:
    """By how long answers were, behind those before: of who is parked, in whose order rows are taken, and of who may
    not start before. One told of in time is a tenth of a second a token here."""
    made = scheduler(max_rows=1)
    made.decoded(0.1, 1)
    for name in "wxyz":
        start_decoding(made, sequence(RequestId(name), 9))
        made.places.decoding[RequestId(name)].drawn = 30
        made.remove(RequestId(name))
    start_decoding(made, sequence(A, 9, decode_started=None))
    made.places.decoding[A].drawn = 5
    made.add(sequence(B, 101))
    made.add(sequence(C, 201))

    assert made.standings(0.0) == [
        Standing(B, 0, pytest.approx(2.5 + 0.1, abs=0.06), "rows"),
        Standing(C, 1, pytest.approx(2.5 + 3.0 + 0.2, abs=0.11), "rows"),
    ]
    made.add(sequence(D, 9, I))  # the highest class may start now: rows of lower ones give way
    made.opened(D, 0, 0.0)
    made.prefilled(Prefill(D, 8, I), 0.008, 0.0)
    assert [each.held_by for each in made.standings(0.0) if each.request_id == D] == ["rows"]
    (parked,) = (each for each in made.standings(0.0) if each.request_id == D)
    assert (parked.ahead, parked.eta_seconds) == (0, pytest.approx(2.5))


def test_where_no_answer_is_known_nobody_is_told_when_a_row_gets_free() -> None:
    """Unless `max_tokens` is so small that it is as good as a word."""
    made = scheduler(max_rows=1)
    made.decoded(0.1, 1)
    start_decoding(made, sequence(A, 9, max_tokens=30_000))
    made.add(sequence(B, 101))
    assert made.standings(0.0) == [Standing(B, 0, None, "rows")]
    made.places.decoding[A].max_tokens = 51
    assert made.standings(0.0) == [Standing(B, 0, pytest.approx(5.1, abs=0.1), "rows")]


def test_a_prompt_that_has_begun_is_told_whom_it_waits_for() -> None:
    """Not between two slices, but when others have had the device for seconds: a soak saw such prompts for half a
    minute with no reason in the status."""
    made = scheduler(sequence(A, 1001, BATCH))
    play(made, made.next_step(0.0))
    made.prefilled(Prefill(A, 100, BATCH), 0.1, 0.1)
    start_decoding(made, sequence(B, 9, I), now=0.1)
    assert made.standings(2.0) == []
    assert [(told.request_id, told.held_by) for told in made.standings(2.1)] == [(A, "higher_class")]
    made.prefilled(Prefill(A, 100, BATCH), 0.1, 2.2)
    assert made.standings(2.3) == []


def test_held_seconds_are_those_of_others() -> None:
    """By reason; who is served is not held."""
    made = scheduler(sequence(A, 1001, I), sequence(B, 1001, BATCH))
    play(made, made.next_step(0.0))
    play(made, made.next_step(0.0), seconds=0.5)
    held = made.get(B)
    served = made.get(A)
    assert held is not None
    assert served is not None
    assert (held.held_seconds, held.held_by) == (0.5, "higher_class")
    assert (served.held_seconds, served.held_by) == (0, "")


def test_lower_lanes_rest_while_the_disk_answers_a_higher_one() -> None:
    """A question waited for a whole batch pass, since the disk's word that it has nothing came 2 ms after it began."""
    made = scheduler(sequence(A, 1001, BATCH))
    start_decoding(made, sequence(B, 9, BATCH))
    assert made.next_step(0.0) == Open(A)
    made.add(sequence(C, 11, I, blocks_deadline=5.0, answer_due=0.02))
    assert made.next_step(0.0) == Rest(0.02)
    assert isinstance(made.next_step(0.02), Open)  # it may be reading now: that takes longer than a pass
    made.blocks_arrived(C)
    assert made.next_step(0.01) == Open(C)
    made.remove(C)
    made.remove(A)
    made.add(sequence(D, 11, I, blocks_deadline=5.0, answer_due=0.02))
    assert made.next_step(0.0) == Rest(0.02)  # before a step of lower rows
    made.remove(B)
    start_decoding(made, sequence(A, 9, I))
    assert made.next_step(0.0) == Decode()  # but not before one of its own


# --- a simulated machine --------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Costs: seconds of a prefill token (growing with the context), of a decode step, and of each row in it."""

    token_seconds: float
    context_factor: float
    decode_seconds: float
    row_seconds: float

    def prefill(self, tokens: int, context: int) -> float:
        return tokens * self.token_seconds * (1 + self.context_factor * context / 1000)

    def decode(self, rows: int) -> float:
        return self.decode_seconds + rows * self.row_seconds


@dataclass
class Arrival:
    at_step: int
    prompt_tokens: int
    lane: Lane
    tenant: str
    family: int
    cached_part: float
    answer_tokens: int
    waits_seconds: float | None
    cancelled_at_step: int | None

    def as_sequence(self, index: int, now: float) -> Sequence:
        grains = tuple(Grain(bytes([self.family, i % 256])) for i in range(self.prompt_tokens // 16))
        deadline = None if self.waits_seconds is None else now + self.waits_seconds
        return sequence(
            RequestId(str(index)),
            self.prompt_tokens,
            self.lane,
            tenant=self.tenant,
            arrived=now,
            blocks_deadline=deadline,
            answer_due=now + 0.02,
            grains=grains,
        )


MACHINES = st.builds(
    Machine,
    token_seconds=st.floats(1e-5, 5e-2),
    context_factor=st.floats(0, 1),
    decode_seconds=st.floats(1e-3, 0.3),
    row_seconds=st.sampled_from([0, 1e-3, 0.1]),
)
SLICES = st.sampled_from(["apart", "mixed"])
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 60),
        prompt_tokens=st.integers(1, 3000),
        lane=st.sampled_from(Lane),
        tenant=st.sampled_from("ab"),
        family=st.integers(0, 9),
        cached_part=st.sampled_from([0, 0.3, 0.9, 1]),
        answer_tokens=st.integers(1, 30),
        waits_seconds=st.none() | st.floats(0, 5),
        cancelled_at_step=st.none() | st.integers(0, 200),
    ),
    max_size=8,
)


def simulate(  # noqa: C901 - one arm for each step
    machine: Machine,
    arrivals: list[Arrival],
    max_rows: int,
    slices: Slices,
    watch: Callable[[Scheduler, Step, float], None],
) -> Counter[int]:
    """Run to the end; returns how often each finished or was cancelled. Raises when a step is no progress."""
    made = scheduler(max_rows=max_rows, rate=256.0, slices=slices)
    now, steps = 0.0, 0
    left = {i: arrival.answer_tokens for i, arrival in enumerate(arrivals)}
    todo = sorted(enumerate(arrivals), key=lambda pair: pair[1].at_step)
    over: Counter[int] = Counter()

    def drew(decoding: list[RequestId]) -> None:
        for name in decoding:
            left[int(name)] -= 1
            if left[int(name)] <= 0:
                made.remove(name)
                over[int(name)] += 1

    while True:
        while todo and (todo[0][1].at_step <= steps or made.is_empty):
            index, arrival = todo.pop(0)
            made.add(arrival.as_sequence(index, now))
        for index, arrival in enumerate(arrivals):
            if arrival.cancelled_at_step == steps and made.remove(RequestId(str(index))) is not None:
                over[index] += 1
        if made.is_empty and not todo:
            return over
        step = made.next_step(now)
        watch(made, step, now)
        seconds = 0.0
        match step:
            case Open(request_id=name):
                known = made.get(name)
                assert known is not None
                made.opened(name, int(known.prefill_total * arrivals[int(name)].cached_part), now)
                if known.lane is Lane.WARM and made.get(name) is None:
                    over[int(name)] += 1
            case Prefill(request_id=name, tokens=tokens) | Mixed(request_id=name, tokens=tokens):
                known = made.get(name)
                assert known is not None
                decoding = [s.request_id for s in made.places.decoding.values()] if isinstance(step, Mixed) else []
                seconds = machine.prefill(tokens, known.prefilled) + machine.decode(len(decoding)) * bool(decoding)
                now += seconds
                play(made, step, now, seconds)
                drew(decoding)
                if made.get(name) is None:
                    assert known.lane is Lane.WARM
                    over[int(name)] += 1
            case Decode():
                decoding = [s.request_id for s in made.places.decoding.values()]
                seconds = machine.decode(len(decoding))
                now += seconds
                made.decoded(seconds, len(decoding))
                drew(decoding)
            case Rest(until=until):
                now = until
            case Idle(until=until):
                assert until is not None or made.is_empty, "idle for ever with work to do"
                now = max(now, until or now)
            case Join() | Park():
                play(made, step, now)
        made.check()
        if steps % 16 == 0:
            made.standings(now)
        steps += 1
        assert steps < 20_000


@given(MACHINES, ARRIVALS, st.integers(1, 4), SLICES)
def test_everybody_gets_to_the_end(machine: Machine, arrivals: list[Arrival], max_rows: int, slices: Slices) -> None:
    """Whatever the costs, classes and order, every sequence ends or is cancelled, once, and the books stay right."""
    assert simulate(machine, arrivals, max_rows, slices, lambda *_: None) == Counter(range(len(arrivals)))


@given(MACHINES, ARRIVALS, st.integers(1, 4), SLICES)
def test_a_slice_is_what_the_gap_allows(
    machine: Machine, arrivals: list[Arrival], max_rows: int, slices: Slices
) -> None:
    """At most the tokens that fit (or the floor), inside the prompt; on the grid where that costs under a half."""

    def watch(made: Scheduler, step: Step, _now: float) -> None:
        if not isinstance(step, Prefill):
            return
        known = made.get(step.request_id)
        assert known is not None
        fitting = made.costs.tokens_in(made._slice_seconds(step.lane), known.prefilled)
        floor = max(16, made.costs.break_even_tokens(known.prefilled))
        allowed = min(max(floor, fitting), 2048)
        assert 0 < step.tokens <= min(allowed, known.prefill_left)
        if step.tokens < known.prefill_left and step.tokens != allowed:
            assert (known.prefilled + step.tokens) % BLOCK_TOKENS == 0
            assert step.tokens > allowed / 2

    simulate(machine, arrivals, max_rows, slices, watch)


def lanes_ready(made: Scheduler, now: float) -> set[Lane]:
    """Of the prompts that can run a slice, looked up one by one."""
    started = {s.lane for s in everybody(made) if s.is_open and s.prefill_left}
    in_line = [s for s in everybody(made) if not s.is_open and (s.blocks_deadline is None or s.blocks_deadline <= now)]
    return started | {s.lane for s in in_line if made._readiness.may_open(s.lane, now)}


@given(MACHINES, ARRIVALS, st.integers(1, 4), SLICES)
def test_lanes_are_strict(machine: Machine, arrivals: list[Arrival], max_rows: int, slices: Slices) -> None:
    """A slice is run for a lower lane only when no higher one could run, or when it let sixteen by."""

    def watch(made: Scheduler, step: Step, now: float) -> None:
        if not isinstance(step, Prefill | Mixed):
            return
        if {lane for lane in lanes_ready(made, now) if lane < step.lane} & set(made._lanes_not_owing()):
            assert made._let_by[step.lane] >= 16
            assert step.lane is not Lane.WARM

    simulate(machine, arrivals, max_rows, slices, watch)


@given(MACHINES, ARRIVALS, st.integers(1, 4), SLICES)
def test_neither_prefill_nor_decode_starves(
    machine: Machine, arrivals: list[Arrival], max_rows: int, slices: Slices
) -> None:
    """After a slice beside decoding rows comes at least one step; a started prompt waits only while decode is owed."""
    owing: Lane | None = None

    def watch(made: Scheduler, step: Step, now: float) -> None:
        nonlocal owing
        if isinstance(step, Mixed) or (isinstance(step, Prefill) and made.is_mixing):
            assert step.lane in made._lanes_not_owing()  # a debt of less than a step is not paid yet
        elif isinstance(step, Prefill):
            if owing is not None and made.is_decoding:
                assert step.lane < owing, "a second slice although decode is owed"
            owing = step.lane if made.is_decoding else None
        elif isinstance(step, Decode):
            owing = None
            is_new = slices == "mixed" and not made.costs.step_seconds(1)
            for lane in lanes_ready(made, now):
                assert lane not in made._lanes_not_owing() or is_new, "a prompt waits although nothing is owed"
        elif not made.is_decoding:
            owing = None

    simulate(machine, arrivals, max_rows, slices, watch)


@settings(max_examples=25)
@given(st.integers(1, 3), st.floats(0.005, 0.05))
def test_a_batch_row_beside_endless_interactive_ones_goes_on(higher_rows: int, row_seconds: float) -> None:
    """At least half a second of decode in every minute."""
    made = scheduler(max_rows=4)
    for i in range(higher_rows):
        start_decoding(made, sequence(RequestId(f"i{i}"), 10, I))
    start_decoding(made, sequence(A, 10, BATCH))
    now, last_decoded, served = 0.0, 0.0, 0.0
    while now < 130:
        step = made.next_step(now)
        if isinstance(step, Decode):
            seconds = row_seconds * len(made.places.decoding)
            now += seconds
            made.decoded(seconds, len(made.places.decoding))
            if A in made.places.decoding:
                served += seconds
                last_decoded = now
        else:
            play(made, step, now)
        assert now - last_decoded <= 61

    assert 130 * 0.5 / 61 - 0.5 <= served <= 130 * 0.02 + 1
