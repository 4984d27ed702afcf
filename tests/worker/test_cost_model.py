"""What a slice and a step will cost, from those that ran."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.cost_model import CostModel, PrefillCost

COSTS = st.builds(
    lambda fixed, token, doubles_at: PrefillCost(fixed=fixed, token=token, attention=token / doubles_at),
    st.floats(0, 0.05),
    st.floats(1e-5, 2e-2),
    st.floats(1500, 1e6),  # the context at which a token costs twice as much
)


def test_before_the_first_slice_the_given_rate_holds() -> None:
    """And says the same at any context."""
    model = CostModel(500.0)

    assert model.prefill_seconds(100, 0) == pytest.approx(0.2)
    assert model.tokens_in(0.2, 9000) in (99, 100)
    assert model.step_seconds(3) == 0


@given(COSTS, st.floats(1, 1e5))
def test_a_device_is_learned(device: PrefillCost, first_rate: float) -> None:
    """After a prompt and a question, a slice's estimate is within a quarter of the truth, at the contexts seen."""
    model = CostModel(first_rate)
    for _ in range(2):
        context = 0
        for tokens in (20, 256, 512, 100, 256, 1024, 256, 512):
            model.prefilled(tokens, context, device.seconds(tokens, context))
            context += tokens

    for tokens, context in ((256, 0), (256, 2500), (1000, 1000)):
        assert model.prefill_seconds(tokens, context) == pytest.approx(device.seconds(tokens, context), rel=0.25)


@given(COSTS, st.floats(0.001, 10), st.integers(0, 100_000))
def test_a_slice_fits_its_seconds(cost: PrefillCost, seconds: float, context: int) -> None:
    """The inverse of the cost: one more token would not fit."""
    tokens = cost.tokens_in(seconds, context)

    if tokens:
        assert cost.seconds(tokens, context) <= seconds * 1.0001
    assert cost.seconds(tokens + 2, context) > seconds


def test_small_slices_do_not_make_slices_shrink() -> None:
    """A fixed cost is told from a rate: after ten-token questions, a slice has as many tokens as before."""
    device = PrefillCost(fixed=0.05, token=0.001, attention=0)
    model = CostModel(256.0)
    for tokens in (150, 100, 17, 16, 150, 20, 16, 16, 120, 16, 16, 16, 16):
        model.prefilled(tokens, 0, device.seconds(tokens, 0))

    assert model.tokens_in(0.2, 0) == pytest.approx(150, rel=0.1)


def test_the_bound_is_that_of_the_slow_slices() -> None:
    """Every fifth slice takes half as long again: a slice is sized for those."""
    model = CostModel(1000.0)
    for i in range(40):
        model.prefilled(100, 0, 0.15 if i % 5 == 0 else 0.1)

    assert 0.19 < model.prefill_seconds(model.tokens_in(0.3, 0), 0) < 0.25


def test_one_disturbed_slice_does_not_change_the_estimate_much() -> None:
    """The machine was busy for a moment."""
    model = CostModel(1000.0)
    for _ in range(20):
        model.prefilled(100, 0, 0.1)
    model.prefilled(100, 0, 5.0)

    assert model.prefill_seconds(100, 0) == pytest.approx(0.1, rel=0.15)
    assert model.tokens_in(0.2, 0) > 150


def test_what_cannot_be_measured_is_not() -> None:
    """A clock that stood still, a slice of a few tokens."""
    model = CostModel(100.0)
    model.prefilled(100, 0, 0.0)
    model.prefilled(3, 0, 9.0)
    model.stepped(0, 1.0)

    assert model.tokens_in(1.0, 0) in (99, 100)
    assert model.step_seconds(1) == 0


def test_a_step_by_its_rows() -> None:
    """The median of the latest; a size never seen is as the nearest smaller one, or else the smallest."""
    model = CostModel(100.0)
    for seconds in (0.02, 0.5, 0.02):
        model.stepped(2, seconds)
    model.stepped(4, 0.05)

    assert [model.step_seconds(rows) for rows in (1, 2, 3, 4, 9)] == [0.02, 0.02, 0.02, 0.05, 0.05]


# --- mixed passes ---------------------------------------------------------------------------------------------------


def test_before_the_first_a_mixed_pass_is_a_step_and_a_slices_tokens() -> None:
    """And is bounded by twice that, until some ran."""
    model = CostModel(100.0)
    model.stepped(2, 0.05)

    assert model.mixed_seconds(10, 0, 2) == pytest.approx(0.15)
    assert model.mixed_tokens_in(0.3, 0, 2) in (9, 10)
    for _ in range(8):
        model.mixed(10, 0, 2, 0.15)
    assert model.mixed_tokens_in(0.3, 0, 2) in (24, 25)


@given(
    st.floats(0.005, 0.1),
    st.floats(1e-4, 1e-2),
    st.floats(1000, 1e6),  # the context at which a token costs twice as much
    st.floats(0, 5e-5),
    st.floats(0.25, 4),
)
def test_a_device_with_mixed_passes_is_learned(
    step: float, token: float, doubles_at: float, reach: float, rate_factor: float
) -> None:
    """Sized for a gap, passes along a prompt do not go far beyond it, though slices said something else."""
    model = CostModel(rate_factor / token)
    model.stepped(1, step)
    context = 0
    late: list[float] = []
    for _ in range(40):
        tokens = max(1, model.mixed_tokens_in(0.25, context, 1), model.worthwhile_tokens(1 / 3, context, 1))
        fixed = step + reach * context
        seconds = fixed + tokens * token * (1 + (context + tokens / 2) / doubles_at)
        model.mixed(tokens, context, 1, seconds)
        late.append(seconds / max(0.25, 1.5 * fixed))
        context += tokens

    assert max(late[10:]) <= 1.3


def test_a_pass_of_which_no_step_is_known_says_nothing() -> None:
    """Nor does one that took no time."""
    model = CostModel(100.0)
    model.mixed(10, 0, 1, 5.0)
    model.stepped(1, 0.05)
    model.mixed(10, 0, 1, 0.0)

    assert model.mixed_seconds(10, 0, 1) == pytest.approx(0.15)


def test_from_where_on_a_pass_is_worth_it() -> None:
    """A part of its time is that of its tokens."""
    model = CostModel(100.0)
    model.stepped(1, 0.1)

    assert model.worthwhile_tokens(0.5, 0, 1) in (9, 10)
    assert model.worthwhile_tokens(0.2, 0, 1) in (2, 3)


@pytest.mark.parametrize(("factor", "pays"), [(0.7, True), (1.0, True), (1.5, False)])
def test_mixing_is_for_devices_where_it_pays(*, factor: float, pays: bool) -> None:
    """Mixed passes that take longer than their slices and steps apart are given up; until that is known they run."""
    model = CostModel(100.0)
    for _ in range(10):
        model.stepped(1, 0.1)
        model.prefilled(32, 0, 0.4)
    assert model.mixing_pays()
    for _ in range(10):
        model.mixed(32, 0, 1, factor * 0.5)
    assert model.mixing_pays() == pays


def test_mixing_is_tried_again() -> None:
    """What was slow once, when kernels were compiled for instance, is measured again after many slices apart."""
    model = CostModel(100.0)
    for _ in range(10):
        model.stepped(1, 0.1)
        model.prefilled(32, 0, 0.4)
        model.mixed(32, 0, 1, 2.0)
    assert not model.mixing_pays()
    slices = 0
    while not model.mixing_pays():
        model.prefilled(32, 0, 0.4)
        slices += 1
        assert slices < 1000
    assert slices > 100
