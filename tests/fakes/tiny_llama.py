"""A random Llama of two megabytes: unlike the script model's, what it says depends on every key and value it holds.

It says ASCII only and never ends by itself, so that greedy texts can be compared letter for letter.
"""
# pyright: basic

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_LAYERS = 3
_WIDTH = 128
_HEADS = 4
_KV_HEADS = 2
_INNER = 256


def make_tiny_llama(script_model: Path, destination: Path, *, seed: int = 1) -> Path:
    """Write the folder, with the script model's tokenizer, and return its path."""
    destination.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (destination / file).write_bytes((script_model / file).read_bytes())
    config = json.loads((script_model / "config.json").read_text(encoding="utf-8"))
    vocabulary = config["vocab_size"]
    config |= {
        "hidden_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "intermediate_size": _INNER,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _WIDTH // _HEADS,
    }
    (destination / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(vocabulary, _printable_ids(script_model), seed), destination / "model.safetensors")
    return destination


def _printable_ids(script_model: Path) -> list[int]:
    """Tokens of one printable ASCII character."""
    vocabulary = json.loads((script_model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return [token for text, token in vocabulary.items() if len(text) == 1 and "!" <= text <= "~"]


def _weights(vocabulary: int, sayable: list[int], seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)

    def random(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    head = np.zeros((vocabulary, _WIDTH), np.float32)
    head[sayable] = random(len(sayable), _WIDTH, 4.0)
    ones = np.ones(_WIDTH, np.float32)
    weights = {
        "model.embed_tokens.weight": random(vocabulary, _WIDTH, _WIDTH**0.5),
        "lm_head.weight": head,
        "model.norm.weight": ones,
    }
    kv_width = _WIDTH // _HEADS * _KV_HEADS
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones,
            # sharp attention, so that single tokens far back decide what is said
            f"{prefix}.self_attn.q_proj.weight": random(_WIDTH, _WIDTH, 2.0),
            f"{prefix}.self_attn.k_proj.weight": random(kv_width, _WIDTH, 2.0),
            f"{prefix}.self_attn.v_proj.weight": random(kv_width, _WIDTH, 2.0),
            f"{prefix}.self_attn.o_proj.weight": random(_WIDTH, _WIDTH, 2.0),
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.mlp.gate_proj.weight": random(_INNER, _WIDTH),
            f"{prefix}.mlp.up_proj.weight": random(_INNER, _WIDTH),
            f"{prefix}.mlp.down_proj.weight": random(_WIDTH, _INNER),
        }
    return weights
