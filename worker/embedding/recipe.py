"""How a folder's model makes one vector of a text: pooling, layers on top, unit length, prompts, limits. Pure.

The facts are those of sentence-transformers' files; a folder without them gets what its kind is usually made with.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from protocol.model_kind import ModelKind, UnsupportedFolder, text_limit_tokens

Pooling = Literal["mean", "cls", "last_token", "max"]

_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last_token",
    "pooling_mode_max_tokens": "max",
}
_NAMES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last_token", "max": "max"}

DEFAULT_CONTEXT_TOKENS = 512


class Recipe(Struct, frozen=True, kw_only=True):
    """`dense` are the folders of linear layers behind the pooling, in order. The prompts stand before a text that is
    compared with others for rerank."""

    pooling: Pooling
    unit_length: Literal["yes", "no"] = "yes"
    dense: tuple[str, ...] = ()
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    query_prompt: str = ""
    document_prompt: str = ""


class _Module(Struct, frozen=True, kw_only=True):
    type: str
    path: str = ""


class _Prompts(Struct, frozen=True, kw_only=True):
    prompts: dict[str, str | None] = {}


def recipe_of(kind: ModelKind, config: bytes, files: Mapping[str, bytes]) -> Recipe:
    """From the bytes of `config.json` and of those of the other JSON files that are there, by their paths.

    Raises UnsupportedFolder for what would give wrong vectors, and msgspec's errors for files that are no such JSON.
    """
    pooling: Pooling = "last_token" if kind in ("decoder_embedder", "decoder_reranker") else "mean"
    unit_length: Literal["yes", "no"] = "yes"
    dense: tuple[str, ...] = ()
    if "modules.json" in files and kind in ("embedder", "decoder_embedder"):
        modules = msgspec.json.decode(files["modules.json"], type=list[_Module])
        for module in modules:
            match module.type.rpartition(".")[2]:
                case "Transformer":
                    if module.path:
                        raise UnsupportedFolder(f"its transformer lies in the folder {module.path!r}; move it up")
                case "Pooling":
                    pooling = _pooling(files, f"{module.path}/config.json")
                case "Dense":
                    dense = (*dense, module.path)
                case "Normalize":
                    pass
                case other:
                    raise UnsupportedFolder(f"modules.json asks for {other!r}, which cannot be served")
        unit_length = "yes" if any(module.type.endswith(".Normalize") for module in modules) else "no"
    prompts = _prompts(files)
    limit = text_limit_tokens(config, files.get("sentence_bert_config.json"))
    return Recipe(
        pooling=pooling,
        unit_length=unit_length,
        dense=dense,
        context_tokens=limit or DEFAULT_CONTEXT_TOKENS,
        query_prompt=prompts.get("query") or "",
        document_prompt=prompts.get("document") or prompts.get("passage") or "",
    )


def _pooling(files: Mapping[str, bytes], path: str) -> Pooling:
    if path not in files:
        raise UnsupportedFolder(f"modules.json asks for {path}, which is not there; download the model again")
    asked = msgspec.json.decode(files[path], type=dict[str, Any])
    name = asked.get("pooling_mode")
    modes = [name] if isinstance(name, str) else [mode for mode, is_on in asked.items() if is_on is True]
    modes = [mode for mode in modes if mode.startswith("pooling_mode_") or mode == name]
    known: dict[str, Pooling] = {**_MODES, **_NAMES}
    if len(modes) != 1 or modes[0] not in known:
        raise UnsupportedFolder(f"{path} asks for the pooling {' + '.join(modes) or 'none'}, which cannot be served")
    return known[modes[0]]


def _prompts(files: Mapping[str, bytes]) -> dict[str, str | None]:
    if "config_sentence_transformers.json" not in files:
        return {}
    return msgspec.json.decode(files["config_sentence_transformers.json"], type=_Prompts).prompts
