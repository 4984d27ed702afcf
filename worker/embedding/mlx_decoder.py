# pyright: basic
"""Decoders of mlx-lm as embedders and rerankers: the states of their body, without a KV cache.

Rows are padded on the right, where attention from left to right never sees what stands there: no mask is needed.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.embedding.rows import BetweenSlices
from worker.mlx_model import import_mlx_lm


class Decoder:
    """`hidden` as an encoder's; `scores` how much more likely the answer "yes" is than "no", as a logit."""

    def __init__(self, model: nn.Module, answer_ids: tuple[int, int] | None) -> None:
        """`answer_ids` are the tokens of "yes" and "no", for a reranker."""
        self.module = model
        self._body: Any = model["model"]
        self._answer_ids = answer_ids

    def hidden(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array:
        """(rows, longest) tokens → (rows, longest, width)."""
        return self._body(tokens)

    def last_state(self, tokens: mx.array, slice_tokens: int, between: BetweenSlices) -> mx.array | None:
        """(1, tokens) → (1, width): the last token's state, computed slice by slice. None when it was stopped."""
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self.module)
        count = tokens.shape[1]
        states = None
        for start in range(0, count, slice_tokens):
            if start and between() == "stop":
                return None
            states = self._body(tokens[:, start : start + slice_tokens], cache)[:, -1]
            mx.eval(states, [layer.state for layer in cache])
        return states

    def scores(self, tokens: mx.array, types: mx.array, lengths: mx.array) -> mx.array:
        """(rows,) logits."""
        return self.score_of(self.hidden(tokens, types, lengths)[mx.arange(tokens.shape[0]), lengths - 1])

    def score_of(self, last: mx.array) -> mx.array:
        """(rows, width) states of the last tokens → (rows,) logits."""
        if self._answer_ids is None:
            raise ValueError("this decoder was not loaded as a reranker")
        logits = self.module["lm_head"](last) if "lm_head" in self.module else self._body.embed_tokens.as_linear(last)
        yes, no = self._answer_ids
        return logits[:, yes] - logits[:, no]


def load_decoder(folder: Path, answer_ids: tuple[int, int] | None) -> Decoder:
    """Weights are not read yet. The output layer of an embedder is not needed, and not loaded."""
    import_mlx_lm()
    from mlx_lm.utils import load_model

    settings = {} if answer_ids else {"tie_word_embeddings": True}
    model, _ = load_model(folder, lazy=True, model_config=settings, get_model_classes=_classes(answer_ids is not None))
    return Decoder(model, answer_ids)


def _classes(wants_output: bool) -> Callable[[dict[str, Any]], tuple[Any, Any]]:  # noqa: FBT001 - one caller, above
    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        module = importlib.import_module(f"mlx_lm.models.{_module_name(config['model_type'])}")

        class Body(module.Model):
            """The model, from files that hold only its body as well."""

            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                weights = {_full_name(name): array for name, array in weights.items()}
                if not wants_output:
                    weights = {name: array for name, array in weights.items() if not name.startswith("lm_head.")}
                return super().sanitize(weights) if hasattr(module.Model, "sanitize") else weights

        return Body, module.ModelArgs

    return classes


def _module_name(model_type: str) -> str:
    from mlx_lm.utils import MODEL_REMAPPING

    return MODEL_REMAPPING.get(model_type, model_type)


def _full_name(name: str) -> str:
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
