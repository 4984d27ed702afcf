# pyright: basic
"""Load one model from a folder, and say what it is: limits, bytes, fingerprint, which caches it uses."""

import json
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from protocol.generation import PrefixReuse
from worker.weights_fingerprint import fingerprint

_UNBATCHABLE = frozenset(
    ["gemma2", "afm7", "gpt_bigcode", "internlm2", "internlm3", "llama4", "olmo", "phi3small", "deepseek_v41"]
)
"""Model types whose batched attention is wrong or raises in mlx-lm 0.32 (mlx-lm#1903 and our own runs)."""

_POSITION_DEPENDENT_KEYS = frozenset(["internlm2", "internlm3"])
"""Dynamic NTK rope: a key depends on the length of the whole sequence, so no block of it is reusable."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `tokenizer` is mlx-lm's TokenizerWrapper."""

    model: nn.Module
    config: dict[str, Any]
    weight_bytes: int
    fingerprint: str
    is_batchable: bool
    prefix_reuse: PrefixReuse


def import_mlx_lm() -> None:
    """Import mlx-lm without letting it lower this process's limit of open files, as it does at import."""
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        import mlx_lm.utils  # noqa: F401
    finally:
        resource.setrlimit = original


def load_tokenizer(path: Path) -> Any:
    """mlx-lm's TokenizerWrapper. Never runs code of the model's folder, never asks a hub."""
    import_mlx_lm()
    from mlx_lm.utils import load_tokenizer as load

    eos_token_ids = _eos_token_ids(path)
    return load(path, {"trust_remote_code": False, "local_files_only": True}, eos_token_ids=eos_token_ids)


def load_model(path: Path, report: Callable[[int, int], None]) -> LoadedModel:
    """Load the weights on the calling thread, which must be the one that runs them.

    `report(done_bytes, total_bytes)` is called after each group of weights.
    """
    import_mlx_lm()
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model as load

    from worker.mlx_state import shape_of

    model, config = load(path, lazy=True)
    total = evaluate_weights(model, report)
    model.eval()

    caches = make_prompt_cache(model)
    model_type = str(config.get("model_type"))
    reason = shape_of(caches).reason
    if not reason and model_type in _POSITION_DEPENDENT_KEYS:
        reason = f"keys of {model_type} depend on the length of the whole prompt"
    batchable = model_type not in _UNBATCHABLE and all(hasattr(cache, "merge") for cache in caches)
    return LoadedModel(
        model=model,
        config=config,
        weight_bytes=total,
        fingerprint=fingerprint(path),
        is_batchable=batchable,
        prefix_reuse=PrefixReuse(available=not reason, reason=reason),
    )


def evaluate_weights(model: nn.Module, report: Callable[[int, int], None]) -> int:
    """Read weights that were loaded lazily; gives their bytes. `report` as in `load_model`."""
    weights: list[mx.array] = [array for _, array in tree_flatten(model.parameters())]  # pyright: ignore
    total = sum(array.nbytes for array in weights)
    done = 0
    for array in weights:
        mx.eval(array)
        done += array.nbytes
        report(done, total)
    return total


def context_tokens(path: Path) -> int | None:
    """The model's own limit, also from a nested text_config."""
    config = _json(path / "config.json")
    for section in (config, config.get("text_config") or {}):
        for name in ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length"):
            if isinstance(value := section.get(name), int) and value > 0:
                return value
    return None


def _eos_token_ids(path: Path) -> list[int] | None:
    for name in ("generation_config.json", "config.json"):
        if (path / name).exists():
            value = _json(path / name).get("eos_token_id")
            if isinstance(value, int):
                return [value]
            if isinstance(value, list):
                return [token for token in value if isinstance(token, int)]
    return None


def _json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
