"""Sampling: each row as its own settings say, whatever its neighbours."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.sampling import Sampling
from worker.mlx_sampling import BatchSampler

WIDTH = 40
Logits = NDArray[np.float32]


def logits_of(seed: int, rows: int = 1, width: int = WIDTH) -> Logits:
    return (np.random.default_rng(seed).standard_normal((rows, width)) * 3).astype(np.float32)


def sampler_of(
    rows: Sequence[Sampling], prompts: Sequence[Sequence[int]] | None = None, width: int = WIDTH
) -> BatchSampler:
    sampler = BatchSampler(width)
    for i, row in enumerate(rows):
        sampler.join(row, prompts[i] if prompts else ())
    return sampler


def draw(sampler: BatchSampler, logits: Logits, positions: Sequence[int]) -> list[int]:
    tokens: Any = sampler.draw(mx.array(logits), positions).tolist()
    return tokens


def draws(sampling: Sampling, logits: Logits, count: int) -> list[int]:
    """`count` independent draws of one row's logits."""
    sampler = sampler_of([replace(sampling, seed=i) for i in range(count)], width=logits.shape[-1])
    return draw(sampler, np.repeat(logits, count, axis=0), [0] * count)


def reference_support(logits: Logits, sampling: Sampling) -> set[int]:
    """The tokens that may be drawn, by the words of protocol.sampling: min_p, then top_k, then top_p."""
    scaled = logits[0].astype(np.float64) / sampling.temperature
    kept = np.ones(len(scaled), bool)
    p = np.exp(scaled - scaled.max())
    kept &= p >= sampling.min_p
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        kept[order[sampling.top_k :]] = False
    p = np.where(kept, p, 0)
    p /= p.sum()
    before = 0.0
    for token in order:
        if sampling.top_p < 1 and before >= sampling.top_p and before > 0:
            kept[token] = False
        before += p[token]
    return set(np.flatnonzero(kept).tolist())


# --- one row --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000))
def test_greedy_takes_the_best(seed: int) -> None:
    """Temperature 0 ignores min_p, top_k and top_p."""
    logits = logits_of(seed)
    sampler = sampler_of([Sampling(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)])

    assert draw(sampler, logits, [0]) == [int(logits.argmax())]


@settings(max_examples=40)
@given(
    st.integers(0, 1000),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 1, 3, 10, WIDTH, 1000]),
        top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    ),
)
def test_truncation_keeps_what_the_reference_keeps(seed: int, sampling: Sampling) -> None:
    """min_p, top_k, top_p, alone and together; the best token always stays, also with a top_p of 0."""
    logits = logits_of(seed)
    support = reference_support(logits, sampling)
    kept: Any = sampler_of([sampling])._truncated(mx.array(logits) / sampling.temperature)

    assert set(np.flatnonzero(np.array(kept)[0] > -np.inf).tolist()) == support
    assert set(draws(sampling, logits, 64)) <= support


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-45])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    """Never an infinity or a NaN."""
    logits = logits_of(3) * 30

    assert set(draws(Sampling(temperature=temperature), logits, 16)) == {int(logits.argmax())}
    assert set(draws(Sampling(temperature=temperature, top_p=0.5, min_p=0.1), logits, 16)) == {int(logits.argmax())}


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.5, 5)])
def test_draws_follow_the_distribution(temperature: float, top_k: int) -> None:
    """Chi-square of 4,000 draws against the softmax, with fixed seeds: far outside chance would be a bug."""
    logits = np.array([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5]], np.float32)
    count = 4000
    p = np.exp(logits[0].astype(np.float64) / temperature)
    if top_k:
        p[top_k:] = 0
    p /= p.sum()

    seen = np.bincount(draws(Sampling(temperature=temperature, top_k=top_k), logits, count), minlength=8)

    expected = p[p > 0] * count
    assert seen[p == 0].sum() == 0
    assert ((seen[p > 0] - expected) ** 2 / expected).sum() < 24.3  # 0.1 % of chance, at seven degrees of freedom


# --- penalties, bias ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, repetition_penalty=1.3),
        Sampling(temperature=0.0, repetition_penalty=0.8),
        Sampling(temperature=0.0, presence_penalty=1.5),
        Sampling(temperature=0.0, frequency_penalty=0.7),
        Sampling(
            temperature=0.0,
            repetition_penalty=1.2,
            presence_penalty=-0.5,
            frequency_penalty=0.3,
            logit_bias={3: 2.0, 5: -100.0},
        ),
    ],
)
def test_penalties_follow_the_reference(sampling: Sampling) -> None:
    """Repetition counts prompt and answer, presence and frequency the answer only; then the bias."""
    logits = logits_of(11)
    prompt = [1, 2, 3, 3, int(logits.argmax()), WIDTH + 5]
    sampler = sampler_of([sampling], [prompt])
    counts = np.zeros(WIDTH)
    seen = set(prompt)
    for position in range(25):
        values = logits[0].astype(np.float64)
        for token in seen & set(range(WIDTH)):
            value = values[token]
            values[token] = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        values -= sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
        for token, bias in sampling.logit_bias.items():
            values[token] += bias
        expected = int(values.argmax())

        assert draw(sampler, logits, [position]) == [expected]
        counts[expected] += 1
        seen.add(expected)


