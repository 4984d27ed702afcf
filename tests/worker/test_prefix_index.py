"""The hot tier's index: token-exact matches, a budget that holds, parents that outlive their children."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.ids import BLOCK_TOKENS, BlockKey
from tests.worker.parts import FINGERPRINT, chain_of_blocks
from worker import hashing
from worker.prefix_index import Block, PrefixIndex, State
from worker.sequence import BooksDoNotAddUp

Index = PrefixIndex[tuple[int, ...]]
ROOT = hashing.root(FINGERPRINT, b"").digest


def tokens(count: int, first: int = 0) -> list[int]:
    return [first] * min(count, 1) + list(range(1, count))


def index_of(*token_lists: list[int], budget_bytes: int = 10**9) -> Index:
    index: Index = PrefixIndex(budget_bytes)
    index.open_root(ROOT)
    for token_ids in token_lists:
        for block in chain_of_blocks(token_ids):
            index.insert(block)
    return index


@pytest.mark.parametrize(
    ("kept", "asked", "limit", "found"),
    [
        (0, 10, 10, 0),
        (1, 1, 0, 0),
        (1, 2, 1, 1),
        (100, 300, 299, 100),
        (255, 256, 255, 255),
        (256, 256, 255, 255),
        (256, 257, 256, 256),
        (257, 513, 512, 257),
        (600, 600, 599, 599),
        (600, 100, 99, 99),
        (513, 512, 511, 511),
    ],
)
def test_matches_token_by_token(kept: int, asked: int, limit: int, found: int) -> None:
    """K01: whatever the block size, reuse reaches to the last common token, and never beyond the limit."""
    assert index_of(tokens(kept)).match(ROOT, tokens(asked), limit).tokens == found


def test_the_best_of_several_children_is_used() -> None:
    """Two tails below one block: the one that agrees longest."""
    base = tokens(BLOCK_TOKENS)
    index = index_of([*base, 7, 8, 9, 10], [*base, 7, 8, 5])

    match = index.match(ROOT, [*base, 7, 8, 5, 6], BLOCK_TOKENS + 4)

    assert match.tokens == BLOCK_TOKENS + 3
    assert match.whole_blocks == 1


def test_roots_do_not_meet() -> None:
    """S04: what hangs below one scope's root is not found below another's."""
    index = index_of(tokens(300))
    other = hashing.root(FINGERPRINT, b"other").digest
    index.open_root(other)

    assert index.match(other, tokens(300), 299).tokens == 0


def test_a_growing_tail_is_kept_once() -> None:
    """A conversation's next turn replaces its own tail, and inherits how often that was used."""
    index = index_of(tokens(20))
    index.touch(index.match(ROOT, tokens(20), 19))
    (grown,) = chain_of_blocks(tokens(50))
    index.insert(grown)

    assert len(index) == 1
    assert index.match(ROOT, tokens(60), 59).tokens == 50
    assert grown.touches == 1


def test_a_shorter_copy_is_not_kept_beside_a_longer_one() -> None:
    """The same question asked again: its own tail is the beginning of one that holds the answer too."""
    index = index_of(tokens(50), tokens(20))

    assert len(index) == 1
    assert index.match(ROOT, tokens(60), 59).tokens == 50


def test_the_disk_learns_which_tail_is_superseded_by_its_name_there() -> None:
    """A tail on disk holds whole grains only, so its name there is its last grain and not its key in RAM."""
    (short,), (middle,), (long,) = (chain_of_blocks(tokens(count)) for count in (20, 39, 60))
    short.is_durable = True
    index = index_of()
    index.insert(short)
    index.insert(middle)
    assert middle.supersedes == short.grains[-1]

    index.insert(long)

    assert long.supersedes == short.grains[-1]  # `middle` never got to the disk: there, `short` is what `long` contains


def test_a_block_that_adds_no_grain_to_a_durable_tail_is_durable() -> None:
    """Nothing new could be written; to write the same file again would supersede it by itself."""
    (short,), (grown,) = (chain_of_blocks(tokens(count)) for count in (20, 25))
    short.is_durable = True
    index = index_of()
    index.insert(short)
    index.insert(grown)

    assert grown.is_durable
    assert grown.supersedes is None


def test_the_least_recently_used_leaf_goes_first() -> None:
    """Not its parent, although nobody asked for the parent since."""
    index = index_of(tokens(300), tokens(100, first=9), budget_bytes=10 * 400)
    index.touch(index.match(ROOT, tokens(100, first=9), 99))

    (evicted,) = index.insert(chain_of_blocks(tokens(40, first=8))[0])

    assert evicted.start == BLOCK_TOKENS
    assert index.match(ROOT, tokens(300), 299).tokens == BLOCK_TOKENS


