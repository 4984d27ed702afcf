"""The line: whom it finds, against a look at everybody; and how few it looks at."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import RequestId
from worker.line import Line
from worker.live_kv import Entrance, KVFootprint, LiveKV
from worker.sequence import Lane, Sequence

TOKEN = KVFootprint(bytes_per_token=1)
NOW = 10.0


def prompt(
    number: int, tokens: int, *, lane: Lane = Lane.STANDARD, tenant: str = "", max_tokens: int = 300, drawn: int = 0
) -> Sequence:
    return Sequence(
        request_id=RequestId(f"{number}"),
        prompt_tokens=tokens,
        arrived=float(-number % 7),
        lane=lane,
        tenant=tenant,
        max_tokens=max_tokens,
        ticket=number,
        drawn=drawn,
    )


def row(tokens: int, lane: Lane) -> Sequence:
    return prompt(10**6 + tokens, tokens, lane=lane, max_tokens=500)


def line_of(*prompts: Sequence) -> Line:
    line = Line(Lane.STANDARD)
    for each in prompts:
        line.add(each)
    return line


@dataclass
class Counting(Entrance):
    """Counts whom it was asked about."""

    asked: list[Sequence] = field(default_factory=list[Sequence])

    def __init__(self, kv: LiveKV, live: list[Sequence], only: Sequence | None = None) -> None:
        super().__init__(kv, live, only)
        self.asked = []

    def admits(self, candidate: Sequence) -> bool:
        self.asked.append(candidate)
        return super().admits(candidate)


def beside(rows: list[Sequence], room_tokens: int, only: Sequence | None = None) -> Counting:
    """An entrance with room for one more row of so many tokens, when the others have grown by their reserve."""
    kv = LiveKV(footprint=TOKEN, budget_bytes=(len(rows) + 1) * TOKEN.row_bytes(room_tokens))
    return Counting(kv, rows, only)


PROMPTS = st.lists(
    st.tuples(
        st.integers(1, 2500),
        st.sampled_from(["a", "b", "c"]),
        st.integers(1, 600),
        st.integers(0, 2),
        st.sampled_from([None, NOW - 1, NOW + 1]),
    ),
    max_size=12,
)
ROWS = st.lists(st.builds(row, st.integers(1, 1500), st.sampled_from([Lane.INTERACTIVE, Lane.BATCH])), max_size=3)


@given(PROMPTS, ROWS, st.integers(1, 3000), st.data())
def test_nobody_is_overlooked(
    prompts: list[tuple[int, str, int, int, float | None]], rows: list[Sequence], room: int, data: st.DataObject
) -> None:
    """Whatever the prompts and the room: there is a candidate when somebody may come in, the shortest of each tenant
    and the oldest are among those found, and all that are found may come in."""
    waiting: list[Sequence] = []
    for number, (tokens, tenant, max_tokens, preemptions, deadline) in enumerate(prompts):
        each = prompt(number, tokens, tenant=tenant, max_tokens=max_tokens)
        each.preemptions, each.blocks_deadline = preemptions, deadline
        waiting.append(each)
    line = line_of(*waiting)
    if waiting and data.draw(st.booleans()):
        line.remove(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))).request_id)
    only = data.draw(st.sampled_from([None, *waiting, prompt(99, 10)]))
    entrance = beside(rows, room, only)
    may = [each for each in waiting if (each.blocks_deadline or 0.0) <= NOW and entrance.admits(each)]

    assert line.has_candidate(entrance, NOW) is bool(may)
    shortest, oldest = list(line.shortest(entrance, NOW)), list(line.oldest(entrance, NOW))
    assert all(each in may for each in (*shortest, *oldest))
    for tenant in {each.tenant for each in may}:
        assert min((s for s in may if s.tenant == tenant), key=lambda s: (s.prefill_total, s.ticket)) in shortest
    if may:
        assert min(may, key=lambda s: (s.arrived, s.ticket)) in oldest


ASKED: list[Callable[[Line, Entrance], object]] = [
    lambda line, entrance: line.has_candidate(entrance, NOW),
    lambda line, entrance: list(line.shortest(entrance, NOW)),
    lambda line, entrance: list(line.oldest(entrance, NOW)),
]


@pytest.mark.parametrize("ask", ASKED)
def test_a_room_for_nobody_is_seen_at_once(ask: Callable[[Line, Entrance], object]) -> None:
    """Prompts that would fit but for their reserve are not looked at one by one."""
    line = line_of(*(prompt(i, 900 + i % 200, tenant=f"t{i % 20}") for i in range(1000)))
    entrance = beside([row(700, Lane.INTERACTIVE)], 1100)
    ask(line, entrance)
    assert len(entrance.asked) <= 1


@pytest.mark.parametrize("ask", ASKED)
def test_whose_turn_it_is_is_looked_at_alone(ask: Callable[[Line, Entrance], object]) -> None:
    """While nobody else comes in before one that waited too long, nobody else is looked at, here or in other lines."""
    late = prompt(1000, 5000)
    for line in (
        line_of(*(prompt(i, 100) for i in range(1000))),
        line_of(late, *(prompt(i, 100) for i in range(1000))),
    ):
        entrance = beside([row(700, Lane.INTERACTIVE)], 1100, late)
        ask(line, entrance)
        assert len(entrance.asked) <= 1


@pytest.mark.parametrize("ask", ASKED)
def test_those_who_do_not_fit_are_passed_over(ask: Callable[[Line, Entrance], object]) -> None:
    """One whose answer is short enough comes in beside a thousand that need more room; only he is looked at closely."""
    short = prompt(1000, 1000, max_tokens=8)
    line = line_of(short, *(prompt(i, 900 + i % 200) for i in range(1000)))
    entrance = beside([row(700, Lane.INTERACTIVE)], 1100)
    assert ask(line, entrance) in (True, [short])
    assert len(entrance.asked) <= 2
