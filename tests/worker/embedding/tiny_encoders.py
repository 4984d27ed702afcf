"""Encoder folders of a few kilobytes under Hugging Face's tensor names, with noise in every weight."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

VOCABULARY = 60
WIDTH, WIDE, LAYERS = 16, 24, 4

BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": WIDE,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
BERT_RANKER = {**BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 1}
XLM_RANKER = {
    **BERT,
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaForSequenceClassification"],
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
    "id2label": {"0": "LABEL_0"},
}
MPNET: dict[str, Any] = {
    **BERT,
    "model_type": "mpnet",
    "architectures": ["MPNetForMaskedLM"],
    "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 200,
    "relative_attention_num_buckets": 32,
}
MODERN: dict[str, Any] = {
    "model_type": "modernbert",
    "architectures": ["ModernBertModel"],
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": WIDE,
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "global_attn_every_n_layers": 3,
    "local_attention": 8,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
}
MODERN_RANKER = {
    **MODERN,
    "architectures": ["ModernBertForSequenceClassification"],
    "num_labels": 1,
    "classifier_pooling": "mean",
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that a file of this configuration holds."""
    if config["model_type"] == "mpnet":
        return _mpnet_shapes(config)
    return _modern_shapes(config) if config["model_type"] == "modernbert" else _bert_shapes(config)


def make(config: dict[str, Any], folder: Path) -> dict[str, NDArray[np.float32]]:
    """Write the folder, the same bytes every time, and return its tensors."""
    random = np.random.default_rng(7)
    tensors = {
        name: (
            random.normal(0, 0.3, shape) + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
        ).astype(np.float32)
        for name, shape in shapes(config).items()
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tensors


def _bert_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    is_ranker = config["architectures"][0].endswith("ForSequenceClassification")
    is_roberta = "roberta" in config["model_type"]
    prefix = ("roberta." if is_roberta else "bert.") if is_ranker else ""
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], WIDTH),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], WIDTH),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], WIDTH),
        **_norm("embeddings.LayerNorm"),
    }
    for number in range(LAYERS):
        name = f"encoder.layer.{number}"
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            found |= _linear(f"{name}.{part}", WIDTH, WIDTH)
        found |= _norm(f"{name}.attention.output.LayerNorm") | _norm(f"{name}.output.LayerNorm")
        found |= _linear(f"{name}.intermediate.dense", WIDE, WIDTH) | _linear(f"{name}.output.dense", WIDTH, WIDE)
    if not is_roberta:
        found |= _linear("pooler.dense", WIDTH, WIDTH)
    found = {prefix + name: shape for name, shape in found.items()}
    if is_ranker and is_roberta:
        found |= _linear("classifier.dense", WIDTH, WIDTH) | _linear("classifier.out_proj", 1, WIDTH)
    elif is_ranker:
        found |= _linear("classifier", 1, WIDTH)
    return found


def _mpnet_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], WIDTH),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], WIDTH),
        "encoder.relative_attention_bias.weight": (32, config["num_attention_heads"]),
        **_norm("embeddings.LayerNorm"),
        **_linear("pooler.dense", WIDTH, WIDTH),
    }
    for number in range(LAYERS):
        name = f"encoder.layer.{number}"
        for part in "qkvo":
            found |= _linear(f"{name}.attention.attn.{part}", WIDTH, WIDTH)
        found |= _norm(f"{name}.attention.LayerNorm") | _norm(f"{name}.output.LayerNorm")
        found |= _linear(f"{name}.intermediate.dense", WIDE, WIDTH) | _linear(f"{name}.output.dense", WIDTH, WIDE)
    return found


def _modern_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embeddings.tok_embeddings.weight": (config["vocab_size"], WIDTH),
        "model.embeddings.norm.weight": (WIDTH,),
        "model.final_norm.weight": (WIDTH,),
    }
    for number in range(LAYERS):
        name = f"model.layers.{number}"
        if number:
            found[f"{name}.attn_norm.weight"] = (WIDTH,)
        found[f"{name}.attn.Wqkv.weight"] = (3 * WIDTH, WIDTH)
        found[f"{name}.attn.Wo.weight"] = (WIDTH, WIDTH)
        found[f"{name}.mlp_norm.weight"] = (WIDTH,)
        found[f"{name}.mlp.Wi.weight"] = (2 * WIDE, WIDTH)
        found[f"{name}.mlp.Wo.weight"] = (WIDTH, WIDE)
    if config["architectures"][0].endswith("ForSequenceClassification"):
        found["head.dense.weight"] = (WIDTH, WIDTH)
        found["head.norm.weight"] = (WIDTH,)
        found |= _linear("classifier", 1, WIDTH)
    return found


def _linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
