"""A cache can be absent and is never wrong, whatever comes between: requests, twins, cancels, evictions, forgets,
preemptions, restarts and a disk that answers late, refuses and forgets."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.worker.disorderly_service import Disorder
from tests.worker.engine_parts import Model


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v32", "llama4", "baichuan_m1", "mamba2"])
def test_every_answer_is_the_cold_one(model_of: Callable[[str], Model], family: str, seed: int, tmp_path: Path) -> None:
    """K02, K03, H02, S04: two lives on one disk, and every token and logprob is that of mlx-lm's own loop."""
    disorder = Disorder(model_of(family), tmp_path, seed, longest_tokens=300)
    for _ in range(2):
        assert disorder.live(6) == []
    assert disorder.answers
    assert disorder.hits
