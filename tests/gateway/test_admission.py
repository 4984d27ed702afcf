"""Admission: which bound refuses, by what name, and when to come back."""

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import (
    DAY_SECONDS,
    ClassBounds,
    ClassLimits,
    DayBook,
    DayTokens,
    KeyLimits,
    Load,
    RecentEnds,
    model_refusal,
    rate_headers,
    refusal,
    reset_text,
)
from gateway.latency_class import WorkClass
from protocol.failures import Failure, FailureKind

SMALL = st.integers(0, 12)
LIMITS = st.builds(
    KeyLimits,
    max_running=st.none() | st.integers(1, 5),
    max_queued=st.none() | SMALL,
    tokens_per_day=st.none() | st.integers(1, 100),
)
LOADS = st.builds(
    Load,
    key_open=SMALL,
    key_queued=SMALL,
    class_queued=SMALL,
    key_tokens_today=st.integers(0, 200),
    class_tokens_today=st.integers(0, 200),
)
WORK_CLASSES: tuple[WorkClass, ...] = get_args(WorkClass)


def refused(
    load: Load,
    limits: KeyLimits,
    work_class: WorkClass = "standard",
    most: int = 10,
    class_tokens_per_day: int | None = None,
) -> Failure | None:
    bounds = ClassBounds(max_queued=most, tokens_per_day=class_tokens_per_day)
    return refusal(
        load,
        key_name="ada",
        limits=limits,
        work_class=work_class,
        class_limits=ClassLimits(interactive=bounds, standard=bounds, batch=bounds, warm=bounds),
    )


@pytest.mark.parametrize(
    ("load", "limits", "named"),
    [
        (Load(), KeyLimits(), None),
        (Load(key_open=99, key_queued=9, class_queued=9, key_tokens_today=10**9), KeyLimits(), None),
        (Load(key_tokens_today=99), KeyLimits(tokens_per_day=100), None),
        (Load(key_tokens_today=100), KeyLimits(tokens_per_day=100), "tokens_per_day"),
        (Load(key_open=5), KeyLimits(max_running=2), None),
        (Load(key_open=5), KeyLimits(max_running=2, max_queued=4), None),
        (Load(key_open=6), KeyLimits(max_running=2, max_queued=4), "max_running 2 and max_queued 4"),
        (Load(key_open=1), KeyLimits(max_running=1, max_queued=0), "max_running 1"),
        (Load(key_open=0), KeyLimits(max_running=1, max_queued=0), None),
        (Load(key_open=9, key_queued=3), KeyLimits(max_queued=4), None),
        (Load(key_open=9, key_queued=4), KeyLimits(max_queued=4), "max_queued 4"),
        (Load(class_queued=10), KeyLimits(), "max_queued_standard 10"),
    ],
)
def test_the_refusal_names_the_limit(load: Load, limits: KeyLimits, named: str | None) -> None:
    """Which limit, whose (a key's own is another kind), and when to come back; nothing else is a reason."""
    failure = refused(load, limits)
    if named is None:
        assert failure is None
        return
    assert failure is not None
    of_key = named != "max_queued_standard 10"
    assert failure.kind is (FailureKind.RATE_LIMITED if of_key else FailureKind.OVERLOADED)
    assert named in failure.message
    assert failure.retry_after_seconds is not None
    assert re.search(r"again in about \d+ s|Come back after midnight", failure.message)


def test_a_classs_day_is_spent_by_all_keys_together() -> None:
    """Named by the setting, and over until midnight: another class may still be asked for."""
    load = Load(class_tokens_today=100, day_left_seconds=7_000.0)
    failure = refused(load, KeyLimits(), "batch", class_tokens_per_day=100)
    assert failure is not None
    assert "tokens_per_day_batch" in failure.message
    assert (failure.kind, failure.retry_after_seconds) == (FailureKind.RATE_LIMITED, 7_000.0)
    assert refused(Load(class_tokens_today=99), KeyLimits(), "batch", class_tokens_per_day=100) is None


def test_a_warm_is_bound_by_its_class_and_by_the_day() -> None:
    """A key that is busy may warm: what it warms is meant to hasten its answers. Its tokens are spent all the same."""
    busy = Load(key_open=9, key_queued=9, key_tokens_today=5)
    limits = KeyLimits(max_running=1, max_queued=1)
    assert refused(busy, limits, "standard") is not None
    assert refused(busy, limits, "warm") is None
    assert refused(busy, KeyLimits(tokens_per_day=5), "warm") is not None
    assert refused(Load(class_queued=10), limits, "warm") is not None


def test_a_full_day_comes_back_tomorrow() -> None:
    """Its time is the day's end, not the queue's."""
    failure = refused(Load(key_tokens_today=5, day_left_seconds=7_000.0), KeyLimits(tokens_per_day=5))
    assert failure is not None
    assert failure.retry_after_seconds == 7_000.0


