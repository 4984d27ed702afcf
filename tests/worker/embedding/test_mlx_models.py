"""What the models compute, against plain NumPy and mlx-lm itself; and that no row's result depends on its batch."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from protocol.model_kind import ModelKind, UnsupportedFolder
from tests.fakes import numpy_encoders
from tests.fakes.numpy_encoders import gelu, layer_norm, linear
from tests.worker.embedding import tiny_encoders
from tests.worker.embedding.tiny_encoders import BERT, BERT_RANKER, MODERN, MODERN_RANKER, MPNET, XLM_RANKER
from tests.worker.tiny_models import CONFIGS, make_tiny_model
from worker.embedding.folder import model_kind, read_recipe
from worker.embedding.mlx_batch import MlxBatchModel, load_batch_model
from worker.embedding.rows import TokenRow
from worker.mlx_model import load_tokenizer

LENGTHS = (1, 2, 3, 7, 8, 9, 17, 30)
ANSWERS = (7, 8)


def loaded(folder: Path, name: str = "model") -> MlxBatchModel:
    kind = model_kind(folder, name)
    _, recipe = read_recipe(folder, kind)
    return load_batch_model(folder, kind, recipe, answer_ids=ANSWERS, report=lambda done, total: None).model


def run(model: MlxBatchModel, rows: list[TokenRow], slice_tokens: int = 1000) -> list[bytes]:
    outputs = model.run(rows, slice_tokens=slice_tokens, between=lambda: "go_on")
    assert outputs is not None
    return outputs


def rows_of(lengths: tuple[int, ...] = LENGTHS, *, types: int = 2, vocabulary: int = 60) -> list[TokenRow]:
    random = np.random.default_rng(3)
    return [
        TokenRow(
            token_ids=tuple(int(token) for token in random.integers(2, vocabulary, length)),
            type_ids=tuple(int(at >= length // 2) % types for at in range(length)),
        )
        for length in lengths
    ]


def floats(output: bytes) -> NDArray[np.float32]:
    return np.frombuffer(output, "<f4")


def unit(vector: NDArray[Any]) -> NDArray[Any]:
    return vector / np.linalg.norm(vector)


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def test_minilm_is_computed_as_its_formulas_say(minilm: Path) -> None:
    """Real weights and a real tokenizer: mean over the text's tokens, then unit length."""
    tensors, config = load_file(minilm / "model.safetensors"), json.loads((minilm / "config.json").read_bytes())
    tokenizer = load_tokenizer(minilm)._tokenizer
    texts = ["Hello world", "The quick brown fox jumps over the lazy dog.", "東京タワー", ""]
    rows = [TokenRow(token_ids=tuple(tokenizer(text)["input_ids"])) for text in texts]
    for row, output in zip(rows, run(loaded(minilm), rows), strict=True):
        states = numpy_encoders.bert(tensors, config, row.token_ids, [0] * len(row.token_ids))
        assert floats(output) == pytest.approx(unit(states.mean(axis=0)), abs=1e-5)


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "lasttoken", "max_tokens"])
def test_each_pooling_with_a_dense_layer_and_without_normalizing(tmp_path: Path, pooling: str) -> None:
    """Over the row's own tokens; then the folder's layers; of unit length only where the folder says so."""
    folder = tmp_path / "m"
    tensors = tiny_encoders.make(BERT, folder)
    kinds = ("Transformer", "Pooling", "Dense")
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{number}_{kind}" if number else ""}
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    (folder / "2_Dense").mkdir()
    dense = {"linear.weight": np.random.default_rng(1).normal(size=(6, tiny_encoders.WIDTH)).astype(np.float32)}
    save_file(dense, folder / "2_Dense" / "model.safetensors")
    (folder / "2_Dense" / "config.json").write_text(
        json.dumps({"in_features": tiny_encoders.WIDTH, "out_features": 6, "bias": False})
    )
    rows = rows_of()
    for row, output in zip(rows, run(loaded(folder), rows), strict=True):
        assert row.type_ids is not None
        states = numpy_encoders.bert(tensors, BERT, row.token_ids, row.type_ids)
        by_pooling = {
            "mean_tokens": states.mean(axis=0),
            "cls_token": states[0],
            "lasttoken": states[-1],
            "max_tokens": states.max(axis=0),
        }
        expected = np.tanh(by_pooling[pooling] @ dense["linear.weight"].T.astype(np.float64))
        assert floats(output) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("config", [BERT_RANKER, XLM_RANKER], ids=["bert", "xlm_roberta"])
