# pyright: basic
"""What each persist policy writes for a day of coding agents, and what it finds again.

    python -m tests.bench.trace_bench [--seed N] [--picture]

The trace is `agent_trace`'s. It goes through the worker's own PrefixCache and PrefixIndex and a real cachestore; only
the engine is a stand-in, which cuts zeros. KV is scaled down to a 64th of SmolLM2's in float32; bytes are told at full
size. Wanted: second-touch writes at least 5 times fewer bytes than through, at a hit rate within 2 points.

A run differs in how much RAM holds (all that is ever asked, a quarter of that, or a quarter of the working set: what
was asked and will be asked again) and in what happens at half time: nothing, a clean stop (the model leaves memory and
writes what only RAM had) or SIGKILL (what only RAM had is lost). Bytes are told until the end of the day, and with what
a clean stop writes then. *Read again* is the part of them that some later request read: a policy that knew the future
would write only this, and none finds as much that writes less.
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
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey, Grain, RequestId
from protocol.launch import PersistPolicy
from protocol.sampling import Sampling
from tests.bench.agent_trace import Asked, TraceShape, agent_trace, needed_tokens, working_set_tokens
from tests.bench.measuring import print_head, print_table, save_bars, versions
from tests.bench.running_cachestore import RunningCachestore, running_cachestore
from worker import hashing
from worker.cold_cache import ColdCache
from worker.cost_model import PrefillCost
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
PREFILL = PrefillCost(fixed=0.0, token=0.004, attention=0.0)
_ANSWER_SECONDS = 30.0

Hot = Literal["the day", "1/4 of the day", "1/4 of the working set"]
HalfTime = Literal["nothing", "clean stop", "SIGKILL"]

POLICIES: tuple[PersistPolicy, ...] = ("second-touch", "through", "off")
CASES: tuple[tuple[Hot, HalfTime, tuple[PersistPolicy, ...]], ...] = (
    ("the day", "nothing", POLICIES[:2]),
    ("the day", "clean stop", POLICIES),
    ("the day", "SIGKILL", POLICIES),
    ("1/4 of the day", "SIGKILL", POLICIES),
    ("1/4 of the working set", "clean stop", POLICIES),
    ("1/4 of the working set", "SIGKILL", POLICIES),
)


class Outcome(NamedTuple):
    """Of one replay. Bytes as the cachestore counts them, scaled down."""

    prompt_tokens: int
    ram_tokens: int
    disk_tokens: int
    requests: int
    written_bytes: int
    leaving_bytes: int
    read_again_share: float
    published: int
    misses: Counter[str]

    @property
    def hit_rate(self) -> float:
        return (self.ram_tokens + self.disk_tokens) / self.prompt_tokens


class CountedDisk:
    """The worker's ColdCache, how many answers it owes, and what of it was written and read."""

    def __init__(self, store: RunningCachestore, fingerprint: str) -> None:
        self.answers: queue.SimpleQueue[BlocksFetched[KVArrays] | BlockStored] = queue.SimpleQueue()
        self.owed = 0
        self._bytes: dict[BlockKey, int] = {}
        self._holder: dict[Grain, BlockKey] = {}
        self._read: set[BlockKey] = set()
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
        if is_taken:
            key = BlockKey(block.grains[-1])
            self._bytes[key] = len(block.grains) * GRAIN_TOKENS * BYTES_PER_TOKEN
            self._holder |= dict.fromkeys(block.grains, key)
        return is_taken

    def was_read(self, blocks: Sequence[Block[KVArrays]]) -> None:
        """A part of a block is read with all of it."""
        self._read |= {self._holder[block.grains[-1]] for block in blocks}

    @property
    def read_again_share(self) -> float:
        """The part of the bytes written so far that was read."""
        written_bytes = sum(self._bytes.values())
        return sum(self._bytes[key] for key in self._read) / written_bytes if written_bytes else 0.0

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
        if self._cache.prefetch(prepared, PREFILL):
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

    @property
    def read_again_share(self) -> float:
        return self._disk.read_again_share

    def outcome(self, *, written_bytes: int, leaving_bytes: int, read_again_share: float, published: int) -> Outcome:
        return Outcome(
            prompt_tokens=self._prompt_tokens,
            ram_tokens=self._ram_tokens,
            disk_tokens=self._disk_tokens,
            requests=self._requests,
            written_bytes=written_bytes,
            leaving_bytes=leaving_bytes,
            read_again_share=read_again_share,
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
                self._disk.was_read(answer.blocks)
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
) -> Outcome:
    """What it did, until the end of the day and at a clean stop then."""
    # A model of its own for each replay, so that none finds another's blocks.
    fingerprint = hashing.root(f"{policy} {budget_bytes} {half_time}", b"").digest.hex()
    before = store.books()
    cache = Replay(store, policy, budget_bytes, fingerprint)
    for number, asked in enumerate(trace):
        if number == len(trace) // 2:
            cache.half_time(half_time)
        cache.ask(asked)
    after = store.books()
    read_again_share = cache.read_again_share
    cache.leave()
    outcome = cache.outcome(
        written_bytes=after.written_bytes - before.written_bytes,
        leaving_bytes=store.books().written_bytes - after.written_bytes,
        read_again_share=read_again_share,
        published=after.published - before.published,
    )
    cache.close()
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} under pictures/")
    arguments = parser.parse_args()
    print_head("bytes written and tokens found again, by persist policy, on a replayed trace of agents")
    trace = agent_trace(TraceShape(), arguments.seed)
    different, working_set = needed_tokens(trace), working_set_tokens(trace)
    kinds = Counter(asked.kind for asked in trace)
    prompt_tokens = sum(len(asked.prompt) for asked in trace)
    print(f"{len(trace)} requests ({', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}),")
    print(
        f"{prompt_tokens:,} prompt tokens, {different:,} different tokens, working set {working_set:,}, longest prompt "
        f"{max(len(asked.prompt) for asked in trace):,}",
        flush=True,
    )
    budgets: dict[Hot, int] = {
        "the day": 2 * different * BYTES_PER_TOKEN,
        "1/4 of the day": different * BYTES_PER_TOKEN // 4,
        "1/4 of the working set": working_set * BYTES_PER_TOKEN // 4,
    }
    rows: list[list[str]] = []
    groups: list[str] = []
    bars: dict[PersistPolicy, list[float]] = {policy: [] for policy in POLICIES[:2]}
    with running_cachestore() as store:
        for hot, half_time, policies in CASES:
            outcomes: dict[PersistPolicy, Outcome] = {
                policy: replay(store, trace, policy, budgets[hot], half_time) for policy in policies
            }
            for policy, outcome in outcomes.items():
                rows.append(_row(hot, half_time, policy, outcome, outcomes["through"]))
                if policy in bars:
                    bars[policy].append(_full_mb(outcome.written_bytes) / outcome.requests)
            groups.append(f"RAM: {hot}\nhalf time: {half_time}")
    columns = [
        "RAM holds; half time; policy",
        "MB",
        "fewer",
        "read again",
        "MB, left",
        "fewer",
        "hit rate",
        "points",
        "from disk",
    ]
    print_table("MB a request at full size (46 KB of KV a token)", columns, rows)
    print(
        "MB: until the end of the day; left: and with what is written when the model leaves memory then. fewer: times"
    )
    print("fewer than through. read again: of the bytes of the day, what some request read. points: hit rate minus")
    print("through's. from disk: tokens of prompts that came from there.")
    if arguments.picture:
        named = {str(policy): values for policy, values in bars.items()}
        save_bars(
            PICTURE, "Written to disk for each request of an agent", "MB (less is better)", groups, named, versions()
        )


