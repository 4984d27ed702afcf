# pyright: basic
"""What each persist policy writes for a day of coding agents, and what it finds again.

    python -m tests.bench.trace_bench [--seed N] [--picture]

The trace is `agent_trace`'s. It goes through the worker's own PrefixCache and PrefixIndex and a real cachestore; only
the engine is a stand-in, which cuts zeros. KV is scaled down to a 64th of SmolLM2's in float32; bytes are told at full
size. Wanted: second-touch writes at least 5 times fewer bytes than through, at a hit rate within 2 points.

A run differs in how much is hot (all that is ever asked, or a quarter of it) and in what happens at half time: nothing,
a clean stop (the model leaves memory and writes what only RAM had) or SIGKILL (what only RAM had is lost).
"""

import argparse
import queue
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import mlx.core as mx

from protocol.generation import CacheUse, Generate, Pin, TokenPrompt
from protocol.ids import BLOCK_TOKENS, BlockKey, RequestId
from protocol.launch import PersistPolicy
from protocol.sampling import Sampling
from tests.bench.agent_trace import Asked, TraceShape, agent_trace, needed_tokens
from tests.bench.measuring import print_head, print_table, save_bars, versions
from tests.bench.running_cachestore import RunningCachestore, running_cachestore
from worker import hashing
from worker.cold_cache import ColdCache
from worker.messages import BlocksFetched, BlockStored
from worker.mlx_block_files import BlockFile, write_block
from worker.mlx_blocks import KVArrays, block_bytes
from worker.prefix_cache import Fetch, PrefixCache
from worker.prefix_index import Block, PrefixIndex
from worker.sequence import Prepared

PICTURE = Path(__file__).parent / "pictures" / "trace.png"
SCALE = 64
WIDTH = 90
BYTES_PER_TOKEN = 2 * 4 * WIDTH
"""Keys and values in float32: a 64th of the 46,080 bytes that a token of SmolLM2-135M takes."""
PREFILL_TOKENS_PER_SECOND = 250.0
_ANSWER_SECONDS = 30.0

Hot = Literal["everything", "a quarter"]
HalfTime = Literal["nothing", "clean stop", "SIGKILL"]

POLICIES: tuple[PersistPolicy, ...] = ("second-touch", "through", "off")
CASES: tuple[tuple[Hot, HalfTime, tuple[PersistPolicy, ...]], ...] = (
    ("everything", "nothing", POLICIES),
    ("a quarter", "nothing", POLICIES),
    ("everything", "clean stop", POLICIES[:2]),
    ("everything", "SIGKILL", POLICIES),
)


class Outcome(NamedTuple):
    """Of one replay. Bytes as the cachestore counts them, scaled down."""

    prompt_tokens: int
    ram_tokens: int
    disk_tokens: int
    requests: int
    written_bytes: int
    published: int
    misses: Counter[str]

    @property
    def hit_rate(self) -> float:
        return (self.ram_tokens + self.disk_tokens) / self.prompt_tokens


class CountedDisk:
    """The worker's ColdCache, and how many answers it owes."""

    def __init__(self, store: RunningCachestore, fingerprint: str) -> None:
        self.answers: queue.SimpleQueue[BlocksFetched[KVArrays] | BlockStored] = queue.SimpleQueue()
        self.owed = 0
        self._cold: ColdCache[KVArrays] = ColdCache(
            connect=store.connect,
            fingerprint=fingerprint,
            begin=BlockFile,
            write=write_block,
            deliver=self.answers.put,
            clock=time.monotonic,
        )
        self._cold.start()

    def fetch(self, fetch: Fetch[KVArrays]) -> None:
        self.owed += 1
        self._cold.fetch(fetch)

    def store(self, block: Block[KVArrays]) -> bool:
        is_taken = self._cold.store(block)
        self.owed += is_taken
        return is_taken

    def pin(self, keys: Sequence[BlockKey], owner: str, pin: Pin) -> None:
        self._cold.pin(keys, owner, pin)

    def unpin(self, owner: str, name: str) -> None:
        self._cold.unpin(owner, name)

    def is_storing(self, key: BlockKey) -> bool:
        return self._cold.is_storing(key)

    def forget(self, owner: str | None) -> int:
        return self._cold.forget(owner)

    @property
    def read_bytes_per_second(self) -> float:
        return self._cold.read_bytes_per_second

    def stop(self) -> None:
        self._cold.stop(_ANSWER_SECONDS)


