# pyright: basic
"""What a long prompt costs those who already read, and what it costs the short question behind it.

    python -m tests.bench.waiting_bench [--repeats N] [--prompt-tokens N…] [--waits N] [--model FOLDER] [--picture]
        [--peer NAME=COMMAND]…

One run, one machine, one server at a time: mlxd with its default settings, then mlx-lm's own, which reads whole prompts
in the order they come, and others on request. Per repeat and size, with documents that no cache knows:

a. A stream decodes; a long prompt arrives. Its gaps during the prompt are all that overlap the time from the prompt's
   arrival to its first token, the one still open then included, so they are counted after the stream has gone on.
   *Decode kept* is its tokens in that time against its own rate just before and after. The prompt's first token is
   compared with the same length alone (mlxd only). mlxd's turn comes twice: both of the standard class, where the
   prompt is to lose little, and both interactive, where who reads along is. What the two keep of their speed alone adds
   up to about one, so half of decode and a prompt within 1.3 times of alone exclude each other.
b. A question of ten tokens arrives 0.3 s behind such a prompt: its first token, against the wait for the same with
   mlx-lm's server in the same repeat.

c. (mlxd only) Interactive questions of some forty tokens and messages of 300, in turn with a pause to read, while the
   batch class has more than it can do: prompts and answers that are replaced as they end. The same without, half before
   and half after. A question that meets a pass waits for its end, so how much longer its first token takes is told by
   the two together.

Before anything is timed mlxd has served a prompt beside a stream, so that it knows this machine's speed; b comes
before a, so that it has also read a prompt of that length.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from gateway.config import WorkerSettings
from tests.bench.batch_crowd import BATCH_STREAMS, MESSAGE_TOKENS, Waits, interactive, saturated
from tests.bench.fresh_prompts import FreshPrompts
from tests.bench.measuring import Bound, Spread, percentile, print_bounds, print_head, print_table, spread, versions
from tests.bench.servers import BenchFailed, Mlxd, Server, mlx_lm_server, models_cache, peer_server
from tests.bench.streams import Stream, chat
from tests.bench.waiting_picture import PICTURE, Raster, save_waiting
from worker import demo_model

MLXD = "mlxd"
READING = "mlxd, interactive"
FIFO = "mlx-lm"
IDLE, SATURATED = "idle", "batch full"
SLICE_SECONDS = WorkerSettings().prefill_slice_seconds
ANSWER_TOKENS = 8
READER_TOKENS = 4000
SETTLED_PIECES = 32
AFTER_PIECES = 24
WARM_UP_TOKENS = 600
HEAD_START_SECONDS = 0.3
LEFT_SECONDS = 1.0
LONGEST_GAP_SECONDS = {2100: 0.30, 4600: 0.40}
"""What is wanted of prompts of up to so many tokens."""


class Beside(Struct, frozen=True, kw_only=True):
    """Part a, one server, one size, one class, one repeat. Seconds; `pieces` from the prompt's arrival on."""

    step: float
    gaps: tuple[float, ...]
    kept: float
    prompt: float
    pieces: tuple[float, ...]


class Taken(Struct, frozen=True, kw_only=True):
    """One repeat of one server and size. `alone` and `reading` of mlxd only."""

    repeat: int
    beside: Beside
    reading: Beside | None
    alone: float | None
    behind: float


def warm_up(server: Server, material: FreshPrompts) -> None:
    """The model is loaded, kernels are compiled, and a server that measures itself has seen both kinds of pass."""
    Stream(server, chat("Say hello."), 4).wait()
    beside(server, material, WARM_UP_TOKENS)


def beside(server: Server, material: FreshPrompts, prompt_tokens: int, latency_class: str = "") -> Beside:
    """Part a, both of one class."""
    messages = material.document(prompt_tokens)
    reader = Stream(server, material.tale(), READER_TOKENS, latency_class=latency_class)
    reader.until(SETTLED_PIECES)
    prompt = Stream(server, messages, ANSWER_TOKENS, latency_class=latency_class).wait()
    assert prompt.ended is not None
    reader.until(AFTER_PIECES, after=prompt.ended)
    reader.stop()
    time.sleep(LEFT_SECONDS)  # a server may notice at its next token only that nobody reads
    began, ended = prompt.started, prompt.first_arrival

    def tokens(since: float, to: float) -> float:
        return reader.tokens_until(to, material.counter) - reader.tokens_until(since, material.counter)

    spans = [(reader.arrivals[2], began), (prompt.ended, reader.arrivals[-1])]
    rate_alone = sum(tokens(*span) for span in spans) / sum(to - since for since, to in spans)
    return Beside(
        step=statistics.median(to - since for since, to in reader.gaps if since >= reader.arrivals[2] and to <= began),
        gaps=tuple(to - since for since, to in reader.gaps if to > began and since < ended),
        kept=tokens(began, ended) / (ended - began) / rate_alone,
        prompt=prompt.first_token_seconds,
        pieces=tuple(at - began for at in reader.arrivals),
    )


