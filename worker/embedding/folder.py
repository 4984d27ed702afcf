"""Reads what a model's folder says of itself: its kind, and how it makes vectors."""

import json
from pathlib import Path
from typing import Any

from protocol.model_kind import ModelKind, folder_facts, kind_of
from worker.embedding.recipe import Recipe, recipe_of

_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


def model_kind(folder: Path, name: str) -> ModelKind:
    """Of the folder that is served as `name`. Raises UnsupportedFolder, OSError or ValueError."""
    modules = folder / "modules.json"
    config = (folder / "config.json").read_bytes()
    return kind_of(folder_facts(name, config, modules.read_bytes() if modules.exists() else None))


def read_recipe(folder: Path, kind: ModelKind) -> tuple[dict[str, Any], Recipe]:
    """The decoded `config.json` with the recipe. Raises as `model_kind`."""
    config = (folder / "config.json").read_bytes()
    paths = [folder / name for name in _FILES]
    paths += sorted(folder.glob("*_Pooling/config.json"))
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.exists()}
    return json.loads(config), recipe_of(kind, config, files)
