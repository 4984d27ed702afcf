"""When rows get free: tables of what is known of answers, and what holds for all of them."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import RequestId
from worker.row_ends import AnswerLengths, RowEnds
from worker.sequence import Lane, Sequence

INTERACTIVE, STANDARD, BATCH, _ = Lane
FAR_TOO_MANY = 100_000


def row(
    drawn: int = 1, *, max_tokens: int = FAR_TOO_MANY, lane: Lane = STANDARD, began: float | None = None
) -> Sequence:
    return Sequence(
        request_id=RequestId("a"),
        prompt_tokens=9,
        arrived=0.0,
        lane=lane,
        drawn=drawn,
        max_tokens=max_tokens,
        decode_started=began,
    )


def lengths_of(*tokens: int, lane: Lane = STANDARD) -> AnswerLengths:
    lengths = AnswerLengths()
    for each in tokens:
        lengths.ended(lane, each)
    return lengths


def told(rows: list[Sequence], lengths: AnswerLengths, count: int, step_seconds: float = 0.1) -> list[float | None]:
    ends = RowEnds(rows, lengths, step_seconds, now=0.0)
    return [ends.seconds_until(number) for number in range(1, count + 1)]


def test_small_max_tokens_are_taken_at_their_word() -> None:
    """Nothing is known of answers: rows end at the latest then. Who has them next has nobody's word."""
    rows = [row(10, max_tokens=40), row(5, max_tokens=15), row(1, max_tokens=FAR_TOO_MANY)]
    assert told(rows, AnswerLengths(), 3) == [pytest.approx(1.0), pytest.approx(3.0), None]


def test_what_most_clients_ask_for_says_nothing() -> None:
    """No number at all, rather than hours that nobody will wait."""
    assert told([row(), row()], AnswerLengths(), 1) == [None]
    assert told([row()], lengths_of(30, 30, 30), 1) == [None]  # three are few


def test_answers_that_are_all_alike() -> None:
    """Each row ends when it is as long as they were, and who has it next after as long again."""
    lengths = lengths_of(30, 30, 30, 30)
    assert told([row(10), row(25)], lengths, 4) == [pytest.approx(each) for each in (0.5, 2.0, 3.5, 5.0)]


def test_of_many_rows_one_is_short() -> None:
    """Half of the answers have 10 tokens and half 100: of two rows at their beginning one will end after 10."""
    lengths = lengths_of(10, 10, 100, 100)
    assert told([row(0), row(0)], lengths, 1) == [pytest.approx(1.0)]
    assert told([row(0)], lengths, 1) == [pytest.approx(6.5)]  # a short one's next, or a long one: 10 or 65 of 55


def test_an_answer_that_is_longer_than_all_of_them() -> None:
    """Is trusted to keep to `max_tokens` if that is near, else it is not counted on."""
    lengths = lengths_of(10, 10, 10, 10)
    assert told([row(20)], lengths, 1) == [None]
    assert told([row(20, max_tokens=50)], lengths, 1) == [pytest.approx(3.0)]


def test_classes_have_answers_of_their_own() -> None:
    """What the batch lane's answers were says nothing of another's."""
    lengths = lengths_of(10, 10, 10, 10, lane=BATCH)
    assert told([row(0, lane=INTERACTIVE)], lengths, 1) == [None]
    assert told([row(0, lane=BATCH)], lengths, 1) == [pytest.approx(1.0)]


def test_the_pace_is_that_of_the_rows_themselves() -> None:
    """A prompt in between makes steps rarer than they are long. Nothing measured: nobody can say."""
    rows = [row(10, max_tokens=20, began=-5.0), row(10, max_tokens=30, began=-5.0)]
    assert told(rows, AnswerLengths(), 1) == [pytest.approx(5.0)]
    assert told(rows, AnswerLengths(), 1, step_seconds=2.0) == [pytest.approx(20.0)]
    assert told([row(1, max_tokens=20)], AnswerLengths(), 1, step_seconds=0.0) == [None]


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_told_is_what_then_happens(rows: int) -> None:
    """Answers of a skewed spread, rows taken anew as they end: in the mean within half an answer's time."""
    draw = random.Random(rows)

    def some_length() -> int:
        return min(800, int(draw.lognormvariate(5, 0.7)) + 5)

    # Who looks at a row meets long answers oftener than short ones: each as often as it has tokens.
    met = [some_length() for _ in range(500)]
    met = draw.choices(met, weights=met, k=500)
    errors: dict[int, list[float]] = {1: [], 5: [], 20: []}
    for _ in range(60):
        lengths = lengths_of(*(some_length() for _ in range(64)))
        left: list[int] = []
        running: list[Sequence] = []
        for _ in range(rows):
            length = draw.choice(met)
            drawn = draw.randrange(length)
            left.append(length - drawn)
            running.append(row(drawn))
        ends = RowEnds(running, lengths, 1.0, now=0.0)
        happens: list[int] = []
        while len(happens) < max(errors):
            soonest = min(left)
            happens.append(soonest)
            left.remove(soonest)
            left.append(soonest + some_length())
        for number, found in errors.items():
            told_seconds = ends.seconds_until(number)
            if told_seconds is not None:  # one alone may be longer than all that are known
                found.append(told_seconds - happens[number - 1])
    mean_tokens = sum(some_length() for _ in range(500)) / 500
    for number, found in errors.items():
        # Against an answer's time, not against the wait: a first end of sixteen is a moment.
        scale = mean_tokens * max(1.0, number / rows)
        assert len(found) > 50
        assert abs(sum(found) / len(found)) < scale / 2, number


ROWS = st.lists(
    st.builds(
        row,
        st.integers(0, 400),
        max_tokens=st.integers(0, 2000),
        lane=st.sampled_from((INTERACTIVE, STANDARD, BATCH)),
        began=st.none() | st.floats(-1e6, 0.0),
    ),
    max_size=16,
)


@given(ROWS, st.lists(st.integers(0, 500), max_size=20), st.floats(0.0, 10.0), st.sets(st.integers(1, 200), max_size=8))
def test_never_negative_nor_less_for_who_is_further_behind(
    rows: list[Sequence], answers: list[int], step_seconds: float, counts: set[int]
) -> None:
    """A number or none; and where nobody can say it of one, nobody can of those behind."""
    ends = RowEnds(rows, lengths_of(*answers), step_seconds, now=0.0)
    told_seconds = [ends.seconds_until(count) for count in sorted(counts)]
    known = [seconds for seconds in told_seconds if seconds is not None]
    assert told_seconds[: len(known)] == known
    assert all(math.isfinite(seconds) and seconds >= 0 for seconds in known)
    assert known == sorted(known)


@given(st.integers(1, 16), st.integers(1, 300), st.integers(0, 299))
def test_as_steps_go_by_it_only_gets_sooner(rows: int, length: int, steps: int) -> None:
    """By a step each: what is told grows for no reason of its own."""
    steps = min(steps, length - 1)
    lengths = lengths_of(length, length, length, length)
    first = told([row(0) for _ in range(rows)], lengths, 1)[0]
    later = told([row(steps) for _ in range(rows)], lengths, 1)[0]
    assert first is not None
    assert later is not None
    assert later == pytest.approx(first - steps * 0.1)
