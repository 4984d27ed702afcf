# pyright: basic
"""Draw one token for each row of a batch, every row with its own settings.

All rows are drawn in one set of array operations, with the settings as arrays `[rows, 1]`; a row's draw depends on
its own logits, seed and position only, never on its neighbours.
"""

import os
from collections.abc import Sequence
from hashlib import blake2b

import mlx.core as mx
import numpy as np

from protocol.sampling import Sampling

_NEVER = -mx.inf

_COLDEST = 1e-6
"""The smallest temperature that is not 0: only logits equal to the best one have a chance at either."""


class BatchSampler:
    """Holds the settings of the rows of one decode batch, in their order."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._rows: list[Sampling] = []
        self._seeds: list[int] = []
        self._drawn: mx.array | None = None  # [rows, vocabulary] how often a row drew a token
        self._seen: mx.array | None = None  # [rows, vocabulary] whether prompt or answer hold it
        self._bias: mx.array | None = None  # [rows, vocabulary]

    def join(self, sampling: Sampling, prompt_ids: Sequence[int], drawn_ids: Sequence[int] = ()) -> None:
        """Add a row at the end. `drawn_ids` is what it drew already, if it was in a batch before."""
        seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(8), "little")
        self._rows.append(sampling)
        self._seeds.append(seed % 2**64)
        count = len(self._rows)
        width = self._vocabulary_size
        if self._drawn is not None or _counts_draws(sampling):
            drawn = np.bincount(np.array(drawn_ids, np.int64), minlength=width)[None].astype(np.float32)
            self._drawn = _with_row(self._drawn, count, mx.array(drawn))  # pyright: ignore[reportArgumentType] - numpy arrays are taken
        if self._seen is not None or sampling.repetition_penalty != 1.0:
            seen = np.zeros((1, width), np.bool_)
            seen[0, [token for token in (*prompt_ids, *drawn_ids) if token < width]] = True
            self._seen = _with_row(self._seen, count, mx.array(seen))  # pyright: ignore[reportArgumentType] - numpy arrays are taken
        if self._bias is not None or sampling.logit_bias:
            bias = np.zeros((1, width), np.float32)
            for token, value in sampling.logit_bias.items():
                bias[0, token] = value
            self._bias = _with_row(self._bias, count, mx.array(bias))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._rows = [self._rows[i] for i in rows]
        self._seeds = [self._seeds[i] for i in rows]
        index = mx.array(list(rows), mx.int32)
        needs = {
            "_drawn": any(_counts_draws(row) for row in self._rows),
            "_seen": any(row.repetition_penalty != 1.0 for row in self._rows),
            "_bias": any(row.logit_bias for row in self._rows),
        }
        for name, needed in needs.items():
            matrix = getattr(self, name)
            setattr(self, name, matrix[index] if needed and matrix is not None else None)

    def draw(self, logits: mx.array, positions: Sequence[int], allowed: mx.array | None = None) -> mx.array:
        """`logits [rows, vocabulary]` → tokens `[rows]`, lazy. `positions` count a row's draws from 0.

        `allowed [rows, vocabulary]`: no other token is drawn, whatever penalties and biases say.
        """
        logits = self._penalised(logits.astype(mx.float32))
        if allowed is not None:
            logits = mx.where(allowed, logits, _NEVER)
        greedy = mx.argmax(logits, axis=-1)
        if all(row.temperature == 0 for row in self._rows):
            tokens = greedy
        else:
            temperatures = self._column(
                [max(row.temperature, _COLDEST) if row.temperature else 1.0 for row in self._rows]
            )
            # From the best downwards, so that a division by a tiny temperature leaves 0 for it and not an infinity.
            truncated = self._truncated((logits - mx.max(logits, axis=-1, keepdims=True)) / temperatures)
            keys = mx.array([_key(seed, at) for seed, at in zip(self._seeds, positions, strict=True)], mx.uint32)
            drawn = _categorical(truncated, keys)
            is_greedy = mx.array([row.temperature == 0 for row in self._rows])
            tokens = mx.where(is_greedy, greedy, drawn)
        self._count(tokens)
        return tokens

    @property
    def state(self) -> list[mx.array]:
        """Arrays to evaluate with each step, so that no graph grows."""
        return [matrix for matrix in (self._drawn, self._seen) if matrix is not None]

    def _penalised(self, logits: mx.array) -> mx.array:
        if self._seen is not None:
            penalty = self._column([row.repetition_penalty for row in self._rows])
            lowered = mx.where(logits > 0, logits / penalty, logits * penalty)
            logits = mx.where(self._seen, lowered, logits)
        if self._drawn is not None:
            presence = self._column([row.presence_penalty for row in self._rows])
            frequency = self._column([row.frequency_penalty for row in self._rows])
            logits = logits - presence * (self._drawn > 0) - frequency * self._drawn
        if self._bias is not None:
            logits = logits + self._bias
        return logits

    def _truncated(self, logits: mx.array) -> mx.array:
        if any(row.min_p > 0 for row in self._rows):
            # p < min_p times p_max, in logits: below max + log(min_p)
            floor = self._column([np.log(row.min_p) if row.min_p > 0 else -np.inf for row in self._rows])
            logits = mx.where(logits < mx.max(logits, axis=-1, keepdims=True) + floor, _NEVER, logits)
        if any(row.top_k > 0 or row.top_p < 1 for row in self._rows):
            width = logits.shape[-1]
            order = mx.argsort(-logits, axis=-1)
            ordered = mx.take_along_axis(logits, order, axis=-1)
            ranks = mx.arange(width)[None]
            keep_ranks = self._column([row.top_k if row.top_k > 0 else width for row in self._rows])
            ordered = mx.where(ranks < keep_ranks, ordered, _NEVER)
            probabilities = mx.softmax(ordered, axis=-1)
            mass_before = mx.cumsum(probabilities, axis=-1) - probabilities
            keep_mass = self._column([row.top_p for row in self._rows])
            # The best token stays, also with a top_p of 0.
            ordered = mx.where((mass_before < keep_mass) | (keep_mass >= 1) | (ranks == 0), ordered, _NEVER)
            logits = mx.put_along_axis(logits, order, ordered, axis=-1)
        return logits

    def _count(self, tokens: mx.array) -> None:
        rows = mx.arange(len(self._rows))
        if self._drawn is not None:
            self._drawn = self._drawn.at[rows, tokens].add(1.0)
        if self._seen is not None:
            self._seen = mx.put_along_axis(self._seen, tokens[:, None], mx.array(1, mx.bool_), axis=-1)

    def _column(self, values: Sequence[float]) -> mx.array:
        return mx.array([float(value) for value in values])[:, None]


_categorical = mx.vmap(lambda logits, key: mx.random.categorical(logits, key=key))
"""Per row, with the row's own key: independent of batch size and order (a 2-D call would not be)."""


def _counts_draws(sampling: Sampling) -> bool:
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _key(seed: int, position: int) -> list[int]:
    digest = blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]


def _with_row(matrix: mx.array | None, rows: int, row: mx.array) -> mx.array:
    if matrix is None:
        matrix = mx.zeros((rows - 1, row.shape[1]), row.dtype)
    return mx.concatenate([matrix, row])
