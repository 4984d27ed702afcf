# pyright: basic
"""BERT and RoBERTa (XLM-R, CamemBERT), with the head of a reranker where the folder has one."""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from protocol.model_kind import first_position
from worker.embedding.mlx_layers import activation, attend, is_text

_RENAMES = (
    (r"^(bert|roberta)\.", ""),
    (r"^embeddings\.word_embeddings\.", "words."),
    (r"^embeddings\.position_embeddings\.", "positions."),
    (r"^embeddings\.token_type_embeddings\.", "types."),
    (r"^embeddings\.LayerNorm\.", "norm."),
    (r"^encoder\.layer\.", "layers."),
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
        self.types = nn.Embedding(config.get("type_vocab_size", 2), width)
        self.norm = nn.LayerNorm(width, eps=config.get("layer_norm_eps", 1e-12))
        self.layers = [_Layer(config) for _ in range(config["num_hidden_layers"])]
        if head == "score":
            self.head = _Head(width)
        self._first_position = first_position(config.get("model_type"), config.get("pad_token_id"))

    def hidden(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array:
        """(rows, longest) tokens → (rows, longest, width). What stands behind a row's `lengths` is padding."""
        longest = tokens.shape[1]
        x = self.words(tokens) + self.types(types)
        x = self.norm(x + self.positions(mx.arange(longest) + self._first_position))
        mask = is_text(lengths, longest)[:, None, None, :]
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
