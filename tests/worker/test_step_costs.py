"""What a decode step takes: by rows a table, by what they hold a number that noise does not make up."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.step_costs import StepCosts

LENGTHS = (900, 16_000, 3000, 9000, 40_000, 700, 22_000, 2000)
"""What the rows hold, as requests come and go; each goes on for some steps."""


def run(costs: StepCosts, rows: int, seconds: float, token_seconds: float, seed: int) -> None:
    """Steps of so many rows. Each is up to a twentieth slower or faster, and one in six three times as long; with some
    seeds the first of each length is."""
    draw = random.Random(seed)
    for length in LENGTHS:
        for i in range(12):
            held = length + rows * i
            disturbed = 3 if i % 6 == seed % 6 else draw.uniform(0.95, 1.05)
            costs.ran(rows, (seconds + held * token_seconds) * disturbed, held)


@given(st.floats(0.005, 0.05), st.floats(0.02, 1), st.integers(0, 1000))
def test_what_held_tokens_cost_is_learned(seconds: float, part: float, seed: int) -> None:
    """Where it is between a fiftieth and all of a step at 16,000 tokens: a step of a length that was not the last is
    foretold within a quarter, though some of those that ran were disturbed."""
    token_seconds = part * seconds / 16_000
    costs = StepCosts()
    run(costs, 2, seconds, token_seconds, seed)
    for held in (1000, 16_000, 32_000):
        assert costs.seconds(2, held) == pytest.approx(seconds + held * token_seconds, rel=0.25)


@given(st.floats(0.005, 0.05), st.integers(0, 1000))
def test_lengths_that_cost_nothing_are_told_as_nothing(seconds: float, seed: int) -> None:
    """Noise does not become a price: a step of far other lengths is foretold within a fifth."""
    costs = StepCosts()
    run(costs, 2, seconds, 0.0, seed)
    for held in (1000, 40_000):
        assert costs.seconds(2, held) == pytest.approx(seconds, rel=0.2)


def test_a_token_costs_the_same_in_steps_of_any_size() -> None:
    """Learned from one row, known for four."""
    costs = StepCosts()
    for held in (1000, 9000, 20_000, 3000, 30_000):
        for _ in range(5):
            costs.ran(1, 0.01 + held * 1e-6, held)
    costs.ran(4, 0.03, 5000)

    assert costs.token_seconds == pytest.approx(1e-6)
    assert costs.seconds(4) == 0.03
    assert costs.seconds(4, 15_000) == pytest.approx(0.04)
    assert costs.seconds(4, 0) == pytest.approx(0.025)
    assert costs.seconds(3, 10_000) == costs.seconds(1, 10_000)


def test_a_few_steps_say_nothing_of_lengths() -> None:
    """Nor do many whose lengths are alike, or not known."""
    costs = StepCosts()
    for held in (1000, 50_000, 20_000, 4000, 60_000, 90_000):
        for _ in range(4):
            costs.ran(1, 0.01 + held * 1e-6, held)
    for i in range(2000):
        costs.ran(2, 0.01 + 1e-5 * i, 3000 + i)
        costs.ran(2, 0.01)

    assert costs.token_seconds == 0
    assert costs.seconds(1, 0) == costs.seconds(1, 90_000) == costs.seconds(1)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.floats(0, 1), st.none() | st.integers(0, 200_000)),
        max_size=60,
    ),
    st.integers(0, 8),
    st.none() | st.integers(0, 1_000_000),
)
def test_a_step_takes_some_time(ran: list[tuple[int, float, int | None]], rows: int, held: int | None) -> None:
    """Whatever ran: never less than none, and none only before there was one; more tokens never take less."""
    costs = StepCosts()
    for each in ran:
        costs.ran(*each)
    is_known = any(size > 0 and seconds > 0 for size, seconds, _ in ran)

    assert (costs.seconds(rows, held) > 0) == (is_known and rows > 0)
    if held is not None:
        assert costs.seconds(rows, held + 1000) >= costs.seconds(rows, held)
