"""What the first token after a hit is drawn from is what a cold run computes, for every kind of cache.

Greedy tokens hide what does not change the best one: here all logprobs of the first token are compared. Each mistake
that reuse could make is made once on purpose, and is seen by the same bound.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.ids import GRAIN_TOKENS
from tests.worker.engine_parts import Desk, Model, after_a_restart, prompt
from tests.worker.test_mlx_packed import MixedDesk
from tests.worker.tiny_models import CONFIGS, QUANTIZED, VOCABULARY
from worker import mlx_engine
from worker.mlx_blocks import KVLayout
from worker.mlx_state import leaves

FLOAT32_NOISE = 1e-4
"""How far a logprob may be from the cold run's, of a range of some 8. Measured: 3e-6 at most."""

ROUNDED_NOISE = 30 * FLOAT32_NOISE
"""The same of quantized kinds: a number near the middle of two steps may be rounded to either by a last bit. Measured:
as above on a CPU, 1.5e-4 on a GPU."""

BF16_NOISE = 0.1
"""The same where weights and caches are bf16. Measured: up to 0.05, also between cold runs with other slices."""

MISTAKE = 100 * FLOAT32_NOISE
"""What a mistake does at least. Measured: 0.05 and more, mostly above 1."""

REUSED = tuple(sorted({*CONFIGS, *QUANTIZED} - {"internlm2"}))

Make = Callable[..., Model]


def noise_of(family: str) -> float:
    return ROUNDED_NOISE if family in QUANTIZED else FLOAT32_NOISE


def first_logprobs(desk: Desk, name: str, token_ids: list[int], **settings: Any) -> np.ndarray:
    """Of the first token after `token_ids`, by token id; the row runs beside those that run."""
    desk.start(name, token_ids, max_tokens=2, top_logprobs=VOCABULARY, **settings)
    while name in desk._running:  # pyright: ignore[reportPrivateUsage]
        desk.step()
    top = desk.logprobs[name][0].top
    assert len(top) == VOCABULARY
    by_id = {int(one.token.strip("<>")): one.logprob for one in top}
    return np.array([by_id[token] for token in range(VOCABULARY)])


def difference(model: Model, desk: Desk, name: str, token_ids: list[int], **settings: Any) -> float:
    """The largest to the cold run of mlx-lm's own loop."""
    cold = model.reference(token_ids, 1)[1][0].astype(np.float32)
    return float(np.max(np.abs(first_logprobs(desk, name, token_ids, **settings) - cold)))


@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513])
@pytest.mark.parametrize("family", REUSED)
def test_first_logits_after_a_hit_are_the_cold_ones(model_of: Make, family: str, length: int, tmp_path: Path) -> None:
    """K02, K03: in RAM and from disk, the whole prompt, another ending, and the next turn on a finished one's tail; all
    beside a row that decodes, where rows are batched."""
    model = model_of(family)
    desk: Desk = MixedDesk(model) if model.engine().mixes else Desk(model)
    first = prompt(length, length)
    assert difference(model, desk, "cold", first, slice_tokens=200) <= noise_of(family)
    answer = desk.drawn["cold"]
    boundary = (length - 1) // GRAIN_TOKENS * GRAIN_TOKENS  # where the desk keeps a state
    asked = {
        "again": first,
        "other ending": [*first[: length - 3], 9, 8, 7, 6],
        "next turn": [*first, *answer, 5, 4, 3],
    }
    fresh = after_a_restart(desk, model, tmp_path)
    for where, tier in {"RAM": desk, "disk": fresh}.items():
        if tier.engine.is_batchable:
            tier.start("beside", prompt(5, 33), max_tokens=100)
            tier.step()
        for name, token_ids in asked.items():
            assert difference(model, tier, name, token_ids, slice_tokens=150) <= noise_of(family), (where, name)
            common = length - 3 if name == "other ending" else length - 1
            if not tier.engine.keeps_states or boundary <= common:
                assert tier.cached[name] >= common // GRAIN_TOKENS * GRAIN_TOKENS, (where, name)
    assert desk.cached["again"] == length - 1
    assert desk.cached["next turn"] >= length


@pytest.mark.parametrize("family", sorted({*REUSED} - {*QUANTIZED, "gpt_oss"}))  # which is nothing without its experts
def test_first_logits_in_bf16_are_within_its_noise(model_of: Make, family: str, tmp_path: Path) -> None:
    """K02: as real models run; the type survives blocks, states and files."""
    model = model_of(family, mx.bfloat16)
    desk = Desk(model)
    first = prompt(520, 520)
    assert difference(model, desk, "cold", first, slice_tokens=200) <= BF16_NOISE
    held = [array for block in desk.index.blocks() for array in block.payload.values()]
    assert all(array.dtype == mx.bfloat16 for array in held)
    fresh = after_a_restart(desk, model, tmp_path)
    for tier in (desk, fresh):
        for name, token_ids in {"again": first, "other ending": [*first[:517], 9, 8, 7, 6]}.items():
            assert difference(model, tier, name, token_ids) <= BF16_NOISE
            assert tier.cached[name] >= 512


# --- mistakes, made on purpose --------------------------------------------------------------------------------------


def shift_offsets(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every layer that counts positions is one ahead."""
    open_row = desk.engine.open

    def opened(prepared: Any, uses: Any) -> None:
        open_row(prepared, uses)
        row: Any = desk.engine._alone[prepared.request_id]  # pyright: ignore[reportPrivateUsage]
        for leaf in leaves(row.caches):
            if getattr(leaf, "offset", 0):
                leaf.offset += 1

    monkeypatch.setattr(desk.engine, "open", opened)
    return desk.engine._shape.cut != () or desk.engine.kv_footprint.windows != ()  # pyright: ignore[reportPrivateUsage]


def lose_a_block(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The first block's place is taken by a copy of the second one: as many tokens, other ones."""
    fill = KVLayout.fill

    def filled(self: KVLayout, caches: Any, uses: Any, capacity_tokens: int) -> None:
        fill(self, caches, [uses[1], *uses[1:]], capacity_tokens)

    monkeypatch.setattr(KVLayout, "fill", filled)
    return desk.engine._shape.cut != ()  # pyright: ignore[reportPrivateUsage]


def take_up_a_stale_state(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What windows and recurrent layers held one grain earlier."""
    resume = mlx_engine.resume
    states = {
        block.start + tokens: state.payload for block in desk.index.blocks() for tokens, state in block.states.items()
    }

    def resumed(flat: Any, shape: Any, _arrays: Any) -> None:
        resume(flat, shape, states[min(states)])

    monkeypatch.setattr(mlx_engine, "resume", resumed)
    return desk.engine.keeps_states


@pytest.mark.parametrize("mistake", [shift_offsets, lose_a_block, take_up_a_stale_state])
@pytest.mark.parametrize("family", REUSED)
def test_a_mistake_of_reuse_is_seen(
    model_of: Make, family: str, mistake: Callable[[Desk, pytest.MonkeyPatch], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound would not let it pass: positions off by one, a block that is not there, a state of an earlier token."""
    model = model_of(family)
    desk = Desk(model)
    base = prompt(1, 600)
    desk.ask("earlier", base[:530], 2)
    desk.ask("base", base, 2)
    assert difference(model, desk, "right", [*base[:592], 9, 8, 7, 6]) <= noise_of(family)
    if not mistake(desk, monkeypatch):
        pytest.skip("it has no such layers")

    assert difference(model, desk, "mistaken", [*base[:592], 1, 2, 3, 4]) > MISTAKE
    assert desk.cached["mistaken"] == 592
