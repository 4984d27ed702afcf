"""The prefix cache of one worker: the hot tier, and what goes to and comes from the cold one. Moves no tensor itself.

Owned by the step thread, which never waits here: disk work is handed to `ColdTier`, whose answers come back as
messages in the loop's inbox.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey
from protocol.launch import PersistPolicy
from worker.hashing import block_key, grains
from worker.prefix_index import Block, Match, PrefixIndex
from worker.sequence import Prepared

Payload = TypeVar("Payload")


class ColdTier(Protocol[Payload]):
    """Disk work done elsewhere."""

    def fetch(self, prepared: Prepared, hot_blocks: int, hot_tokens: int) -> None:
        """Ask for what the disk holds of a prompt beyond what is hot; answered by a message, always."""
        ...

    def store(self, block: Block[Payload]) -> None:
        """Ask for a block to be made durable; answered by a message if it was. May refuse silently when busy."""
        ...

    def is_storing(self, key: BlockKey) -> bool: ...


class PrefixCache(Generic[Payload]):
    """`reuse_off_reason` non-empty: this model's cache cannot be cut, so nothing is ever kept or found."""

    def __init__(
        self, index: PrefixIndex[Payload], cold: ColdTier[Payload], policy: PersistPolicy, *, reuse_off_reason: str = ""
    ) -> None:
        self._index = index
        self._cold = cold
        self._policy: PersistPolicy = policy
        self._is_on = not reuse_off_reason
        self.misses: Counter[str] = Counter()

    @property
    def size_bytes(self) -> int:
        return self._index.size_bytes

    @property
    def block_count(self) -> int:
        return len(self._index)

    def prefetch(self, prepared: Prepared) -> bool:
        """Ask the disk for what RAM lacks of this prompt. False when there is nothing to wait for."""
        if not self._is_on or self._policy == "off":
            return False
        hot = self._match(prepared)
        reachable = len(prepared.grains) * GRAIN_TOKENS
        if hot.tokens >= min(reachable, len(prepared.token_ids) - 1):
            return False
        self._cold.fetch(prepared, hot.whole_blocks, hot.tokens)
        return True

    def fetched(self, blocks: Sequence[Block[Payload]]) -> None:
        """Blocks came from disk, in order. Those whose parent is gone again are dropped: a miss."""
        for block in blocks:
            self._index.insert(block)

    def missed(self, reason: str) -> None:
        """Count why blocks that might have been used were not."""
        self.misses[reason] += 1

    def use(self, prepared: Prepared) -> Match[Payload]:
        """The hot prefix of this prompt, at most all but its last token; counted as a touch. See `used`."""
        if not self._is_on:
            return Match(())
        match = self._match(prepared)
        self._index.touch(match)
        return match

    def used(self, touched: Sequence[BlockKey]) -> None:
        """The request that touched these blocks is over: they have been used twice now, and go to disk.

        Not earlier, since writing beside somebody's first token would delay it.
        """
        if self._policy != "second-touch":
            return
        for key in touched:
            if block := self._index.get(key):
                self._store(block)

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

    def became_durable(self, key: BlockKey) -> None:
        if block := self._index.get(key):
            block.is_durable = True

    def store_everything(self) -> int:
        """The model leaves memory: send all that is not on disk there, parents first. Returns how many blocks."""
        if not self._is_on or self._policy == "off":
            return 0
        return sum(self._store(block) for block in self._index.blocks())

    def check(self) -> None:
        self._index.check()

    def _match(self, prepared: Prepared) -> Match[Payload]:
        self._index.open_root(prepared.root.digest)
        return self._index.match(prepared.root.digest, prepared.token_ids, len(prepared.token_ids) - 1)

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
        chain = grains(prepared.root.secret, parent, token_ids)
        key = block_key(prepared.root.secret, parent, chain, token_ids)
        if self._index.holds(parent, token_ids):
            return key
        payload, size_bytes = cut(start, start + len(token_ids))
        block = Block(
            key=key,
            parent=parent,
            start=start,
            token_ids=token_ids,
            grains=chain,
            payload=payload,
            size_bytes=size_bytes,
        )
        self._index.insert(block)
        if key not in self._index:
            return None
        if self._policy == "through":
            self._store(block)
        return key

    def _store(self, block: Block[Payload]) -> bool:
        if block.is_durable or not block.grains or self._cold.is_storing(block.key):
            return False
        self._cold.store(block)
        return True
