"""What a folder is, by its facts: nothing of it may surprise gateway or worker."""

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.generation import Capability
from protocol.model_kind import (
    FolderFacts,
    ModelKind,
    UnsupportedFolder,
    capabilities_of,
    folder_facts,
    kind_of,
    text_limit_tokens,
)

SENTENCES = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
JUDGES = [{"type": "sentence_transformers.cross_encoder.modules.LogitScore"}]


def kind(name: str, config: dict[str, Any], modules: Any = None) -> ModelKind:
    return kind_of(folder_facts(name, json.dumps(config).encode(), json.dumps(modules).encode() if modules else None))


@pytest.mark.parametrize(
    ("name", "config", "modules", "expected"),
    [
        ("org/chat", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, None, "generation"),
        ("org/any", {"model_type": "gpt_oss"}, None, "generation"),
        ("org/minilm", {"model_type": "bert", "architectures": ["BertModel"]}, SENTENCES, "embedder"),
        ("org/bge", {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}, None, "embedder"),
        ("org/mpnet", {"model_type": "mpnet", "architectures": ["MPNetForMaskedLM"]}, SENTENCES, "embedder"),
        ("org/m", {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, None, "embedder"),
        (
            "org/ms-marco",
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
            None,
            "cross_encoder",
        ),
        (
            "org/bge-reranker",
            {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"], "num_labels": 1},
            None,
            "cross_encoder",
        ),
        ("org/q", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, SENTENCES, "decoder_embedder"),
        ("org/Qwen3-Embedding-0.6B-4bit", {"model_type": "qwen3"}, None, "decoder_embedder"),
        ("org/Qwen3-Reranker-0.6B", {"model_type": "qwen3"}, None, "decoder_reranker"),
        ("org/judge", {"model_type": "qwen3"}, JUDGES, "decoder_reranker"),
    ],
)
def test_a_folder_is_what_its_facts_say(name: str, config: dict[str, Any], modules: Any, expected: str) -> None:
    """By architecture and files; a decoder without them by its name."""
    assert kind(name, config, modules) == expected


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, None),
        (
            {
                "model_type": "bert",
                "architectures": ["BertForSequenceClassification"],
                "id2label": {"0": "a", "1": "b"},
            },
            None,
        ),
        ({"model_type": "deberta-v2", "architectures": ["DebertaV2ForSequenceClassification"], "num_labels": 1}, None),
        ({"model_type": "nomic_bert", "architectures": ["NomicBertModel"]}, SENTENCES),
        ({"model_type": "gemma3_text", "architectures": ["Gemma3TextModel"]}, SENTENCES),
    ],
)
def test_what_no_worker_runs_is_said_before_a_load(config: dict[str, Any], modules: Any) -> None:
    """A sentiment classifier is no reranker, and another family's vectors would be wrong."""
    with pytest.raises(UnsupportedFolder, match=r"labels|model_type"):
        kind("org/any", config, modules)


@given(
    st.builds(
        FolderFacts,
        name=st.text(),
        model_type=st.none() | st.sampled_from(["bert", "qwen3", "llama", "modernbert", "t5"]) | st.text(),
        architectures=st.lists(st.sampled_from(["BertModel", "XForSequenceClassification", "YForCausalLM"])).map(tuple),
        labels=st.integers(0, 3),
        modules=st.none() | st.lists(st.text()).map(tuple),
    )
)
def test_every_folder_is_of_one_kind_or_refused(facts: FolderFacts) -> None:
    """Whatever lies in it; and every kind can do something."""
    try:
        found = kind_of(facts)
    except UnsupportedFolder as why:
        assert str(why)
    else:
        assert set(capabilities_of(found)) <= set(get_args(Capability))
        assert capabilities_of(found)


@pytest.mark.parametrize(
    ("config", "limits", "expected"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, None, 512),
        ({"model_type": "bert", "max_position_embeddings": 512}, {"max_seq_length": 256}, 256),
        ({"model_type": "roberta", "max_position_embeddings": 514}, None, 512),
        ({"model_type": "bert"}, None, None),
    ],
)
def test_how_long_a_text_may_be(config: dict[str, Any], limits: Any, expected: int | None) -> None:
    """The shorter of the two limits."""
    given_limits = None if limits is None else json.dumps(limits).encode()
    assert text_limit_tokens(json.dumps(config).encode(), given_limits) == expected
