"""When a limit lets somebody by: tables, and what holds for all of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.turn_etas import RunTimes, turn_eta

SECONDS = st.lists(st.floats(0.0, 1e5), max_size=12)


@pytest.mark.parametrize(
    ("running", "usual", "ahead", "told"),
    [
        ([2.0], [10.0, 10.0], 0, 8.0),
        ([2.0], [10.0, 10.0], 1, 18.0),
        ([2.0, 7.0], [10.0], 0, 3.0),  # the one that ends first
        ([2.0, 7.0], [10.0], 2, 13.0),  # two at a time
        ([5.0], [2.0, 8.0, 10.0], 0, 4.0),  # those that it has outlived say nothing of it
        ([12.0], [10.0], 0, None),  # longer than all that are known
        ([12.0, 1.0], [10.0], 0, 9.0),
        ([2.0], [], 0, None),  # none has ended yet
        ([], [10.0], 0, None),
    ],
)
def test_told(running: list[float], usual: list[float], ahead: int, told: float | None) -> None:
    """By how long such requests ran lately, and by how many may run at a time."""
    assert turn_eta(running, usual, ahead=ahead) == told


@given(SECONDS, SECONDS, st.integers(0, 500))
def test_never_negative_and_longer_for_who_came_later(running: list[float], usual: list[float], ahead: int) -> None:
    """A number or none, for all of them alike."""
    told = [turn_eta(running, usual, ahead=each) for each in (ahead, ahead + 1)]
    first, second = told
    if first is None or second is None:
        assert told == [None, None]
        return
    assert math.isfinite(first)
    assert 0 < first <= second


@given(SECONDS.filter(bool), st.floats(0.0, 1e4), st.floats(0.0, 1e4))
def test_as_time_goes_by_it_only_gets_sooner(usual: list[float], ran: float, later: float) -> None:
    """Unless what runs has outlived one of those that tell: that is a reason to tell more."""
    sooner = turn_eta([ran + later], usual, ahead=0)
    first = turn_eta([ran], usual, ahead=0)
    if first is not None and not any(ran < each <= ran + later for each in usual):
        assert sooner == pytest.approx(first - later, abs=1e-6)


def test_what_ran_long_ago_is_no_measure() -> None:
    """And names are told apart."""
    runs = RunTimes()
    runs.ended("ada", seconds=100.0, now=0.0)
    runs.ended("ada", seconds=2.0, now=4000.0)
    runs.ended("bob", seconds=7.0, now=4000.0)
    assert runs.of("ada", 4000.0) == (2.0,)
    assert runs.of("eve", 4000.0) == ()
