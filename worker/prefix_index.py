"""Which KV blocks are hot: match, insert, evict by bytes. Knows tokens, never what a payload is.

A tree: every block hangs below the block before it (or below a root, one per scope). Whole blocks hold BLOCK_TOKENS
tokens; a tail holds fewer and has no children. A prompt is matched block by block and then, inside the last block,
token by token, so reuse in RAM is token-exact whatever the block size.

Some layers (windows, recurrent state) cannot be cut at a token. Their models keep *states* inside blocks: the whole
state of such layers after a certain token. Reuse then goes to the deepest token at which there is one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from protocol.ids import BLOCK_TOKENS, BlockKey, Grain
from worker.sequence import BooksDoNotAddUp

Payload = TypeVar("Payload")


Boundary = Literal["any_token", "states"]
"""Where a model's cache can be taken up again: after any token, or only where a state was kept."""


Parting = Literal["extends", "repeats", "branches"]


class State(NamedTuple, Generic[Payload]):
    """What the layers that cannot be cut hold after one token."""

    payload: Payload
    size_bytes: int


@dataclass(eq=False)
class Block(Generic[Payload]):
    """One run of tokens with its KV. `key` is unique to (root, all tokens up to its end).

    `start` is the position of its first token; a block at 0 has a root as its parent.
    `grains` are the digests of its complete runs of GRAIN_TOKENS tokens. `is_durable`: the same tokens are on disk.
    `supersedes` names a durable shorter tail that this block contains, by its key on disk: its last grain.
    `states` maps how many of its tokens a state comes after to that state. `owner` is who may have it forgotten,
    `is_storable` whether anybody who used it lets it go to disk, for `ttl_seconds` at most when unused there.
    `is_extended`: a conversation went on from it. `is_wanted_on_disk`: it, or what is below it, was worth writing.
    `not_written` is why it was not, the last time it was to be. `pinned_by` are the (owner, name) pairs that keep it
    from eviction.
    """

    key: BlockKey
    parent: BlockKey
    start: int
    token_ids: tuple[int, ...]
    grains: tuple[Grain, ...]
    payload: Payload
    kv_bytes: int
    states: dict[int, State[Payload]] = field(default_factory=dict[int, State[Payload]])
    owner: str = ""
    ttl_seconds: float | None = None
    is_storable: bool = True
    is_durable: bool = False
    is_extended: bool = False
    is_wanted_on_disk: bool = False
    not_written: Literal["", "disk_slower", "staging_full"] = ""
    supersedes: BlockKey | None = None
    touches: int = 0
    children: set[BlockKey] = field(default_factory=set[BlockKey])
    pinned_by: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    @property
    def size_bytes(self) -> int:
        return self.kv_bytes + sum(state.size_bytes for state in self.states.values())

    @property
    def is_whole(self) -> bool:
        return len(self.token_ids) == BLOCK_TOKENS


class BlockParts(NamedTuple, Generic[Payload]):
    """What a block file holds."""

    payload: Payload
    kv_bytes: int
    states: dict[int, State[Payload]]


class BlockUse(NamedTuple, Generic[Payload]):
    """A block and how many of its tokens match, counted from its start."""

    block: Block[Payload]
    tokens: int


class Match(NamedTuple, Generic[Payload]):
    """The longest usable prefix. All uses are of whole blocks, except perhaps the last.

    `known_tokens` is how far the tokens themselves are known; more than `tokens` where no state was kept there.
    `parting` says how the prompt goes on from there: it `extends` the chain beyond all that is known of it, as the
    next turn of a conversation does; it `repeats` a prompt word for word; or it `branches` off with other words.
    """

    uses: tuple[BlockUse[Payload], ...]
    known_tokens: int = 0
    parting: Parting = "branches"

    @property
    def tokens(self) -> int:
        return sum(use.tokens for use in self.uses)

    @property
    def touched(self) -> tuple[BlockKey, ...]:
        """The blocks that were really shared: not those of a conversation that goes on or asks its last turn again,
        nor a tail of which only the first words are used."""
        if self.parting == "extends":
            return ()
        if self.parting == "repeats" and any(use.block.is_extended for use in self.uses):
            return ()
        return tuple(use.block.key for use in self.uses if use.tokens * 2 >= len(use.block.token_ids))

    @property
    def whole_blocks(self) -> int:
        return sum(use.tokens == BLOCK_TOKENS for use in self.uses)


