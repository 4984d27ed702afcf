# pyright: basic
"""Tokens per second of all streams together: mlxd over HTTP, mlx-lm's server, and mlx-lm's bare BatchGenerator.

    python -m tests.bench.decode_bench [--repeats N] [--streams N…] [--model FOLDER] [--picture] [--peer NAME=COMMAND]…

One run, one machine, the same model and BLAS, one after the other in every repeat. The bare generator has no HTTP, no
text and no stops: it is what the engine could give at most. Prompts are short stories to write, all different; a
stream's rate counts from the first token of any to the last of all.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from gateway.blas import worker_environment
from tests.bench.measuring import ROOT, print_head, print_table, save_bars, spread, versions
from tests.bench.servers import BenchFailed, Mlxd, Server, mlx_lm_server, models_cache, peer_server
from tests.bench.waiting_bench import Stream, chat
from worker import demo_model

PICTURE = Path(__file__).parent / "pictures" / "decode.png"
TOKENS = 96
BARE = "bare BatchGenerator"

_BARE_PROGRAM = """
import sys, time
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import BatchGenerator
folder, streams, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model, tokenizer = load(folder)
for run in range(2):  # the first compiles
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Write a very long story about a sailor, number {run}{row}."}],
            add_generation_prompt=True,
        )
        for row in range(streams)
    ]
    generator = BatchGenerator(model, max_tokens=tokens, stop_tokens=[])
    generator.insert(prompts)
    first = None
    count = 0
    left = set(range(streams))
    while count < streams * tokens:
        responses = generator.next_generated()
        if responses and first is None:
            first = time.perf_counter()
            count += len(responses)
            began = count
            continue
        count += len(responses)
    last = time.perf_counter()
print((count - began) / (last - first))
"""


def bare(folder: Path, streams: int, environment: dict[str, str]) -> float:
    """In a process of its own, since it wants the BLAS preloaded."""
    command = [sys.executable, "-c", _BARE_PROGRAM, str(folder), str(streams), str(TOKENS)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise BenchFailed(f"the bare generator ended badly:\n{ran.stderr[-1500:]}")
    return float(ran.stdout.strip().splitlines()[-1])


def served(server: Server, streams: int) -> float:
    """All streams at once."""
    number = time.monotonic_ns()
    many = [
        Stream(server, chat(f"Write a very long story about a sailor, number {number}{row}."), TOKENS)
        for row in range(streams)
    ]
    arrivals = sorted(at for one in many for at in one.wait().arrivals)
    if len(arrivals) < 2:
        raise BenchFailed(f"{server.name} streamed no text: {many[0].error}")
    return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--model", type=Path, help="a model folder instead of SmolLM2-135M in float32")
    parser.add_argument("--peer", action="append", default=[], help="NAME=COMMAND with {model} and {port}; repeatable")
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} under pictures/")
    arguments = parser.parse_args()
    folder = arguments.model or demo_model.build(
        models_cache() / "smollm2-float32", dtype="float32", progress=lambda _: None
    )
    print_head(f"tokens per second of all streams, model {folder.name}")
    rates: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="mlxdb") as directory:
        base = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        blas = worker_environment({**base, "HF_HUB_OFFLINE": "1"}, Path(directory))
        print(f"BLAS for all: {blas.description}", flush=True)
        servers = [
            Mlxd(folder),
            mlx_lm_server(folder, Path(directory)),
            *(peer_server(peer, folder, Path(directory)) for peer in arguments.peer),
        ]
        try:
            for repeat in range(arguments.repeats):
                for streams in arguments.streams:
                    rates[BARE][streams].append(bare(folder, streams, dict(blas.environment)))
                for server in servers:
                    server.start()
                    served(server, 1)  # loads the model
                    for streams in arguments.streams:
                        rates[server.name][streams].append(served(server, streams))
                    server.stop()
                print(f"repeat {repeat + 1} of {arguments.repeats}", flush=True)
        finally:
            for server in servers:
                server.close()
    rows = []
    for name, by_streams in rates.items():
        texts = []
        for streams in arguments.streams:
            share = spread(by_streams[streams]).median / spread(rates[BARE][streams]).median
            texts.append(f"{spread(by_streams[streams]).text(1)} [{share:.0%}]")
        rows.append([name, *texts])
    columns = ["streams", *(str(streams) for streams in arguments.streams)]
    print_table("tokens per second, median (least-most) [share of the bare generator]", columns, rows)
    if arguments.picture:
        groups = [f"{streams} stream{'s' if streams > 1 else ''}" for streams in arguments.streams]
        series = {
            name: [spread(by_streams[streams]).median for streams in arguments.streams]
            for name, by_streams in rates.items()
        }
        title = f"Decode, all streams together, {folder.name}"
        save_bars(PICTURE, title, "tokens per second (more is better)", groups, series, versions())


if __name__ == "__main__":
    main()