def behind(server: Server, material: FreshPrompts, prompt_tokens: int) -> float:
    """Part b."""
    prompt = Stream(server, material.document(prompt_tokens), ANSWER_TOKENS)
    time.sleep(HEAD_START_SECONDS)  # the prompt is being worked on when the question comes
    question = Stream(server, material.short_question(), ANSWER_TOKENS)
    if prompt.arrivals:
        raise BenchFailed(f"{server.name} had read {prompt_tokens} tokens before the question came: take more")
    seconds = question.wait().first_token_seconds
    prompt.wait()
    return seconds


def one_repeat(server: Server, material: FreshPrompts, prompt_tokens: int, repeat: int) -> Taken:
    behind_seconds = behind(server, material, prompt_tokens)
    alone = reading = None
    if server.name == MLXD:
        alone = Stream(server, material.document(prompt_tokens), ANSWER_TOKENS).wait().first_token_seconds
        reading = beside(server, material, prompt_tokens, "interactive")
    both = beside(server, material, prompt_tokens)
    return Taken(repeat=repeat, beside=both, reading=reading, alone=alone, behind=behind_seconds)


@contextlib.contextmanager
def all_servers(folder: Path, peers: Sequence[str]) -> Generator[list[Server]]:
    """Not started; nothing of them is left at the end."""
    with tempfile.TemporaryDirectory(prefix="mlxdb") as directory, contextlib.ExitStack() as stack:
        servers: list[Any] = [
            Mlxd(folder),
            mlx_lm_server(folder, Path(directory)),
            *(peer_server(peer, folder, Path(directory)) for peer in peers),
        ]
        for server in servers:
            stack.callback(server.close)
        print(f"BLAS for all: {servers[1].blas}", flush=True)
        yield servers


