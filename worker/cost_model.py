"""What work costs on this device, learned from what ran: a slice by its size and context; `step_costs` has steps. Pure.

A slice of n tokens behind c tokens of context takes about `fixed + n * (token + attention * (c + n / 2))` seconds. The
fixed part matters: without it small slices look slow per token, so slices shrink, look slower, and shrink again.
A mixed pass, which is a slice and a step of rows at once, takes about `steps * s + reach * c + n * (…)`, where s is a
step of those rows alone: its fixed part is the step, and grows with the context that a small slice reaches over. Before
such passes ran, they are taken for a step and the tokens of a slice.
A *bound* is that estimate times how far the slowest tenth of the latest slices lay above it: who waits for a token
meets the slow slices, not the mean.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from worker.step_costs import StepCosts

_KEPT_SLICES = 48
_RATIOS_KEPT = 24
_BOUND_AT = 0.9
_WORST_BOUND = 2.0
"""A slice that took longer than this times the estimate was disturbed from outside; smaller slices would not help."""

_OUTLIER = 3.0
_WEAKLY = 0.02
_FIRMLY = 1.0
"""How much priors weigh, beside 48 passes. That a mixed pass's fixed part is a step is known, and not only guessed."""

_SMALLEST_TOKEN_SECONDS = 1e-7
_MEASURABLE_TOKENS = 16
_COMPARED_PASSES = 12
_MIXING_TOLERANCE = 1.1
_TRIED_AGAIN_AFTER_SLICES = 200

_FAMILIAR_PASSES = 4
"""Until so many mixed passes ran, they are bounded by the worst: rows wait for the first one, too."""

_CONTEXT_SCALE = 8192
"""Only for the arithmetic: at about this context, attention may cost what all else does."""


@dataclass(frozen=True)
class PrefillCost:
    """Seconds: of a slice as such, of one of its tokens, and of one token for each token of context before it."""

    fixed: float
    token: float
    attention: float

    def seconds(self, tokens: int, context: int) -> float:
        if tokens <= 0:
            return 0.0
        return self.fixed + self.tokens_seconds(tokens, context)

    def tokens_seconds(self, tokens: int, context: int) -> float:
        """What of that is not fixed."""
        return tokens * (self.token + self.attention * (context + tokens / 2))

    def tokens_in(self, seconds: float, context: int) -> int:
        """The most tokens that take at most `seconds`; may be 0."""
        left = seconds - self.fixed
        if left <= 0:
            return 0
        linear = self.token + self.attention * context
        # attention/2 n² + linear n = left, in the form that does not cancel when attention is small
        return int(2 * left / (linear + (linear * linear + 2 * self.attention * left) ** 0.5))


@dataclass(frozen=True)
class _Pass:
    """A slice or a mixed pass that ran: what each term of its cost is multiplied with, what it took, and what of that
    the fit looks at."""

    factors: tuple[float, ...]
    seconds: float
    fitted_seconds: float


class _Fit:
    """Learns the terms of one kind of pass, and how far the slow ones lie above the estimate."""

    def __init__(self, *, always: int, unfamiliar_passes: int) -> None:
        """`always` is the index of the term that is never taken for nothing: the cost of a token."""
        self._always = always
        self._unfamiliar_passes = unfamiliar_passes
        self._passes: deque[_Pass] = deque(maxlen=_KEPT_SLICES)
        self.terms: tuple[float, ...] = ()
        """Empty before the first pass."""
        self.bound = _WORST_BOUND if unfamiliar_passes else 1.0

    @property
    def passes(self) -> Sequence[_Pass]:
        return self._passes

    def ran(self, factors: tuple[float, ...], seconds: float, estimate: float) -> None:
        """Call `solve` next."""
        # A single disturbed slice shows in the bound, not in the fit; a device that became slower moves the fit.
        is_first = not self._passes and not self._unfamiliar_passes
        self._passes.append(_Pass(factors, seconds, seconds if is_first else min(seconds, _OUTLIER * estimate)))

    def solve(self, scales: tuple[float, ...], priors: tuple[float, ...], weights: tuple[float, ...]) -> None:
        """Least squares of relative errors. `scales` are about what the terms are, and `priors` what they are drawn to,
        in their scale, where the passes do not tell them apart."""
        columns = [
            [scale * f / p.fitted_seconds for scale, f in zip(scales, p.factors, strict=True)] for p in self._passes
        ]
        active = list(range(len(scales)))
        while True:
            solved = _ridge(columns, priors, weights, active)
            negative = [term for term in active if solved[term] < 0 and term != self._always]
            if not negative:
                break
            active = [term for term in active if term not in negative]
        self.terms = tuple(max(0.0, part) * scale for part, scale in zip(solved, scales, strict=True))
        self.bound = self._bound()

    def _bound(self) -> float:
        if len(self._passes) < self._unfamiliar_passes:
            return _WORST_BOUND
        latest = list(self._passes)[-_RATIOS_KEPT:]
        ordered = sorted(p.seconds / max(sum(map(mul, self.terms, p.factors)), _SMALLEST_TOKEN_SECONDS) for p in latest)
        return min(max(1.0, ordered[int(_BOUND_AT * (len(ordered) - 1))]), _WORST_BOUND)


