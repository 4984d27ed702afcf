# pyright: basic
"""ModernBERT: rotary positions, gated MLPs, and a narrow window in two layers of three."""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.embedding.mlx_layers import activation, attend, is_text

_UNUSED = re.compile(r"^decoder\.")


def _norm(config: Mapping[str, Any]) -> nn.LayerNorm:
    has_bias = bool(config.get("norm_bias", False))
    return nn.LayerNorm(config["hidden_size"], eps=config.get("norm_eps", 1e-5), bias=has_bias)


class _Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any], index: int) -> None:
        super().__init__()
        width, wide = config["hidden_size"], config["intermediate_size"]
        has_bias, mlp_has_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
        if index:
            self.attn_norm = _norm(config)
        self.attn = {
            "Wqkv": nn.Linear(width, 3 * width, bias=has_bias),
            "Wo": nn.Linear(width, width, bias=has_bias),
        }
        self.mlp_norm = _norm(config)
        self.mlp = {
            "Wi": nn.Linear(width, 2 * wide, bias=mlp_has_bias),
            "Wo": nn.Linear(wide, width, bias=mlp_has_bias),
        }
        self._heads = config["num_attention_heads"]
        self._is_local = _is_local(config, index)
        self._rope = nn.RoPE(width // self._heads, base=_rope_theta(config, is_local=self._is_local))
        self._activation = activation(config.get("hidden_activation", "gelu"))

    def __call__(self, x: mx.array, everywhere: mx.array, nearby: mx.array) -> mx.array:
        normed = self.attn_norm(x) if "attn_norm" in self else x
        queries, keys, values = mx.split(self.attn["Wqkv"](normed), 3, axis=-1)
        mask = nearby if self._is_local else everywhere
        attended = attend(self._turned(queries), self._turned(keys), values, self._heads, mask)
        x = x + self.attn["Wo"](attended)
        wide, gate = mx.split(self.mlp["Wi"](self.mlp_norm(x)), 2, axis=-1)
        return x + self.mlp["Wo"](self._activation(wide) * gate)

    def _turned(self, x: mx.array) -> mx.array:
        rows, tokens, width = x.shape
        heads = x.reshape(rows, tokens, self._heads, -1).transpose(0, 2, 1, 3)
        return self._rope(heads).transpose(0, 2, 1, 3).reshape(rows, tokens, width)


def _is_local(config: Mapping[str, Any], index: int) -> bool:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return kinds[index] == "sliding_attention"
    return index % int(config.get("global_attn_every_n_layers", 3)) != 0


def _rope_theta(config: Mapping[str, Any], *, is_local: bool) -> float:
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        own = parameters.get("sliding_attention" if is_local else "full_attention")
        if isinstance(own, dict) and "rope_theta" in own:
            return float(own["rope_theta"])
    return float(config.get("local_rope_theta", 10_000.0) if is_local else config.get("global_rope_theta", 160_000.0))


class _Head(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.dense = nn.Linear(width, width, bias=bool(config.get("classifier_bias", False)))
        self.norm = _norm(config)
        self._activation = activation(config.get("classifier_activation", "gelu"))

    def __call__(self, pooled: mx.array) -> mx.array:
        return self.norm(self._activation(self.dense(pooled)))


class ModernBert(nn.Module):
    """`hidden` gives each token's last state; `scores` a row's logit, of a model with a head."""

    def __init__(self, config: Mapping[str, Any], *, head: str) -> None:
        """`head` is "score" or "none"."""
        super().__init__()
        self.embeddings = {
            "tok_embeddings": nn.Embedding(config["vocab_size"], config["hidden_size"]),
            "norm": _norm(config),
        }
        self.layers = [_Layer(config, index) for index in range(config["num_hidden_layers"])]
        self.final_norm = _norm(config)
        if head == "score":
            self.head = _Head(config)
            self.classifier = nn.Linear(config["hidden_size"], 1)
        # the window counts both sides
        self._reach = int(config.get("local_attention", 128)) // 2
        self._pooling = config.get("classifier_pooling", "cls")

    def hidden(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array:
        """As `Bert.hidden`; these models have no types."""
        longest = tokens.shape[1]
        everywhere = is_text(lengths, longest)[:, None, None, :]
        positions = mx.arange(longest)
        near = mx.abs(positions[:, None] - positions[None, :]) <= self._reach
        # a padded token sees itself, or it would see nothing and become NaN
        nearby = (everywhere & near) | (positions[:, None] == positions[None, :])
        x = self.embeddings["norm"](self.embeddings["tok_embeddings"](tokens))
        for layer in self.layers:
            x = layer(x, everywhere, nearby)
        return self.final_norm(x)

    def scores(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array:
        """(rows,) logits."""
        states = self.hidden(tokens, types, lengths)
        if self._pooling == "mean":
            kept = is_text(lengths, tokens.shape[1])[:, :, None]
            pooled = mx.where(kept, states, 0).sum(axis=1) / lengths[:, None]
        else:
            pooled = states[:, 0]
        return self.classifier(self.head(pooled))[:, 0]

    @staticmethod
    def named(weights: Mapping[str, mx.array], *, head: str) -> dict[str, mx.array]:
        """As `Bert.named`."""
        named = {name.removeprefix("model."): array for name, array in weights.items() if not _UNUSED.search(name)}
        if head == "none":
            named = {name: array for name, array in named.items() if not name.startswith(("head.", "classifier."))}
        return named