class Replay:
    """One worker's cache, asked as the step loop asks it."""

    def __init__(self, store: RunningCachestore, policy: PersistPolicy, budget_bytes: int, fingerprint: str) -> None:
        self._policy: PersistPolicy = policy
        self._budget_bytes = budget_bytes
        self._fingerprint = fingerprint
        self._disk = CountedDisk(store, fingerprint)
        self._cache = self._empty_cache()
        self._misses: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._ram_tokens = 0
        self._disk_tokens = 0
        self._requests = 0

    def ask(self, asked: Asked) -> None:
        """One request, from its fetch to the last block it sends to disk."""
        prepared = self._prepared(asked)
        if self._cache.prefetch(prepared, PREFILL_TOKENS_PER_SECOND):
            self._settle()
        match, report = self._cache.use(prepared)
        self._requests += 1
        self._prompt_tokens += len(asked.prompt)
        self._ram_tokens += report.ram_tokens
        self._disk_tokens += report.disk_tokens
        start = match.whole_blocks * BLOCK_TOKENS
        start = self._cache.keep(prepared, asked.prompt, start, _zeros, end=len(asked.prompt) - 1)
        row = asked.prompt + asked.answer
        self._cache.keep(prepared, row, start, _zeros, end=len(row) - 1)
        self._cache.request_over(prepared, row, match.touched)
        self._settle()

    def half_time(self, event: HalfTime) -> None:
        """The process ends, in one way or the other, and another takes its place."""
        if event == "nothing":
            return
        if event == "clean stop":
            self._cache.store_everything()
            self._settle()
        self._misses += self._cache.misses
        self._cache = self._empty_cache()

    def leave(self) -> None:
        """The model leaves memory."""
        self._cache.store_everything()
        self._settle()

    def close(self) -> None:
        self._disk.stop()

    def outcome(self, written_bytes: int, published: int) -> Outcome:
        return Outcome(
            prompt_tokens=self._prompt_tokens,
            ram_tokens=self._ram_tokens,
            disk_tokens=self._disk_tokens,
            requests=self._requests,
            written_bytes=written_bytes,
            published=published,
            misses=self._misses + self._cache.misses,
        )

    def _empty_cache(self) -> PrefixCache[KVArrays]:
        index: PrefixIndex[KVArrays] = PrefixIndex(self._budget_bytes)
        return PrefixCache(index, self._disk, self._policy)

    def _settle(self) -> None:
        """Take all answers of the disk: between two turns of an agent there is time for them."""
        while self._disk.owed:
            answer = self._disk.answers.get(timeout=_ANSWER_SECONDS)
            self._disk.owed -= 1
            if isinstance(answer, BlocksFetched):
                self._cache.fetched(answer.request_id, answer.blocks, answer.outcome)
            elif answer.outcome == "durable":
                self._cache.became_durable(answer.key)

    def _prepared(self, asked: Asked) -> Prepared:
        root = hashing.root(self._fingerprint, asked.scope)
        return Prepared(
            request=Generate(
                request_id=RequestId(f"r{self._requests}"),
                prompt=TokenPrompt(token_ids=asked.prompt),
                sampling=Sampling(temperature=0.0),
                cache=CacheUse(scope=asked.scope, owner=asked.scope.hex()),
            ),
            token_ids=asked.prompt,
            max_tokens=len(asked.answer),
            root=root,
            grains=hashing.grains(root.secret, root.digest, asked.prompt),
            arrived=0.0,
        )


