# pyright: basic
"""Attention, norms, rotations and sigmoid as this repository writes them for MLX's CPU build are those of MLX."""

import ctypes
import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest

from worker import mlx_cpu

_attention = mx.fast.scaled_dot_product_attention
_sigmoid = mx.sigmoid
_rms_norm = mx.fast.rms_norm
_rope = mx.fast.rope


def arrays(
    length: int, context: int, *, heads: int = 6, kv_heads: int = 2, batch: int = 2, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of unequal widths, the latter slices of something longer, as caches hand them."""
    mx.random.seed(length * 1000 + context)
    queries = mx.random.normal((batch, length, heads, 16)).swapaxes(1, 2) * 3
    keys = mx.random.normal((batch, kv_heads, context + 5, 16))[:, :, :context]
    values = mx.random.normal((batch, kv_heads, context + 5, 12))[:, :, :context]
    return queries.astype(dtype), keys.astype(dtype), values.astype(dtype)


def difference(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one - other).max())  # pyright: ignore[reportArgumentType] - one number


def causal(length: int, context: int) -> mx.array:
    return mx.arange(context - length, context)[:, None] >= mx.arange(context)[None]


def masks(length: int, context: int) -> dict[str, Any]:
    seen = causal(length, context)
    window = seen & (mx.arange(context - length, context)[:, None] < mx.arange(context)[None] + 7)
    first = mx.array([0, min(3, context - length)])  # how much of the left of each row is padding
    padded = seen & (first[:, None, None, None] <= mx.arange(context))
    biased = mx.where(seen, mx.random.normal((2, 6, length, context)), -mx.inf)
    return {
        "none": None,
        "causal": "causal",
        "two dimensions": seen,
        "window": window,
        "batch": padded,
        "added": mx.where(seen, 0.0, -1e9),
        "added, by head": biased,
        "one for all queries": mx.arange(context)[None] < max(1, context - 2),
    }


@pytest.mark.parametrize("name", list(masks(1, 1)))
@pytest.mark.parametrize(("length", "context"), [(1, 1), (1, 40), (5, 5), (63, 90), (64, 64), (65, 300), (200, 260)])
def test_attention_is_that_of_mlx(length: int, context: int, name: str) -> None:
    """For every form of mask, at lengths around the pieces that it goes over."""
    queries, keys, values = arrays(length, context)
    mask = masks(length, context)[name]

    expected = _attention(queries, keys, values, scale=0.3, mask=mask)
    actual = mlx_cpu.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)

    assert actual.shape == expected.shape
    assert actual.dtype == mx.float32
    assert difference(actual, expected) < 1e-5


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_heads_may_share_keys(kv_heads: int) -> None:
    """Any number of queries' heads to one of keys."""
    queries, keys, values = arrays(70, 150, kv_heads=kv_heads)
    for mask in ("causal", causal(70, 150)):
        expected = _attention(queries, keys, values, scale=0.25, mask=mask)
        actual = mlx_cpu.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
        assert difference(actual, expected) < 1e-5


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_other_types_are_mlx_own(dtype: mx.Dtype) -> None:
    """To the last bit."""
    queries, keys, values = arrays(20, 40, dtype=dtype)
    expected = _attention(queries, keys, values, scale=0.25, mask="causal")
    actual = mlx_cpu.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask="causal")
    assert actual.dtype == dtype
    assert mx.array_equal(actual, expected)


def test_sinks_are_mlx_own() -> None:
    """What asks for more than a mask is handed on."""
    queries, keys, values = arrays(20, 40)
    values = values[..., :12]
    sinks = mx.random.normal((6,))
    expected = _attention(queries, keys, values, scale=0.25, mask="causal", sinks=sinks)
    actual = mlx_cpu.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask="causal", sinks=sinks)
    assert mx.array_equal(actual, expected)


def test_large_scores_do_not_overflow() -> None:
    """A score of thousands, as some models have."""
    queries, keys, values = arrays(9, 30)
    expected = _attention(queries * 200, keys, values, scale=1.0, mask="causal")
    actual = mlx_cpu.scaled_dot_product_attention(queries * 200, keys, values, scale=1.0, mask="causal")
    assert difference(actual, expected) < 1e-3


@pytest.mark.parametrize("shape", [(1, 1, 576), (8, 1, 576), (1, 70, 64), (2, 3, 5, 16)])
def test_a_norm_is_that_of_mlx(shape: tuple[int, ...]) -> None:
    """To the last bit; without weights and in other types it is MLX's own."""
    x, weight = mx.random.normal(shape) * 7, mx.random.normal(shape[-1:])
    assert mx.array_equal(mlx_cpu.rms_norm(x, weight, 1e-5), _rms_norm(x, weight, 1e-5))
    assert mx.array_equal(mlx_cpu.rms_norm(x, None, 1e-5), _rms_norm(x, None, 1e-5))
    half = x.astype(mx.bfloat16)
    assert mx.array_equal(mlx_cpu.rms_norm(half, weight, 1e-6), _rms_norm(half, weight, 1e-6))