def test_a_cross_encoders_score(tmp_path: Path, config: dict[str, Any]) -> None:
    """The head over the first token's state, from a logit to 0…1; a RoBERTa's positions begin behind its padding id."""
    folder = tmp_path / "m"
    tensors = tiny_encoders.make(config, folder)
    is_roberta = config is XLM_RANKER
    prefix = "roberta." if is_roberta else "bert."
    rows = rows_of(types=1 if is_roberta else 2)
    for row, output in zip(rows, run(loaded(folder), rows), strict=True):
        assert row.type_ids is not None
        states = numpy_encoders.bert(tensors, config, row.token_ids, row.type_ids, prefix)
        pooled = np.tanh(linear(states[0], tensors, "classifier.dense" if is_roberta else "bert.pooler.dense"))
        (logit,) = linear(pooled, tensors, "classifier.out_proj" if is_roberta else "classifier")
        assert floats(output) == pytest.approx([sigmoid(logit)], abs=1e-5)


def test_mpnet(tmp_path: Path) -> None:
    """Distances between tokens, near and beyond the farthest; no types."""
    tensors = tiny_encoders.make(MPNET, tmp_path / "m")
    rows = rows_of((1, 2, 9, 17, 60, 180))
    for row, output in zip(rows, run(loaded(tmp_path / "m"), rows), strict=True):
        states = numpy_encoders.mpnet(tensors, MPNET, row.token_ids)
        assert floats(output) == pytest.approx(unit(states.mean(axis=0)), abs=1e-5)


def test_modern_bert(tmp_path: Path) -> None:
    """Windows narrower than the rows, rotary positions of two kinds, gated layers; as embedder and as reranker."""
    tensors = tiny_encoders.make(MODERN, tmp_path / "embedder")
    rows = rows_of()
    for row, output in zip(rows, run(loaded(tmp_path / "embedder"), rows), strict=True):
        states = numpy_encoders.modern_bert(tensors, MODERN, row.token_ids)
        assert floats(output) == pytest.approx(unit(states.mean(axis=0)), abs=1e-5)

    tensors = tiny_encoders.make(MODERN_RANKER, tmp_path / "ranker")
    for row, output in zip(rows, run(loaded(tmp_path / "ranker"), rows), strict=True):
        pooled = numpy_encoders.modern_bert(tensors, MODERN_RANKER, row.token_ids).mean(axis=0)
        head = layer_norm(gelu(linear(pooled, tensors, "head.dense")), tensors, "head.norm", 1e-5)
        (logit,) = linear(head, tensors, "classifier")
        assert floats(output) == pytest.approx([sigmoid(logit)], abs=1e-5)


@pytest.fixture
def decoder_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Qwen3 with noise in every weight and an output layer of its own."""
    config = {**CONFIGS["llama"], "model_type": "qwen3", "max_position_embeddings": 64}
    monkeypatch.setitem(CONFIGS, "qwen3", config)
    return make_tiny_model("qwen3", tmp_path / "tiny")


@pytest.mark.parametrize("names", ["as_mlx_lm_writes", "body_only"])
def test_a_decoder_embeds_by_its_last_token(decoder_folder: Path, names: str) -> None:
    """As mlx-lm's own body alone says; also from a file that holds the body without its prefix and no output layer."""
    model: Any = load_model(decoder_folder)[0]
    if names == "body_only":
        tensors = load_file(decoder_folder / "model.safetensors")
        kept = {name.removeprefix("model."): array for name, array in tensors.items() if "lm_head" not in name}
        save_file(kept, decoder_folder / "model.safetensors", {"format": "pt"})
    rows = rows_of()
    for row, output in zip(rows, run(loaded(decoder_folder, "tiny-embedding"), rows), strict=True):
        alone = np.asarray(model.model(mx.array([row.token_ids]))[0, -1])
        assert floats(output) == pytest.approx(unit(alone), abs=1e-5)


