"""Model folders of a few kilobytes with noise in every weight, so that what is wrong with a cache shows in the tokens.

Made of mlx-lm's own classes: one folder for each way in which families keep their state.
"""
# pyright: basic

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten

VOCABULARY = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama", "num_hidden_layers": 3},
    # two layers of four with a window much shorter than the prompts
    "gemma3_text": {
        **_COMMON,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": {
        **_COMMON,
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "intermediate_size": 64,
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    # linear attention in three layers of four
    "qwen3_next": {
        **_COMMON,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    "lfm2": {
        **_COMMON,
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": 4,
    },
    # MLA: keys and values of different widths
    "deepseek_v3": {
        **_COMMON,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
    # the same with an indexer, which keeps a cache of its own beside the other
    "deepseek_v32": {
        **_COMMON,
        "model_type": "deepseek_v32",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 16,
    },
    # chunks much shorter than the prompts, and a layer in four that sees everything; such rows are not batched
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            **_COMMON,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": 24,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
            # a scale that grows with the position, within these prompts already
            "floor_scale": 16,
        },
    },
    # a list of caches in each layer: recurrent state beside keys and values
    "falcon_h1": {
        **_COMMON,
        "model_type": "falcon_h1",
        "mamba_chunk_size": 16,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "rope_theta": 10000.0,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
    },
    # the same beside a window
    "baichuan_m1": {
        **_COMMON,
        "model_type": "baichuan_m1",
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "sliding_window_layers": [1, 3],
        "conv_window": 2,
    },
    # keys are scaled by the length of the whole prompt; reuse must be off
    "internlm2": {
        **_COMMON,
        "model_type": "internlm2",
        "bias": False,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
}

_WITHOUT_EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 2},
    "deepseek_v32": {"first_k_dense_replace": 2},
    "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]},
    "llama4": {"text_config": {**CONFIGS["llama4"]["text_config"], "interleave_moe_layer_step": 8}},
}

PLAIN_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": CONFIGS["llama"],
    "qwen2": {**_COMMON, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_COMMON, "model_type": "qwen3"},
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    # no positions at all in the second layer
    "smollm3": {**_COMMON, "model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "phi3": {**_COMMON, "model_type": "phi3"},
    "gemma": {**_COMMON, "model_type": "gemma"},
    # logits are scaled behind the output layer
    "granite": {
        **_COMMON,
        "model_type": "granite",
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "glm4": {**_COMMON, "model_type": "glm4", "attention_bias": False, "partial_rotary_factor": 0.5},
}
"""Families of plain attention, each with a way of its own in what a packed pass has to tell apart."""


QUANTIZED: dict[str, tuple[str, Literal[8, 4]]] = {
    "llama kv8": ("llama", 8),
    "llama kv4": ("llama", 4),
    "gemma3_text kv8": ("gemma3_text", 8),
    "lfm2 kv4": ("lfm2", 4),
    "falcon_h1 kv8": ("falcon_h1", 8),
    "llama4 kv8": ("llama4", 8),
    "gpt_oss kv8": ("gpt_oss", 8),
    "deepseek_v3 kv8": ("deepseek_v3", 8),
}
"""Families with wide heads, whose keys and values are kept in so many bits; windows and recurrent state as they are."""

_WIDE_HEADS: dict[str, Any] = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
_WIDE_LATENT: dict[str, Any] = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 32, "index_head_dim": 32},
}
_WIDE: dict[str, dict[str, Any]] = {
    "deepseek_v3": _WIDE_LATENT,
    "deepseek_v32": _WIDE_LATENT,
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "lfm2": {"hidden_size": 64, "block_dim": 64},
    "falcon_h1": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "llama4": {"text_config": {**CONFIGS["llama4"]["text_config"], **_WIDE_HEADS}},
}


def make_tiny_model(
    family: str,
    destination: Path,
    dtype: mx.Dtype = mx.float32,
    experts: Literal["some", "none"] = "some",
    heads: Literal["narrow", "wide"] = "narrow",
) -> Path:
    """Write the folder; the same bytes every time. `dtype` is that of the weights; MLX's CPU build computes experts in
    float32 only. Wide heads are of 32 numbers, a quantization group."""
    config = CONFIGS.get(family) or PLAIN_CONFIGS[family]
    if heads == "wide":
        config = {**config, **_WIDE_HEADS, **_WIDE.get(family, {})}
    if experts == "none":
        config = {**config, **_WITHOUT_EXPERTS.get(family, {})}
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = {
        name: _noise(name, array, seed).astype(dtype)  # pyright: ignore
        for seed, (name, array) in enumerate(sorted(tree_flatten(model.parameters())))  # pyright: ignore
    }
    destination.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(destination / "model.safetensors"), weights, {"format": "mlx"})
    (destination / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return destination


def _noise(name: str, array: mx.array, seed: int) -> mx.array:
    noise = mx.random.normal(array.shape, key=mx.random.key(seed))
    if name.endswith("A_log"):
        # a slow decay: what was said a hundred tokens ago is still in the state
        return (0.3 * noise - 5).astype(array.dtype)
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    if array.ndim < 2:
        return (gain * (1 + 0.3 * noise)).astype(array.dtype)
    return (gain * noise * 1.5 / array.shape[-1] ** 0.5).astype(array.dtype)


_GAINS = {
    "mamba.out_proj": 0.02,  # beside attention, which it would drown
    **dict.fromkeys(("q_norm", "q_layernorm", "q_proj", "k_proj", "q_b_proj", "W_pack", "in_proj_qkvz"), 2.0),
    **dict.fromkeys(("v_proj", "o_proj", "out_proj", "conv.conv"), 2.0),
}
"""Sharp attention whose outcome counts: one token far back decides what is said, as it does in a trained model."""