@dataclass(frozen=True)
class _MixedPass:
    """One that ran, to be held against the same work done apart."""

    tokens: int
    context: int
    rows: int
    seconds: float


class CostModel:
    """Tell it what ran; ask it what would run how long. Estimates before the first slice rest on `first_rate`."""

    def __init__(self, first_rate_tokens_per_second: float) -> None:
        self._slices = _Fit(always=1, unfamiliar_passes=0)
        self._mixed = _Fit(always=2, unfamiliar_passes=_FAMILIAR_PASSES)
        self._latest_mixed: deque[_MixedPass] = deque(maxlen=_COMPARED_PASSES)
        self._slices_since_mixed = 0
        self._mixing_pays = True
        self._steps = StepCosts()
        self.prefill = PrefillCost(fixed=0.0, token=1 / first_rate_tokens_per_second, attention=0.0)

    # --- slices ----------------------------------------------------------------------------------------------------

    @property
    def tokens_per_second(self) -> float:
        """Of a prompt's first thousand tokens."""
        return 1000 / self.prefill.seconds(1000, 0)

    def prefill_seconds(self, tokens: int, context: int) -> float:
        return self.prefill.seconds(tokens, context)

    def tokens_in(self, seconds: float, context: int) -> int:
        """How many tokens a slice may have that is to last at most `seconds`, slow ones included."""
        return self.prefill.tokens_in(seconds / self._slices.bound, context)

    def break_even_tokens(self, context: int) -> int:
        """From how many tokens on a slice spends most of its time on them and not on being a slice."""
        return self.prefill.tokens_in(2 * self.prefill.fixed, context)

    def prefilled(self, tokens: int, context: int, seconds: float) -> None:
        """A slice ran. Too few tokens, or no measurable time, say nothing about the rate."""
        if tokens < _MEASURABLE_TOKENS or seconds <= 0:
            return
        self._slices_since_mixed += 1
        if self._slices_since_mixed >= _TRIED_AGAIN_AFTER_SLICES:
            self._latest_mixed.clear()
        factors = (1.0, tokens, tokens * (context + tokens / 2))
        self._slices.ran(factors, seconds, self.prefill.seconds(tokens, context))
        rate = statistics.median(p.seconds / p.factors[1] for p in self._slices.passes)
        scales = (min(p.seconds for p in self._slices.passes), rate, rate / _CONTEXT_SCALE)
        # Of terms that the slices cannot tell apart, the cost of a token gets the share: that is the cautious reading.
        self._slices.solve(scales, (0.0, 1.0, 0.0), (_WEAKLY,) * 3)
        fixed, token, attention = self._slices.terms
        self.prefill = PrefillCost(fixed=fixed, token=max(token, _SMALLEST_TOKEN_SECONDS), attention=attention)
        self._mixing_pays = self._compared()

    # --- mixed passes ----------------------------------------------------------------------------------------------

    def mixed_seconds(self, tokens: int, context: int, rows: int) -> float:
        return self._mixed_cost(context, rows).seconds(tokens, context)

    def mixed_tokens_in(self, seconds: float, context: int, rows: int) -> int:
        """How many tokens may ride on a step of `rows` rows that is to last at most `seconds`, slow ones included."""
        return self._mixed_cost(context, rows).tokens_in(seconds / self._mixed.bound, context)

    def worthwhile_tokens(self, part: float, context: int, rows: int) -> int:
        """From how many tokens on a mixed pass spends at least `part` of its time on them."""
        cost = self._mixed_cost(context, rows)
        return cost.tokens_in(cost.fixed / (1 - part), context)

    def mixed(self, tokens: int, context: int, rows: int, seconds: float) -> None:
        """A slice and a step of `rows` rows ran in one pass."""
        step_seconds = self.step_seconds(rows)
        if tokens <= 0 or seconds <= 0 or step_seconds <= 0:
            return
        self._slices_since_mixed = 0
        self._latest_mixed.append(_MixedPass(tokens, context, rows, seconds))
        factors = (step_seconds, context, tokens, tokens * (context + tokens / 2))
        self._mixed.ran(factors, seconds, self.mixed_seconds(tokens, context, rows))
        # What is above a step is that of the tokens, where the passes do not tell more.
        rates = ((p.seconds - p.factors[0]) / p.factors[2] for p in self._mixed.passes)
        token = max(statistics.median(rates), _SMALLEST_TOKEN_SECONDS)
        scales = (1.0, step_seconds / _CONTEXT_SCALE, token, token / _CONTEXT_SCALE)
        self._mixed.solve(scales, (1.0, 0.0, 1.0, 0.0), (_FIRMLY, _WEAKLY, _WEAKLY, _WEAKLY))
        self._mixing_pays = self._compared()  # here, since the scheduler asks several times in each step

    def mixing_pays(self) -> bool:
        """Whether mixed passes take no longer than their slices and steps would apart.

        It does where a pass is mostly the reading of weights. It need not: on one CUDA device a pass of a new shape
        cost more than it saved. Until there is something to compare it is believed, and tried again after many slices.
        """
        return self._mixing_pays

    def _compared(self) -> bool:
        if len(self._latest_mixed) < _FAMILIAR_PASSES or len(self._slices.passes) < _FAMILIAR_PASSES:
            return True
        ratios = [
            one.seconds / (self.prefill.seconds(one.tokens, one.context) + self.step_seconds(one.rows))
            for one in self._latest_mixed
        ]
        return statistics.median(ratios) <= _MIXING_TOLERANCE

    def _mixed_cost(self, context: int, rows: int) -> PrefillCost:
        prefill = self.prefill
        steps, reach, token, attention = self._mixed.terms or (1.0, 0.0, prefill.token, prefill.attention)
        fixed = steps * self.step_seconds(rows) + reach * context
        return PrefillCost(fixed=fixed, token=max(token, _SMALLEST_TOKEN_SECONDS), attention=attention)

    # --- steps -----------------------------------------------------------------------------------------------------

    def step_seconds(self, rows: int, held_tokens: int | None = None) -> float:
        """Of one decode step of rows that hold so many tokens together, or as many as those that ran last."""
        return self._steps.seconds(rows, held_tokens)

    def knows_step(self, rows: int) -> bool:
        """Whether a step of so many rows was measured."""
        return self._steps.knows(rows)

    def stepped(self, rows: int, seconds: float, held_tokens: int | None = None) -> None:
        """A decode step of `rows` rows was waited for. `held_tokens` None: it is not known what they held."""
        self._steps.ran(rows, seconds, held_tokens)


def _ridge(
    rows: list[list[float]], priors: tuple[float, ...], weights: tuple[float, ...], active: list[int]
) -> list[float]:
    """Least squares for `rows @ x = 1` over the active terms, each held to its prior; the others are 0."""
    size = len(active)
    matrix = [[sum(row[a] * row[b] for row in rows) for b in active] for a in active]
    target = [sum(row[a] for row in rows) for a in active]
    for i, term in enumerate(active):
        matrix[i][i] += weights[term]
        target[i] += weights[term] * priors[term]
    for i in range(size):  # the matrix is positive definite, so no pivoting
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
            target[j] -= factor * target[i]
    solved = [0.0] * len(priors)
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * solved[active[j]] for j in range(i + 1, size))
        solved[active[i]] = (target[i] - rest) / matrix[i][i]
    return solved
