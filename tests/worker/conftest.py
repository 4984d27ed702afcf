"""Models that several files of tests load. MLX is imported only where one is asked for."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`model_of(family, dtype=float32)` is a tiny model of a family, made and loaded once by the code that loads real
    ones. The CPU build computes experts in float32 only, so in another type it has none. Or one of `QUANTIZED`."""
    import mlx.core as mx

    from protocol.kv_storage import KVQuantization
    from tests.worker.engine_parts import Model
    from tests.worker.tiny_models import QUANTIZED, make_tiny_model
    from worker.mlx_model import load_model

    @cache
    def load(family: str, dtype: mx.Dtype = mx.float32) -> Model:
        folder = tmp_path_factory.mktemp("models") / family
        named, bits = QUANTIZED.get(family, (family, None))
        heads = "narrow" if bits is None else "wide"
        path = make_tiny_model(named, folder, dtype, "some" if dtype == mx.float32 else "none", heads)
        kv = None if bits is None else KVQuantization(bits=bits, group_size=32)
        return Model(load_model(path, lambda _done, _total: None), kv)

    return load
