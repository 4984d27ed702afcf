# pyright: basic
"""Quantized keys and values: what they stand for is what is said; whoever cannot have them is told why and has plain
ones; other settings are other blocks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from protocol.kv_storage import KVBits, KVGroupSize, KVQuantization, KVReading
from tests.worker.engine_parts import Desk, Model, PlainTokenizer, after_a_restart, prompt
from tests.worker.parts import prepared
from tests.worker.test_first_logits import BF16_NOISE, first_logprobs
from tests.worker.tiny_models import QUANTIZED, make_tiny_model
from worker.live_kv import BUFFER_STEP_TOKENS
from worker.mlx_engine import MlxEngine
from worker.mlx_model import load_model
from worker.mlx_quantized_kv import QuantizedKV, RoundedKV, quantized, unpacked
from worker.weights_fingerprint import fingerprint_of_kv

Make = Callable[..., Model]
TERMS = KVQuantization(bits=8, group_size=32)
NO_PRODUCT = "No implementation for problem shape"
"""What MLX's CUDA build says first."""


def noise(seed: int, tokens: int, *, rows: int = 1, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Keys and values of two heads of 64."""
    keys = mx.random.normal((rows, 2, tokens, 64), key=mx.random.key(seed)).astype(dtype)
    return keys, mx.random.normal((rows, 2, tokens, 64), key=mx.random.key(seed + 1000)).astype(dtype)


def plain(held: Any, terms: KVQuantization) -> mx.array:
    """What was fetched, whichever way."""
    return held if isinstance(held, mx.array) else unpacked(held, terms)


def fill(cache: QuantizedKV, keys: mx.array, values: mx.array, cuts: list[int]) -> None:
    for start, end in zip([0, *cuts], [*cuts, keys.shape[2]], strict=True):
        cache.update_and_fetch(keys[:, :, start:end], values[:, :, start:end])


# --- one layer ------------------------------------------------------------------------------------------------------


@given(
    bits=st.sampled_from([4, 6, 8]),
    group_size=st.sampled_from([32, 64]),
    lengths=st.lists(st.integers(0, 300), min_size=2, max_size=4),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_rows_of_a_batch_hold_what_they_hold_alone(
    bits: KVBits, group_size: KVGroupSize, lengths: list[int], data: st.DataObject
) -> None:
    """Whatever slices a prompt came in, and whoever joined and left: a row taken out again has its own bits, to the
    last one."""
    terms = KVQuantization(bits=bits, group_size=group_size)
    alone: list[Any] = []
    for seed, length in enumerate(lengths):
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3))) if length > 1 else []
        row = QuantizedKV(terms)
        if length:
            fill(row, *noise(seed, length), cuts)
        alone.append(row)
    batch = QuantizedKV.merge([alone[0]])
    for row in alone[1:]:
        batch.extend(QuantizedKV.merge([row]))
    batch.update_and_fetch(*noise(77, 1, rows=len(lengths)))
    keep = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    batch.filter(mx.array(keep))

    for at, index in enumerate(keep):
        whole = QuantizedKV(terms)
        keys, values = noise(index, lengths[index])
        new_keys, new_values = noise(77, 1, rows=len(lengths))
        expected = whole.update_and_fetch(
            mx.concatenate([keys, new_keys[index : index + 1]], axis=2),
            mx.concatenate([values, new_values[index : index + 1]], axis=2),
        )
        taken = batch.extract(at)
        assert taken.offset == lengths[index] + 1
        for part, cache in enumerate(taken.caches):
            same = whole.caches[part].keys_and_values()
            assert all(bool(mx.array_equal(a, b)) for a, b in zip(cache.keys_and_values(), same, strict=True))
        assert mx.allclose(plain(expected[0], terms)[..., :-1, :], keys, atol=0.5 if bits == 4 else 0.15).item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("reading", ["quantized", "dequantized"])
def test_a_token_and_a_slice_are_answered_from_the_same_numbers(
    bits: KVBits, dtype: mx.Dtype, reading: KVReading
) -> None:
    """One token gets packed numbers and `bits`, by which mlx-lm tells; a slice gets arrays of its own type and none."""
    terms = KVQuantization(bits=bits, group_size=32)
    cache, rounded = QuantizedKV(terms, reading), RoundedKV(terms)
    assert hasattr(cache, "bits") == (reading == "quantized")
    for seed, tokens in enumerate((9, 1, 4)):
        new = noise(seed, tokens, dtype=dtype)
        held, expected = cache.update_and_fetch(*new), rounded.update_and_fetch(*new)
        assert hasattr(cache, "bits") == (tokens == 1 and reading == "quantized") == isinstance(held[0], tuple)
        again = cache.keys_and_values()
        for one, other, same in zip(held, expected, again, strict=True):
            assert mx.array_equal(plain(same, terms), plain(one, terms)).item()
            assert plain(one, terms).dtype == dtype
            assert mx.array_equal(plain(one, terms), other).item()


@pytest.mark.parametrize("family", ["gemma3_text", "falcon_h1", "deepseek_v32", "mamba2"])
def test_only_plain_leaves_are_replaced(model_of: Make, family: str) -> None:
    """Windows and recurrent state stay; lists are opened; a batch of them merges as before."""
    caches = make_prompt_cache(model_of(family).loaded.model)

    def kinds(each: Any) -> list[type]:
        inner = getattr(each, "caches", None)
        return [type(each)] if inner is None or isinstance(each, QuantizedKV) else [k for c in inner for k in kinds(c)]

    before = [kind for cache in caches for kind in kinds(cache)]
    after = [kind for cache in quantized(caches, TERMS, "quantized") for kind in kinds(cache)]
    assert after == [QuantizedKV if kind is KVCache else kind for kind in before]


# --- a model --------------------------------------------------------------------------------------------------------


def engine(model: Model, bits: KVBits = 8, group_size: KVGroupSize = 64) -> MlxEngine:
    return MlxEngine(model.loaded, PlainTokenizer(), KVQuantization(bits=bits, group_size=group_size))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt_oss", "heads of 8 numbers"),
        ("llama", "heads of 8 numbers cannot be put into groups of 64 or fewer"),
        ("deepseek_v3", "heads of 8, 16 numbers"),
        ("mamba2", "no layer keeps all its keys and values"),
    ],
)
def test_who_has_no_groups_has_plain_kv(model_of: Make, family: str, words: str) -> None:
    """It is said why, and everything works as if nothing had been asked for."""
    model = model_of(family)
    desk = Desk(replace(model, kv=TERMS, known={}))
    desk.engine = engine(model)
    assert desk.engine.kv_storage.quantization is None
    assert words in desk.engine.kv_storage.reason
    assert desk.ask("r", prompt(1, 40), 6) == model.says(prompt(1, 40), 6)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """A family with heads of 32 numbers, or more where `config` says so."""

    def load(family: str, **config: Any) -> Model:
        folder = tmp_path_factory.mktemp("wide") / family
        return Model(load_model(make_tiny_model(family, folder, heads="wide", **config), lambda _d, _t: None))

    return load


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("asked", [32, 64, 128])
def test_groups_are_as_large_as_heads_allow(wide: Make, bits: KVBits, asked: KVGroupSize) -> None:
    """Heads of 32 get groups of 32 whatever was asked for; the books hold what is really used."""
    storage = engine(wide("qwen3"), bits, asked).kv_storage
    assert storage.quantization == KVQuantization(bits=bits, group_size=32)
    layers, heads = 2, 1
    assert storage.bytes_per_token == layers * heads * 2 * (32 * bits // 8 + 2 * 4)


@pytest.mark.parametrize(("family", "words"), [("gpt_oss", "sinks"), ("deepseek_v3", "attention")])
def test_who_cannot_read_packed_numbers_reads_plain_ones(wide: Make, family: str, words: str) -> None:
    """mlx-lm's quantized attention knows no sinks, and MLA computes with what it fetches: found at load, not at the
    first request. What is kept is quantized all the same."""
    storage = engine(wide(family)).kv_storage
    assert storage.quantization == TERMS
    assert storage.reading == "dequantized"
    assert words in storage.reason
    assert storage.bytes_per_token < 0.4 * MlxEngine(wide(family).loaded, PlainTokenizer()).kv_storage.bytes_per_token


def test_who_looks_into_the_cache_has_plain_kv(wide: Make) -> None:
    """An indexer that reads the arrays of its layer's cache: neither way works, and it is as if nothing was asked."""
    model = wide("deepseek_v32")
    desk = Desk(replace(model, kv=TERMS, known={}))
    assert desk.engine.kv_storage.quantization is None
    assert "attention" in desk.engine.kv_storage.reason
    assert desk.engine.prefix_reuse.available
    assert desk.ask("r", prompt(1, 40), 6) == model.says(prompt(1, 40), 6)


def test_a_device_without_a_quantized_product(wide: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's CUDA build has it for few shapes and raises for the others: steps are dequantized there."""

    def absent(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError(f"[quantized_matmul] {NO_PRODUCT}")

    monkeypatch.setattr(mx, "quantized_matmul", absent)
    storage = engine(wide("qwen3")).kv_storage
    assert (storage.quantization, storage.reading) == (TERMS, "dequantized")
    assert NO_PRODUCT in storage.reason


def test_arithmetic_of_its_own_is_seen(wide: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not raise but says something else: here it takes values for twice what they are."""
    model = wide("qwen3")
    fetch = QuantizedKV.update_and_fetch

    def doubled(self: QuantizedKV, keys: mx.array, values: mx.array) -> Any:
        held_keys, held_values = fetch(self, keys, values)
        if isinstance(held_values, tuple):
            packed, scales, biases = held_values
            return held_keys, (packed, scales * 2, biases * 2)
        return held_keys, held_values * 2

    monkeypatch.setattr(QuantizedKV, "update_and_fetch", doubled)
    storage = engine(model).kv_storage
    assert storage.quantization is None
    assert NO_PRODUCT in storage.reason or "logits differ" in storage.reason


def test_rows_that_are_masked_wrongly_are_seen(wide: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone all is well; in a batch the shorter row sees its padding."""
    model = wide("qwen3")

    def unmasked(self: BatchKVCache, *_args: Any, **_options: Any) -> None:
        del self

    monkeypatch.setattr(BatchKVCache, "make_mask", unmasked)
    storage = engine(model).kv_storage
    assert storage.quantization is None
    assert NO_PRODUCT in storage.reason or "logits differ" in storage.reason


@pytest.mark.parametrize("family", sorted({*QUANTIZED} - {"llama4 kv8"}))  # its chunks are cut by the next slice
def test_rows_take_what_the_footprint_says(model_of: Make, family: str) -> None:
    """What memory is planned by is what caches take, alone and in a batch; a fraction of what plain ones take."""
    model = model_of(family)
    desk = Desk(model)
    footprint = desk.engine.kv_footprint
    ratio = footprint.bytes_per_token / replace(model, kv=None).engine().kv_footprint.bytes_per_token
    assert ratio == pytest.approx({8: 0.3125, 4: 0.1875}[QUANTIZED[family][1]])
    lengths = {"a": 300, "b": 40} if desk.engine.is_batchable else {"a": 300}
    for name, length in lengths.items():
        desk.engine.open(prepared(name, prompt(1, length)), ())
        desk.engine.prefill(prepared(name, ()).request_id, length - 1)
    taken = sum(footprint.bytes_per_token * -(-length // BUFFER_STEP_TOKENS) * 256 for length in lengths.values())
    windows = sum(w.bytes_per_token * (length - 1) for w in footprint.windows for length in lengths.values())
    assert desk.engine.live_kv_bytes == taken + windows + footprint.fixed_bytes * len(lengths)


@pytest.mark.parametrize("family", ["llama kv8", "llama kv4", "gemma3_text kv8", "lfm2 kv4"])
def test_a_hit_in_bf16_says_what_its_cold_run_says(model_of: Make, family: str, tmp_path: Path) -> None:
    """K02: as real models run. Scales and biases keep their type in blocks and files."""
    model = model_of(family, mx.bfloat16)
    desk = Desk(model)
    first = prompt(520, 520)
    cold = first_logprobs(desk, "cold", first, slice_tokens=200)
    kinds = {array.dtype for block in desk.index.blocks() for array in block.payload.values()}
    assert kinds == {mx.uint32, mx.bfloat16}
    for tier in (desk, after_a_restart(desk, model, tmp_path)):
        assert np.max(np.abs(first_logprobs(tier, "again", first) - cold)) <= BF16_NOISE
        assert tier.cached["again"] >= 512


# --- names ----------------------------------------------------------------------------------------------------------


def test_other_settings_are_other_blocks() -> None:
    """K04: a change of bits or groups is a miss, and back again a hit; plain blocks keep the name that they had."""
    weights = "0" * 32
    asked = [None, *(KVQuantization(bits=b, group_size=g) for b in (4, 6, 8) for g in (32, 64, 128))]
    names = {fingerprint_of_kv(weights, each) for each in asked}
    assert len(names) == len(asked)
    assert fingerprint_of_kv(weights, None) == weights
    assert all(len(name) == 32 for name in names)
    assert fingerprint_of_kv("1" * 32, TERMS) != fingerprint_of_kv(weights, TERMS)
