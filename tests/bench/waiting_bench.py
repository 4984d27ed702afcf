# pyright: basic
"""What a long prompt costs those who already read, and what it costs the short question behind it.

    python -m tests.bench.waiting_bench [--repeats N] [--prompt-tokens N] [--model FOLDER] [--picture]
        [--peer NAME=COMMAND]…

One run, one machine, one server at a time, in turn: mlxd, mlxd with slices so long that a prompt is one piece (as a
server without them works), mlx-lm's own, and others on request. Per repeat and server, with documents that no cache
knows:

a. A stream decodes; a long prompt arrives. The gaps between its tokens before and during that prompt, and when the
   prompt itself is answered, against the same prompt alone.
b. A question of ten tokens arrives right behind such a prompt: how long until its first token.
c. (mlxd only) An interactive stream and question while the batch class is saturated, against the same when idle.
"""

import argparse
import contextlib
import itertools
import random
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import openai
from msgspec import Struct

from tests.bench.measuring import print_head, print_table, save_bars, spread, versions
from tests.bench.prefix_bench import Prompts, report
from tests.bench.servers import BenchFailed, Mlxd, Server, mlx_lm_server, models_cache, peer_server
from worker import demo_model

PICTURE = Path(__file__).parent / "pictures" / "waiting.png"
WHOLE_PROMPTS = "[worker]\nprefill_slice_seconds = 10\n"
STREAM_TOKENS = 400
SETTLED_TOKENS = 24
BATCH_STREAMS = 8
REQUEST_SECONDS = 600.0


class Stream:
    """A streamed answer on a thread of its own: when each piece of text came."""

    def __init__(self, server: Server, messages: Any, max_tokens: int, **extra: Any) -> None:
        self.started = time.perf_counter()
        self.arrivals: list[float] = []
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server, messages, max_tokens, extra), daemon=True)
        self._thread.start()

    @property
    def first_token_seconds(self) -> float:
        if not self.arrivals:
            raise BenchFailed(f"a stream brought no text: {self.error}")
        return self.arrivals[0] - self.started

    def gaps(self, after: float, before: float) -> list[float]:
        """Between neighbouring tokens in this time; a gap that spans its beginning counts from there."""
        times = [after, *(at for at in self.arrivals if after <= at <= before)]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    def wait(self) -> "Stream":
        self._thread.join(REQUEST_SECONDS)
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(REQUEST_SECONDS)

    def until(self, tokens: int) -> None:
        deadline = time.monotonic() + REQUEST_SECONDS
        while len(self.arrivals) < tokens:
            if self.error is not None or time.monotonic() > deadline or not self._thread.is_alive():
                raise BenchFailed(f"a stream ended after {len(self.arrivals)} tokens: {self.error}")
            time.sleep(0.005)  # the other thread reads

    def _run(self, server: Server, messages: Any, max_tokens: int, extra: dict[str, Any]) -> None:
        try:
            with openai.OpenAI(
                base_url=server.base_url, api_key="any", max_retries=0, timeout=REQUEST_SECONDS
            ) as client:
                chunks = client.chat.completions.create(
                    model=server.model, messages=messages, max_tokens=max_tokens, temperature=0, stream=True, **extra
                )
                for chunk in chunks:
                    if chunk.choices and chunk.choices[0].delta.content:
                        self.arrivals.append(time.perf_counter())
                    if self._stop.is_set():
                        chunks.close()
                        return
        except Exception as why:  # noqa: BLE001 - told by whoever asks
            self.error = why


class Taken(Struct, frozen=True, kw_only=True):
    """One repeat of one server. Gaps and waits in seconds."""

    step: float
    gap_p50: float
    gap_p95: float
    gap_most: float
    kept: float
    alone: float
    beside: float
    behind: float


class Calm(Struct, frozen=True, kw_only=True):
    """An interactive stream and question, beside others or not."""

    first_token: float
    gap_p95: float
    batch_tokens: int


def chat(text: str) -> Any:
    return [{"role": "user", "content": text}]


