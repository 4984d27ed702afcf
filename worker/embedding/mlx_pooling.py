# pyright: basic
"""Token states → one vector for each row, as the folder's recipe says."""

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import msgspec
from msgspec import Struct

from protocol.model_kind import UnsupportedFolder
from worker.embedding.mlx_layers import activation, is_text
from worker.embedding.recipe import Pooling, Recipe


class _DenseConfig(Struct, frozen=True, kw_only=True):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"


class Dense(nn.Module):
    """A linear layer behind the pooling, with its activation."""

    def __init__(self, config: _DenseConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.in_features, config.out_features, bias=config.bias)
        name = config.activation_function.rpartition(".")[2].lower()
        self._activation = None if name == "identity" else activation(name)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.linear(x)
        return x if self._activation is None else self._activation(x)


def load_dense(folder: Path, recipe: Recipe) -> list[Dense]:
    """The recipe's layers with their weights. Raises UnsupportedFolder when they are not safetensors."""
    layers: list[Dense] = []
    for name in recipe.dense:
        layer = Dense(msgspec.json.decode((folder / name / "config.json").read_bytes(), type=_DenseConfig))
        path = folder / name / "model.safetensors"
        if not path.exists():
            raise UnsupportedFolder(f"{name} has no model.safetensors; convert it or leave the model out")
        weights = mx.load(str(path))
        if not isinstance(weights, Mapping):
            raise UnsupportedFolder(f"{name}/model.safetensors holds no tensors")
        layer.load_weights(list(weights.items()))
        layers.append(layer)
    return layers


def pooled(states: mx.array, lengths: mx.array, pooling: Pooling) -> mx.array:
    """(rows, longest, width) → (rows, width), over the `lengths` tokens of each row that are no padding."""
    rows, longest, _ = states.shape
    kept = is_text(lengths, longest)[:, :, None]
    match pooling:
        case "cls":
            return states[:, 0]
        case "last_token":
            return states[mx.arange(rows), lengths - 1]
        case "mean":
            return mx.where(kept, states, 0).sum(axis=1) / lengths[:, None]
        case "max":
            return mx.where(kept, states, -mx.inf).max(axis=1)


def unit_length(vectors: mx.array) -> mx.array:
    """Each row's direction."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
