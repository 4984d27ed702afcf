"""The worker, on the day after mlx-lm brought a kind of cache that nobody here knows. A program, for `worker_command`.

It is a plain one under another name, so that the model says what it always says.
"""
# pyright: basic

from worker.__main__ import exit_at_once, main
from worker.mlx_model import import_mlx_lm


def bring_a_novel_cache() -> None:
    """To every Llama."""
    import_mlx_lm()
    from mlx_lm.models import llama
    from mlx_lm.models.cache import KVCache

    class SpiralKVCache(KVCache):
        """Nobody knows how to cut it."""

    def make_cache(self: llama.Model) -> list[SpiralKVCache]:
        return [SpiralKVCache() for _ in self.layers]

    llama.Model.make_cache = make_cache  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    bring_a_novel_cache()
    exit_at_once(main())