def test_a_banned_token_is_never_drawn() -> None:
    """logit_bias of -100 is a ban, of +100 a command."""
    logits = logits_of(5)
    best = int(logits.argmax())

    assert best not in draws(Sampling(logit_bias={best: -100.0}), logits, 50)
    assert set(draws(Sampling(logit_bias={7: 100.0}), logits, 50)) == {7}


# --- many rows ------------------------------------------------------------------------------------------------------

ROWS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_k=5, seed=2),
    Sampling(temperature=1.2, top_p=0.8, seed=3),
    Sampling(temperature=1.0, min_p=0.1, seed=4),
    Sampling(temperature=0.9, repetition_penalty=1.4, seed=5),
    Sampling(temperature=0.9, presence_penalty=1.0, frequency_penalty=0.5, seed=6),
    Sampling(temperature=1.0, logit_bias={3: 4.0}, seed=7),
]
STEPS = 12


def alone(index: int) -> list[int]:
    """What a row draws by itself, step after step."""
    sampler = sampler_of([ROWS[index]], [[index, 9]])
    return [draw(sampler, logits_of(100 * index + step), [step])[0] for step in range(STEPS)]


@given(st.permutations(range(len(ROWS))), st.lists(st.integers(0, STEPS - 1), min_size=8, max_size=8), st.data())
@settings(max_examples=25)
def test_a_row_draws_as_if_alone(order: list[int], leaves: list[int], data: st.DataObject) -> None:
    """H02: whatever rows join before and after it, in whatever order, and whichever leave: draws depend on
    (seed, position) and its own logits."""
    joins = {row: data.draw(st.integers(0, 6)) for row in order}
    sampler = BatchSampler(WIDTH)
    running: list[int] = []
    positions = dict.fromkeys(order, 0)
    drawn: dict[int, list[int]] = {row: [] for row in order}
    for step in range(6 + STEPS):
        for row in order:
            if joins[row] == step:
                sampler.join(ROWS[row], [row, 9])
                running.append(row)
        if not running:
            continue
        logits = np.concatenate([logits_of(100 * row + positions[row]) for row in running])
        for row, token in zip(running, draw(sampler, logits, [positions[row] for row in running]), strict=True):
            drawn[row].append(token)
            positions[row] += 1
        stay = [i for i, row in enumerate(running) if positions[row] <= leaves[row]]
        if len(stay) < len(running):
            running = [running[i] for i in stay]
            if running:
                sampler.keep(stay)
            else:
                sampler = BatchSampler(WIDTH)
    for row in order:
        assert drawn[row] == alone(row)[: leaves[row] + 1]


def test_a_seed_is_a_promise_per_position() -> None:
    """Same seed, same draws; another position or seed, others."""
    logits = np.zeros((1, WIDTH), np.float32)

    def row(seed: int) -> list[int]:
        sampler = sampler_of([Sampling(seed=seed)])
        return [draw(sampler, logits, [position])[0] for position in range(20)]

    assert row(1) == row(1)
    assert row(1) != row(2)
    assert len(set(row(1))) > 5


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    """Clients send negative ones."""
    sampler = sampler_of([Sampling(seed=seed)])

    assert 0 <= draw(sampler, logits_of(1), [0])[0] < WIDTH


def test_without_a_seed_rows_differ() -> None:
    """Two equal requests give two answers."""
    logits = np.zeros((1, WIDTH), np.float32)
    rows = [tuple(draw(sampler_of([Sampling()]), logits, [p])[0] for p in range(4)) for _ in range(8)]

    assert len(set(rows)) > 1


def test_what_no_row_needs_is_not_kept() -> None:
    """[rows, vocabulary] matrices are megabytes on a real model."""
    sampler = sampler_of(ROWS)
    draw(sampler, logits_of(1, len(ROWS)), [0] * len(ROWS))
    assert len(sampler.state) == 2

    sampler.keep([0, 1])

    assert sampler.state == []


def test_half_precision_logits_are_widened() -> None:
    """Truncation sums in float32."""
    sampler = sampler_of([Sampling(top_p=0.9, seed=1)])
    tokens = sampler.draw(mx.array(logits_of(1)).astype(mx.bfloat16), [0])

    assert tokens.shape == (1,)