def both_lanes(server: Server, material: FreshPrompts, waits: int) -> dict[str, Waits]:
    """Part c; idle is half before and half after, since a machine's speed drifts."""
    before = interactive(server, material, (waits + 1) // 2)
    full = saturated(server, material, waits)
    after = interactive(server, material, waits // 2)
    return {
        IDLE: Waits(
            first_tokens=before.first_tokens + after.first_tokens,
            message_first_tokens=before.message_first_tokens + after.message_first_tokens,
            gaps=before.gaps + after.gaps,
        ),
        SATURATED: full,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[2040, 4460], help="7900 is SmolLM2's most")
    parser.add_argument("--waits", type=int, default=20, help="interactive questions with and without batch")
    parser.add_argument("--model", type=Path, help="a model folder instead of SmolLM2-135M in float32")
    parser.add_argument("--peer", action="append", default=[], help="NAME=COMMAND with {model} and {port}; repeatable")
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} under pictures/")
    arguments = parser.parse_args()
    folder = arguments.model or demo_model.build(
        models_cache() / "smollm2-float32", dtype="float32", progress=lambda _: None
    )
    sizes: list[int] = arguments.prompt_tokens
    print_head(f"beside and behind prompts of {', '.join(map(str, sizes))} tokens, model {folder.name}")
    material = FreshPrompts(folder)
    taken: dict[int, dict[str, list[Taken]]] = {size: defaultdict(list) for size in sizes}
    waits: dict[str, list[Waits]] = defaultdict(list)
    began = time.monotonic()
    with all_servers(folder, arguments.peer) as servers:
        for repeat in range(arguments.repeats):
            for server in servers:
                server.start()
                try:
                    warm_up(server, material)
                    for size in sizes:
                        taken[size][server.name].append(one_repeat(server, material, size, repeat))
                    if server.name == MLXD:
                        for name, found in both_lanes(server, material, arguments.waits).items():
                            waits[name].append(found)
                except BenchFailed as why:
                    if server.name == MLXD:
                        raise
                    print(f"repeat {repeat + 1}, {server.name} failed: {why}", flush=True)
                    server.kill()
                    continue
                server.stop()
                print(f"repeat {repeat + 1}, {server.name}: {time.monotonic() - began:.0f} s", flush=True)
    for size in sizes:
        print_beside(size, taken[size])
    print_waits(waits)
    bounds = [bound for size in sizes for bound in bounds_of(size, taken[size])]
    print_bounds(bounds + bounds_of_waits(waits))
    if arguments.picture:
        rasters = {
            size: [
                Raster(
                    name=name,
                    pieces=many[0].beside.pieces,
                    prompt_seconds=many[0].beside.prompt,
                    longest_gap_seconds=max(many[0].beside.gaps),
                )
                for name, many in taken[size].items()
            ]
            for size in sizes
        }
        first_tokens = {name: [at for one in many for at in one.first_tokens] for name, many in waits.items()}
        gaps = {name: [gap for one in many for gap in one.gaps] for name, many in waits.items()}
        save_waiting(rasters, first_tokens, gaps, f"{folder.name}; {versions()}")


def print_beside(size: int, by_server: Mapping[str, Sequence[Taken]]) -> None:
    """Parts a and b as they were measured."""
    rows: list[list[str]] = []
    for name, many in by_server.items():
        alone = "" if many[0].alone is None else spread([one.alone for one in many if one.alone is not None]).text(1)
        rows.append([*_beside_row(name, [one.beside for one in many], alone), spread([o.behind for o in many]).text()])
        if reading := [one.reading for one in many if one.reading is not None]:
            rows.append([*_beside_row(READING, reading, alone), ""])
    columns = ["seconds", "step", "gap p50", "gap p95", "longest", "kept, %", "alone", "beside", "question"]
    print_table(f"a stream beside a prompt of {size} tokens, and a question behind it", columns, rows)


def _beside_row(name: str, many: Sequence[Beside], alone: str) -> list[str]:
    return [
        name,
        spread([one.step for one in many]).text(),
        *(spread([percentile(one.gaps, percent) for one in many]).text() for percent in (50, 95, 100)),
        spread([100 * one.kept for one in many]).text(0),
        alone,
        spread([one.prompt for one in many]).text(1),
    ]


def bounds_of(size: int, by_server: Mapping[str, Sequence[Taken]]) -> list[Bound]:
    """What is wanted of mlxd in parts a and b."""
    ours = by_server[MLXD]
    reading = [one.reading for one in ours if one.reading is not None]
    longest = next((seconds for most, seconds in LONGEST_GAP_SECONDS.items() if size <= most), None)
    gap_bounds = (
        []
        if longest is None
        else [Bound(what=f"{size}: longest gap, s", got=_over(ours, _longest), side="at most", wanted=longest)]
    )
    fifo = {one.repeat: one.behind for one in by_server.get(FIFO, ())}
    shares = [one.behind / fifo[one.repeat] for one in ours if one.repeat in fifo]
    fifo_bounds = (
        [Bound(what=f"{size}: question behind it / FIFO's", got=spread(shares), side="at most", wanted=0.15, digits=3)]
        if shares
        else []
    )
    return [
        *gap_bounds,
        *(
            Bound(
                what=f"{size}: gap p95 / (2 steps + slice target), {name}",
                got=spread([percentile(one.gaps, 95) / (2 * one.step + SLICE_SECONDS) for one in many]),
                side="at most",
                wanted=1.0,
            )
            for name, many in (("standard", [one.beside for one in ours]), ("interactive", reading))
        ),
        Bound(
            what=f"{size}: decode kept, interactive",
            got=spread([one.kept for one in reading]),
            side="at least",
            wanted=0.5,
        ),
        Bound(
            what=f"{size}: prompt's first token beside / alone, standard",
            got=_over(ours, lambda one: one.beside.prompt / (one.alone or 1.0)),
            side="at most",
            wanted=1.3,
        ),
        *fifo_bounds,
    ]


def print_waits(waits: Mapping[str, Sequence[Waits]]) -> None:
    """Part c as it was measured."""
    rows = [
        [
            name,
            str(sum(len(one.first_tokens) for one in many)),
            *(spread([percentile(one.first_tokens, percent) for one in many]).text(3) for percent in (50, 95)),
            *(spread([percentile(one.message_first_tokens, percent) for one in many]).text(3) for percent in (50, 95)),
            *(spread([percentile(one.gaps, percent) for one in many]).text(3) for percent in (50, 95)),
            str(sum(one.batch_requests for one in many)),
            str(sum(one.batch_tokens for one in many)),
        ]
        for name, many in waits.items()
    ]
    waits_of = ["question p50, s", "p95", f"{MESSAGE_TOKENS} tokens p50, s", "p95", "gap p50, s", "p95"]
    columns = ["interactive", "of each", *waits_of, "batch ended", "their tokens"]
    print_table(f"with {BATCH_STREAMS} batch requests at any time, and without", columns, rows)


def bounds_of_waits(waits: Mapping[str, Sequence[Waits]]) -> list[Bound]:
    """What is wanted of part c."""
    pairs = list(zip(waits[SATURATED], waits[IDLE], strict=True))
    first = [percentile(full.first_tokens, 95) / percentile(idle.first_tokens, 95) for full, idle in pairs]
    message = [
        percentile(full.message_first_tokens, 95) / percentile(idle.message_first_tokens, 95) for full, idle in pairs
    ]
    gaps = [percentile(full.gaps, 95) / percentile(idle.gaps, 95) for full, idle in pairs]
    return [
        Bound(what="first token of a question p95, full / idle", got=spread(first), side="at most", wanted=1.25),
        Bound(what="first token of a message p95, full / idle", got=spread(message), side="at most", wanted=1.25),
        Bound(what="interactive gap p95, batch full / idle", got=spread(gaps), side="at most", wanted=1.25),
    ]


def _over(many: Sequence[Taken], read: Callable[[Taken], float]) -> Spread:
    return spread([read(one) for one in many])


def _longest(one: Taken) -> float:
    return max(one.beside.gaps)


if __name__ == "__main__":
    main()
