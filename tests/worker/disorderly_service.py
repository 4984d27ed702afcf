"""A step loop over a real engine whose requests, cancels, evictions, forgets and disk come in any order.

Everything follows from one seed. The disk keeps real block files, answers late or not at all, and outlives the loop.
"""

import itertools
import queue
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from protocol.blocks import LeasedBlock
from protocol.generation import Cancel, Delta, Drain, Failed, Finished, ForgetHot, Pin, SetBudget, Warmed, WorkerEvent
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey, RequestId
from protocol.latency import LatencyClass
from protocol.sampling import Sampling
from tests.worker.block_files import leased_file
from tests.worker.engine_parts import Desk, Model, prompt
from tests.worker.parts import GREEDY, prepared
from tests.worker.test_preemption import TokenWords
from worker.live_kv import LiveKV
from worker.loop import StepLoop
from worker.messages import BlocksFetched, BlockStored
from worker.mlx_block_files import BlockFile
from worker.pacing import SchedulerSettings
from worker.prefix_cache import Fetch, FetchOutcome, PrefixCache
from worker.prefix_index import Block, PrefixIndex
from worker.scheduler import Scheduler
from worker.sequence import Prepared

_GRAINS = BLOCK_TOKENS // GRAIN_TOKENS
_PARTS = 4

_SEEDED = Sampling(temperature=0.8, top_p=0.9, seed=11, frequency_penalty=0.4, repetition_penalty=1.2)

LOGPROB_NOISE = 1e-3
"""How far a logprob may be from the cold run's, in float32; mistakes of reuse are seen at 0.1 and above."""


@dataclass
class _File:
    """A block on disk, as its writer knew it."""

    path: Path
    grains: tuple[Any, ...]
    parent: BlockKey
    owner: str


