# pyright: basic
"""What quantized keys and values take and cost: bytes of a token, a prompt, a decode step; beside plain ones.

    python -m tests.bench.quantized_kv_bench [--repeats N] [--tokens N] [--rows N…] [--model FOLDER] [--half]

Three engines on one loaded model, in one process, with a worker's BLAS. They take turns, in another order each time, so
ratios of one run mean something where seconds do not. `--half`: the model in bf16, for a GPU.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

from gateway.blas import worker_environment
from protocol.kv_storage import KVBits, KVQuantization
from tests.bench.measuring import ROOT, print_head, print_table, spread
from tests.bench.servers import models_cache

_INSIDE = "MLXD_BENCH_INSIDE"
_SLICE_TOKENS = 256
_STEPS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1020)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--half", action="store_true")
    asked = parser.parse_args()
    if _INSIDE not in os.environ:
        with tempfile.TemporaryDirectory() as blas:
            environment = worker_environment(dict(os.environ), Path(blas)).environment
            environment |= {_INSIDE: "1", "PYTHONPATH": str(ROOT)}
            arguments = [sys.executable, "-m", "tests.bench.quantized_kv_bench", *sys.argv[1:]]
            sys.exit(subprocess.run(arguments, env=environment, check=False).returncode)
    measure(asked)


def measure(asked: argparse.Namespace) -> None:
    import mlx.core as mx

    from tests.worker.engine_parts import PlainTokenizer
    from tests.worker.parts import prepared
    from worker import demo_model, mlx_cpu
    from worker.mlx_engine import MlxEngine
    from worker.mlx_model import load_model

    mlx_cpu.install()
    model = asked.model
    if model is None:
        model = demo_model.build(models_cache() / "smollm2-float32", dtype="float32", progress=lambda _: None)
    loaded = load_model(model, lambda _done, _total: None)
    if asked.half:
        loaded.model.set_dtype(mx.bfloat16)
    print_head(f"Quantized keys and values: {asked.tokens} tokens a row, {asked.repeats} repeats, {model.name}")
    engines = {"plain": MlxEngine(loaded, PlainTokenizer())}
    for bits in sorted(get_args(KVBits), reverse=True):
        engine = MlxEngine(loaded, PlainTokenizer(), KVQuantization(bits=bits))
        kv = engine.kv_storage
        if kv.reason:
            print(f"{bits} bits: {kv.reason}")
        if kv.quantization is not None:
            engines[f"{bits} bits" if kv.reading == "quantized" else f"{bits} bits, dequantized"] = engine

    prompts: dict[str, list[float]] = defaultdict(list)
    steps: dict[tuple[str, int], list[float]] = defaultdict(list)
    dice = random.Random(1)
    for _ in range(asked.repeats):
        for rows in asked.rows:
            requests = [
                prepared(f"r{row}", dice.choices(range(1000, 9000), k=asked.tokens), max_tokens=10**6)
                for row in range(rows)
            ]
            for name in dice.sample(list(engines), len(engines)):
                engine = engines[name]
                for request in requests:
                    engine.open(request, ())
                    began = time.perf_counter()
                    for start in range(0, asked.tokens - 1, _SLICE_TOKENS):
                        engine.prefill(request.request_id, min(_SLICE_TOKENS, asked.tokens - 1 - start))
                    prompts[name].append(time.perf_counter() - began)
                    engine.join(request.request_id)
                for _ in range(3):
                    engine.decode()
                began = time.perf_counter()
                for _ in range(_STEPS):
                    engine.decode()
                engine.read()
                steps[name, rows].append((time.perf_counter() - began) / _STEPS)
                engine.drop([request.request_id for request in requests])
    print_figures(engines, prompts, steps, asked.rows)


def print_figures(
    engines: dict[str, Any],
    prompts: dict[str, list[float]],
    steps: dict[tuple[str, int], list[float]],
    counts: list[int],
) -> None:
    table = []
    for name, engine in engines.items():
        bytes_per_token = engine.kv_storage.bytes_per_token
        of_plain = bytes_per_token / engines["plain"].kv_storage.bytes_per_token
        ratios = [prompt / plain for prompt, plain in zip(prompts[name], prompts["plain"], strict=True)]
        cells = [name, str(bytes_per_token), f"{of_plain:.2f}", f"{spread(prompts[name]).median:.2f}"]
        cells.append(spread(ratios).text())
        for rows in counts:
            paired = zip(steps[name, rows], steps["plain", rows], strict=True)
            cells.append(f"{1000 * spread(steps[name, rows]).median:.1f}")
            cells.append(spread([step / plain for step, plain in paired]).text())
        table.append(cells)
    columns = ["", "bytes a token", "of plain", "prompt s", "of plain"]
    for rows in counts:
        columns += [f"step of {rows} ms", "of plain"]
    print_table("medians, with the smallest and the largest ratio of a turn", columns, table)


if __name__ == "__main__":
    main()
