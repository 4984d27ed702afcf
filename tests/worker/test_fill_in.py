"""How families of code models want to be asked for what stands between two texts."""

import pytest

from worker.fill_in import fill_in_text


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