def test_what_does_not_fit_or_hang_changes_nothing() -> None:
    """A block over the whole budget, a known key, a child whose parent is gone."""
    first, second = chain_of_blocks(tokens(300))
    index: Index = PrefixIndex(10 * BLOCK_TOKENS - 1)
    index.open_root(ROOT)

    assert index.insert(first) == index.insert(second) == []
    assert len(index) == 0

    index.set_budget(10 * 300)
    index.insert(first)
    index.insert(chain_of_blocks(tokens(BLOCK_TOKENS))[0])
    assert len(index) == 1


def test_removing_takes_what_hangs_below() -> None:
    """A doubtful block takes its descendants with it."""
    index = index_of(tokens(700))
    first = chain_of_blocks(tokens(700))[0]

    index.remove(first.key)
    index.remove(first.key)

    assert len(index) == 0
    assert index.size_bytes == 0
    index.check()


def test_broken_books_are_noticed() -> None:
    """`check` is what tells a bug of ours from a full cache."""
    index = index_of(tokens(300))
    index._size_bytes += 1

    with pytest.raises(BooksDoNotAddUp, match="sizes"):
        index.check()


class IndexMachine(RuleBasedStateMachine):
    """Against a model that knows only token lists: what was kept and is still there must be found, token by token."""

    @initialize(budget_tokens=st.integers(1, 1500))
    def start(self, budget_tokens: int) -> None:
        self.index: Index = PrefixIndex(budget_tokens * 10)
        self.index.open_root(ROOT)
        self.asked: list[list[int]] = []

    def _check_evicted(self, evicted: list[Block[tuple[int, ...]]]) -> None:
        for block in evicted:
            assert not block.children, "a parent went before its child"
            assert block.key not in self.index

    # Few different first tokens and long shared runs: collisions, shared prefixes and forks all happen.
    @rule(
        fork=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200)), min_size=1, max_size=5),
        start_block=st.integers(0, 3),
    )
    def keep(self, fork: list[tuple[int, int]], start_block: int) -> None:
        token_ids = [token for token, count in fork for _ in range(count)]
        for block in chain_of_blocks(token_ids)[start_block:]:
            self._check_evicted(self.index.insert(block))
        self.asked.append(token_ids)

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        if not self.asked:
            return
        token_ids = data.draw(st.sampled_from(self.asked))
        match = self.index.match(ROOT, token_ids, len(token_ids))
        joined = [token for use in match.uses for token in use.block.token_ids[: use.tokens]]
        assert joined == token_ids[: len(joined)], "found KV of other tokens"
        assert match.tokens == self._longest(token_ids)
        assert all(use.tokens == BLOCK_TOKENS for use in match.uses[:-1])
        self.index.touch(match)

    @rule(budget_tokens=st.integers(0, 1500))
    def set_budget(self, budget_tokens: int) -> None:
        self._check_evicted(self.index.set_budget(budget_tokens * 10))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if len(self.index):
            self.index.remove(data.draw(st.sampled_from([block.key for block in self.index.blocks()])))

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        assert self.index.size_bytes <= self.index.budget_bytes
        seen: set[BlockKey] = {ROOT}
        for block in self.index.blocks():
            assert block.parent in seen, "a child is listed before its parent"
            seen.add(block.key)

    def _longest(self, token_ids: list[int]) -> int:
        """Longest common prefix with any chain of blocks that is there, the slow way."""
        by_key = {block.key: block for block in self.index.blocks()}
        best = 0
        for block in by_key.values():
            chain = list(block.token_ids)
            above = block
            while above.parent != ROOT:
                above = by_key[above.parent]
                chain = [*above.token_ids, *chain]
            common = next((i for i, (a, b) in enumerate(zip(chain, token_ids, strict=False)) if a != b), None)
            best = max(best, min(len(chain), len(token_ids)) if common is None else common)
        return best


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
test_against_a_naive_model = IndexMachine.TestCase


# --- states: caches that cannot be cut at a token ---------------------------------------------------------------------


def stateful_index(*kept: tuple[list[int], list[int]], budget_bytes: int = 10**9) -> Index:
    """Chains with a state after each of these positions."""
    index: Index = PrefixIndex(budget_bytes, "states")
    index.open_root(ROOT)
    for token_ids, positions in kept:
        for block in chain_of_blocks(token_ids):
            index.insert(block)
        for position in positions:
            keep_state(index, token_ids, position)
    return index


