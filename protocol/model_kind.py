"""What kind of model lies in a folder, told by the folder's own facts. Pure: gateway and worker must agree on it.

Encoders and folders of sentence-transformers say so in `config.json` and `modules.json`. A decoder that was converted
without `modules.json` looks like any chat model; only its name tells that it embeds or reranks.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from protocol.generation import Capability

ModelKind = Literal["generation", "embedder", "cross_encoder", "decoder_embedder", "decoder_reranker"]
"""`embedder` and `cross_encoder` attend in both directions; the other two are decoders of mlx-lm."""

ENCODER_TYPES = frozenset(["bert", "camembert", "modernbert", "mpnet", "roberta", "xlm-roberta"])
"""Values of `model_type` that the worker has an encoder for."""

DECODER_TYPES = frozenset(["gemma", "llama", "mistral", "qwen2", "qwen3"])
"""Values of `model_type` whose hidden states the worker can pool."""

RERANKING_DECODER_TYPES = frozenset(["qwen2", "qwen3"])
"""Those of them that have been trained to answer yes or no, and whose prompt for that is known."""

_CAPABILITIES: dict[ModelKind, tuple[Capability, ...]] = {
    "generation": ("chat", "completions"),
    "embedder": ("embeddings", "rerank"),
    "decoder_embedder": ("embeddings", "rerank"),
    "cross_encoder": ("rerank",),
    "decoder_reranker": ("rerank",),
}


class UnsupportedFolder(Exception):
    """No worker can run this folder; the words say why."""


class FolderFacts(Struct, frozen=True, kw_only=True):
    """What decides. `modules` are the types that `modules.json` names, None where there is no such file."""

    name: str = ""
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    labels: int = 2
    modules: tuple[str, ...] | None = None


class _Config(Struct, frozen=True, kw_only=True):
    model_type: str | None = None
    architectures: list[str] | None = None
    id2label: dict[str, Any] | None = None
    num_labels: int | None = None


class _Positions(Struct, frozen=True, kw_only=True):
    model_type: str | None = None
    max_position_embeddings: int | None = None
    pad_token_id: int | None = None


class _SentenceLimits(Struct, frozen=True, kw_only=True):
    max_seq_length: int | None = None


class _Module(Struct, frozen=True, kw_only=True):
    type: str


def folder_facts(name: str, config: bytes, modules: bytes | None) -> FolderFacts:
    """Facts of a model served as `name`, from the bytes of `config.json` and `modules.json`.

    Raises msgspec.DecodeError.
    """
    read = msgspec.json.decode(config, type=_Config)
    labels = read.num_labels if read.id2label is None else len(read.id2label)
    return FolderFacts(
        name=name,
        model_type=read.model_type,
        architectures=tuple(read.architectures or ()),
        labels=2 if labels is None else labels,
        modules=None
        if modules is None
        else tuple(module.type for module in msgspec.json.decode(modules, type=list[_Module])),
    )


def kind_of(facts: FolderFacts) -> ModelKind:
    """Raises UnsupportedFolder for what is neither a language model nor an embedder or reranker we can run."""
    is_classifier = any(name.endswith("ForSequenceClassification") for name in facts.architectures)
    if is_classifier and facts.labels != 1:
        raise UnsupportedFolder(
            f"it sorts texts into {facts.labels} labels; of classifiers only rerankers, which have one, can be served"
        )
    if facts.model_type in ENCODER_TYPES:
        return "cross_encoder" if is_classifier else "embedder"
    if is_classifier:
        raise UnsupportedFolder(f"rerankers of model_type {facts.model_type!r} cannot be served; {_known_encoders()}")
    wanted = _wanted_of_decoder(facts)
    if wanted == "decoder_embedder" and facts.model_type not in DECODER_TYPES:
        raise UnsupportedFolder(f"embeddings of model_type {facts.model_type!r} cannot be served; {_known_encoders()}")
    return wanted


def first_position(model_type: str | None, pad_token_id: int | None) -> int:
    """Positions of a RoBERTa or MPNet begin behind the padding token's id; those of the others at 0."""
    if model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        return (1 if pad_token_id is None else pad_token_id) + 1
    return 0


def text_limit_tokens(config: bytes, sentence_limits: bytes | None) -> int | None:
    """How long a text an embedder or reranker takes, from the bytes of `config.json` and `sentence_bert_config.json`.

    None where neither says. Raises msgspec.DecodeError.
    """
    read = msgspec.json.decode(config, type=_Positions)
    limits: list[int] = []
    if read.max_position_embeddings is not None and read.max_position_embeddings > 0:
        limits.append(read.max_position_embeddings - first_position(read.model_type, read.pad_token_id))
    if sentence_limits is not None:
        asked = msgspec.json.decode(sentence_limits, type=_SentenceLimits).max_seq_length
        if asked is not None and asked > 0:
            limits.append(asked)
    return min(limits, default=None)


def capabilities_of(kind: ModelKind) -> tuple[Capability, ...]:
    """What every model of this kind can be asked for; a loaded one may know more."""
    return _CAPABILITIES[kind]


def _wanted_of_decoder(facts: FolderFacts) -> ModelKind:
    name = facts.name.lower()
    is_known = facts.model_type in RERANKING_DECODER_TYPES
    if is_known and ("rerank" in name or any("cross_encoder" in module for module in facts.modules or ())):
        return "decoder_reranker"
    if facts.modules is not None or ("embed" in name and facts.model_type in DECODER_TYPES):
        return "decoder_embedder"
    return "generation"


def _known_encoders() -> str:
    return f"those of {', '.join(sorted(ENCODER_TYPES | DECODER_TYPES))} can"
