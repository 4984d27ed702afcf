"""The catalog: every model folder and nothing else, broken ones with their reason, names never as paths."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.catalog import Catalog
from tests.fakes.ordinary_rights import drop_roots_rights, files_can_be_forbidden

CONFIG = {"model_type": "llama", "max_position_embeddings": 4096}


def safetensors(data_bytes: int = 16) -> bytes:
    header = json.dumps(
        {
            "__metadata__": {"format": "mlx"},
            "w": {"dtype": "U8", "shape": [data_bytes], "data_offsets": [0, data_bytes]},
        }
    ).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * data_bytes


def make_model(folder: Path, *, config: object = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder


def make_sharded(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shards = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for shard in shards:
        (folder / shard).write_bytes(safetensors())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", shards, strict=True))})
    )
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    make_model(folder / "org" / "good")
    return folder


def names(catalog: Catalog) -> list[str]:
    return [entry.name for entry in catalog.entries()]


def test_a_model_is_a_folder_with_a_config(models: Path):
    """Named by its relative path; other folders, hidden ones, files and what lies deeper than three are not listed."""
    make_sharded(models / "flat:tag")
    make_model(models / "a" / "b" / "c")
    make_model(models / "too" / "deep" / "by" / "one")
    make_model(models / ".cache" / "hidden")
    make_model(models / "org" / "good" / "inner")
    (models / "notes").mkdir()
    (models / "config.json").write_text("{}")
    catalog = Catalog([models])
    assert names(catalog) == ["a/b/c", "flat:tag", "org/good"]
    entry = catalog.find("org/good")
    assert entry is not None
    assert entry.problem is None
    assert entry.context_tokens == 4096
    assert entry.path == str(models / "org" / "good")
    assert entry.weight_bytes == len(safetensors())
    assert entry.created_unix > 0
    sharded = catalog.find("flat:tag")
    assert sharded is not None
    assert (sharded.problem, sharded.weight_bytes) == (None, 2 * len(safetensors()))


def test_no_models_directory_is_no_error(tmp_path: Path):
    """Nothing there yet: nothing listed."""
    catalog = Catalog([tmp_path / "absent"])
    assert catalog.entries() == ()
    assert catalog.find("x") is None


def test_the_first_directory_wins(models: Path, tmp_path: Path):
    """Two directories may hold the same name; the order of the settings decides."""
    make_model(tmp_path / "second" / "org" / "good")
    make_model(tmp_path / "second" / "other")
    catalog = Catalog([models, tmp_path / "second"])
    assert names(catalog) == ["org/good", "other"]
    found = catalog.find("org/good")
    assert found is not None
    assert found.path.startswith(str(models))


def test_the_context_limit_of_a_nested_configuration(models: Path):
    """Multimodal configurations keep it under text_config; absent means unknown, never a guess (C09)."""
    make_model(models / "vision", config={"model_type": "x", "text_config": {"max_position_embeddings": 8192}})
    make_model(models / "unsaid", config={"model_type": "x", "max_position_embeddings": None})
    catalog = Catalog([models])
    assert {entry.name: entry.context_tokens for entry in catalog.entries()} == {
        "org/good": 4096,
        "unsaid": None,
        "vision": 8192,
    }


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def config_of_wrong_shape(folder: Path) -> None:
    (folder / "config.json").write_text('{"max_position_embeddings": "many"}')


def config_deeply_nested(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' + "[" * 100_000)


def config_is_a_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def dangling_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "gone")


def remove_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def remove_all_weights(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


def dangling_shard(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(folder / "gone")


def empty_shard(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def cut_shard(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors()[:-1])


def cut_header(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors()[:20])


def pointer_file(folder: Path) -> None:
    """What git leaves where large files were not fetched."""
    (folder / "model-00001-of-00002.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )


def garbage_header(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(struct.pack("<Q", 4) + b"\xff\xfe{}" + b"\0" * 9)


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')


def index_that_points_out(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../good/model.safetensors"}}')


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (break_config, "config.json is not a valid"),
        (config_of_wrong_shape, "config.json is not a valid"),
        (config_deeply_nested, "config.json is not a valid"),
        (config_is_a_folder, "config.json is not a file"),
        (dangling_config, "config.json is a symlink to a file that is not there"),
        (remove_a_shard, "model-00002-of-00002.safetensors' is named in model.safetensors.index.json and not there"),
        (remove_all_weights, "no weights"),
        (dangling_shard, "model-00002-of-00002.safetensors is a symlink"),
        (empty_shard, "model-00001-of-00002.safetensors is cut short"),
        (cut_shard, "model-00001-of-00002.safetensors has"),
        (cut_header, "model-00001-of-00002.safetensors is cut short"),
        (pointer_file, "model-00001-of-00002.safetensors is cut short"),
        (garbage_header, "model-00001-of-00002.safetensors has a damaged header"),
        (broken_index, "model.safetensors.index.json is not a valid index"),
        (index_that_points_out, "../good/model.safetensors' is named in"),
    ],
)
def test_a_broken_folder_is_listed_with_its_reason(models: Path, fault: Callable[[Path], None], words: str):
    """E06: the reason names the file; the others are unaffected; once mended it is good at the next look."""
    folder = make_sharded(models / "broken")
    catalog = Catalog([models])
    assert [entry.problem for entry in catalog.entries()] == [None, None]
    fault(folder)
    for entry in (catalog.find("broken"), catalog.entries()[0]):
        assert entry is not None
        assert entry.problem is not None
        assert words in entry.problem
        assert "\n" not in entry.problem
    assert catalog.entries()[1].problem is None


PROBLEMS = """
import json, sys
from pathlib import Path
from gateway.catalog import Catalog
print(json.dumps({entry.name: entry.problem for entry in Catalog([Path(sys.argv[1])]).entries()}))
"""


@pytest.mark.skipif(not files_can_be_forbidden(), reason="nothing can be kept from this user")
def test_unreadable_files_and_folders(models: Path):
    """E06: what this user may not read is listed with that reason."""
    config, weights = make_model(models / "config"), make_model(models / "weights")
    closed = make_model(models / "closed")
    (config / "config.json").chmod(0)
    (weights / "model.safetensors").chmod(0)
    closed.chmod(0)
    try:
        listed = subprocess.run(
            [sys.executable, "-c", PROBLEMS, str(models)],
            cwd=Path(__file__).parents[2],
            preexec_fn=drop_roots_rights,
            capture_output=True,
            check=True,
        )
    finally:
        closed.chmod(0o700)
    problems = json.loads(listed.stdout)
    assert "config.json cannot be read" in (problems["config"] or "")
    assert "model.safetensors cannot be read" in (problems["weights"] or "")
    assert "folder cannot be read" in (problems["closed"] or "")
    assert problems["org/good"] is None


def test_symlinked_folders_are_followed_and_loops_are_not(models: Path, tmp_path: Path):
    """A link to a model elsewhere is a model; a link that leads back up ends there; a dangling one is nothing."""
    outside = make_model(tmp_path / "outside" / "real")
    (models / "linked").symlink_to(outside)
    (models / "org" / "loop").symlink_to(models)
    (models / "gone").symlink_to(tmp_path / "nowhere")
    assert names(Catalog([models])) == ["linked", "org/good"]


def test_a_model_that_comes_or_goes_is_noticed(models: Path):
    """A miss looks again; a hit whose folder is gone is a miss."""
    catalog = Catalog([models])
    assert catalog.find("late") is None
    late = make_model(models / "late")
    assert catalog.find("late") is not None
    for file in late.iterdir():
        file.unlink()
    late.rmdir()
    assert catalog.find("late") is None


def test_unchanged_folders_are_not_read_again(models: Path, monkeypatch: pytest.MonkeyPatch):
    """A second listing examines nothing, a changed folder alone is examined anew."""
    make_model(models / "other")
    catalog = Catalog([models])
    before = catalog.entries()
    examined: list[str] = []
    module = sys.modules["gateway.catalog"]
    examine = module.examine
    monkeypatch.setattr(module, "examine", lambda name, path: examined.append(name) or examine(name, path))
    assert catalog.entries() == before
    assert examined == []
    (models / "other" / "model.safetensors").write_bytes(safetensors(32))
    catalog.entries()
    assert examined == ["other"]


@pytest.mark.parametrize(
    "name",
    ["../../etc", "/etc", "a\0b", "~x", "~", "", ".", "..", "org", "org/", "org//good", "/org/good", "org/good/",
     "./org/good", "org/../org/good", "ORG/GOOD", "org/good\n", "x" * 10_000, "\ud800", "org\\good"],
)  # fmt: skip
def test_a_name_is_compared_never_opened(models: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """S03: whatever is not exactly a listed name is no model, and no path is ever made of it."""
    catalog = Catalog([models])
    catalog.entries()
    touched: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: touched.append(str(path)) or scandir(path))
    assert catalog.find(name) is None
    assert set(touched) <= {str(models), str(models / "org"), str(models / "org" / "good")}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "org" / "good")
    return Catalog([folder])


@given(name=st.text())
@example(name="org/good")
def test_no_text_finds_a_model_but_its_name(shared: Catalog, name: str):
    """find() is equality with a listed name."""
    assert (shared.find(name) is not None) == (name == "org/good")
