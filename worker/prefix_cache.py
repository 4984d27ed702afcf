"""The prefix cache of one worker: the hot tier, and what goes to and comes from the cold one. Moves no tensor itself.

Owned by the step thread, which never waits here: disk work is handed to `ColdTier`, whose answers come back as
messages in the loop's inbox.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from protocol.generation import CacheReport, Pin, PinnedPrefix
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey, RequestId
from protocol.launch import PersistPolicy
from worker.chain_worth import is_read_sooner, tokens_saved, worth_writing
from worker.cost_model import PrefillCost
from worker.hashing import block_key, grains
from worker.prefix_index import Block, Match, PrefixIndex, State
from worker.sequence import Prepared
from worker.unwritten import Unwritten

Payload = TypeVar("Payload")

PINNED_SHARE = 0.5
"""At most this part of the hot tier may be pinned, so that everybody else keeps a cache."""

_REMEMBERED_EVICTIONS = 8192


@dataclass(frozen=True)
class Fetch(Generic[Payload]):
    """What to ask of the disk for one prompt: all beyond its first `hot_blocks` blocks and `hot_tokens` tokens, if
    reading that is faster than computing it at the cost of `prefill`."""

    prepared: Prepared
    hot_blocks: int
    hot_tokens: int
    prefill: PrefillCost


class FetchOutcome(NamedTuple):
    """What became of a fetch."""

    miss_reason: str = ""
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    expected_restore_seconds: float | None = None
    expected_compute_seconds: float | None = None


class ColdTier(Protocol[Payload]):
    """Disk work done elsewhere."""

    def fetch(self, fetch: Fetch[Payload]) -> None:
        """Ask for what the disk holds of a prompt beyond what is hot; answered by a message, always."""
        ...

    def store(self, block: Block[Payload]) -> bool:
        """Ask for a block to be made durable; answered by a message, always. False: refused, too much is waiting."""
        ...

    def pin(self, keys: Sequence[BlockKey], owner: str, pin: Pin) -> None:
        """Ask for durable blocks to be kept from eviction on disk. Best effort."""
        ...

    def unpin(self, owner: str, name: str) -> None: ...

    def is_storing(self, key: BlockKey) -> bool: ...

    def forget(self, owner: str | None) -> None:
        """What waits to be written, of one owner or of all, is not written, and what this process wrote is deleted."""
        ...

    @property
    def read_bytes_per_second(self) -> float:
        """How fast blocks came from disk lately."""
        ...


@dataclass
class _Pinned:
    tokens: int
    expires: float | None


@dataclass
class _Asked:
    """A request between its fetch and its use."""

    hot_tokens: int
    outcome: FetchOutcome = field(default_factory=FetchOutcome)


@dataclass
class _Fetching:
    """Answers that are still to come from the disk for one request; the first `stale` of them were asked for before
    their owner had these blocks forgotten."""

    owner: str
    answers: int = 0
    stale: int = 0


class PrefixCache(Generic[Payload]):
    """`reuse_off_reason` non-empty: this model's cache cannot be taken up again, so nothing is ever kept or found."""

    def __init__(
        self, index: PrefixIndex[Payload], cold: ColdTier[Payload], policy: PersistPolicy, *, reuse_off_reason: str = ""
    ) -> None:
        self._index = index
        self._cold = cold
        self._policy: PersistPolicy = policy
        self._is_on = not reuse_off_reason
        self._asked: dict[RequestId, _Asked] = {}
        self._fetching: dict[RequestId, _Fetching] = {}
        self._evicted: OrderedDict[BlockKey, None] = OrderedDict()
        self._unwritten = Unwritten()
        self._pins: dict[tuple[str, str], _Pinned] = {}
        self._prefill: PrefillCost | None = None
        self.misses: Counter[str] = Counter()
        self.not_written: Counter[str] = Counter()

    # --- books -----------------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def size_bytes(self) -> int:
        return self._index.size_bytes

    @property
    def budget_bytes(self) -> int:
        return self._index.budget_bytes

    @property
    def block_count(self) -> int:
        return len(self._index)

    @property
    def read_bytes_per_second(self) -> float:
        return self._cold.read_bytes_per_second

    def pins(self, now: float) -> tuple[PinnedPrefix, ...]:
        return tuple(
            PinnedPrefix(
                owner=owner,
                name=name,
                tokens=pinned.tokens,
                size_bytes=sum(block.size_bytes for block in self._index.blocks() if (owner, name) in block.pinned_by),
                expires_seconds=None if pinned.expires is None else max(0.0, pinned.expires - now),
            )
            for (owner, name), pinned in self._pins.items()
        )

    def check(self) -> None:
        self._index.check()

    # --- before a request runs -------------------------------------------------------------------------------------

    def prefetch(self, prepared: Prepared, prefill: PrefillCost) -> bool:
        """Ask the disk for what RAM lacks of this prompt. False when there is nothing to wait for."""
        self._prefill = prefill
        if not self._is_on:
            return False
        hot = self._match(prepared)
        asked = self._asked[prepared.request_id] = _Asked(hot.tokens)
        if self._policy == "off":
            asked.outcome = FetchOutcome("off")
            return False
        reachable = len(prepared.grains) * GRAIN_TOKENS
        if hot.tokens >= min(reachable, len(prepared.token_ids) - 1):
            return False
        owner = prepared.request.cache.owner
        self._fetching.setdefault(prepared.request_id, _Fetching(owner)).answers += 1
        self._cold.fetch(Fetch(prepared, hot.whole_blocks, hot.tokens, prefill))
        return True

    def fetched(self, request_id: RequestId, blocks: Sequence[Block[Payload]], outcome: FetchOutcome) -> None:
        """Blocks came from disk, in order. Those whose parent is gone again are dropped, as are those that were
        forgotten while they were read: a miss."""
        if self._is_stale(request_id):
            blocks, outcome = (), FetchOutcome("forgotten")
        for block in blocks:
            self._note_evicted(self._index.insert(block))
        if asked := self._asked.get(request_id):
            asked.outcome = outcome

    def gave_up_waiting(self, request_id: RequestId) -> None:
        """The blocks did not come in time; if they come later they are kept all the same."""
        if asked := self._asked.get(request_id):
            asked.outcome = FetchOutcome("timeout")

    def use(self, prepared: Prepared) -> tuple[Match[Payload], CacheReport]:
        """The hot prefix of this prompt, at most all but its last token, counted as a touch; and how it came."""
        asked = self._asked.pop(prepared.request_id, _Asked(0))
        if not self._is_on:
            return Match(()), CacheReport(miss_reason="off")
        match = self._match(prepared)
        self._index.touch(match)
        if prepared.request.cache.retention == "disk":
            for use in match.uses:
                use.block.is_storable = True
        outcome = asked.outcome
        from_ram = min(match.tokens, asked.hot_tokens)
        reason = "" if match.tokens >= len(prepared.token_ids) - 1 else self._why_not_more(prepared, match, outcome)
        if reason:
            self.misses[reason] += 1
        report = CacheReport(
            ram_tokens=from_ram,
            disk_tokens=match.tokens - from_ram,
            miss_reason=reason,
            restored_bytes=outcome.restored_bytes,
            restore_seconds=outcome.restore_seconds,
            expected_restore_seconds=outcome.expected_restore_seconds,
            expected_compute_seconds=outcome.expected_compute_seconds,
        )
        return match, report

    # --- while and after it runs -----------------------------------------------------------------------------------

    def keep(
        self,
        prepared: Prepared,
        token_ids: Sequence[int],
        start: int,
        cut: Callable[[int, int], tuple[Payload, int]],
        *,
        end: int,
    ) -> int:
        """Keep the whole blocks of `token_ids[start:end]` and the tail after them; `start` is a block boundary.

        `cut(a, b)` gives the KV of tokens [a, b). Returns the boundary after the last whole block.
        """
        if not self._is_on:
            return start
        parent = self._parent_of(prepared, token_ids, start)
        while parent is not None and start < end:
            stop = min(start + BLOCK_TOKENS, end)
            parent = self._keep_block(prepared, parent, start, tuple(token_ids[start:stop]), cut)
            if stop - start < BLOCK_TOKENS:
                break
            start = stop
        return start

    def keep_state(
        self,
        prepared: Prepared,
        token_ids: Sequence[int],
        position: int,
        state: State[Payload],
        cut: Callable[[int, int], tuple[Payload, int]],
    ) -> None:
        """Keep what the layers that cannot be cut hold after `position` tokens, whose blocks were kept just before."""
        if not self._is_on or position == 0:
            return
        start = (position - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        parent = self._parent_of(prepared, token_ids, start)
        if parent is None:
            return
        own = tuple(token_ids[start:position])
        if self._policy != "off" and self._index.wants_own_block(parent, own):
            block = self._new_block(prepared, parent, start, own, cut)
            block.states[len(own)] = state
            self._note_evicted(self._index.insert(block))
        else:
            self._note_evicted(self._index.attach(parent, own, state))

    def request_over(self, prepared: Prepared, token_ids: Sequence[int], touched: Sequence[BlockKey]) -> None:
        """Blocks that it shared with an earlier request go to disk; under `through`, so do all that it made.

        Not earlier, since writing beside somebody's first token would delay it. A conversation that only goes on is
        not written at each turn: its blocks are hot, and go to disk when RAM lets them go or the model leaves.
        """
        self._asked.pop(prepared.request_id, None)
        if not self._is_on:
            return
        if self._policy == "through":
            made = self._index.match(prepared.root.digest, token_ids, len(token_ids))
            touched = [use.block.key for use in made.uses]
        if self._policy != "off":
            self._store([block for key in touched if (block := self._index.get(key))])

    def is_storing(self, key: BlockKey) -> bool:
        return self._cold.is_storing(key)

    def became_durable(self, key: BlockKey) -> None:
        self._unwritten.answered(key, "")
        if block := self._index.get(key):
            block.is_durable = True

    def was_refused(self, key: BlockKey, refusal: str) -> None:
        """A block is not on disk; `refusal` is the store's word for why."""
        self._unwritten.answered(key, refusal)

    def warmed(self, prepared: Prepared, now: float) -> tuple[Block[Payload], ...]:
        """The blocks of a prompt that was computed to be kept: they are sent to disk, and pinned if that was asked."""
        blocks = tuple(use.block for use in self._match(prepared).uses)
        warm = prepared.warm
        if warm is not None and warm.pin is not None:
            self._pin(prepared.request.cache.owner, warm.pin, blocks, now)
        if self._policy != "off":
            self._store(blocks, although_slower="yes")
        return blocks

    def pin_on_disk(self, blocks: Sequence[Block[Payload]], owner: str, pin: Pin) -> None:
        """Once they are durable, keep a pinned prefix's blocks from eviction there too."""
        keys = [BlockKey(block.grains[-1]) for block in blocks if block.is_durable and block.grains]
        if keys:
            self._cold.pin(keys, owner, pin)

    def unpin(self, owner: str, name: str) -> None:
        """An unknown name is fine."""
        self._pins.pop((owner, name), None)
        self._note_evicted(self._index.unpin((owner, name)))
        self._cold.unpin(owner, name)

    def expire_pins(self, now: float) -> None:
        """End the pins whose time has come. On disk they end by themselves."""
        for key, pinned in list(self._pins.items()):
            if pinned.expires is not None and pinned.expires <= now:
                del self._pins[key]
                self._note_evicted(self._index.unpin(key))

    def set_budget(self, budget_bytes: int) -> None:
        self._note_evicted(self._index.set_budget(budget_bytes))

    def forget(self, owner: str | None) -> int:
        """Drop hot blocks, those of one owner or all, with their pins, and what is on its way to or from the disk.
        Returns how many hot ones there were."""
        self._cold.forget(owner)
        for fetching in self._fetching.values():
            if owner is None or fetching.owner == owner:
                fetching.stale = fetching.answers
        keys = [block.key for block in self._index.blocks() if owner is None or block.owner == owner]
        for key in keys:
            self._index.remove(key)
        for pin in [pin for pin in self._pins if owner is None or pin[0] == owner]:
            del self._pins[pin]
        return len(keys)

    def store_everything(self) -> int:
        """The model leaves memory: send all that is not on disk there, parents first. Returns how many blocks."""
        if not self._is_on or self._policy == "off":
            return 0
        return self._store(self._index.blocks())

    # --- small things ----------------------------------------------------------------------------------------------

    def _match(self, prepared: Prepared) -> Match[Payload]:
        self._index.open_root(prepared.root.digest)
        return self._index.match(prepared.root.digest, prepared.token_ids, len(prepared.token_ids) - 1)

    def _is_stale(self, request_id: RequestId) -> bool:
        """Whether the answer that came for this request is older than a forget. To be asked once for each answer."""
        fetching = self._fetching.get(request_id)
        if fetching is None:
            return False
        fetching.answers -= 1
        if not fetching.answers:
            del self._fetching[request_id]
        if not fetching.stale:
            return False
        fetching.stale -= 1
        return True

    def _why_not_more(self, prepared: Prepared, match: Match[Payload], outcome: FetchOutcome) -> str:
        if match.known_tokens > match.tokens:
            return "hybrid_boundary"
        if outcome.miss_reason not in ("", "absent"):
            return outcome.miss_reason
        next_whole = (match.whole_blocks + 1) * BLOCK_TOKENS // GRAIN_TOKENS
        if refused := self._unwritten.why(prepared.grains[match.tokens // GRAIN_TOKENS : next_whole]):
            return refused
        if next_whole <= len(prepared.grains) and BlockKey(prepared.grains[next_whole - 1]) in self._evicted:
            return "evicted"
        return "absent"

    def _note_evicted(self, blocks: Sequence[Block[Payload]]) -> None:
        for block in blocks:
            self._evicted[block.key] = None
        if self._policy == "second-touch":
            self._store([block for block in blocks if block.touches])  # they stay readable until they are durable
        while len(self._evicted) > _REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def _pin(self, owner: str, pin: Pin, blocks: Sequence[Block[Payload]], now: float) -> None:
        """Too much pinned already: the prefix is only kept like any other."""
        key = (owner, pin.name)
        self._note_evicted(self._index.unpin(key))
        self._pins.pop(key, None)
        pinned_bytes = sum(block.size_bytes for block in self._index.blocks() if block.pinned_by)
        if pinned_bytes + sum(block.size_bytes for block in blocks) > PINNED_SHARE * self._index.budget_bytes:
            self.misses["pin_refused"] += 1
            return
        for block in blocks:
            block.pinned_by.add(key)
        expires = None if pin.ttl_seconds is None else now + pin.ttl_seconds
        tokens = sum(len(block.token_ids) for block in blocks)
        self._pins[key] = _Pinned(tokens, expires)

    def _parent_of(self, prepared: Prepared, token_ids: Sequence[int], start: int) -> BlockKey | None:
        """The key of the whole block that ends at `start`, if it is hot (or the root)."""
        if start == 0:
            self._index.open_root(prepared.root.digest)
            return prepared.root.digest
        chain = prepared.grains[: start // GRAIN_TOKENS]
        if len(chain) * GRAIN_TOKENS < start:  # beyond the prompt: the chain goes on through what was generated
            chain = grains(prepared.root.secret, prepared.root.digest, token_ids[:start])
        key = BlockKey(chain[-1])
        return key if key in self._index else None

    def _keep_block(
        self,
        prepared: Prepared,
        parent: BlockKey,
        start: int,
        token_ids: tuple[int, ...],
        cut: Callable[[int, int], tuple[Payload, int]],
    ) -> BlockKey | None:
        if self._index.holds(parent, token_ids):
            chain = grains(prepared.root.secret, parent, token_ids)
            return block_key(prepared.root.secret, parent, chain, token_ids)
        block = self._new_block(prepared, parent, start, token_ids, cut)
        self._note_evicted(self._index.insert(block))
        return block.key if block.key in self._index else None

    def _new_block(
        self,
        prepared: Prepared,
        parent: BlockKey,
        start: int,
        token_ids: tuple[int, ...],
        cut: Callable[[int, int], tuple[Payload, int]],
    ) -> Block[Payload]:
        chain = grains(prepared.root.secret, parent, token_ids)
        payload, kv_bytes = cut(start, start + len(token_ids))
        cache = prepared.request.cache
        return Block(
            key=block_key(prepared.root.secret, parent, chain, token_ids),
            parent=parent,
            start=start,
            token_ids=token_ids,
            grains=chain,
            payload=payload,
            kv_bytes=kv_bytes,
            owner=cache.owner,
            ttl_seconds=cache.disk_ttl_seconds,
            is_storable=cache.retention == "disk",
        )

    def _store(self, blocks: Sequence[Block[Payload]], *, although_slower: Literal["yes", "no"] = "no") -> int:
        """Ask for these blocks to be written, parents first. Returns how many were taken.

        Not chains that would take longer to read than to compute: by today's rates they would not be read. Nor what no
        prompt can be taken up from. Whoever warms or pins a prefix wants it there whatever the rates of today are;
        those of the day it is read decide then.
        What is above a block that is written follows in its time, whatever the rates are by then.
        """
        given = {block.key: block for block in blocks}
        unwritten = [block for block in blocks if self._is_to_write(block)]
        bytes_per_second, prefill, boundary = self._cold.read_bytes_per_second, self._prefill, self._index.boundary

        def parent_of(block: Block[Payload]) -> Block[Payload] | None:
            return given.get(block.parent) or self._index.get(block.parent)

        def is_wanted(block: Block[Payload], size_bytes: int) -> bool:
            if although_slower == "yes" or block.is_wanted_on_disk or block.pinned_by or prefill is None:
                return True
            return is_read_sooner(size_bytes, tokens_saved(block, boundary), 0, bytes_per_second, prefill)

        worth = worth_writing(unwritten, parent_of, is_wanted)
        for block in worth:
            block.is_wanted_on_disk = True
        for block in worth_writing(unwritten, parent_of, lambda block, _: tokens_saved(block, boundary) > 0):
            if not block.is_wanted_on_disk and self._is_to_write(block):
                self._count_not_written(block, "disk_slower")
        to_write = [block for block in worth if block.key in given and self._is_to_write(block)]
        taken = 0
        for block in to_write:
            if not self._cold.store(block):
                break
            self._unwritten.sent(block.key, BlockKey(block.grains[-1]))
            taken += 1
        for block in to_write[taken:]:  # what comes after one that was refused may hang from it
            self._count_not_written(block, "staging_full")
        return taken

    def _is_to_write(self, block: Block[Payload]) -> bool:
        is_fit = block.is_storable and bool(block.grains)
        return is_fit and not block.is_durable and not self._cold.is_storing(block.key)

    def _count_not_written(self, block: Block[Payload], reason: Literal["disk_slower", "staging_full"]) -> None:
        """Once for a block and a reason: each request that shares it would have it written."""
        if block.not_written != reason:
            self.not_written[reason] += 1
        block.not_written = reason