def document(prompts: Prompts, prompt_tokens: int) -> Any:
    """That no earlier run left anywhere."""
    seed = random.SystemRandom().randrange(2**32)
    return prompts.ask(report(seed, lines=prompt_tokens // 5), "Was there a storm?")


def one_repeat(server: Server, prompts: Prompts, prompt_tokens: int) -> Taken:
    """Parts a and b on a server that runs."""
    alone = Stream(server, document(prompts, prompt_tokens), 1).wait().first_token_seconds
    reader = Stream(server, chat(_tale()), STREAM_TOKENS)
    reader.until(SETTLED_TOKENS)
    began = time.perf_counter()
    before = reader.gaps(reader.arrivals[2], began)
    long = Stream(server, document(prompts, prompt_tokens), 1).wait()
    ended = long.arrivals[0] if long.arrivals else time.perf_counter()
    beside = long.first_token_seconds
    during = reader.gaps(began, min(ended, reader.arrivals[-1])) or [ended - began]
    read_seconds = min(ended, reader.arrivals[-1]) - began
    reader.stop()
    step = statistics.median(before)
    prompt = Stream(server, document(prompts, prompt_tokens), 1)
    time.sleep(0.3)  # so that the prompt is being worked on when the question comes
    behind = Stream(server, chat(f"Say {random.SystemRandom().randrange(10**6)}."), 1).wait().first_token_seconds
    prompt.wait()
    return Taken(
        step=step,
        gap_p50=_percentile(during, 50),
        gap_p95=_percentile(during, 95),
        gap_most=max(during),
        kept=(len(during) / read_seconds) * step if read_seconds > 0 else 0.0,
        alone=alone,
        beside=beside,
        behind=behind,
    )


def calm(server: Server, prompts: Prompts, prompt_tokens: int, *, batch_streams: int) -> Calm:
    """Part c: an interactive reader, and an interactive question, beside so many batch requests that never end."""
    del prompts, prompt_tokens
    flex = {"extra_body": {"service_tier": "flex"}}
    priority = {"extra_body": {"service_tier": "priority"}}
    crowd = [Stream(server, chat(_tale()), 4000, **flex) for _ in range(batch_streams)]
    for one in crowd:
        one.until(4)
    at_first = sum(len(one.arrivals) for one in crowd)
    waits: list[float] = []
    gaps: list[float] = []
    for _ in range(6):
        reader = Stream(server, chat(_tale()), 48, **priority).wait()
        waits.append(reader.first_token_seconds)
        gaps += reader.gaps(reader.arrivals[0], reader.arrivals[-1])
    batch_tokens = sum(len(one.arrivals) for one in crowd) - at_first
    for one in crowd:
        one.stop()
    return Calm(first_token=_percentile(waits, 95), gap_p95=_percentile(gaps, 95), batch_tokens=batch_tokens)


@contextlib.contextmanager
def all_servers(folder: Path, peers: Sequence[str]) -> Generator[list[Server]]:
    """Not started; nothing of them is left at the end."""
    with tempfile.TemporaryDirectory(prefix="mlxdb") as directory, contextlib.ExitStack() as stack:
        servers: list[Any] = [
            Mlxd(folder),
            Mlxd(folder, name="mlxd, whole prompts", settings_toml=WHOLE_PROMPTS),
            mlx_lm_server(folder, Path(directory)),
            *(peer_server(peer, folder, Path(directory)) for peer in peers),
        ]
        for server in servers:
            stack.callback(server.close)
        yield servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=2040)
    parser.add_argument("--model", type=Path, help="a model folder instead of SmolLM2-135M in float32")
    parser.add_argument("--peer", action="append", default=[], help="NAME=COMMAND with {model} and {port}; repeatable")
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} under pictures/")
    arguments = parser.parse_args()
    folder = arguments.model or demo_model.build(
        models_cache() / "smollm2-float32", dtype="float32", progress=lambda _: None
    )
    print_head(f"beside and behind a prompt of {arguments.prompt_tokens} tokens, model {folder.name}")
    prompts = Prompts(folder, arguments.prompt_tokens)
    taken: dict[str, list[Taken]] = defaultdict(list)
    calms: dict[str, list[Calm]] = defaultdict(list)
    began = time.monotonic()
    with all_servers(folder, arguments.peer) as servers:
        for repeat in range(arguments.repeats):
            for server in servers:
                server.start()
                try:
                    Stream(server, chat("Say hello."), 4).wait()  # loads the model
                    taken[server.name].append(one_repeat(server, prompts, arguments.prompt_tokens))
                    if server.name == "mlxd":
                        for name, streams in (("idle", 0), ("batch saturated", BATCH_STREAMS)):
                            one = calm(server, prompts, arguments.prompt_tokens, batch_streams=streams)
                            calms[name].append(one)
                except (BenchFailed, openai.OpenAIError) as why:
                    if server.name == "mlxd":
                        raise
                    print(f"repeat {repeat + 1}, {server.name} failed: {why}", flush=True)
                server.stop()
                print(f"repeat {repeat + 1}, {server.name}: {time.monotonic() - began:.0f} s", flush=True)
    _print(taken, calms)
    if arguments.picture:
        groups = [
            "longest gap of a stream beside it",
            "its own first token, beside a stream",
            "a short question behind it",
        ]
        series = {
            name: [spread([read(one) for one in many]).median for read in (_most, _beside, _behind)]
            for name, many in taken.items()
        }
        title = f"A prompt of {arguments.prompt_tokens} tokens arrives, {folder.name}"
        save_bars(PICTURE, title, "seconds (less is better)", groups, series, versions())


def _print(taken: dict[str, list[Taken]], calms: dict[str, list[Calm]]) -> None:
    def row(name: str, many: list[Taken], *reads: Callable[[Taken], float]) -> list[str]:
        return [name, *(spread([read(one) for one in many]).text() for read in reads)]

    columns = ["", "step, s", "gap p50", "p95", "longest", "decode kept", "TTFT / alone", "alone, s", "behind, s"]
    rows = [
        row(
            name,
            many,
            lambda one: one.step,
            lambda one: one.gap_p50,
            lambda one: one.gap_p95,
            _most,
            lambda one: one.kept,
            lambda one: one.beside / one.alone,
            lambda one: one.alone,
            _behind,
        )
        for name, many in taken.items()
    ]
    print_table("a stream and a question beside a long prompt, median (least-most)", columns, rows)
    if calms:
        columns = ["interactive", "TTFT p95, s", "gap p95, s", "batch tokens meanwhile"]
        rows = [
            [
                name,
                spread([one.first_token for one in many]).text(),
                spread([one.gap_p95 for one in many]).text(3),
                spread([float(one.batch_tokens) for one in many]).text(0),
            ]
            for name, many in calms.items()
        ]
        print_table(f"{BATCH_STREAMS} batch streams, or none", columns, rows)


def _most(one: Taken) -> float:
    return one.gap_most


def _beside(one: Taken) -> float:
    return one.beside


def _behind(one: Taken) -> float:
    return one.behind


def _tale() -> str:
    return f"Write a very long story about a sailor, number {random.SystemRandom().randrange(10**6)}."


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


if __name__ == "__main__":
    main()