def keep_state(index: Index, token_ids: list[int], position: int) -> None:
    start = (position - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    parent = chain_of_blocks(token_ids[:start])[-1].key if start else ROOT
    index.attach(parent, tuple(token_ids[start:position]), State(tuple(token_ids[:position]), 5))


@pytest.mark.parametrize(
    ("positions", "asked", "limit", "found"),
    [
        ([], 600, 599, 0),
        ([300], 600, 599, 300),
        ([300], 300, 299, 0),
        ([256], 300, 299, 256),
        ([256, 512], 600, 599, 512),
        ([256, 512], 400, 399, 256),
        ([16, 512], 300, 299, 16),
        ([512, 599], 600, 599, 599),
    ],
)
def test_reuse_reaches_to_the_deepest_state(positions: list[int], asked: int, limit: int, found: int) -> None:
    """K03: never beyond a token after which every layer is whole; what is known beyond is told."""
    match = stateful_index((tokens(600), positions)).match(ROOT, tokens(asked), limit)

    assert match.tokens == found
    assert match.known_tokens == limit
    if found:
        last = match.uses[-1]
        assert last.block.states[last.tokens].payload == tuple(tokens(600)[:found])


def test_a_sibling_with_a_deeper_state_is_taken() -> None:
    """The child that agrees longest is not the best one when it has no state."""
    base = tokens(BLOCK_TOKENS)
    longer, shorter = [*base, *range(900, 1000)], [*base, *range(900, 940)]
    index = stateful_index((longer, []), ([*shorter, 5, 5], []))
    keep_state(index, [*shorter, 5, 5], BLOCK_TOKENS + 40)

    assert index.match(ROOT, [*longer, 1], len(longer)).tokens == BLOCK_TOKENS + 40


def test_a_longer_block_takes_over_the_states_of_the_tail_it_replaces() -> None:
    """And its bytes: the books stay exact."""
    index = stateful_index((tokens(100), [96, 100]))
    for block in chain_of_blocks(tokens(300)):
        index.insert(block)

    assert index.match(ROOT, [*tokens(100), 7], 100).tokens == 100
    assert index.size_bytes == 300 * 10 + 2 * 5
    index.check()


def test_states_of_a_block_that_is_hot_already_are_added_to_it() -> None:
    """What comes from disk may know a state that RAM does not."""
    index = stateful_index((tokens(300), []))
    (again, _) = chain_of_blocks(tokens(300))
    again.states[64] = State((1,), 5)
    index.insert(again)

    assert index.match(ROOT, tokens(300), 299).tokens == 64
    index.check()


def test_a_state_for_a_block_on_disk_gets_a_block_of_its_own() -> None:
    """K03: what is on disk is not written again, so the state of another prompt must come in that prompt's block."""
    index = stateful_index((tokens(256), [256]))
    index.blocks()[0].is_durable = True
    other = [*tokens(240), *range(900, 930)]
    assert index.wants_own_block(ROOT, tuple(other[:240]))

    (own,) = chain_of_blocks(other[:240])
    own.states[240] = State(tuple(other[:240]), 5)
    index.insert(own)
    for block in chain_of_blocks(other):
        index.insert(block)

    holder = index.match(ROOT, other, 241).uses[-1].block
    assert holder.token_ids == tuple(other[:256])
    assert not holder.is_durable
    index.check()


forks = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=1, max_size=6)