@dataclass
class Disk:
    """What a cachestore and the thread in front of it do, without either; `late` gives what is due, in any order."""

    folder: Path
    dice: random.Random
    files: dict[BlockKey, _File] = field(default_factory=dict)
    read_bytes_per_second: float = 1e12
    _storing: dict[BlockKey, Block[Any]] = field(default_factory=dict)
    _answers: list[Any] = field(default_factory=list)
    _names: Any = field(default_factory=itertools.count)

    def fetch(self, fetch: Fetch[Any]) -> None:
        self._answers.append(fetch)

    def store(self, block: Block[Any]) -> bool:
        if self.dice.random() < 0.1:
            return False
        self._storing[block.key] = block
        self._answers.append(block.key)
        return True

    def pin(self, keys: Sequence[BlockKey], owner: str, pin: Pin) -> None:
        """Nothing is evicted here."""

    def unpin(self, owner: str, name: str) -> None:
        """Nothing is evicted here."""

    def is_storing(self, key: BlockKey) -> bool:
        return key in self._storing

    def forget(self, owner: str | None) -> None:
        for key, block in list(self._storing.items()):
            if owner is None or block.owner == owner:
                del self._storing[key]
                self._answers.append(BlockStored(key, "refused"))
        self.files = {key: file for key, file in self.files.items() if owner is not None and file.owner != owner}

    def restart(self) -> None:
        """What was on its way is lost."""
        self._storing, self._answers = {}, []

    @property
    def owes(self) -> bool:
        return bool(self._answers)

    def late(self) -> Any:
        """One of the answers that it owes, or None for a job that nobody waits for any more."""
        job: Any = self._answers.pop(self.dice.randrange(len(self._answers)))
        if isinstance(job, Fetch):
            return self._fetched(job)  # pyright: ignore[reportUnknownArgumentType]
        return job if isinstance(job, BlockStored) else self._stored(job)

    def _stored(self, key: BlockKey) -> BlockStored | None:
        block = self._storing.pop(key, None)
        if block is None:
            return None
        if self.dice.random() < 0.2:
            return BlockStored(key, "refused")
        path = self.folder / f"{next(self._names)}.safetensors"
        apart = replace(block, states=dict(block.states))
        leased_file(path, apart, len(block.grains) * GRAIN_TOKENS)
        name = BlockKey(block.grains[-1])
        self.files[name] = _File(path, block.grains, block.parent if block.start else BlockKey(b""), block.owner)
        if block.supersedes is not None:
            self.files.pop(block.supersedes, None)
        return BlockStored(key, "durable")

    def _fetched(self, fetch: Fetch[Any]) -> BlocksFetched[Any]:
        asked = fetch.prepared
        if self.dice.random() < 0.1:
            return BlocksFetched(asked.request_id, (), FetchOutcome("unavailable"))
        blocks: list[Block[Any]] = []
        slot = fetch.hot_blocks
        while (slot + 1) * _GRAINS <= len(asked.grains):
            file = self.files.get(BlockKey(asked.grains[(slot + 1) * _GRAINS - 1]))
            if file is None or self.dice.random() < 0.05:
                break
            blocks.append(self._read(asked, slot, file, _GRAINS))
            slot += 1
        parent = BlockKey(asked.grains[slot * _GRAINS - 1]) if slot else BlockKey(b"")
        wanted = asked.grains[slot * _GRAINS : (slot + 1) * _GRAINS]
        parts: list[tuple[int, _File]] = []
        for file in self.files.values():
            common = sum(1 for one, other in zip(file.grains, wanted, strict=False) if one == other)
            if common and file.parent == parent:
                parts.append((common, file))
        parts.sort(key=lambda part: part[0], reverse=True)
        blocks += [self._read(asked, slot, file, common) for common, file in parts[:_PARTS]]
        return BlocksFetched(asked.request_id, tuple(blocks), FetchOutcome("" if blocks else "absent"))

    def _read(self, asked: Prepared, slot: int, file: _File, grains: int) -> Block[Any]:
        whole = BlockFile(_leased(file, grains)).finish()
        first = slot * _GRAINS
        chain = asked.grains[first : first + grains]
        start = slot * BLOCK_TOKENS
        return Block(
            key=BlockKey(chain[-1]),
            parent=BlockKey(asked.grains[first - 1]) if first else asked.root.digest,
            start=start,
            token_ids=asked.token_ids[start : start + grains * GRAIN_TOKENS],
            grains=chain,
            payload=whole.payload,
            kv_bytes=whole.kv_bytes,
            states=whole.states,
            owner=asked.request.cache.owner,
            is_durable=True,
        )


def _leased(file: _File, grains: int) -> LeasedBlock:
    return LeasedBlock(key=BlockKey(file.grains[-1]), grains=grains, path=str(file.path))


class Inbox:
    """What comes at its read, and what the disk owes at any; a drain when there is nothing more."""

    def __init__(self, arrivals: Sequence[tuple[int, Any]], disk: Disk, dice: random.Random) -> None:
        self._arrivals = deque(arrivals)
        self._disk = disk
        self._dice = dice
        self._reads = 0

    def get_nowait(self) -> Any:
        self._reads += 1
        if self._disk.owes and self._dice.random() < 0.3 and (late := self._disk.late()) is not None:
            return late
        if self._arrivals and self._arrivals[0][0] <= self._reads:
            return self._arrivals.popleft()[1]
        raise queue.Empty

    def get(self, timeout: float | None = None) -> Any:
        del timeout
        while self._disk.owes:
            if (late := self._disk.late()) is not None:
                return late
        return self._arrivals.popleft()[1] if self._arrivals else Drain(deadline_seconds=0.0)


@dataclass
class Difference:
    """An answer that is not the cold run's."""

    name: str
    at: int
    said: list[int]
    cold: list[int]
    logprob: float
    margin: float


