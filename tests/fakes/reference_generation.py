"""What mlx-lm itself says: `python -m tests.fakes.reference_generation MODEL [KV_BITS]`, greedily, to chat messages.

Reads JSON `[[message, …], max_tokens]` items on standard input and writes the texts. A process of its own, so that
it can have the same BLAS as a worker.
"""
# pyright: basic

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def reference_texts(
    model: Path,
    asked: Sequence[tuple[list[dict[str, Any]], int]],
    environment: Mapping[str, str],
    *,
    kv_bits: int | None = None,
) -> list[str]:
    """Each conversation's answer of at most so many tokens, by `mlx_lm.generate`, one after the other; where `kv_bits`
    says so with mlx-lm's own quantized caches, from the first token on."""
    arguments = [str(model), *([] if kv_bits is None else [str(kv_bits)])]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.fakes.reference_generation", *arguments],
        input=json.dumps(asked),
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    import mlx_lm
    from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

    model, tokenizer = mlx_lm.load(sys.argv[1])[:2]
    texts = []
    for messages, max_tokens in json.load(sys.stdin):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        caches = make_prompt_cache(model)
        if len(sys.argv) > 2:
            caches = [QuantizedKVCache(group_size=64, bits=int(sys.argv[2])) for _ in caches]
        texts.append(mlx_lm.generate(model, tokenizer, prompt, max_tokens=max_tokens, prompt_cache=caches))
    sys.stdout.write(json.dumps(texts) + "\n")


if __name__ == "__main__":
    main()