@given(LOADS, LIMITS, st.sampled_from(WORK_CLASSES), st.none() | st.integers(1, 100))
def test_less_load_is_never_refused_more(load: Load, limits: KeyLimits, work_class: WorkClass, day: int | None) -> None:
    """Who is refused now is refused with more load, too; and nobody without load or limits is."""
    more = Load(
        key_open=load.key_open + 1,
        key_queued=load.key_queued + 1,
        class_queued=load.class_queued + 1,
        key_tokens_today=load.key_tokens_today + 1,
        class_tokens_today=load.class_tokens_today + 1,
    )
    if refused(load, limits, work_class, class_tokens_per_day=day) is not None:
        assert refused(more, limits, work_class, class_tokens_per_day=day) is not None
    can_hold = limits.max_queued != 0 or limits.max_running is not None
    assert not can_hold or refused(Load(), limits, work_class, class_tokens_per_day=day) is None


@given(LOADS, LIMITS)
def test_headers_tell_only_of_limits(load: Load, limits: KeyLimits) -> None:
    """An unlimited key gets none; what remains is never negative, and 0 whenever a further one would be refused."""
    headers = dict(rate_headers(load, limits))
    assert bool(headers) == (limits.max_queued is not None or limits.tokens_per_day is not None)
    remaining = [int(value) for name, value in headers.items() if b"remaining" in name]
    assert all(number >= 0 for number in remaining)
    assert (0 in remaining) == (refused(load, limits, most=10**6) is not None)
    for name, value in headers.items():
        if b"reset" in name:
            assert re.fullmatch(rb"(\d+h)?(\d+m)?\d+s", value)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (0.2, "1s"), (360, "6m0s"), (86_399.5, "24h0m0s")])
def test_resets_are_written_as_openai_does(seconds: float, text: str) -> None:
    """`1s`, `6m0s`."""
    assert reset_text(seconds) == text


def ends(*moments: float) -> RecentEnds:
    recent = RecentEnds()
    for moment in moments:
        recent.ended("ada", seconds=8.0, now=moment)
    return recent


def test_when_to_come_back_is_measured() -> None:
    """One end every four seconds: come back in four. One end alone: as long as that one took. Long ago, or of somebody
    else: a guess. A service that stands still promises less and less, up to a minute."""
    assert ends(0, 4, 8).next_of("ada", 12.0) == pytest.approx(4.0)
    assert ends(0).next_of("ada", 1.0) == 8.0
    assert ends(0, 4, 8).next_of("bob", 12.0) == ends().next_of("ada", 12.0)
    assert ends(0, 4, 8).next_of("ada", 100.0) > ends(0, 4, 8).next_of("ada", 12.0)
    assert ends(0, 4, 8).next_of("ada", 500.0) == 60.0
    assert ends(0, 4, 8).next_of("ada", 5_000.0) == ends().next_of("ada", 0.0)


@pytest.mark.parametrize(("ahead", "rows", "named"), [(63, 0, None), (64, 0, "64"), (79, 16, None), (80, 16, "64")])
def test_a_full_model_names_its_limit_and_its_measured_time(ahead: int, rows: int, named: str | None) -> None:
    """`max_queued_requests`, whose rows do not count, and when one of this model's requests will probably end."""
    failure = model_refusal("m", ahead=ahead, max_queued=64, rows=rows, next_seconds=11.4)
    if named is None:
        assert failure is None
        return
    assert failure is not None
    assert failure.kind is FailureKind.OVERLOADED
    assert f"max_queued_requests {named}" in failure.message
    assert "again in about 12 s" in failure.message
    assert failure.retry_after_seconds == 11.4


def test_a_days_tokens_end_with_the_day() -> None:
    """Charges add up by key and by class until midnight UTC; a clock that is set back gives nothing back."""
    tokens = DayTokens()
    tokens.charge("ada", "batch", 30, unix_now=DAY_SECONDS * 3 + 10.0)
    tokens.charge("ada", "standard", 12, unix_now=DAY_SECONDS * 4 - 1.0)
    tokens.charge("bob", "batch", 1, unix_now=DAY_SECONDS * 4 - 1.0)
    assert tokens.used("ada", unix_now=DAY_SECONDS * 3 + 11.0) == 42
    assert tokens.used("ada", unix_now=DAY_SECONDS * 2) == 42
    assert tokens.used_by_class("batch", unix_now=DAY_SECONDS * 2) == 31
    assert tokens.used("ada", unix_now=DAY_SECONDS * 4) == 0
    assert tokens.used_by_class("batch", unix_now=DAY_SECONDS * 4) == 0
    assert tokens.book() == DayBook(day=4)