OFFSETS = mx.array([0, 77, 30_011])
ROTATIONS: dict[str, dict[str, Any]] = {
    "whole heads": {"dims": 32, "base": 10_000.0, "scale": 1.0},
    "a part of each": {"dims": 16, "base": 500_000.0, "scale": 0.25},
    "given frequencies": {"dims": 32, "base": None, "scale": 1.0, "freqs": mx.exp(mx.arange(16) * 0.3)},
}


@pytest.mark.parametrize("name", list(ROTATIONS))
def test_a_rotation_is_that_of_mlx(name: str) -> None:
    """To the last bit, for rows far apart, with the angles of the pass and when they are asked for again."""
    options = {"traditional": False, "offset": OFFSETS, **ROTATIONS[name]}
    mlx_cpu.stand_at(OFFSETS)
    for heads in (2, 5):
        a = mx.random.normal((3, heads, 1, 32))
        assert mx.array_equal(mlx_cpu.rope(a, **options), _rope(a, **options))


def test_rotations_of_one_pass_are_told_apart() -> None:
    """A model with several kinds of them gets for each its own, and the next pass stands elsewhere."""
    a = mx.random.normal((3, 2, 1, 32))
    for offset in (OFFSETS, OFFSETS + 1):
        mlx_cpu.stand_at(offset)
        for rotation in (*ROTATIONS.values(), *ROTATIONS.values()):
            options = {"traditional": False, "offset": offset, **rotation}
            assert mx.array_equal(mlx_cpu.rope(a, **options), _rope(a, **options))


def test_a_rotation_elsewhere_is_mlx_own() -> None:
    """Several tokens of a row, another offset than that of the pass, pairs side by side, other types."""
    mlx_cpu.stand_at(OFFSETS)
    one, several = mx.random.normal((3, 2, 1, 32)), mx.random.normal((3, 2, 4, 32))
    options: dict[str, Any] = {"traditional": False, "offset": OFFSETS, **ROTATIONS["whole heads"]}
    cases: list[tuple[mx.array, dict[str, Any]]] = [
        (several, {}),
        (one, {"offset": OFFSETS + 5}),
        (one, {"offset": 5}),
        (one, {"traditional": True}),
        (one.astype(mx.bfloat16), {}),
    ]
    for a, changed in cases:
        assert mx.array_equal(mlx_cpu.rope(a, **options | changed), _rope(a, **options | changed))


def test_sigmoid_is_that_of_mlx() -> None:
    """Over all that float32 holds, inside compiled functions too; other types are MLX's own."""
    numbers = mx.concatenate([mx.linspace(-120, 120, 4001), mx.array([-3e38, 3e38, -mx.inf, mx.inf, 0.0])])
    for function in (mlx_cpu.sigmoid, mx.compile(mlx_cpu.sigmoid)):
        assert difference(function(numbers), _sigmoid(numbers)) < 1e-6
    halves = numbers.astype(mx.bfloat16)
    assert mx.array_equal(mlx_cpu.sigmoid(halves), _sigmoid(halves))
    assert mlx_cpu.sigmoid(0).item() == 0.5


PROGRAM = """
import sys
import mlx.core as mx
def helped():
    return [mx.fast.scaled_dot_product_attention, mx.fast.rms_norm, mx.fast.rope, mx.sigmoid]
before = helped()
device = mx.Device(getattr(mx, sys.argv[1]))
mx.default_device = lambda: device
from worker import mlx_cpu
mlx_cpu.install()
print(*(now is then for now, then in zip(helped(), before)))
"""


@pytest.mark.parametrize(("device", "said"), [("cpu", "False False False False"), ("gpu", "True True True True")])
def test_only_the_cpu_is_helped(device: str, said: str) -> None:
    """On a GPU MLX's own kernels stay. In a process of its own, since it replaces them for all."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, device], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == said


_ALLOCATES_TWICE = """
import resource
import mlx.core as mx
from worker import mlx_cpu

mlx_cpu.install()
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    mx.eval([mx.zeros((4, 3, 512, 64)) for _ in range(40)])
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc")
def test_freed_memory_is_used_again() -> None:
    """63 MB of arrays, made, freed and made again: the second time the system has no page to clear for them."""
    ran = subprocess.run([sys.executable, "-c", _ALLOCATES_TWICE], capture_output=True, text=True, check=True)
    first, _, third = map(int, ran.stdout.split())
    assert first > 10_000
    assert third < first / 10
