"""What work costs on this device, learned from what ran: a slice by its size and context, a step by its rows. Pure.

A slice of n tokens behind c tokens of context takes about `fixed + n * (token + attention * (c + n / 2))` seconds. The
fixed part matters: without it small slices look slow per token, so slices shrink, look slower, and shrink again.
A *bound* is that estimate times how far the slowest tenth of the latest slices lay above it: who waits for a token
meets the slow slices, not the mean.
"""

import statistics
from collections import deque
from dataclasses import dataclass

_KEPT_SLICES = 48
_KEPT_STEPS = 9
_RATIOS_KEPT = 24
_BOUND_AT = 0.9
_WORST_BOUND = 2.0
"""A slice that took longer than this times the estimate was disturbed from outside; smaller slices would not help."""

_OUTLIER = 3.0
_PRIOR_WEIGHT = 0.02
_SMALLEST_TOKEN_SECONDS = 1e-7
_MEASURABLE_TOKENS = 16


@dataclass(frozen=True)
class PrefillCost:
    """Seconds: of a slice as such, of one of its tokens, and of one token for each token of context before it."""

    fixed: float
    token: float
    attention: float

    def seconds(self, tokens: int, context: int) -> float:
        if tokens <= 0:
            return 0.0
        return self.fixed + tokens * (self.token + self.attention * (context + tokens / 2))

    def tokens_in(self, seconds: float, context: int) -> int:
        """The most tokens that take at most `seconds`; may be 0."""
        left = seconds - self.fixed
        if left <= 0:
            return 0
        linear = self.token + self.attention * context
        # attention/2 n² + linear n = left, in the form that does not cancel when attention is small
        return int(2 * left / (linear + (linear * linear + 2 * self.attention * left) ** 0.5))


@dataclass(frozen=True)
class _Slice:
    tokens: int
    context: int
    seconds: float


class CostModel:
    """Tell it what ran; ask it what would run how long. Estimates before the first slice rest on `first_rate`."""

    def __init__(self, first_rate_tokens_per_second: float) -> None:
        self._prior = PrefillCost(fixed=0.0, token=1 / first_rate_tokens_per_second, attention=0.0)
        self._slices: deque[_Slice] = deque(maxlen=_KEPT_SLICES)
        self._ratios: deque[float] = deque(maxlen=_RATIOS_KEPT)
        self._steps: dict[int, deque[float]] = {}
        self._step_medians: dict[int, float] = {}
        self.prefill = self._prior
        self.prefill_bound = 1.0

    @property
    def tokens_per_second(self) -> float:
        """Of a prompt's first thousand tokens."""
        return 1000 / self.prefill.seconds(1000, 0)

    def prefill_seconds(self, tokens: int, context: int) -> float:
        return self.prefill.seconds(tokens, context)

    def tokens_in(self, seconds: float, context: int) -> int:
        """How many tokens a slice may have that is to last at most `seconds`, slow ones included."""
        return self.prefill.tokens_in(seconds / self.prefill_bound, context)

    def break_even_tokens(self, context: int) -> int:
        """From how many tokens on a slice spends most of its time on them and not on being a slice."""
        return self.prefill.tokens_in(2 * self.prefill.fixed, context)

    def step_seconds(self, rows: int) -> float:
        """Of one decode step. Of a size never seen: as the nearest smaller one, since a guess too low is soon corrected
        by a measurement and one too high never is."""
        if rows <= 0 or not self._step_medians:
            return 0.0
        known = [size for size in self._step_medians if size <= rows] or [min(self._step_medians)]
        return self._step_medians[max(known)]

    def knows_step(self, rows: int) -> bool:
        """Whether a step of so many rows was measured."""
        return rows in self._step_medians

    def prefilled(self, tokens: int, context: int, seconds: float) -> None:
        """A slice ran. Too few tokens, or no measurable time, say nothing about the rate."""
        if tokens < _MEASURABLE_TOKENS or seconds <= 0:
            return
        estimate = self.prefill.seconds(tokens, context)
        if self._slices:
            self._ratios.append(seconds / estimate)
            ordered = sorted(self._ratios)
            ratio = ordered[int(_BOUND_AT * (len(ordered) - 1))]
            self.prefill_bound = min(max(1.0, ratio), _WORST_BOUND)
            # A single disturbed slice shows in the bound, not in the fit; a device that became slower moves the fit.
            seconds = min(seconds, _OUTLIER * estimate)
        self._slices.append(_Slice(tokens, context, seconds))
        self.prefill = self._fitted()

    def stepped(self, rows: int, seconds: float) -> None:
        """A decode step of `rows` rows was waited for."""
        if rows <= 0 or seconds <= 0:
            return
        steps = self._steps.setdefault(rows, deque(maxlen=_KEPT_STEPS))
        steps.append(seconds)
        self._step_medians[rows] = statistics.median(steps)

    def _fitted(self) -> PrefillCost:
        """Least squares of relative errors, drawn weakly to the prior where the slices do not tell the terms apart."""
        rate = statistics.median(s.seconds / s.tokens for s in self._slices)
        scales = (min(s.seconds for s in self._slices), rate, rate / 8192)
        columns = [
            [
                scales[0] / s.seconds,
                scales[1] * s.tokens / s.seconds,
                scales[2] * s.tokens * (s.context + s.tokens / 2) / s.seconds,
            ]
            for s in self._slices
        ]
        # Of terms that the slices cannot tell apart, the cost of a token gets the share: that is the cautious reading.
        priors = (0.0, 1.0, 0.0)
        active = [0, 1, 2]
        while True:
            solved = _ridge(columns, priors, active)
            negative = [term for term in active if solved[term] < 0 and term != 1]
            if not negative:
                break
            active = [term for term in active if term not in negative]
        fixed, token, attention = (max(0.0, part) * scale for part, scale in zip(solved, scales, strict=True))
        return PrefillCost(fixed=fixed, token=max(token, _SMALLEST_TOKEN_SECONDS), attention=attention)


def _ridge(rows: list[list[float]], priors: tuple[float, float, float], active: list[int]) -> list[float]:
    """Least squares for `rows @ x = 1` over the active terms, each weakly held to its prior; the others are 0."""
    size = len(active)
    matrix = [[sum(row[a] * row[b] for row in rows) for b in active] for a in active]
    target = [sum(row[a] for row in rows) for a in active]
    for i, term in enumerate(active):
        matrix[i][i] += _PRIOR_WEIGHT
        target[i] += _PRIOR_WEIGHT * priors[term]
    for i in range(size):  # the matrix is positive definite, so no pivoting
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
            target[j] -= factor * target[i]
    solved = [0.0] * 3
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * solved[active[j]] for j in range(i + 1, size))
        solved[active[i]] = (target[i] - rest) / matrix[i][i]
    return solved
