# pyright: basic
"""BERT, RoBERTa (XLM-R, CamemBERT) and MPNet, with the head of a reranker where the folder has one."""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from protocol.model_kind import first_position
from worker.embedding.mlx_layers import activation, attend, is_text

_RENAMES = (
    (r"^(bert|roberta|mpnet)\.", ""),
    (r"^embeddings\.word_embeddings\.", "words."),
    (r"^embeddings\.position_embeddings\.", "positions."),
    (r"^embeddings\.token_type_embeddings\.", "types."),
    (r"^embeddings\.LayerNorm\.", "norm."),
    (r"^encoder\.layer\.", "layers."),
    (r"^encoder\.relative_attention_bias\.", "distances."),
    (r"\.attention\.attn\.q\.", ".query."),
    (r"\.attention\.attn\.k\.", ".key."),
    (r"\.attention\.attn\.v\.", ".value."),
    (r"\.attention\.attn\.o\.", ".output."),
    (r"\.attention\.LayerNorm\.", ".attention_norm."),
    (r"\.attention\.self\.", "."),
    (r"\.attention\.output\.dense\.", ".output."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".widen."),
    (r"(layers\.\d+)\.output\.dense\.", r"\1.narrow."),
    (r"(layers\.\d+)\.output\.LayerNorm\.", r"\1.output_norm."),
    (r"^pooler\.dense\.", "head.dense."),
    (r"^classifier\.dense\.", "head.dense."),
    (r"^classifier\.out_proj\.", "head.score."),
    (r"^classifier\.", "head.score."),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
)
"""From the names of Hugging Face's files to those of the modules below, in this order."""

_UNUSED = re.compile(r"^(cls|lm_head)\.|position_ids$")


_FARTHEST = 128
"""Tokens that are farther apart than this all have MPNet's last distance."""


def distance_buckets(tokens: int, buckets: int) -> NDArray[np.int32]:
    """(tokens, tokens): which of MPNet's distances lies between a token and one that it sees.

    Half of them are for what follows. Of each half the first half is exact, the rest grows with the logarithm.
    """
    distances = np.arange(tokens)[None, :] - np.arange(tokens)[:, None]
    half = buckets // 2
    exact = half // 2
    far = np.log(np.maximum(np.abs(distances), 1) / exact) / np.log(_FARTHEST / exact) * (half - exact)
    found = np.where(np.abs(distances) < exact, np.abs(distances), np.minimum(exact + far.astype(np.int32), half - 1))
    return (found + np.where(distances > 0, half, 0)).astype(np.int32)


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, wide, epsilon = config["hidden_size"], config["intermediate_size"], config.get("layer_norm_eps", 1e-12)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=epsilon)
        self.widen = nn.Linear(width, wide)
        self.narrow = nn.Linear(wide, width)
        self.output_norm = nn.LayerNorm(width, eps=epsilon)
        self._heads = config["num_attention_heads"]
        self._activation = activation(config.get("hidden_act", "gelu"))

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        attended = attend(self.query(x), self.key(x), self.value(x), self._heads, mask)
        x = self.attention_norm(x + self.output(attended))
        return self.output_norm(x + self.narrow(self._activation(self.widen(x))))


class _Head(nn.Module):
    """A reranker's score out of the first token's state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def __call__(self, first: mx.array) -> mx.array:
        return self.score(mx.tanh(self.dense(first)))[:, 0]


class Bert(nn.Module):
    """`hidden` gives each token's last state; `scores` a row's logit, of a model with a head."""

    def __init__(self, config: Mapping[str, Any], *, head: str) -> None:
        """`head` is "score" or "none"."""
        super().__init__()
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError(f"positions of type {config['position_embedding_type']!r} are not known")
        width = config["hidden_size"]
        self.words = nn.Embedding(config["vocab_size"], width)
        self.positions = nn.Embedding(config["max_position_embeddings"], width)
        self._is_mpnet = config["model_type"] == "mpnet"
        if self._is_mpnet:
            self._buckets = int(config.get("relative_attention_num_buckets", 32))
            self.distances = nn.Embedding(self._buckets, config["num_attention_heads"])
        else:
            self.types = nn.Embedding(config.get("type_vocab_size", 2), width)
        self.norm = nn.LayerNorm(width, eps=config.get("layer_norm_eps", 1e-12))
        self.layers = [_Layer(config) for _ in range(config["num_hidden_layers"])]
        if head == "score":
            self.head = _Head(width)
        self._first_position = first_position(config.get("model_type"), config.get("pad_token_id"))

    def hidden(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array:
        """(rows, longest) tokens → (rows, longest, width). What stands behind a row's `lengths` is padding."""
        longest = tokens.shape[1]
        x = self.words(tokens) if self._is_mpnet else self.words(tokens) + self.types(types)
        x = self.norm(x + self.positions(mx.arange(longest) + self._first_position))
        mask = is_text(lengths, longest)[:, None, None, :]
        if self._is_mpnet:
            buckets = mx.array(distance_buckets(longest, self._buckets))
            by_distance = self.distances(buckets).transpose(2, 0, 1)[None].astype(x.dtype)
            mask = mx.where(mask, by_distance, mx.array(-mx.inf, x.dtype))
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def scores(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array:
        """(rows,) logits."""
        return self.head(self.hidden(tokens, types, lengths)[:, 0])

    @staticmethod
    def named(weights: Mapping[str, mx.array], *, head: str) -> dict[str, mx.array]:
        """The file's tensors under the names of this module; those that no module needs are left out."""
        named: dict[str, mx.array] = {}
        for file_name, array in weights.items():
            if _UNUSED.search(file_name):
                continue
            name = file_name
            for pattern, replacement in _RENAMES:
                name = re.sub(pattern, replacement, name)
            if head == "none" and name.startswith("head."):
                continue
            named[name] = array
        return named
