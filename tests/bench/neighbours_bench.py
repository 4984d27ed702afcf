"""What a decoding row of one model keeps while another model reads a long prompt, on one device.

    python -m tests.bench.neighbours_bench [--repeats N] [--prompt-tokens N] [--model FOLDER]

Two real workers of the same model, A and B. A decodes one row; B gets a prompt of random tokens, so nothing is cached.
Two such pairs take turns in one run: one whose workers take turns on the device (`neighbours: fair`, the default), one
whose workers each behave as if alone (`ignore`). A's rate is measured just before and during B's prompt, so that
whatever else slows this machine slows both.
"""

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from transformers import AutoTokenizer

from gateway.blas import worker_environment
from protocol.generation import Finished
from protocol.launch import NeighbourPolicy
from tests.bench.measuring import ROOT, print_head, print_table, spread
from tests.bench.servers import models_cache
from tests.processes.worker_pair import Pair
from worker import demo_model

POLICIES: tuple[NeighbourPolicy, ...] = ("fair", "ignore")
SOLO_SECONDS = 3.0
WARM_UP_TOKENS = 300


class BenchFailed(Exception):
    """A prompt ended badly. Says how."""


class Taken(Struct, frozen=True, kw_only=True):
    """One repeat of one policy."""

    solo_tokens_per_second: float
    beside_tokens_per_second: float
    longest_gap_seconds: float
    alone_seconds: float
    beside_seconds: float
    slices: int

    @property
    def kept(self) -> float:
        return self.beside_tokens_per_second / self.solo_tokens_per_second


def random_tokens(count: int) -> tuple[int, ...]:
    """Of which no cache knows a prefix."""
    draws = random.SystemRandom()
    return tuple(draws.randrange(1000, 9000) for _ in range(count))


def one_repeat(pair: Pair, prompt_tokens: int) -> Taken:
    """B's prompt alone, then beside A's row."""
    sent = time.monotonic()
    ended, end = pair.end(pair.generate(2, random_tokens(prompt_tokens), 1))
    if not isinstance(end, Finished):
        raise BenchFailed(f"the prompt ended with {end}")
    alone_seconds = ended - sent

    row = pair.generate(1, random_tokens(16), 100_000)
    pair.until(lambda: bool(pair.tokens(row)))
    started = time.monotonic()
    pair.until(lambda: time.monotonic() - started > SOLO_SECONDS)
    sent = time.monotonic()
    ended, end = pair.end(pair.generate(2, random_tokens(prompt_tokens), 1))
    if not isinstance(end, Finished):
        raise BenchFailed(f"the prompt ended with {end}")
    tokens = pair.tokens(row)
    pair.cancel(1, row)
    times = [at for at, _ in tokens if sent <= at <= ended]
    gaps = [after - before for before, after in zip([sent, *times], [*times, ended], strict=True)]
    return Taken(
        solo_tokens_per_second=sum(count for at, count in tokens if started <= at < sent) / (sent - started),
        beside_tokens_per_second=sum(count for at, count in tokens if sent <= at <= ended) / (ended - sent),
        longest_gap_seconds=max(gaps),
        alone_seconds=alone_seconds,
        beside_seconds=ended - sent,
        slices=end.timings.prefill_slices,
    )


@contextlib.contextmanager
def both_pairs(folder: Path) -> Iterator[dict[NeighbourPolicy, Pair]]:
    """Started, with their kernels compiled and their rates known."""
    with tempfile.TemporaryDirectory(prefix="mlxd") as directory, contextlib.ExitStack() as stack:
        base = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        blas = worker_environment(base, Path(directory))
        print(f"BLAS: {blas.description}", flush=True)
        special = tuple(AutoTokenizer.from_pretrained(str(folder)).all_special_ids)
        pairs: dict[NeighbourPolicy, Pair] = {}
        for policy in POLICIES:
            runtime_directory = Path(directory) / policy
            runtime_directory.mkdir(mode=0o700)
            pair = Pair(folder, policy, runtime_directory, blas.environment, banned_token_ids=special)
            stack.callback(pair.close)
            for worker in (1, 2):
                pair.end(pair.generate(worker, random_tokens(WARM_UP_TOKENS), 8))
            pairs[policy] = pair
        yield pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=2040)
    parser.add_argument("--model", type=Path, help="a model folder instead of SmolLM2-135M in float32")
    arguments = parser.parse_args()
    folder = arguments.model or demo_model.build(
        models_cache() / "smollm2-float32", dtype="float32", progress=lambda _: None
    )
    print_head(f"decode kept in A while B reads {arguments.prompt_tokens} tokens, model {folder.name} twice")
    taken: dict[NeighbourPolicy, list[Taken]] = {policy: [] for policy in POLICIES}
    with both_pairs(folder) as pairs:
        for repeat in range(arguments.repeats):
            for policy, pair in pairs.items():
                one = one_repeat(pair, arguments.prompt_tokens)
                taken[policy].append(one)
                print(f"repeat {repeat + 1}, {policy}: kept {one.kept:.0%}", flush=True)
    rows = [
        [
            policy,
            spread([one.solo_tokens_per_second for one in many]).text(1),
            spread([one.beside_tokens_per_second for one in many]).text(1),
            spread([100 * one.kept for one in many]).text(0),
            spread([one.longest_gap_seconds for one in many]).text(),
            spread([one.alone_seconds for one in many]).text(),
            spread([one.beside_seconds for one in many]).text(),
            spread([float(one.slices) for one in many]).text(0),
        ]
        for policy, many in taken.items()
    ]
    columns = ["", "A solo, tok/s", "A beside", "kept, %", "A's gap, s", "B alone, s", "B beside, s", "B's slices"]
    print_table("median (least-most); gap: A's longest during B's prompt", columns, rows)


if __name__ == "__main__":
    main()