def replay(
    store: RunningCachestore, trace: Sequence[Asked], policy: PersistPolicy, budget_bytes: int, half_time: HalfTime
) -> tuple[Outcome, int]:
    """What it did, and how many bytes more are written when the model leaves memory afterwards."""
    # A model of its own for each replay, so that none finds another's blocks.
    fingerprint = hashing.root(f"{policy} {budget_bytes} {half_time}", b"").digest.hex()
    before = store.books()
    cache = Replay(store, policy, budget_bytes, fingerprint)
    for number, asked in enumerate(trace):
        if number == len(trace) // 2:
            cache.half_time(half_time)
        cache.ask(asked)
    after = store.books()
    outcome = cache.outcome(after.written_bytes - before.written_bytes, after.published - before.published)
    cache.leave()
    cache.close()
    return outcome, store.books().written_bytes - after.written_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} under pictures/")
    arguments = parser.parse_args()
    print_head("bytes written and tokens found again, by persist policy, on a replayed trace of agents")
    trace = agent_trace(TraceShape(), arguments.seed)
    different = needed_tokens(trace)
    kinds = Counter(asked.kind for asked in trace)
    prompt_tokens = sum(len(asked.prompt) for asked in trace)
    print(f"{len(trace)} requests ({', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}),")
    print(
        f"{prompt_tokens:,} prompt tokens, {different:,} different tokens, longest prompt "
        f"{max(len(asked.prompt) for asked in trace):,}",
        flush=True,
    )
    budgets: dict[Hot, int] = {
        "everything": 2 * different * BYTES_PER_TOKEN,
        "a quarter": different * BYTES_PER_TOKEN // 4,
    }
    rows: list[list[str]] = []
    groups: list[str] = []
    bars: dict[PersistPolicy, list[float]] = {policy: [] for policy in POLICIES[:2]}
    with running_cachestore() as store:
        for hot, half_time, policies in CASES:
            outcomes: dict[PersistPolicy, tuple[Outcome, int]] = {
                policy: replay(store, trace, policy, budgets[hot], half_time) for policy in policies
            }
            through = outcomes["through"][0]
            for policy, (outcome, leaving_bytes) in outcomes.items():
                rows.append(_row(hot, half_time, policy, outcome, leaving_bytes, through))
                if policy in bars:
                    bars[policy].append(_full_mb(outcome.written_bytes) / outcome.requests)
            groups.append(f"{hot} hot\nhalf time: {half_time}")
    columns = [
        "hot; half time; policy",
        "MB a request",
        "through /",
        "hit rate",
        "points",
        "from disk",
        "files",
        "leaving",
    ]
    print_table("MB at full size (46 KB of KV a token)", columns, rows)
    print("through /: how many times fewer bytes than through; points: hit rate minus through's; leaving: MB a request")
    print("more when the model leaves memory at the end of the day and writes what only RAM has.")
    if arguments.picture:
        named = {str(policy): values for policy, values in bars.items()}
        save_bars(
            PICTURE, "Written to disk for each request of an agent", "MB (less is better)", groups, named, versions()
        )


def _row(
    hot: Hot, half_time: HalfTime, policy: PersistPolicy, outcome: Outcome, leaving_bytes: int, through: Outcome
) -> list[str]:
    fewer = through.written_bytes / outcome.written_bytes if outcome.written_bytes else 0.0
    return [
        f"{hot}; {half_time}; {policy}",
        f"{_full_mb(outcome.written_bytes) / outcome.requests:.1f}",
        f"{fewer:.1f}x" if fewer else "-",
        f"{outcome.hit_rate:.1%}",
        f"{(outcome.hit_rate - through.hit_rate) * 100:+.1f}",
        f"{outcome.disk_tokens / outcome.prompt_tokens:.1%}",
        f"{outcome.published}",
        f"{_full_mb(leaving_bytes) / outcome.requests:.1f}",
    ]


def _full_mb(scaled_bytes: int) -> float:
    return scaled_bytes * SCALE / 1e6


def _zeros(start: int, end: int) -> tuple[KVArrays, int]:
    arrays = {name: mx.zeros((1, 1, end - start, WIDTH)) for name in ("keys0", "values0")}
    mx.eval(arrays)
    return arrays, block_bytes(arrays)


if __name__ == "__main__":
    main()
