# pyright: basic
"""Tokens per second of all streams together: mlxd over HTTP, mlx-lm's server, and mlx-lm's bare BatchGenerator.

    python -m tests.bench.decode_bench [--repeats N] [--streams N…] [--tokens N] [--model FOLDER] [--picture]
        [--peer NAME=COMMAND]…

One run, one machine, the same model and BLAS. All of them are up and have answered before anything is timed, and then
take turns, so that few seconds lie between two figures that are compared; an idle one uses no processor, and how much
all of them use while nobody asks is printed. The bare generator (`bare_generator.py`) has no HTTP, no text and no
stops: it is what mlxd's engine, served, can reach at most.

All streams of a turn begin at once, with stories to write that all differ, the same for everybody. What counts is the
time from the last stream's first token to the first stream's end, when all of them decode: by the servers' own usage,
shared out by the text that had come, for one chunk may hold several tokens. Rows go on past the model's end where a
server can; where it cannot, the time ends there, and is taken again with other stories when it is too short.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from gateway.blas import worker_environment
from tests.bench.measuring import ROOT, Bound, print_bounds, print_head, print_table, save_lines, spread, versions
from tests.bench.servers import BenchFailed, Mlxd, Server, mlx_lm_server, models_cache, peer_server
from tests.bench.streams import Stream, TokenCounter, chat
from worker import demo_model

PICTURE = Path(__file__).parent / "pictures" / "decode.png"
MLXD = "mlxd"
BARE = "bare BatchGenerator"
OF_BARE = 0.97
TRIES = 3
LEAST_TOKENS = 24
WARM_UP_TOKENS = 24
LEFT_SECONDS = 0.5

Rates = Mapping[str, Mapping[int, Sequence[float]]]
"""By name and number of streams, one a repeat."""


class TooShort(BenchFailed):
    """A stream ended long before it was asked to."""


class Contestant(Protocol):
    name: str

    def tokens_per_second(self, questions: Sequence[str], tokens: int) -> float:
        """Raises BenchFailed."""
        ...


class Bare:
    """A running `bare_generator.py`."""

    name = BARE

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "bare_generator.py"), str(folder)],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def tokens_per_second(self, questions: Sequence[str], tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([questions, tokens]) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed("the bare generator ended; its last words are above")
        return line.strip()


class Served:
    """A running server, asked by as many streams at once as there are questions."""

    def __init__(self, server: Server, counter: TokenCounter) -> None:
        self.name = server.name
        self._server = server
        self._counter = counter

    def tokens_per_second(self, questions: Sequence[str], tokens: int) -> float:
        many = [Stream(self._server, chat(question), tokens) for question in questions]
        for stream in many:
            stream.wait()
        time.sleep(LEFT_SECONDS)  # what a server still does for the last of them is not the next one's
        began = max(stream.first_arrival for stream in many)
        ended = min(stream.arrivals[-1] for stream in many)
        counts = [
            stream.tokens_until(ended, self._counter) - stream.tokens_until(began, self._counter) for stream in many
        ]
        if max(counts) < LEAST_TOKENS or ended <= began:
            raise TooShort(f"{self.name}: all {len(many)} streams decoded together for {max(counts):.0f} tokens only")
        return sum(counts) / (ended - began)


@contextlib.contextmanager
def everybody(folder: Path, peers: Sequence[str]) -> Generator[list[Contestant]]:
    """Started, with the model loaded; the bare generator first, then mlxd. Nothing of them is left at the end."""
    with tempfile.TemporaryDirectory(prefix="mlxdb") as directory, contextlib.ExitStack() as stack:
        base = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        blas = worker_environment({**base, "HF_HUB_OFFLINE": "1"}, Path(directory))
        print(f"BLAS for all: {blas.description}", flush=True)
        bare = Bare(folder, blas.environment)
        stack.callback(bare.close)
        counter = TokenCounter(folder)
        contestants: list[Contestant] = [bare]
        servers: list[Any] = [
            Mlxd(folder),
            mlx_lm_server(folder, Path(directory)),
            *(peer_server(peer, folder, Path(directory)) for peer in peers),
        ]
        for server in servers:
            stack.callback(server.close)
            server.start()
            contestants.append(Served(server, counter))
        yield contestants


def stories(streams: int) -> list[str]:
    """That nobody was asked before."""
    numbers = random.SystemRandom().sample(range(10**6), streams)
    return [f"Write a very long story about a sailor, number {number}." for number in numbers]


def one_turn(contestants: Sequence[Contestant], streams: int, tokens: int) -> dict[str, float]:
    """Everybody with the same stories. Those of a server that ends too soon are replaced for all."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(TooShort):
            return _asked(contestants, stories(streams), tokens)
    return _asked(contestants, stories(streams), tokens)


