"""A loaded tiny model, what mlx-lm makes of a prompt, and a desk that runs rows on the engine as the loop does."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from protocol.generation import ChosenLogprob
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey
from protocol.kv_storage import KVQuantization, KVReading
from tests.worker.block_files import leased_file, read_whole
from tests.worker.parts import FINGERPRINT, prepared
from tests.worker.test_prefix_cache import RecordingDisk
from tests.worker.tiny_models import VOCABULARY
from worker import hashing
from worker.engine import Drawn, nothing
from worker.mlx_engine import MlxEngine
from worker.mlx_model import LoadedModel
from worker.mlx_quantized_kv import rounded
from worker.prefix_cache import PrefixCache
from worker.prefix_index import Block, PrefixIndex


class PlainTokenizer:
    """Token 7 is `<7>`."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)


_LONG_TOKENS = 128


@dataclass
class Model:
    """A loaded tiny model, with what mlx-lm itself makes of a prompt."""

    loaded: LoadedModel
    kv: KVQuantization | None = None
    known: dict[tuple[tuple[int, ...], int], tuple[list[int], list[Any]]] = field(default_factory=dict)

    steps: Literal["pipelined", "read at once"] = "pipelined"

    def engine(self) -> MlxEngine:
        return MlxEngine(self.loaded, PlainTokenizer(), self.kv, self.steps)

    @cached_property
    def reading(self) -> KVReading:
        """What steps of its engines read."""
        return self.engine().kv_storage.reading

    def reference(self, token_ids: Sequence[int], count: int) -> tuple[list[int], list[Any]]:
        """Greedy tokens and logprobs of `generate_step`."""
        key = (tuple(token_ids), count)
        if key not in self.known:
            caches = make_prompt_cache(self.loaded.model)
            if self.kv is not None:
                # What mlx-lm's quantized attention does not know, or takes long for, is computed from rounded numbers.
                knows = len(token_ids) < _LONG_TOKENS and self.reading == "quantized"
                caches = _quantized(caches, self.kv) if knows else rounded(caches, self.kv)
            steps = generate_step(mx.array(list(token_ids)), self.loaded.model, max_tokens=count, prompt_cache=caches)
            pairs = [(int(token), np.array(logprobs.astype(mx.float32))) for token, logprobs in steps]
            self.known[key] = [token for token, _ in pairs], [logprobs for _, logprobs in pairs]
        return self.known[key]

    def says(self, token_ids: Sequence[int], count: int) -> list[int]:
        return self.reference(token_ids, count)[0]


def _quantized(caches: Sequence[Any], kv: KVQuantization) -> list[Any]:
    """With mlx-lm's own quantized caches in the place of plain ones."""
    replaced: list[Any] = []
    for cache in caches:
        if type(cache) is KVCache:
            replaced.append(QuantizedKVCache(kv.group_size, kv.bits))
        else:
            is_list = type(cache) is CacheList
            replaced.append(CacheList(*_quantized(cache.caches, kv)) if is_list else cache)
    return replaced


def prompt(seed: int, length: int) -> list[int]:
    """The first `length` of one endless text for each seed, in which the tokens differ."""
    return random.Random(seed).choices(range(VOCABULARY), k=length)


class Desk:
    """Runs rows on an engine step by step, as the loop does, with a prefix cache that is kept between rows."""

    def __init__(self, model: Model, *, budget_bytes: int = 10**9) -> None:
        self.engine = model.engine()
        reason = self.engine.prefix_reuse.reason
        self.index: PrefixIndex[Any] = PrefixIndex(budget_bytes, "states" if self.engine.keeps_states else "any_token")
        self.cache: PrefixCache[Any] = PrefixCache(self.index, RecordingDisk(), "off", reuse_off_reason=reason)
        self.drawn: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[ChosenLogprob]] = {}
        self.cached: dict[str, int] = {}
        self._running: dict[str, tuple[Any, int]] = {}

    def start(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        slice_tokens: int = 100,
        parts: int = 1,
        before_each: Callable[[], None] = nothing,
        **settings: Any,
    ) -> None:
        """Open, prefill and join one row."""
        request = prepared(name, token_ids, **settings)
        match, _ = self.cache.use(request)
        self.cached[name] = match.tokens
        self.engine.open(request, match.uses)
        start, at = match.whole_blocks * BLOCK_TOKENS, match.tokens
        boundary = (len(token_ids) - 1) // GRAIN_TOKENS * GRAIN_TOKENS
        while at < len(token_ids) - 1:
            end = boundary if self.engine.keeps_states and at < boundary else len(token_ids) - 1
            step = min(slice_tokens, end - at)
            self._slice(request, step, parts, before_each)
            at += step
            if at == boundary:
                start = self._keep(request, start, at)
        start = self._keep(request, start, at)
        self.engine.join(request.request_id)
        self.drawn[name], self.logprobs[name] = [], []
        self._running[name] = (request, start)

    def _slice(self, request: Any, tokens: int, parts: int = 1, before_each: Callable[[], None] = nothing) -> None:
        self.engine.prefill(request.request_id, tokens, parts, before_each)

    def step(self) -> None:
        """One decode step; rows that have all their tokens leave."""
        self._take(self.engine.decode())

    def read(self) -> None:
        """What the last step drew, without another step."""
        self._take(self.engine.read())

    def _take(self, tokens: Sequence[Drawn]) -> None:
        done = []
        for drawn in tokens:
            self.drawn[drawn.request_id].append(drawn.token_id)
            if drawn.logprob is not None:
                self.logprobs[drawn.request_id].append(drawn.logprob)
            if len(self.drawn[drawn.request_id]) == self._running[drawn.request_id][0].max_tokens:
                done.append(drawn.request_id)
        for name in done:
            request, start = self._running[name]
            self._keep(request, start, self.engine.tokens_held(request.request_id))
        self.leave(*done)

    def leave(self, *names: Any) -> None:
        for name in names:
            del self._running[name]
        self.engine.drop(names)

    def run(self) -> None:
        while self._running:
            self.step()

    def ask(self, name: str, token_ids: Sequence[int], count: int, **settings: Any) -> list[int]:
        self.start(name, token_ids, max_tokens=count, **settings)
        self.run()
        return self.drawn[name]

    def _keep(self, request: Any, start: int, end: int) -> int:
        token_ids = self.engine.token_ids(request.request_id)
        start = self.cache.keep(
            request, token_ids, start, lambda a, b: self.engine.cut(request.request_id, a, b), end=end
        )
        if self.engine.keeps_states:
            state = self.engine.state(request.request_id)
            self.cache.keep_state(
                request, token_ids, end, state, lambda a, b: self.engine.cut(request.request_id, a, b)
            )
        return start


def after_a_restart(desk: Desk, model: Model, folder: Path) -> Desk:
    """A new engine whose cache holds what the old one's blocks are as files."""
    fresh = Desk(model)
    fresh.index.open_root(hashing.root(FINGERPRINT, b"").digest)
    for number, block in enumerate(desk.index.blocks()):
        tokens = len(block.grains) * GRAIN_TOKENS
        if not tokens:
            continue
        parts = read_whole(leased_file(folder / f"{number}.safetensors", block, tokens))
        fresh.index.insert(
            Block(
                key=BlockKey(block.grains[-1]),
                parent=block.parent,
                start=block.start,
                token_ids=block.token_ids[:tokens],
                grains=block.grains,
                payload=parts.payload,
                kv_bytes=parts.kv_bytes,
                states=parts.states,
            )
        )
    return fresh
