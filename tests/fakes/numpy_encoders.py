"""Forward passes of encoders in plain NumPy, one row at a time, from the tensors' names in Hugging Face's files.

Written from the papers' formulas and apart from the worker's, so that the two can be held against each other.
"""

from collections.abc import Mapping, Sequence
from math import erf, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Tensors = Mapping[str, NDArray[Any]]

_erf = np.vectorize(erf)


def gelu(x: Matrix) -> Matrix:
    return x * 0.5 * (1 + _erf(x / sqrt(2)))


def softmax(x: Matrix) -> Matrix:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def layer_norm(x: Matrix, tensors: Tensors, name: str, epsilon: float) -> Matrix:
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
    bias = tensors.get(f"{name}.bias")
    return scaled * tensors[f"{name}.weight"] + (0 if bias is None else bias)


def linear(x: Matrix, tensors: Tensors, name: str) -> Matrix:
    bias = tensors.get(f"{name}.bias")
    return x @ tensors[f"{name}.weight"].astype(np.float64).T + (0 if bias is None else bias)


def attention(queries: Matrix, keys: Matrix, values: Matrix, heads: int, may_see: Matrix | None = None) -> Matrix:
    """(tokens, width) each; `may_see[i, j]` is 1 where token i sees token j."""
    width = queries.shape[-1] // heads
    out: list[Matrix] = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = queries[:, part] @ keys[:, part].T / sqrt(width)
        if may_see is not None:
            scores = np.where(may_see == 1, scores, -np.inf)
        out.append(softmax(scores) @ values[:, part])
    return np.concatenate(out, axis=-1)


def bert(
    tensors: Tensors, config: Mapping[str, Any], token_ids: Sequence[int], type_ids: Sequence[int], prefix: str = ""
) -> Matrix:
    """The last states of one row's tokens."""

    def at(name: str) -> str:
        return prefix + name

    first = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    epsilon = config["layer_norm_eps"]
    x = tensors[at("embeddings.word_embeddings.weight")][list(token_ids)].astype(np.float64)
    x = x + tensors[at("embeddings.position_embeddings.weight")][first : first + len(token_ids)]
    x = x + tensors[at("embeddings.token_type_embeddings.weight")][list(type_ids)]
    x = layer_norm(x, tensors, at("embeddings.LayerNorm"), epsilon)
    for number in range(config["num_hidden_layers"]):
        name = at(f"encoder.layer.{number}.")
        queries, keys, values = (
            linear(x, tensors, f"{name}attention.self.{part}") for part in ("query", "key", "value")
        )
        seen = attention(queries, keys, values, config["num_attention_heads"])
        x = x + linear(seen, tensors, f"{name}attention.output.dense")
        x = layer_norm(x, tensors, f"{name}attention.output.LayerNorm", epsilon)
        wide = gelu(linear(x, tensors, f"{name}intermediate.dense"))
        x = layer_norm(x + linear(wide, tensors, f"{name}output.dense"), tensors, f"{name}output.LayerNorm", epsilon)
    return x


def mpnet(tensors: Tensors, config: Mapping[str, Any], token_ids: Sequence[int]) -> Matrix:
    """The last states of one row's tokens."""
    count, heads, epsilon = len(token_ids), config["num_attention_heads"], config["layer_norm_eps"]
    first = config["pad_token_id"] + 1
    x = tensors["embeddings.word_embeddings.weight"][list(token_ids)].astype(np.float64)
    x = x + tensors["embeddings.position_embeddings.weight"][first : first + count]
    x = layer_norm(x, tensors, "embeddings.LayerNorm", epsilon)
    table = tensors["encoder.relative_attention_bias.weight"]
    by_distance = np.zeros((heads, count, count))
    for seeing in range(count):
        for seen in range(count):
            by_distance[:, seeing, seen] = table[_distance(seen - seeing)]
    for number in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{number}."
        queries, keys, values = (linear(x, tensors, f"{name}attention.attn.{part}") for part in "qkv")
        width = x.shape[-1] // heads
        parts: list[Matrix] = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = queries[:, part] @ keys[:, part].T / sqrt(width) + by_distance[head]
            parts.append(softmax(scores) @ values[:, part])
        x = x + linear(np.concatenate(parts, axis=-1), tensors, f"{name}attention.attn.o")
        x = layer_norm(x, tensors, f"{name}attention.LayerNorm", epsilon)
        wide = gelu(linear(x, tensors, f"{name}intermediate.dense"))
        x = layer_norm(x + linear(wide, tensors, f"{name}output.dense"), tensors, f"{name}output.LayerNorm", epsilon)
    return x


def _distance(ahead: int) -> int:
    """Of 32: sixteen for what stands before, sixteen behind; eight of each are exact, the others reach to 128."""
    offset, far = (16, ahead) if ahead > 0 else (0, -ahead)
    if far < 8:
        return offset + far
    return offset + min(15, 8 + int(log(far / 8) / log(128 / 8) * 8))


def rotated(x: Matrix, heads: int, theta: float) -> Matrix:
    """Rotary positions, each head's first half turned against its second."""
    tokens, width = x.shape
    half = width // heads // 2
    angles = np.arange(tokens)[:, None] / theta ** (np.arange(half) / half)[None, :]
    split = x.reshape(tokens, heads, 2, half)
    one, two = split[:, :, 0], split[:, :, 1]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.stack([one * cos - two * sin, two * cos + one * sin], axis=2).reshape(tokens, width)


def modern_bert(tensors: Tensors, config: Mapping[str, Any], token_ids: Sequence[int]) -> Matrix:
    """The last states of one row's tokens."""
    heads, epsilon = config["num_attention_heads"], config["norm_eps"]
    x = tensors["model.embeddings.tok_embeddings.weight"][list(token_ids)].astype(np.float64)
    x = layer_norm(x, tensors, "model.embeddings.norm", epsilon)
    places = np.arange(len(token_ids))
    near = (np.abs(places[:, None] - places[None, :]) <= config["local_attention"] // 2).astype(np.float64)
    for number in range(config["num_hidden_layers"]):
        name = f"model.layers.{number}"
        is_global = number % config["global_attn_every_n_layers"] == 0
        theta = config["global_rope_theta"] if is_global else config["local_rope_theta"]
        normed = x if number == 0 else layer_norm(x, tensors, f"{name}.attn_norm", epsilon)
        queries, keys, values = np.split(linear(normed, tensors, f"{name}.attn.Wqkv"), 3, axis=-1)
        seen = attention(
            rotated(queries, heads, theta), rotated(keys, heads, theta), values, heads, None if is_global else near
        )
        x = x + linear(seen, tensors, f"{name}.attn.Wo")
        normed = layer_norm(x, tensors, f"{name}.mlp_norm", epsilon)
        wide, gate = np.split(linear(normed, tensors, f"{name}.mlp.Wi"), 2, axis=-1)
        x = x + linear(gelu(wide) * gate, tensors, f"{name}.mlp.Wo")
    return layer_norm(x, tensors, "model.final_norm", epsilon)
