"""Blocks: what is cut out of a cache is what goes back in, bit for bit, through RAM or a file."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey
from tests.worker.block_files import leased_file, read_whole
from worker.mlx_blocks import KVArrays, KVLayout, block_bytes
from worker.prefix_index import Block, BlockUse

SHAPES = {
    "equal": [(2, 8, 8, mx.float32)] * 3,
    "half": [(2, 8, 8, mx.bfloat16)] * 3,
    "mla": [(1, 16, 8, mx.float16)] * 2,
    "mixed": [(2, 8, 8, mx.float32), (4, 16, 8, mx.float32), (2, 8, 8, mx.float32), (2, 8, 8, mx.bfloat16)],
}
"""Per layer: heads, width of keys, width of values, type."""


def filled(shapes: list[tuple[int, int, int, mx.Dtype]], tokens: int) -> list[KVCache]:
    """Single-row caches that hold noise."""
    caches = []
    for layer, (heads, key_width, value_width, dtype) in enumerate(shapes):
        cache = KVCache()
        keys = mx.random.normal((1, heads, tokens, key_width), key=mx.random.key(layer)).astype(dtype)
        values = mx.random.normal((1, heads, tokens, value_width), key=mx.random.key(layer + 100)).astype(dtype)
        cache.update_and_fetch(keys, values)
        caches.append(cache)
    return caches


def layout_of(caches: list[KVCache]) -> KVLayout:
    return KVLayout.of(caches, range(len(caches)))


def use(arrays: KVArrays, tokens: int) -> BlockUse[KVArrays]:
    """As if found in the index: `tokens` of the block match."""
    held = next(iter(arrays.values())).shape[2]
    block = Block(
        key=BlockKey(b""),
        parent=BlockKey(b""),
        start=0,
        token_ids=tuple(range(held)),
        grains=(),
        payload=arrays,
        kv_bytes=block_bytes(arrays),
    )
    return BlockUse(block, tokens)


def is_equal(cache: Any, original: Any, tokens: int) -> bool:
    keys, values = cache.keys_and_values()
    same_type = keys.dtype == original.keys.dtype and values.dtype == original.values.dtype
    same = mx.array_equal(keys, original.keys[..., :tokens, :]) & mx.array_equal(
        values, original.values[..., :tokens, :]
    )
    return same_type and keys.shape[2] == tokens and bool(same.item())


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("tokens", [1, 15, 255, 256, 257, 300, 512, 600])
def test_cut_and_filled_again(kind: str, tokens: int, tmp_path: Path) -> None:
    """Layers of any shape and type, whole blocks and a tail, half of them through files."""
    caches = filled(SHAPES[kind], tokens)
    layout = layout_of(caches)
    uses = []
    for number, start in enumerate(range(0, tokens, BLOCK_TOKENS)):
        end = min(start + BLOCK_TOKENS, tokens)
        arrays = layout.cut(caches, 0, start, end)
        if number % 2 == 0 and (end - start) % GRAIN_TOKENS == 0:
            path = tmp_path / f"{number}.safetensors"
            parts = read_whole(leased_file(path, use(arrays, end - start).block, end - start))
            arrays = parts.payload
            assert parts.kv_bytes == block_bytes(arrays)
        uses.append(use(arrays, end - start))
    empty = [KVCache() for _ in caches]
    layout.fill(empty, uses, tokens + 10)

    assert all(is_equal(cache, original, tokens) for cache, original in zip(empty, caches, strict=True))


def test_a_part_of_a_block_is_filled_in() -> None:
    """Token-exact reuse: the last block's first tokens only."""
    caches = filled(SHAPES["mixed"], 300)
    layout = layout_of(caches)
    uses = [use(layout.cut(caches, 0, 0, 256), 256), use(layout.cut(caches, 0, 256, 300), 7)]
    empty = [KVCache() for _ in caches]
    layout.fill(empty, uses, 263)

    assert all(is_equal(cache, original, 263) for cache, original in zip(empty, caches, strict=True))


def test_a_filled_cache_grows_on() -> None:
    """The next tokens go behind the restored ones, without touching the block."""
    caches = filled(SHAPES["equal"], 300)
    layout = layout_of(caches)
    arrays = layout.cut(caches, 0, 0, 100)
    before = {name: array.tolist() for name, array in arrays.items()}
    empty = [KVCache() for _ in caches]
    layout.fill(empty, [use(arrays, 100)], 100)
    for cache, original in zip(empty, caches, strict=True):
        cache.update_and_fetch(original.keys[..., 100:300, :], original.values[..., 100:300, :])

    assert all(is_equal(cache, original, 300) for cache, original in zip(empty, caches, strict=True))
    assert {name: array.tolist() for name, array in arrays.items()} == before


def test_layers_of_one_shape_share_their_arrays() -> None:
    """Metal bounds the number of buffers: a pair per shape, not per layer."""
    layout = layout_of(filled(SHAPES["mixed"], 4))

    assert layout.groups == ((0, 2), (1,), (3,))
    assert set(layout.cut(filled(SHAPES["mixed"], 4), 0, 0, 4)) == {
        f"{k}{g}" for k in ("keys", "values") for g in range(3)
    }


def test_a_row_of_a_batch_is_cut_by_itself() -> None:
    """Left-padded rows: slots, not tokens."""
    long, short = filled(SHAPES["equal"], 40), filled(SHAPES["equal"], 25)
    batch = [KVCache.merge([a, b]) for a, b in zip(long, short, strict=True)]
    arrays = layout_of(long).cut(batch, 1, 40 - 25 + 3, 40)

    assert mx.array_equal(arrays["keys0"][2], short[2].keys[0, :, 3:25]).item()


@pytest.mark.parametrize("shape", [(2, 64, 64, mx.float32), (1, 128, 128, mx.float32)])
def test_a_block_outlives_its_row(shape: tuple[int, int, int, mx.Dtype]) -> None:
    """A detached copy: a view would keep the whole row's memory. Also of a model with one layer, or one head."""
    caches = filled([shape], 2048)
    arrays = layout_of(caches).cut(caches, 0, 0, 16)
    mx.eval([cache.state for cache in caches])
    mx.clear_cache()
    before = mx.get_active_memory()
    row_bytes = caches[0].nbytes
    caches.clear()
    mx.synchronize()  # a GPU gives memory back when the work that used it has ended

    assert before - mx.get_active_memory() >= row_bytes
    assert block_bytes(arrays) == 2 * 16 * 128 * 4
