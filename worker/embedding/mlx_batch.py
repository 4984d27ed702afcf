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
from worker.embedding.mlx_decoder import Decoder, load_decoder
from worker.embedding.mlx_modern_bert import ModernBert
from worker.embedding.mlx_pooling import Dense, load_dense, pooled, unit_length
from worker.embedding.recipe import Recipe
from worker.embedding.rows import BetweenSlices, TokenRow
from worker.mlx_model import evaluate_weights
from worker.weights_fingerprint import fingerprint

_PAD_TO = 8
"""Rows are padded to multiples of this, so that a GPU compiles fewer shapes."""

_WARM_UP_TOKENS = 16
_CLEAR_EVERY_BATCHES = 128


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
        self._batches = 0

    def run(self, rows: Sequence[TokenRow], *, slice_tokens: int, between: BetweenSlices) -> list[bytes] | None:
        """See `BatchModel`. Only decoders can be run in slices: an encoder's first token sees the last."""
        is_long = len(rows) == 1 and len(rows[0].token_ids) > slice_tokens
        if is_long and isinstance(self._network, Decoder) and self._recipe.pooling == "last_token":
            out = self._sliced(self._network, rows[0], slice_tokens, between)
        else:
            out = self._batched(rows)
        if out is None:
            return None
        mx.eval(out)
        values = np.asarray(out, "<f4")
        self._batches += 1
        if self._batches % _CLEAR_EVERY_BATCHES == 0:
            mx.clear_cache()  # batches have many shapes, and each leaves buffers of its own size behind
        return [value.tobytes() for value in values]

    def _sliced(self, decoder: Decoder, row: TokenRow, slice_tokens: int, between: BetweenSlices) -> mx.array | None:
        state = decoder.last_state(mx.array([row.token_ids]), slice_tokens, between)
        if state is None:
            return None
        if self._gives_scores:
            return _chances(decoder.score_of(state))
        return self._finished(state.astype(mx.float32))

    def _batched(self, rows: Sequence[TokenRow]) -> mx.array:
        """Lazy."""
        lengths = [len(row.token_ids) for row in rows]
        longest = min(-(-max(lengths) // _PAD_TO) * _PAD_TO, max(max(lengths), self._recipe.context_tokens))
        tokens = np.zeros((len(rows), longest), np.int32)
        types = np.zeros((len(rows), longest), np.int32)
        for index, row in enumerate(rows):
            tokens[index, : lengths[index]] = row.token_ids
            if row.type_ids is not None:
                types[index, : lengths[index]] = row.type_ids
        return self._outputs(mx.array(tokens), mx.array(types), mx.array(lengths))

    def warm_up(self) -> int:
        """Run one small batch. Gives how many numbers a row's result has."""
        out = self._batched([TokenRow(token_ids=(0,) * _WARM_UP_TOKENS)])
        mx.eval(out)
        return out.shape[1]

    @property
    def active_bytes(self) -> int:
        return mx.get_active_memory()

    def _outputs(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array:
        if self._gives_scores:
            return _chances(self._network.scores(tokens, types, lengths))
        states = self._network.hidden(tokens, types, lengths).astype(mx.float32)
        return self._finished(pooled(states, lengths, self._recipe.pooling))

    def _finished(self, vectors: mx.array) -> mx.array:
        for layer in self._dense:
            vectors = layer(vectors)
        return unit_length(vectors) if self._recipe.unit_length == "yes" else vectors


def _chances(logits: mx.array) -> mx.array:
    return mx.sigmoid(logits.astype(mx.float32))[:, None]


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
    dimensions = model.warm_up()
    gives_scores = kind in ("cross_encoder", "decoder_reranker")
    return LoadedBatchModel(
        model=model,
        weight_bytes=total,
        fingerprint=fingerprint(folder),
        dimensions=None if gives_scores else dimensions,
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
