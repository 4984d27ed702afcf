# pyright: basic
"""The model of an embedding or reranking worker: loads a folder and runs batches of rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from protocol.model_kind import ModelKind
from worker.embedding.mlx_bert import Bert
from worker.embedding.mlx_decoder import load_decoder
from worker.embedding.mlx_modern_bert import ModernBert
from worker.embedding.mlx_pooling import Dense, load_dense, pooled, unit_length
from worker.embedding.recipe import Recipe
from worker.embedding.rows import TokenRow
from worker.mlx_model import evaluate_weights, fingerprint

_PAD_TO = 8
"""Rows are padded to multiples of this, so that a GPU compiles fewer shapes."""

_WARM_UP_TOKENS = 16


class _Network(Protocol):
    def hidden(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array: ...
    def scores(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array: ...


@dataclass(frozen=True)
class LoadedBatchModel:
    """A model ready to run. `dimensions` is the size of its vectors, None where it gives scores."""

    model: "MlxBatchModel"
    weight_bytes: int
    fingerprint: str
    dimensions: int | None


class MlxBatchModel:
    """A `BatchModel`. Owned by the thread that loaded it."""

    def __init__(self, network: _Network, kind: ModelKind, recipe: Recipe, dense: Sequence[Dense]) -> None:
        self._network = network
        self._gives_scores = kind in ("cross_encoder", "decoder_reranker")
        self._recipe = recipe
        self._dense = tuple(dense)

    def run(self, rows: Sequence[TokenRow]) -> list[bytes]:
        """See `BatchModel`."""
        lengths = [len(row.token_ids) for row in rows]
        longest = min(-(-max(lengths) // _PAD_TO) * _PAD_TO, max(max(lengths), self._recipe.context_tokens))
        tokens = np.zeros((len(rows), longest), np.int32)
        types = np.zeros((len(rows), longest), np.int32)
        for index, row in enumerate(rows):
            tokens[index, : lengths[index]] = row.token_ids
            if row.type_ids is not None:
                types[index, : lengths[index]] = row.type_ids
        out = self._outputs(mx.array(tokens), mx.array(types), mx.array(lengths))
        mx.eval(out)
        values = np.asarray(out, "<f4")
        return [value.tobytes() for value in values]

    @property
    def active_bytes(self) -> int:
        return mx.get_active_memory()

    def _outputs(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array:
        if self._gives_scores:
            return mx.sigmoid(self._network.scores(tokens, types, lengths).astype(mx.float32))[:, None]
        states = self._network.hidden(tokens, types, lengths).astype(mx.float32)
        vectors = pooled(states, lengths, self._recipe.pooling)
        for layer in self._dense:
            vectors = layer(vectors)
        return unit_length(vectors) if self._recipe.unit_length == "yes" else vectors


def load_batch_model(
    folder: Path,
    kind: ModelKind,
    recipe: Recipe,
    *,
    answer_ids: tuple[int, int] | None,
    report: Callable[[int, int], None],
) -> LoadedBatchModel:
    """Load the weights on the calling thread, which must be the one that runs them, and run one small batch.

    `report(done_bytes, total_bytes)` is called after each group of weights. `answer_ids`: see `Decoder`.
    """
    if kind in ("decoder_embedder", "decoder_reranker"):
        network = load_decoder(folder, answer_ids if kind == "decoder_reranker" else None)
        module = network.module
    else:
        network = module = _load_encoder(folder, "score" if kind == "cross_encoder" else "none")
    dense = load_dense(folder, recipe)
    for part in (module, *dense):
        part.eval()
        if mx.default_device() == mx.cpu:
            part.set_dtype(mx.float32)  # the CPU has no fast path for half precision
    total = sum(evaluate_weights(part, report) for part in (module, *dense))
    model = MlxBatchModel(network, kind, recipe, dense)
    (output,) = model.run([TokenRow(token_ids=(0,) * _WARM_UP_TOKENS)])
    gives_scores = kind in ("cross_encoder", "decoder_reranker")
    return LoadedBatchModel(
        model=model,
        weight_bytes=total,
        fingerprint=fingerprint(folder),
        dimensions=None if gives_scores else len(output) // 4,
    )


def _load_encoder(folder: Path, head: str) -> Bert | ModernBert:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = ModernBert if config["model_type"] == "modernbert" else Bert
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        part = mx.load(str(file))
        if isinstance(part, Mapping):
            weights.update(part)
    named = family.named(weights, head=head)
    model = family(config, head=head)
    quantization = config.get("quantization")
    if isinstance(quantization, dict):
        nn.quantize(
            model,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            class_predicate=lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in named,
        )
    model.load_weights(list(named.items()))
    return model