def test_a_decoder_judges_by_yes_and_no(decoder_folder: Path) -> None:
    """The chance of yes, when only yes and no are possible, behind the whole prompt."""
    model: Any = load_model(decoder_folder)[0]
    rows = rows_of()
    for row, output in zip(rows, run(loaded(decoder_folder, "tiny-reranker"), rows), strict=True):
        logits = np.asarray(model(mx.array([row.token_ids]))[0, -1])
        yes, no = np.exp(logits[list(ANSWERS)])
        assert floats(output) == pytest.approx([yes / (yes + no)], abs=1e-5)


@pytest.mark.parametrize("name", ["tiny-embedding", "tiny-reranker"])
@pytest.mark.parametrize("slice_tokens", [1, 7, 16, 29])
def test_a_long_row_runs_in_slices(decoder_folder: Path, name: str, slice_tokens: int) -> None:
    """To the same result; between two slices somebody else has a turn, and may stop it."""
    model = loaded(decoder_folder, name)
    row = rows_of((30,))
    slices: list[None] = []
    outputs = model.run(row, slice_tokens=slice_tokens, between=lambda: slices.append(None) or "go_on")
    assert outputs is not None
    assert len(slices) == -(-30 // slice_tokens) - 1
    assert floats(outputs[0]) == pytest.approx(floats(run(model, row)[0]), abs=1e-5)
    assert model.run(row, slice_tokens=slice_tokens, between=lambda: "stop") is None


@pytest.mark.parametrize("config", [BERT, XLM_RANKER, MPNET, MODERN], ids=lambda config: config["model_type"])
def test_a_row_does_not_know_its_batch(tmp_path: Path, config: dict[str, Any]) -> None:
    """Alone, among others, in another order: the same vector."""
    tiny_encoders.make(config, tmp_path / "m")
    model = loaded(tmp_path / "m")
    rows = rows_of(types=config.get("type_vocab_size", 2))
    together = run(model, rows)
    backwards = run(model, rows[::-1])[::-1]
    for row, one, other in zip(rows, together, backwards, strict=True):
        (alone,) = run(model, [row])
        assert floats(one) == pytest.approx(floats(alone), abs=1e-5)
        assert floats(other) == pytest.approx(floats(alone), abs=1e-5)


def test_a_quantized_encoder_runs(tmp_path: Path) -> None:
    """Files that MLX quantized: near to the whole ones, and nothing of them is left unread."""
    config = {**BERT, "hidden_size": 64, "intermediate_size": 128}
    tensors = {
        name: np.random.default_rng(5).normal(0, 0.1, [{16: 64, 24: 128}.get(size, size) for size in shape])
        for name, shape in tiny_encoders.shapes(config).items()
    }
    whole, quantized = tmp_path / "whole", tmp_path / "quantized"
    for folder, more in ((whole, {}), (quantized, {"quantization": {"group_size": 64, "bits": 8}})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **more}))
    save_file({name: array.astype(np.float32) for name, array in tensors.items()}, whole / "model.safetensors")
    packed: dict[str, mx.array] = {}
    for name, array in tensors.items():
        weight = mx.array(array.astype(np.float32))
        is_linear = array.ndim == 2 and ("encoder" in name or "word" in name)
        if is_linear:
            stem = name.removesuffix(".weight")
            packed[name], packed[f"{stem}.scales"], packed[f"{stem}.biases"] = mx.quantize(weight, 64, 8)
        else:
            packed[name] = weight
    mx.save_safetensors(str(quantized / "model.safetensors"), packed)
    row = rows_of((9,))
    assert floats(run(loaded(quantized), row)[0]) @ floats(run(loaded(whole), row)[0]) > 0.99


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"hidden_act": "laplace"}, "embedder"),
        ({"position_embedding_type": "relative_key"}, "embedder"),
        ({"num_hidden_layers": 3}, "embedder"),
        ({"num_hidden_layers": 5}, "embedder"),
    ],
)
def test_a_folder_that_is_not_as_it_says_is_refused(tmp_path: Path, change: dict[str, Any], kind: ModelKind) -> None:
    """A weight too many or too few, or a part that is not known, would give vectors of nothing."""
    folder = tmp_path / "m"
    tiny_encoders.make(BERT, folder)
    (folder / "config.json").write_text(json.dumps({**BERT, **change}))
    assert model_kind(folder, "m") == kind
    with pytest.raises((ValueError, UnsupportedFolder)):
        loaded(folder)
