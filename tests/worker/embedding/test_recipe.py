"""A folder's own files → pooling, unit length, layers, limits, prompts; what would give wrong vectors is refused."""

import json
from typing import Any

import pytest

from protocol.model_kind import UnsupportedFolder
from worker.embedding.recipe import Recipe, recipe_of

PREFIX = "sentence_transformers.models."
CONFIG: dict[str, Any] = {"model_type": "bert", "max_position_embeddings": 512}


def modules(*types: str) -> list[dict[str, Any]]:
    return [
        {"type": PREFIX + name, "path": "" if name == "Transformer" else f"{number}_{name}"}
        for number, name in enumerate(types)
    ]


def recipe(config: dict[str, Any] = CONFIG, kind: Any = "embedder", **files: Any) -> Recipe:
    names = {"modules": "modules.json", "pooling": "1_Pooling/config.json", "limits": "sentence_bert_config.json"}
    names["prompts"] = "config_sentence_transformers.json"
    given = {names[name]: json.dumps(content).encode() for name, content in files.items()}
    return recipe_of(kind, json.dumps(config).encode(), given)


def test_without_files_an_encoder_takes_the_mean_and_a_decoder_its_last_token() -> None:
    """Both of unit length."""
    assert recipe() == Recipe(pooling="mean", context_tokens=512)
    assert recipe(kind="decoder_embedder").pooling == "last_token"


@pytest.mark.parametrize(
    ("asked", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 8}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last_token"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 8, "include_prompt": True}, "last_token"),
    ],
)
def test_pooling_is_as_the_folder_says(asked: dict[str, Any], pooling: str) -> None:
    """In the older and the newer spelling."""
    made = recipe(modules=modules("Transformer", "Pooling", "Normalize"), pooling=asked)
    assert (made.pooling, made.unit_length) == (pooling, "yes")


def test_unit_length_and_layers_are_as_modules_say() -> None:
    """Without Normalize vectors keep their length; dense layers are run in order."""
    made = recipe(modules=modules("Transformer", "Pooling", "Dense", "Dense"), pooling={"pooling_mode_cls_token": True})
    assert (made.unit_length, made.dense) == ("no", ("2_Dense", "3_Dense"))


@pytest.mark.parametrize(
    "files",
    [
        {"modules": modules("Transformer", "LayerNorm")},
        {"modules": modules("Transformer", "Pooling")},
        {"modules": [{"type": PREFIX + "Transformer", "path": "0_Transformer"}]},
        {"modules": modules("Transformer", "Pooling"), "pooling": {"pooling_mode_weightedmean_tokens": True}},
        {
            "modules": modules("Transformer", "Pooling"),
            "pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        },
    ],
)
def test_what_would_give_wrong_vectors_is_refused(files: dict[str, Any]) -> None:
    """A module or pooling that is not there would be left out silently otherwise."""
    with pytest.raises(UnsupportedFolder):
        recipe(**files)


def test_limits_and_prompts() -> None:
    """The shorter limit counts; a RoBERTa's positions begin behind its padding id."""
    assert recipe(limits={"max_seq_length": 256, "do_lower_case": False}).context_tokens == 256
    assert recipe(limits={"max_seq_length": None}).context_tokens == 512
    roberta = {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    assert recipe(roberta).context_tokens == 512
    made = recipe(prompts={"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": None})
    assert (made.query_prompt, made.document_prompt) == ("Q: ", "")
    assert recipe(prompts={"prompts": {"query": "query: ", "passage": "passage: "}}).document_prompt == "passage: "
