"""The fingerprint: equal weights are one model, wherever they lie; whatever else lies in their place is not."""
# pyright: basic

import itertools
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.tiny_models import make_tiny_model
from worker.weights_fingerprint import SAMPLE_BYTES, SAMPLED_EVERY_BYTES, fingerprint, sample_starts

MIB = 1024 * 1024


def change(folder: Path, name: str, *, at: slice = slice(None)) -> None:
    """Set a part of one tensor to zero; the file keeps its size and its header."""
    path = folder / "model.safetensors"
    header_before, weights = mx.load(str(path), return_metadata=True)[1], mx.load(str(path))
    weights[name][at] = 0
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, header_before)


def test_it_names_the_weights_not_the_folder(tmp_path: Path) -> None:
    """K04: the same files elsewhere are the same model; another config or other weights are another one."""
    one = make_tiny_model("llama", tmp_path / "one")
    other = make_tiny_model("llama", tmp_path / "other")
    assert fingerprint(one) == fingerprint(other)
    assert len(fingerprint(one)) == 32
    (other / "chat_template.jinja").write_text("another")
    assert fingerprint(one) == fingerprint(other)

    config = one / "config.json"
    before = fingerprint(one)
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert fingerprint(one) != before


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_next"])
def test_no_single_tensor_can_change_unseen(family: str, tmp_path: Path) -> None:
    """K04: an adapter fused into a few layers leaves name, size and header as they were; its KV is another model's."""
    folder = make_tiny_model(family, tmp_path / "m")
    seen = {fingerprint(folder)}
    names = sorted(mx.load(str(folder / "model.safetensors")))
    for name in names:
        change(folder, name)
        seen.add(fingerprint(folder))
    assert len(seen) == len(names) + 1


def test_one_expert_of_a_large_tensor_cannot_change_unseen(tmp_path: Path) -> None:
    """Fused experts are one tensor; each of them is sampled, whichever it is."""
    (tmp_path / "config.json").write_text("{}")
    weights = {"norm": mx.ones(8), "experts": mx.ones((4, SAMPLED_EVERY_BYTES // 4)), "small": mx.ones(3)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    seen = {fingerprint(tmp_path)}
    for expert in range(4):
        change(tmp_path, "experts", at=slice(expert, expert + 1))
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 5


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 4000, (2).to_bytes(8, "little") + b"[]" + b"data"])
def test_a_file_that_is_no_weights_has_a_name_too(content: bytes, tmp_path: Path) -> None:
    """Whoever loads it says what is wrong; here nothing raises, and its bytes count."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    name = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content + b"more")
    assert len(name) == 32
    assert fingerprint(tmp_path) != name


@given(st.integers(0, 10**9), st.integers(0, 3 * 1024**3))
def test_samples_reach_everywhere_and_are_few(start: int, size: int) -> None:
    """The first and the last bytes are sampled, nothing lies further than 8 MiB from a sample, small ones are whole."""
    starts = list(sample_starts(start, start + size))
    assert starts == sorted(set(starts))
    assert len(starts) <= 4 + size // SAMPLED_EVERY_BYTES
    if size:
        assert starts[0] == start
        assert starts[-1] + SAMPLE_BYTES >= start + size
        gaps = [after - before for before, after in itertools.pairwise(starts)]
        assert max(gaps, default=0) <= SAMPLED_EVERY_BYTES
        if size <= 3 * SAMPLE_BYTES:
            assert max(gaps, default=0) <= SAMPLE_BYTES
