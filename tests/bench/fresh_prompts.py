# pyright: basic
"""Prompts that no run before had, so that nothing an earlier one left anywhere can help."""

import random
from pathlib import Path
from typing import Any

from tests.bench.prefix_bench import Prompts, report
from tests.bench.streams import TokenCounter, chat


class FreshPrompts:
    """For one model, with a counter of its tokens."""

    def __init__(self, folder: Path) -> None:
        self.counter = TokenCounter(folder)
        self._folder = folder
        self._draw = random.SystemRandom()
        self._prompts: dict[int, Prompts] = {}

    def document(self, prompt_tokens: int) -> Any:
        if prompt_tokens not in self._prompts:
            self._prompts[prompt_tokens] = Prompts(self._folder, prompt_tokens)
        seed = self._draw.randrange(2**32)
        return self._prompts[prompt_tokens].ask(report(seed, lines=prompt_tokens // 5), "Was there a storm?")

    def tale(self) -> Any:
        return chat(f"Write a very long story about a sailor, number {self._draw.randrange(10**6)}.")

    def short_question(self) -> Any:
        return chat(f"Say {self._draw.randrange(10**6)}.")

    def pause_seconds(self) -> float:
        return self._draw.uniform(0.3, 1.2)
