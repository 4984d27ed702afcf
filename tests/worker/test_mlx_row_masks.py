"""Rows get a mask when one of them is padded, and only then; what they say is the same."""
# pyright: basic

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from tests.worker.parts import prepared
from tests.worker.tiny_models import VOCABULARY, make_tiny_model
from worker.mlx_engine import MlxEngine
from worker.mlx_model import LoadedModel, load_model
from worker.mlx_row_masks import UnpaddedRows, mask_padding_only
from worker.mlx_state import leaves


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "deepseek_v3", "deepseek_v32"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_tiny_model(request.param, tmp_path_factory.mktemp("model")), lambda _done, _total: None)


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 13 + 7 * i * i + i) % VOCABULARY for i in range(length)]


class Rows:
    """An engine with what each row said."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.engine = MlxEngine(loaded, None)
        self.said: dict[str, list[int]] = {}

    def join(self, name: str, token_ids: list[int]) -> None:
        request = prepared(name, token_ids, max_tokens=100)
        self.engine.open(request, [])
        if len(token_ids) > 1:
            self.engine.prefill(request.request_id, len(token_ids) - 1)
        self.engine.join(request.request_id)
        self.said[name] = []

    def step(self, times: int) -> None:
        for _ in range(times):
            self._take(self.engine.decode())

    def leave(self, name: Any) -> None:
        self._take(self.engine.read())
        self.engine.drop([name])

    def _take(self, drawn: Any) -> None:
        for each in drawn:
            self.said[each.request_id].append(each.token_id)

    def held(self, name: str) -> int:
        """Tokens in its cache, those of a step that is not read yet included."""
        return next(row.held for row in self.engine._rows if row.prepared.request_id == name)

    @property
    def kinds(self) -> set[str]:
        """Of the batch caches that could need a mask."""
        return {type(leaf).__name__ for leaf in leaves(self.engine._caches) if isinstance(leaf, BatchKVCache)}


def test_only_padded_rows_are_masked_and_all_say_what_they_say_alone(loaded: LoadedModel) -> None:
    """Alone, beside a row of the same length, beside a longer one, and alone again after the others left."""
    rows = Rows(loaded)
    prompts = {"first": prompt(1, 30), "longer": prompt(3, 70)}

    rows.join("first", prompts["first"])
    rows.step(4)
    assert rows.kinds == {"UnpaddedRows"}
    prompts["same length"] = prompt(2, rows.held("first") + 1)
    rows.join("same length", prompts["same length"])
    assert rows.kinds == {"UnpaddedRows"}
    rows.step(3)
    rows.join("longer", prompts["longer"])
    assert rows.kinds == {"BatchKVCache"}
    rows.step(5)
    rows.leave("longer")
    assert rows.kinds == {"UnpaddedRows"}
    rows.step(3)
    rows.leave("same length")
    rows.step(3)
    assert rows.kinds == {"UnpaddedRows"}
    rows.leave("first")

    for name, said in rows.said.items():
        assert len(said) >= 3
        steps = generate_step(mx.array(prompts[name]), loaded.model, max_tokens=len(said))
        assert said == [int(token) for token, _ in steps], name  # pyright: ignore[reportArgumentType]


def test_what_hides_more_than_padding_is_still_masked() -> None:
    """Several tokens at once, a window, who asks for an array; and other kinds of caches are left as they are."""
    cache: Any = BatchKVCache([0, 0])
    rotating = BatchRotatingKVCache(16, [0, 0])
    keys = mx.zeros((2, 1, 5, 4))
    cache.update_and_fetch(keys, keys)

    mask_padding_only([cache, rotating], [5, 5])

    assert type(cache) is UnpaddedRows
    assert type(rotating) is BatchRotatingKVCache
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, return_array=True).shape[-1] == 6
    assert cache.make_mask(1, window_size=3).shape[-1] == 6
    assert cache.make_mask(2).shape[-2:] == (2, 7)
    mask_padding_only([cache], [5, 4])
    assert type(cache) is BatchKVCache
    assert cache.make_mask(1).shape[-1] == 6
