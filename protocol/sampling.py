"""How a row draws its tokens: one struct for every dialect and for the worker."""

from msgspec import Struct


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling settings of one row, ranges already checked by the dialect.

    The worker applies them in this order: repetition, presence and frequency penalty, `logit_bias`, temperature,
    `min_p`, `top_k`, `top_p`. A temperature of 0 is greedy and ignores the last three.

    `seed` makes the draws depend on (seed, position) alone; equal logits are best effort, see the worker's README.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
