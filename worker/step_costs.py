"""What a decode step takes, by its rows and by the tokens that they hold, learned from steps that ran. Pure.

By rows it is a table and no formula: kernels change with the number of rows. What a held token adds is one number for
all sizes: the middle of what pairs of times say that were of as many rows and of far other lengths, far pairs counting
more. Such a time is that of a few steps in a row: the first after a row joined is slow for another reason. So disturbed
steps do not move it, and without such pairs a token adds nothing.
"""

import statistics
from collections import deque
from dataclasses import dataclass

_KEPT_STEPS = 9
_KEPT_LENGTHS = 16
_STEPS_OF_A_LENGTH = 5
_APART_TOKENS = 1024
"""Steps that hold no more or less than this are of a length."""

_COMPARED_TOKENS = 4096
"""Nearer to each other, steps differ by what disturbs them more than by what they hold."""

_FEWEST_PAIRS = 6
_LEAST_PART = 0.25
"""A step of fewer tokens is not taken for shorter than this part of what was measured."""


@dataclass(frozen=True)
class _Step:
    held_tokens: int | None
    seconds: float


class StepCosts:
    """Tell it what ran; ask it what a step takes."""

    def __init__(self) -> None:
        self._latest: dict[int, deque[_Step]] = {}
        self._lengths: dict[int, deque[tuple[int, float]]] = {}
        self._seconds: dict[int, float] = {}
        self.token_seconds = 0.0
        """What a held token adds."""
        self._nearest: dict[int, int] = {}
        """The sizes that were asked for, by the one that tells: the scheduler asks several times in each step."""

    def knows(self, rows: int) -> bool:
        """Whether a step of so many rows was measured."""
        return rows in self._latest

    def seconds(self, rows: int, held_tokens: int | None = None) -> float:
        """Of one step of rows that hold so many tokens together, or as many as those that ran last. Of a number of
        rows never seen: as the nearest smaller one, since a guess too low is soon corrected by a measurement and one
        too high never is. 0 when nothing ran yet."""
        if rows <= 0 or not self._seconds:
            return 0.0
        if (known := self._nearest.get(rows)) is None:
            known = max([size for size in self._seconds if size <= rows] or [min(self._seconds)])
            self._nearest[rows] = known
        if held_tokens is None or not self.token_seconds:
            return self._seconds[known]
        at_length = (
            step.seconds
            + self.token_seconds * (held_tokens - (held_tokens if step.held_tokens is None else step.held_tokens))
            for step in self._latest[known]
        )
        return max(statistics.median(at_length), _LEAST_PART * self._seconds[known])

    def ran(self, rows: int, seconds: float, held_tokens: int | None = None) -> None:
        """A step was waited for. `held_tokens` None: it is not known what its rows held."""
        if rows <= 0 or seconds <= 0:
            return
        if rows not in self._latest:
            self._nearest.clear()
        latest = self._latest.setdefault(rows, deque(maxlen=_KEPT_STEPS))
        latest.append(_Step(held_tokens, seconds))
        self._seconds[rows] = statistics.median(step.seconds for step in latest)
        if held_tokens is not None:
            self._ran_at(held_tokens, rows, list(latest)[-_STEPS_OF_A_LENGTH:])

    def _ran_at(self, held_tokens: int, rows: int, steps: list[_Step]) -> None:
        """The latest steps of so many rows: if they are of a length that is a new one, it is kept."""
        lengths = self._lengths.setdefault(rows, deque(maxlen=_KEPT_LENGTHS))
        if lengths and abs(held_tokens - lengths[-1][0]) < _APART_TOKENS:
            return
        alike = [s for s in steps if s.held_tokens is not None and abs(held_tokens - s.held_tokens) < _APART_TOKENS]
        if len(alike) == _STEPS_OF_A_LENGTH:
            lengths.append((held_tokens, statistics.median(s.seconds for s in alike)))
            self._learn_token()

    def _learn_token(self) -> None:
        pairs: list[tuple[float, int]] = []
        for lengths in self._lengths.values():
            steps = list(lengths)
            for i, (held, seconds) in enumerate(steps):
                for other_held, other_seconds in steps[:i]:
                    if (apart := held - other_held) and abs(apart) >= _COMPARED_TOKENS:
                        pairs.append(((seconds - other_seconds) / apart, abs(apart)))
        if len(pairs) >= _FEWEST_PAIRS:
            self.token_seconds = max(0.0, _weighted_median(pairs))


def _weighted_median(values: list[tuple[float, int]]) -> float:
    """The value that half of the weight is not above."""
    left = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        left -= weight
        if left <= 0:
            return value
    raise ValueError("of nothing there is no middle")
