"""How long a load still takes: by the model's last one, by its own progress, by others' bytes, or nobody knows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.load_times import LoadTimes
from protocol.generation import Loading
from protocol.ids import ModelName

BYTES = st.integers(0, 2**45)
MODEL, OTHER = ModelName("m"), ModelName("other")


def half_read(total_bytes: int = 100) -> Loading:
    return Loading(done_bytes=total_bytes // 2, total_bytes=total_bytes)


def test_nothing_measured_is_nothing_said() -> None:
    """Neither before the first byte."""
    times = LoadTimes()
    assert times.seconds_left(MODEL, loading=None, elapsed_seconds=3.0) is None
    none_read = Loading(done_bytes=0, total_bytes=100)
    assert times.seconds_left(MODEL, loading=none_read, elapsed_seconds=3.0) is None


def test_as_it_went_the_last_time() -> None:
    """Until that is past; then its progress tells, and when all is read, for longer than it ever took, nobody does."""
    times = LoadTimes()
    times.loaded(MODEL, size_bytes=100, seconds=30.0)
    times.loaded(MODEL, size_bytes=100, seconds=10.0)
    assert times.seconds_left(MODEL, loading=None, elapsed_seconds=4.0) == 6.0
    assert times.seconds_left(MODEL, loading=half_read(), elapsed_seconds=4.0) == 6.0
    assert times.seconds_left(MODEL, loading=None, elapsed_seconds=-5.0) == 15.0  # it starts again in five
    assert times.seconds_left(MODEL, loading=half_read(), elapsed_seconds=12.0) == 12.0
    all_read = Loading(done_bytes=100, total_bytes=100)
    assert times.seconds_left(MODEL, loading=all_read, elapsed_seconds=31.0) is None


def test_a_first_load_goes_by_its_bytes() -> None:
    """At its own rate as soon as there is one, before that at the one of other models."""
    times = LoadTimes()
    assert times.seconds_left(MODEL, loading=half_read(), elapsed_seconds=4.0) == 4.0
    times.loaded(OTHER, size_bytes=1000, seconds=10.0)
    none_read = Loading(done_bytes=0, total_bytes=5000)
    assert times.seconds_left(MODEL, loading=none_read, elapsed_seconds=1.0) == pytest.approx(49.0)
    times.loaded(OTHER, size_bytes=None, seconds=10.0)  # it reported no bytes
    assert times.seconds_left(MODEL, loading=none_read, elapsed_seconds=1.0) == pytest.approx(49.0)


@given(
    st.lists(st.tuples(st.sampled_from((MODEL, OTHER)), st.none() | BYTES, st.floats(0.0, 1e5)), max_size=10),
    st.none() | st.builds(Loading, done_bytes=BYTES, total_bytes=BYTES),
    st.floats(-100.0, 1e6),
)
def test_a_positive_number_or_none(
    loads: list[tuple[ModelName, int | None, float]], loading: Loading | None, elapsed_seconds: float
) -> None:
    """Whatever was measured and reported."""
    times = LoadTimes()
    for model, size_bytes, seconds in loads:
        times.loaded(model, size_bytes=size_bytes, seconds=seconds)
    left = times.seconds_left(MODEL, loading=loading, elapsed_seconds=elapsed_seconds)
    assert left is None or (left > 0 and math.isfinite(left))
