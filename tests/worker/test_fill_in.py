"""How families of code models want to be asked for what stands between two texts."""

import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from protocol.failures import FailureKind
from protocol.generation import TextPrompt
from worker.fill_in import fill_in_text
from worker.mlx_model import load_tokenizer
from worker.prompts import PromptRefused, prompt_tokens


@pytest.mark.parametrize(
    ("markers", "text"),
    [
        (
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"],
            "<|fim_prefix|>def {f}<|fim_suffix|>end<|fim_middle|>",
        ),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>def {f}<fim_suffix>end<fim_middle>"),
        (
            ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
            "<｜fim▁begin｜>def {f}<｜fim▁hole｜>end<｜fim▁end｜>",
        ),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]end[PREFIX]def {f}"),
        (["<fim_prefix>", "<fim_suffix>"], None),
        ([], None),
    ],
)
def test_each_family(markers: list[str], text: str | None) -> None:
    """A family is told by its markers, all of them; without one there is nothing to ask with."""
    ids = {marker: index for index, marker in enumerate(markers)}
    assert fill_in_text(ids.get, "def {f}", "end") == text


def test_the_markers_are_tokens_of_the_prompt(script_model: Path, tmp_path: Path) -> None:
    """A model with markers gets them as tokens, around what the client sent; without a suffix there are none."""
    folder = tmp_path / "coder"
    shutil.copytree(script_model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    coder = load_tokenizer(folder)
    ids = [tokenizer.token_to_id(marker) for marker in markers]
    tokens = prompt_tokens(coder, TextPrompt(text="ab", suffix="c"), 10_000).token_ids
    assert [token for token in tokens if token in ids] == ids
    assert len(tokens) == len(ids) + len("abc")
    assert tokens[0] == ids[0]
    assert tokens[-1] == ids[-1]
    assert not set(prompt_tokens(coder, TextPrompt(text="ab"), 10_000).token_ids) & set(ids)


def test_without_markers_a_suffix_is_refused(script_model: Path) -> None:
    """Never an answer to half of what was asked."""
    with pytest.raises(PromptRefused) as caught:
        prompt_tokens(load_tokenizer(script_model), TextPrompt(text="ab", suffix="c"), 10_000)
    assert (caught.value.failure.kind, caught.value.failure.param) == (FailureKind.UNSUPPORTED, "suffix")