def _row(hot: Hot, half_time: HalfTime, policy: PersistPolicy, outcome: Outcome, through: Outcome) -> list[str]:
    left_bytes, through_left_bytes = (one.written_bytes + one.leaving_bytes for one in (outcome, through))
    return [
        f"{hot}; {half_time}; {policy}",
        f"{_full_mb(outcome.written_bytes) / outcome.requests:.1f}",
        _times(through.written_bytes, outcome.written_bytes),
        f"{outcome.read_again_share:.0%}",
        f"{_full_mb(left_bytes) / outcome.requests:.1f}",
        _times(through_left_bytes, left_bytes),
        f"{outcome.hit_rate:.1%}",
        f"{(outcome.hit_rate - through.hit_rate) * 100:+.1f}",
        f"{outcome.disk_tokens / outcome.prompt_tokens:.1%}",
    ]


def _times(more_bytes: int, fewer_bytes: int) -> str:
    return f"{more_bytes / fewer_bytes:.1f}x" if fewer_bytes else "-"


def _full_mb(scaled_bytes: int) -> float:
    return scaled_bytes * SCALE / 1e6


def _zeros(start: int, end: int) -> tuple[KVArrays, int]:
    arrays = {name: mx.zeros((1, 1, end - start, WIDTH)) for name in ("keys0", "values0")}
    mx.eval(arrays)
    return arrays, block_bytes(arrays)


if __name__ == "__main__":
    main()