class PrefixIndex(Generic[Payload]):
    """Owned by the step thread. Every method leaves `size_bytes <= budget_bytes`, but for what is pinned."""

    def __init__(self, budget_bytes: int, boundary: Boundary = "any_token") -> None:
        self._budget_bytes = budget_bytes
        self._boundary: Boundary = boundary
        self._size_bytes = 0
        # Least recently used first. A touch moves a chain's deepest block first and its first block last, so a parent
        # is always more recent than its children and eviction from the front never orphans a child.
        self._blocks: OrderedDict[BlockKey, Block[Payload]] = OrderedDict()
        self._roots: dict[BlockKey, set[BlockKey]] = {}

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def boundary(self) -> Boundary:
        return self._boundary

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def get(self, key: BlockKey) -> Block[Payload] | None:
        return self._blocks.get(key)

    def blocks(self) -> list[Block[Payload]]:
        """All blocks, most recently used first: parents before their children."""
        return list(reversed(self._blocks.values()))

    def match(self, root: BlockKey, token_ids: Sequence[int], limit: int) -> Match[Payload]:
        """The longest prefix of `token_ids[:limit]` that is hot. Changes nothing; see `touch`."""
        uses: list[BlockUse[Payload]] = []
        parent, start = root, 0
        while start < limit:
            best = self._best_child(parent, token_ids, start, limit)
            if best is None:
                break
            uses.append(best)
            if best.tokens < BLOCK_TOKENS:
                break
            parent, start = best.block.key, start + BLOCK_TOKENS
        known = sum(use.tokens for use in uses)
        at_end = bool(uses) and uses[-1].tokens == len(uses[-1].block.token_ids) and not uses[-1].block.children
        if self._boundary == "states":
            uses = self._up_to_a_state(root, uses, token_ids, limit)
        return Match(tuple(uses), known, "repeats" if known == limit else "extends" if at_end else "branches")

    def touch(self, match: Match[Payload]) -> None:
        """Record that a prompt used these blocks."""
        for use in reversed(match.uses):
            use.block.touches += 1
            use.block.is_extended |= match.parting == "extends"
            self._blocks.move_to_end(use.block.key)

    def insert(self, block: Block[Payload]) -> list[Block[Payload]]:
        """Add a block below its parent, which must be a root or hot. Returns the blocks evicted to make room.

        A tail that this block continues is dropped (its touches are inherited), so a growing turn keeps one tail.
        Of a block that a hot one contains only the states are taken; but when that one is on disk already, without
        them, a block with states is kept beside it, so that they can go to disk too.
        A missing parent and a block larger than the whole budget change nothing.
        """
        siblings = self._siblings(block.parent)
        if siblings is None or block.size_bytes > self._budget_bytes:
            return []
        if (known := self._blocks.get(block.key)) is not None:
            self._add_states(known, block.states)
            return self.shrink()
        holder = self._holder(block.parent, block.token_ids)
        if holder is not None and not (block.states and holder.is_durable):
            self._add_states(holder, block.states)
            return self.shrink()
        for key in list(siblings):
            sibling = self._blocks[key]
            shorter = len(sibling.token_ids)
            if shorter < len(block.token_ids) and sibling.token_ids == block.token_ids[:shorter]:
                _inherit(block, sibling)
                self._remove(sibling)
        self._blocks[block.key] = block
        siblings.add(block.key)
        self._size_bytes += block.size_bytes
        self._refresh_ancestors(block)
        return self.shrink()

    def holds(self, parent: BlockKey, token_ids: tuple[int, ...]) -> bool:
        """Whether a block below `parent` begins with these tokens."""
        return self._holder(parent, token_ids) is not None

    def attach(self, parent: BlockKey, token_ids: tuple[int, ...], state: State[Payload]) -> list[Block[Payload]]:
        """Keep the state after `token_ids`, the first tokens of a block below `parent`. Returns the blocks evicted.

        Nothing happens when no hot block holds these tokens, or when it has a state there.
        """
        if holder := self._holder(parent, token_ids):
            self._add_states(holder, {len(token_ids): state})
        return self.shrink()

    def wants_own_block(self, parent: BlockKey, token_ids: tuple[int, ...]) -> bool:
        """Whether a state after these tokens could not reach the disk with the block that holds them."""
        holder = self._holder(parent, token_ids)
        is_short = holder is not None and len(token_ids) < len(holder.token_ids)
        return is_short and holder is not None and holder.is_durable and len(token_ids) not in holder.states

    def unpin(self, pin: tuple[str, str]) -> list[Block[Payload]]:
        """Let the blocks of a pin age again. Returns the blocks evicted."""
        for block in self._blocks.values():
            block.pinned_by.discard(pin)
        return self.shrink()

    def open_root(self, root: BlockKey) -> None:
        """Make a root known. Idempotent."""
        self._roots.setdefault(root, set())

    def set_budget(self, budget_bytes: int) -> list[Block[Payload]]:
        """Change the budget now. Returns the blocks evicted."""
        self._budget_bytes = budget_bytes
        return self.shrink()

    def shrink(self) -> list[Block[Payload]]:
        """Evict least recently used leaves until the budget holds. Returns them."""
        evicted: list[Block[Payload]] = []
        while self._size_bytes > self._budget_bytes:
            leaves = (block for block in self._blocks.values() if not block.children and not block.pinned_by)
            leaf = next(leaves, None)
            if leaf is None:
                break
            self._remove(leaf)
            evicted.append(leaf)
        return evicted

    def remove(self, key: BlockKey) -> None:
        """Drop a block with everything below it. An unknown key is fine."""
        block = self._blocks.get(key)
        if block is None:
            return
        for child in list(block.children):
            self.remove(child)
        self._remove(block)

    def check(self) -> None:
        """Raise BooksDoNotAddUp if an invariant is broken. For tests, and when idle."""
        if self._size_bytes != sum(block.size_bytes for block in self._blocks.values()):
            raise BooksDoNotAddUp("the sizes of the blocks are not the size of the index")
        for key, block in self._blocks.items():
            siblings = self._siblings(block.parent)
            if siblings is None or key not in siblings:
                raise BooksDoNotAddUp("a block's parent is neither hot nor a root")
            if block.children and not block.is_whole:
                raise BooksDoNotAddUp("a tail has children")
            if not block.children <= self._blocks.keys():
                raise BooksDoNotAddUp("a block lists a child that is gone")

    def _holder(self, parent: BlockKey, token_ids: tuple[int, ...]) -> Block[Payload] | None:
        """A block below `parent` that begins with these tokens."""
        siblings = (self._blocks[key] for key in self._siblings(parent) or ())
        return next((block for block in siblings if block.token_ids[: len(token_ids)] == token_ids), None)

    def _add_states(self, block: Block[Payload], states: dict[int, State[Payload]]) -> None:
        for tokens, state in states.items():
            if tokens not in block.states:
                block.states[tokens] = state
                self._size_bytes += state.size_bytes

    def _up_to_a_state(
        self, root: BlockKey, uses: list[BlockUse[Payload]], token_ids: Sequence[int], limit: int
    ) -> list[BlockUse[Payload]]:
        """Cut a match back to the deepest token after which there is a state; the last block may be a sibling."""
        for depth in range(len(uses), 0, -1):
            parent = uses[depth - 2].block.key if depth > 1 else root
            start = (depth - 1) * BLOCK_TOKENS
            best: BlockUse[Payload] | None = None
            for key in self._siblings(parent) or ():
                block = self._blocks[key]
                common = _common_tokens(block.token_ids, token_ids, start, limit)
                deepest = max((tokens for tokens in block.states if tokens <= common), default=0)
                if deepest and (best is None or deepest > best.tokens):
                    best = BlockUse(block, deepest)
            if best is not None:
                return [*uses[: depth - 1], best]
        return []

    def _siblings(self, parent: BlockKey) -> set[BlockKey] | None:
        if parent in self._roots:
            return self._roots[parent]
        block = self._blocks.get(parent)
        return block.children if block is not None and block.is_whole else None

    def _best_child(
        self, parent: BlockKey, token_ids: Sequence[int], start: int, limit: int
    ) -> BlockUse[Payload] | None:
        best: BlockUse[Payload] | None = None
        for key in self._siblings(parent) or ():
            block = self._blocks[key]
            common = _common_tokens(block.token_ids, token_ids, start, limit)
            if common and (best is None or common > best.tokens):
                best = BlockUse(block, common)
        return best

    def _refresh_ancestors(self, block: Block[Payload]) -> None:
        ancestor: Block[Payload] | None = block
        while ancestor is not None:
            self._blocks.move_to_end(ancestor.key)
            ancestor = self._blocks.get(ancestor.parent)

    def _remove(self, block: Block[Payload]) -> None:
        del self._blocks[block.key]
        self._size_bytes -= block.size_bytes
        siblings = self._siblings(block.parent)
        if siblings is not None:
            siblings.discard(block.key)


def _inherit(block: Block[Payload], tail: Block[Payload]) -> None:
    """`block` takes the place of `tail`, which it contains. On disk a tail is known by its last grain."""
    block.states = {**tail.states, **block.states}
    block.pinned_by |= tail.pinned_by
    block.touches = max(block.touches, tail.touches)
    block.is_extended |= tail.is_extended
    on_disk = BlockKey(tail.grains[-1]) if tail.is_durable and tail.grains else tail.supersedes
    if on_disk is not None and block.grains and on_disk == block.grains[-1]:
        block.is_durable = True
    else:
        block.supersedes = on_disk


def _common_tokens(block_ids: tuple[int, ...], token_ids: Sequence[int], start: int, limit: int) -> int:
    length = min(len(block_ids), limit - start)
    if length <= 0 or block_ids[0] != token_ids[start]:
        return 0
    if tuple(token_ids[start : start + length]) == block_ids[:length]:
        return length
    return next(i for i in range(length) if block_ids[i] != token_ids[start + i])