class StatefulIndexMachine(RuleBasedStateMachine):
    """What rows keep and what the disk gives, in any order: the books add up, and a match ends at the state after just
    the tokens that were asked for."""

    @initialize(budget_tokens=st.integers(50, 1500))
    def start(self, budget_tokens: int) -> None:
        self.index: Index = PrefixIndex(budget_tokens * 10, "states")
        self.index.open_root(ROOT)
        self.asked: list[list[int]] = []

    @rule(fork=forks, positions=st.lists(st.integers(1, 540), max_size=3))
    def keep(self, fork: list[tuple[int, int]], positions: list[int]) -> None:
        """As the prefix cache does: blocks, then states, in blocks of their own where those could not be written."""
        token_ids = [token for token, count in fork for _ in range(count)]
        for block in chain_of_blocks(token_ids):
            self.index.insert(block)
        for position in sorted(positions):
            if position > len(token_ids):
                continue
            start = (position - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            own = chain_of_blocks(token_ids[:position])[-1]
            state = State(tuple(token_ids[:position]), 5)
            if self.index.wants_own_block(own.parent, tuple(token_ids[start:position])):
                own.states[position - start] = state
                self.index.insert(own)
            else:
                self.index.attach(own.parent, tuple(token_ids[start:position]), state)
        self.asked.append(token_ids)

    @rule(
        data=st.data(), grains=st.sampled_from([2, 5, 16, 18, 34]), with_states=st.lists(st.integers(1, 16), max_size=2)
    )
    def read(self, data: st.DataObject, grains: int, with_states: list[int]) -> None:
        """From disk: durable, cut to grains, with whatever states are in the file; perhaps not for the first time."""
        if not self.asked:
            return
        token_ids = data.draw(st.sampled_from(self.asked))[: grains * 16]
        token_ids = token_ids[: len(token_ids) // 16 * 16]
        for block in chain_of_blocks(token_ids):
            block.is_durable = True
            for position in (grain * 16 for grain in with_states):
                if position <= len(block.token_ids):
                    block.states[position] = State(tuple(token_ids[: block.start + position]), 5)
            self.index.insert(block)

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        if len(self.index):
            data.draw(st.sampled_from(self.index.blocks())).is_durable = True

    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=3))
    def use(self, data: st.DataObject, more: list[int]) -> None:
        if not self.asked:
            return
        token_ids = [*data.draw(st.sampled_from(self.asked)), *more]
        match = self.index.match(ROOT, token_ids, len(token_ids))
        joined = [token for use in match.uses for token in use.block.token_ids[: use.tokens]]
        assert joined == token_ids[: match.tokens]
        assert all(use.tokens == BLOCK_TOKENS for use in match.uses[:-1])
        if match.uses:
            last = match.uses[-1]
            assert last.block.states[last.tokens].payload == tuple(token_ids[: match.tokens])
        self.index.touch(match)

    @rule(budget_tokens=st.integers(0, 1500))
    def set_budget(self, budget_tokens: int) -> None:
        self.index.set_budget(budget_tokens * 10)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            assert self.index.size_bytes <= self.index.budget_bytes


StatefulIndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
test_states_against_their_tokens = StatefulIndexMachine.TestCase


@pytest.mark.parametrize("seed", range(16))
def test_a_block_that_is_there_already_is_counted_once(seed: int) -> None:
    """Also when a longer one beside it, which is on disk, contains its tokens: whichever of the two is found first."""
    token_ids = tokens(64, first=seed)
    index = stateful_index((token_ids, []))
    index.blocks()[0].is_durable = True
    for position in (16, 48):
        (part,) = chain_of_blocks(token_ids[:48])
        part.states[position] = State((position,), 5)
        index.insert(part)

    index.check()
    assert index.size_bytes == 64 * 10 + 48 * 10 + 2 * 5
    assert [index.match(ROOT, token_ids, limit).tokens for limit in (47, 48)] == [16, 48]


def test_the_pinned_stay() -> None:
    """Whatever is asked for after them; unpinned they age like any other."""
    index = index_of(tokens(300), budget_bytes=6000)
    for block in index.blocks():
        block.pinned_by.add(("ada", "repo"))
    for first in range(1, 5):
        for block in chain_of_blocks(tokens(300, first)):
            index.insert(block)
    assert index.match(ROOT, tokens(300), 299).tokens == 299

    index.unpin(("ada", "repo"))
    for first in range(5, 9):
        for block in chain_of_blocks(tokens(300, first)):
            index.insert(block)
    assert index.match(ROOT, tokens(300), 299).tokens == 0
    index.check()


@pytest.mark.parametrize(
    ("asked", "touched"),
    [
        ([*tokens(300), 7, 8], 0),  # the next turn of the same conversation
        (tokens(300), 2),  # the same again
        ([*tokens(280), 9, 9], 2),  # another ending
        ([*tokens(256), 9, 9], 1),  # another ending, where the tail is not shared
        ([*tokens(260), 9, 9], 1),  # only the first words of the tail are shared
    ],
)
def test_what_counts_as_shared(asked: list[int], touched: int) -> None:
    """A conversation that goes on shares nothing with anybody but itself."""
    match = index_of(tokens(300)).match(ROOT, asked, len(asked) - 1)

    assert len(match.touched) == touched


def test_a_turn_asked_again_is_no_sharing() -> None:
    """A retry late in a conversation must not write the whole conversation; another question on its prefix does."""
    index = index_of(tokens(300))
    going_on = index.match(ROOT, tokens(400), 399)
    assert going_on.parting == "extends"
    index.touch(going_on)
    for block in chain_of_blocks(tokens(400)):
        index.insert(block)

    again = index.match(ROOT, tokens(400), 399)
    other = index.match(ROOT, [*tokens(390), 7, 7], 391)

    assert (again.parting, again.touched) == ("repeats", ())
    assert other.parting == "branches"
    assert len(other.touched) == 2