def _asked(contestants: Sequence[Contestant], questions: Sequence[str], tokens: int) -> dict[str, float]:
    return {one.name: one.tokens_per_second(questions, tokens) for one in contestants}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--model", type=Path, help="a model folder instead of SmolLM2-135M in float32")
    parser.add_argument("--peer", action="append", default=[], help="NAME=COMMAND with {model} and {port}; repeatable")
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} under pictures/")
    arguments = parser.parse_args()
    folder = arguments.model or demo_model.build(
        models_cache() / "smollm2-float32", dtype="float32", progress=lambda _: None
    )
    print_head(f"tokens per second of all streams, model {folder.name}")
    rates: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    began = time.monotonic()
    with everybody(folder, arguments.peer) as contestants:
        for streams in (1, max(arguments.streams)):  # kernels, and a server's measure of itself
            for one in contestants:
                with contextlib.suppress(TooShort):
                    one.tokens_per_second(stories(streams), WARM_UP_TOKENS)
        busy = psutil.cpu_percent(2.0) / 100 * (os.cpu_count() or 1)
        print(f"all are up, {time.monotonic() - began:.0f} s; the machine uses {busy:.2f} cores meanwhile", flush=True)
        for repeat in range(arguments.repeats):
            turn = contestants if repeat % 2 == 0 else contestants[::-1]
            for streams in arguments.streams:
                for name, rate in one_turn(turn, streams, arguments.tokens).items():
                    rates[name][streams].append(rate)
            print(f"repeat {repeat + 1} of {arguments.repeats}: {time.monotonic() - began:.0f} s", flush=True)
        names = [one.name for one in contestants]
    rates = {name: rates[name] for name in names}
    print_rates(rates, arguments.streams)
    print_bounds(bounds_of(rates, arguments.streams))
    if arguments.picture:
        title = f"Decode, all streams together, {folder.name}"
        save_lines(PICTURE, title, "streams", "tokens per second (more is better)", rates, versions())


def ratios(rates: Rates, other: str, streams: int) -> list[float]:
    """mlxd's rate over another's, turn by turn."""
    return [ours / theirs for ours, theirs in zip(rates[MLXD][streams], rates[other][streams], strict=True)]


def bounds_of(rates: Rates, counts: Sequence[int]) -> list[Bound]:
    """What is wanted of mlxd: nearly all that the bare generator gives, and not behind any server."""
    return [
        Bound(
            what=f"{streams} at once: mlxd / {other}",
            got=spread(ratios(rates, other, streams)),
            side="at least",
            wanted=OF_BARE if other == BARE else 1.0,
            digits=3,
        )
        for other in rates
        if other != MLXD
        for streams in counts
    ]


def print_rates(rates: Rates, counts: Sequence[int]) -> None:
    rows = [[name, *(spread(of_name[streams]).text(1) for streams in counts)] for name, of_name in rates.items()]
    columns = ["streams", *(str(streams) for streams in counts)]
    print_table("tokens per second of all streams, median (least-most)", columns, rows)


if __name__ == "__main__":
    main()
