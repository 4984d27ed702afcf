"""A model's own settings stand before those of every model, one by one."""

import pytest

from gateway.model_settings import KVSettings, ModelSettings
from gateway.serve import dispatch_settings
from protocol.ids import ModelName
from protocol.kv_storage import KVQuantization
from tests.gateway.test_config import decided


@pytest.mark.parametrize(
    ("every", "own", "expected"),
    [
        ({}, {}, None),
        ({"bits": 8}, {}, (8, 64)),
        ({"bits": 8, "group_size": 32}, {"kv_bits": 4}, (4, 32)),
        ({"bits": 8}, {"kv_bits": "off"}, None),
        ({"bits": 8}, {"kv_group_size": 128}, (8, 128)),
        ({}, {"kv_bits": 6, "kv_group_size": 32}, (6, 32)),
        ({}, {"kv_group_size": 32}, None),
    ],
)
def test_a_models_own_setting_wins(every: dict[str, object], own: dict[str, object], expected: tuple[int, int] | None):
    """What it does not say is as for every model; another model is not concerned."""
    kv = KVSettings(**every, models={"m": ModelSettings(**own)})  # pyright: ignore[reportArgumentType]
    seen = kv.of(ModelName("m"))
    assert (None if seen is None else (seen.bits, seen.group_size)) == expected
    assert kv.of(ModelName("other")) == KVSettings(**every).of(ModelName("m"))  # pyright: ignore[reportArgumentType]


def test_the_file_reaches_the_workers():
    """From the document to what a worker is launched with."""
    settings = decided(
        {
            "worker": {"kv_bits": 8},
            "models": {"org/small": {"kv_bits": "off"}, "big": {"kv_bits": 4, "kv_group_size": 32}},
        }
    )
    kv = dispatch_settings(settings, {}).kv
    assert kv.of(ModelName("any")) == KVQuantization(bits=8)
    assert kv.of(ModelName("org/small")) is None
    assert kv.of(ModelName("big")) == KVQuantization(bits=4, group_size=32)
