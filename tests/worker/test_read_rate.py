"""The read rate: what was measured counts, and a bad time does not count for ever."""

from hypothesis import given
from hypothesis import strategies as st

from worker.read_rate import BELIEVED_BYTES_PER_SECOND, FADING_SECONDS, ReadRate

MB = 10**6


def slow_disk(now: float) -> ReadRate:
    rate = ReadRate()
    for _ in range(40):
        rate.measured(3 * MB, 1.0, now)
    return rate


def test_what_was_measured_lately_counts() -> None:
    rate = slow_disk(now=50.0)
    assert 3 * MB <= rate.bytes_per_second(50.0) < 4 * MB
    assert rate.bytes_per_second(60.0) < 5 * MB


def test_a_bad_time_is_not_for_ever() -> None:
    """Since nothing is read, nothing would be measured: belief comes back until the disk is asked again; a disk that
    is slow still is seen to be at once, one that is well again is believed."""
    rate = slow_disk(now=0.0)
    block_bytes, compute_seconds = 12 * MB, 0.15
    refused = [at for at in range(0, 3600, 10) if block_bytes / rate.bytes_per_second(at) > compute_seconds]
    assert refused[0] == 0
    assert FADING_SECONDS / 2 < refused[-1] < 2 * FADING_SECONDS
    asked_at = refused[-1] + 10.0
    rate.measured(block_bytes, 4.0, asked_at)
    still_slow = rate.bytes_per_second(asked_at)
    for number in range(20):
        rate.measured(block_bytes, 0.01, asked_at + number)
    assert rate.bytes_per_second(asked_at + 20) > 10 * still_slow


@given(st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-6, 1e4), st.floats(0, 1e4)), max_size=20))
def test_belief_is_positive_and_only_rises_between_measurements(reads: list[tuple[int, float, float]]) -> None:
    """Towards what a disk is believed to read; a faster one stays what it was measured to be."""
    rate, now = ReadRate(), 0.0
    for file_bytes, seconds, later in reads:
        rate.measured(file_bytes, seconds, now)
        before = rate.bytes_per_second(now)
        after = rate.bytes_per_second(now + later)
        assert 0 < before <= after * (1 + 1e-9)
        assert after <= max(before, BELIEVED_BYTES_PER_SECOND) * (1 + 1e-9)
        now += later