class Disorder:
    """A service's life from one seed: a few loops after one another, with one disk."""

    def __init__(self, model: Model, folder: Path, seed: int, *, longest_tokens: int = 640) -> None:
        self.model = model
        self.dice = random.Random(seed)
        self.disk = Disk(folder, self.dice)
        self.longest_tokens = longest_tokens
        self.hits = self.answers = self.cancelled = self.preemptions = self.from_disk = 0
        footprint = model.engine().kv_footprint
        self._bytes_per_token = footprint.bytes_per_token or 64
        self._names = itertools.count()
        self._known = [prompt(seed * 10 + number, longest_tokens) for number in range(3)]

    def live(self, requests: int = 10) -> list[Difference]:
        """One loop, from an empty hot tier to its drain. Every request must end once; gives those that ended wrong."""
        dice = self.dice
        engine = self.model.engine()
        row_tokens = dice.choice([None, None, self.longest_tokens + 40, self.longest_tokens // 2])
        kv = LiveKV(
            footprint=engine.kv_footprint,
            budget_bytes=None if row_tokens is None else 2 * engine.kv_footprint.row_bytes(row_tokens),
        )
        scheduler = Scheduler(
            SchedulerSettings(
                max_rows=dice.choice([2, 4]) if engine.is_batchable else 1,
                ceiling_tokens=dice.choice([16, 48, 100, 256, 2048]),
                slices="mixed" if engine.mixes and dice.random() < 0.7 else "apart",
                live_kv=kv,
            )
        )
        index: PrefixIndex[Any] = PrefixIndex(self._budget(), "states" if engine.keeps_states else "any_token")
        policy: Literal["through", "second-touch"] = dice.choice(["through", "second-touch"])
        cache: PrefixCache[Any] = PrefixCache(index, self.disk, policy, reuse_off_reason=engine.prefix_reuse.reason)
        arrivals, asked = self._traffic(requests)
        events: list[WorkerEvent] = []
        self.disk.restart()
        StepLoop(
            engine=engine,
            scheduler=scheduler,
            cache=cache,
            make_detokenizer=TokenWords,
            end_token_ids=frozenset(),
            inbox=Inbox(arrivals, self.disk, dice),  # pyright: ignore[reportArgumentType]
            send=events.append,
            clock=itertools.count(1000.0, 0.001).__next__,
        ).run()
        index.check()
        assert engine.live_kv_bytes == 0
        self.preemptions += scheduler.preemptions
        cache.store_everything()
        while self.disk.owes:
            self.disk.late()
        return self._judged(events, asked)

    def _budget(self) -> int:
        """Of a hot tier: nothing, a few blocks, or all that comes."""
        of_token = self._bytes_per_token
        return self.dice.choice([0, 300 * of_token, 900 * of_token, 10**9, 10**9])

    def _traffic(self, requests: int) -> tuple[list[tuple[int, Any]], dict[str, Prepared]]:
        dice = self.dice
        asked: dict[str, Prepared] = {}
        arrivals: list[tuple[int, Any]] = []
        for _ in range(requests):
            at = dice.randrange(120)
            one = self._request()
            twins = [one, self._named(one)] if dice.random() < 0.25 else [one]
            for twin in twins:
                asked[twin.request_id] = twin
                arrivals.append((at, twin))
                if dice.random() < 0.25:
                    arrivals.append((at + dice.randrange(60), Cancel(request_id=twin.request_id)))
                    again = self._named(twin)
                    asked[again.request_id] = again
                    arrivals.append((at + dice.randrange(90), again))
            if dice.random() < 0.2:
                arrivals.append((dice.randrange(120), SetBudget(hot_cache_bytes=self._budget())))
            if dice.random() < 0.1:
                arrivals.append((dice.randrange(120), ForgetHot(owner=dice.choice(["ann", "bob", None]))))
        arrivals.sort(key=lambda arrival: arrival[0])
        return arrivals, asked

    def _request(self) -> Prepared:
        """Something known, cut anywhere or near a boundary, with perhaps other words behind it."""
        dice = self.dice
        known = dice.choice(self._known)
        length = dice.choice(
            [
                dice.randrange(1, len(known) + 1),
                dice.choice([15, 16, 17, 255, 256, 257, 511, 512, 513]),
                dice.randrange(1, len(known) // GRAIN_TOKENS + 2) * GRAIN_TOKENS,
                len(known),
            ]
        )
        token_ids = [*known[:length], *prompt(dice.randrange(4), dice.choice([0, 0, 1, 5, 40]))][: self.longest_tokens]
        count = dice.choice([1, 2, 5, 12])
        if dice.random() < 0.4:  # the next turn may follow, on all that will have been said
            self._known.append([*token_ids, *self.model.says(token_ids, count)][: self.longest_tokens])
        owner = dice.choice(["ann", "ann", "bob"])
        made = prepared(
            f"r{next(self._names)}",
            token_ids,
            max_tokens=count,
            sampling=dice.choice([GREEDY, GREEDY, GREEDY, _SEEDED]),
            top_logprobs=dice.choice([None, 0]),
            scope=owner.encode(),
            owner=owner,
            retention=dice.choice(["disk", "disk", "in_memory"]),
            latency_class=dice.choice(list(LatencyClass)),
            arrived=1000.0,
            pin=Pin(name="p", ttl_seconds=dice.choice([None, 0.05])) if dice.random() < 0.1 else None,
        )
        grains = len(token_ids) // GRAIN_TOKENS
        places = sorted(
            {dice.randrange(1, grains + 1) * GRAIN_TOKENS for _ in range(dice.randrange(3))} if grains else ()
        )
        return replace(made, boundaries=tuple(place for place in places if place < len(token_ids)))

    def _named(self, one: Prepared) -> Prepared:
        """The same once more, under another id."""
        name = RequestId(f"r{next(self._names)}")
        request = msgspec.structs.replace(one.request, request_id=name)
        warm = None if one.warm is None else msgspec.structs.replace(one.warm, request_id=name)
        return replace(one, request=request, warm=warm)

    def _judged(self, events: Sequence[WorkerEvent], asked: dict[str, Prepared]) -> list[Difference]:
        ends: dict[str, list[Any]] = {name: [] for name in asked}
        said: dict[str, list[int]] = {name: [] for name in asked}
        logprobs: dict[str, list[float]] = {name: [] for name in asked}
        for event in events:
            match event:
                case Delta(request_id=name, text=text, logprobs=drawn):
                    said[name] += [int(word) for word in text.replace("<", " ").replace(">", " ").split()]
                    logprobs[name] += [one.chosen.logprob for one in drawn]
                case Finished(request_id=name) | Failed(request_id=name) | Warmed(request_id=name):
                    ends[name].append(event)
                case _:
                    pass
        wrong: list[Difference] = []
        for name, one in asked.items():
            (end,) = ends[name]
            if isinstance(end, Failed):
                self.cancelled += 1
            if isinstance(end, Finished):
                self.answers += 1
                assert len(said[name]) == one.max_tokens
                assert end.usage.cached_tokens <= len(one.token_ids) - 1
                self.hits += end.usage.cached_tokens > 0
                self.from_disk += end.cache.disk_tokens > 0
            if difference := self._difference(name, one, said[name], logprobs[name]):
                wrong.append(difference)
        return wrong

    def _difference(self, name: str, one: Prepared, said: list[int], logprobs: list[float]) -> Difference | None:
        """Also of those that were cancelled, as far as they came."""
        if not said:
            return None
        if one.request.sampling != GREEDY:
            cold = Desk(self.model).ask(name, one.token_ids, one.max_tokens, sampling=one.request.sampling)
            return None if said == cold[: len(said)] else Difference(name, 0, said, cold, 0.0, 0.0)
        cold, references = self.model.reference(one.token_ids, one.max_tokens)
        same = next((at for at, pair in enumerate(zip(said, cold, strict=False)) if pair[0] != pair[1]), len(said))
        off = max((abs(logprobs[at] - references[at][said[at]]) for at in range(min(same, len(logprobs)))), default=0.0)
        if same == len(said) and off <= LOGPROB_NOISE:
            return None
        at = min(same, len(cold) - 1)
        best = sorted(references[at].tolist())[-2:]
        return Difference(name, same, said, cold, float(off), best[1] - best[0])
