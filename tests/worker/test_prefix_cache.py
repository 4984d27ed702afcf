"""The prefix cache: what is kept, found, and sent to the disk."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.generation import Pin
from protocol.ids import BLOCK_TOKENS, BlockKey, RequestId
from protocol.launch import PersistPolicy
from tests.worker.parts import chain_of_blocks, prepared
from worker.cost_model import PrefillCost
from worker.prefix_cache import Fetch as PrefixFetch
from worker.prefix_cache import FetchOutcome, PrefixCache
from worker.prefix_index import Block, Boundary, PrefixIndex, State
from worker.sequence import Prepared

Kv = tuple[int, ...]
PREFILL = PrefillCost(fixed=0.0, token=0.01, attention=0.0)
"""A hundred tokens a second."""


class RecordingDisk:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.fetches: list[tuple[str, int, int]] = []
        self.stored: list[Block[Kv]] = []

        self.pinned: list[tuple[str, str]] = []
        self.read_bytes_per_second = 1e9

    def fetch(self, fetch: PrefixFetch[Kv]) -> None:
        self.fetches.append((fetch.prepared.request_id, fetch.hot_blocks, fetch.hot_tokens))

    def store(self, block: Block[Kv]) -> bool:
        self.stored.append(block)
        return True

    def pin(self, keys: Sequence[BlockKey], owner: str, pin: Pin) -> None:
        self.pinned.append((owner, pin.name))

    def unpin(self, owner: str, name: str) -> None:
        self.pinned = [pin for pin in self.pinned if pin != (owner, name)]

    def is_storing(self, key: BlockKey) -> bool:
        return any(block.key == key for block in self.stored)

    def forget(self, owner: str | None) -> None:
        self.stored = [block for block in self.stored if owner is not None and block.owner != owner]


class Kit:
    """A cache, its disk, and a row that `keep` cuts from."""

    def __init__(
        self,
        policy: PersistPolicy = "second-touch",
        *,
        budget_tokens: int = 10_000,
        off: str = "",
        boundary: Boundary = "any_token",
    ) -> None:
        self.disk = RecordingDisk()
        self.index: PrefixIndex[Kv] = PrefixIndex(budget_tokens * 10, boundary)
        self.cache: PrefixCache[Kv] = PrefixCache(self.index, self.disk, policy, reuse_off_reason=off)
        self.cuts: list[tuple[int, int]] = []

    def keep(self, request: Prepared, token_ids: Sequence[int], start: int, end: int) -> int:
        def cut(a: int, b: int) -> tuple[Kv, int]:
            self.cuts.append((a, b))
            return tuple(token_ids[a:b]), (b - a) * 10

        return self.cache.keep(request, token_ids, start, cut, end=end)

    def ask(self, token_ids: Sequence[int], *, scope: bytes = b"") -> int:
        """Use and keep one prompt, as a row does; returns how many tokens were hot."""
        request = prepared("r", token_ids, scope=scope)
        match, _ = self.cache.use(request)
        self.keep(request, token_ids, match.whole_blocks * BLOCK_TOKENS, len(token_ids))
        self.cache.request_over(request, token_ids, match.touched)
        return match.tokens


def tokens(count: int, first: int = 0) -> list[int]:
    return [first, *range(1, count)]


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 255, 256, 257, 511, 512, 513, 700])
def test_the_same_prompt_again(count: int) -> None:
    """K01: all but the last token is hot, since one must be computed to say anything."""
    kit = Kit()

    assert kit.ask(tokens(count)) == 0
    assert kit.ask(tokens(count)) == count - 1
    assert kit.ask(tokens(count)) == count - 1


@pytest.mark.parametrize("policy", ["second-touch", "through", "off"])
def test_the_next_turn_reuses_all_of_this_one(policy: PersistPolicy) -> None:
    """Token by token, whatever the disk does."""
    kit = Kit(policy)
    kit.ask(tokens(613))

    assert kit.ask([*tokens(613), *range(40)]) == 613


def test_what_is_hot_is_not_cut_again() -> None:
    """Cutting copies KV."""
    kit = Kit()
    kit.ask(tokens(600))
    assert kit.cuts == [(0, 256), (256, 512), (512, 600)]

    kit.cuts.clear()
    kit.ask(tokens(600))
    kit.ask(tokens(550))

    assert kit.cuts == []


def test_a_row_keeps_what_it_generated() -> None:
    """The chain goes on through the answer, where the prompt's digests end."""
    kit = Kit()
    request = prepared("r", tokens(500))
    row = [*tokens(500), *range(1000, 1100)]

    start = kit.keep(request, row, 0, 499)
    start = kit.keep(request, row, start, 600)

    assert start == 512
    assert kit.cache.use(prepared("next", [*row, 1]))[0].tokens == 600


def test_a_chain_whose_parent_is_gone_is_not_continued() -> None:
    """An orphan could not be found; the row goes on without."""
    kit = Kit(budget_tokens=BLOCK_TOKENS)
    request = prepared("r", tokens(700))
    start = kit.keep(request, tokens(700), 0, 256)
    kit.index.set_budget(0)
    kit.index.set_budget(10**6)

    assert kit.keep(request, tokens(700), start, 700) == start
    assert len(kit.index) == 0


def test_a_full_tier_keeps_nothing_and_breaks_nothing() -> None:
    """Budgets smaller than a block happen."""
    kit = Kit(budget_tokens=100)

    assert kit.ask(tokens(600)) == 0
    assert kit.ask(tokens(600)) == 0
    kit.cache.check()


def test_scopes_share_nothing() -> None:
    """S04: B neither reuses nor sees what A computed; A itself does."""
    kit = Kit()
    kit.ask(tokens(600), scope=b"A")

    assert kit.ask(tokens(600), scope=b"B") == 0
    assert kit.ask(tokens(600), scope=b"A") == 599


def test_a_model_without_reuse_is_left_alone() -> None:
    """K03: no fetch, no cut, no hit, no store."""
    kit = Kit("through", off="layers keep their state in ArraysCache")

    assert kit.ask(tokens(600)) == kit.ask(tokens(600)) == 0
    assert not kit.cache.prefetch(prepared("r", tokens(600)), PREFILL)
    assert kit.cache.store_everything() == 0
    assert (kit.cuts, kit.disk.stored, kit.disk.fetches) == ([], [], [])


# --- disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hot", "asked", "fetches"),
    [(0, 15, 0), (0, 16, 1), (0, 700, 1), (700, 700, 0), (699, 700, 0), (300, 700, 1)],
)
def test_the_disk_is_asked_only_for_what_ram_lacks(hot: int, asked: int, fetches: int) -> None:
    """A prompt shorter than a grain cannot be on disk; a hot one need not."""
    kit = Kit()
    if hot:
        kit.ask(tokens(hot))

    assert kit.cache.prefetch(prepared("r", tokens(asked)), PREFILL) == (fetches == 1)
    assert kit.disk.fetches == [("r", hot // BLOCK_TOKENS, hot)] * fetches


def test_policy_off_never_touches_the_disk() -> None:
    """Neither to read nor to write."""
    kit = Kit("off")
    kit.ask(tokens(600))
    kit.ask(tokens(600))

    assert not kit.cache.prefetch(prepared("r", tokens(900)), PREFILL)
    assert kit.cache.store_everything() == 0
    assert kit.disk.stored == []


def test_second_touch_stores_what_is_used_again() -> None:
    """Parents first. A tail of which only the first words were shared was not used again."""
    kit = Kit()
    kit.ask(tokens(600))
    assert kit.disk.stored == []

    kit.ask([*tokens(520), 7, 7, 7])

    assert [block.start for block in kit.disk.stored] == [0, 256]
    kit.ask(tokens(600))
    assert [block.start for block in kit.disk.stored] == [0, 256, 512]


def test_nothing_is_written_beside_somebodys_first_token() -> None:
    """Second touch stores when the request is over, not when it starts."""
    kit = Kit()
    kit.ask(tokens(600))
    match, _ = kit.cache.use(prepared("r", tokens(600)))
    assert kit.disk.stored == []

    kit.index.remove(match.uses[2].block.key)
    kit.cache.request_over(prepared("r", tokens(600)), tokens(600), match.touched)

    assert [block.start for block in kit.disk.stored] == [0, 256]  # what was evicted meanwhile is not written


def test_through_stores_at_once_and_once() -> None:
    """A tail under one grain has no name on disk and stays in RAM."""
    kit = Kit("through")
    kit.ask(tokens(520))
    kit.ask(tokens(520))

    assert [block.start for block in kit.disk.stored] == [0, 256]


def test_leaving_memory_stores_what_is_not_durable() -> None:
    """Parents before children, nothing twice."""
    kit = Kit()
    kit.ask(tokens(600))
    first = chain_of_blocks(tokens(600))[0]
    kit.cache.became_durable(first.key)
    kit.cache.became_durable(BlockKey(b"unknown"))

    assert kit.cache.store_everything() == 2
    assert [block.start for block in kit.disk.stored] == [256, 512]


def test_blocks_from_disk_are_found_like_hot_ones() -> None:
    """They are durable already: no store follows."""
    kit = Kit()
    request = prepared("r", tokens(700))
    kit.cache.prefetch(request, PREFILL)
    blocks = chain_of_blocks(tokens(640))
    for block in blocks:
        block.is_durable = True
    kit.cache.fetched(request.request_id, blocks, FetchOutcome())

    assert kit.cache.use(request)[0].tokens == 640
    assert kit.disk.stored == []


def test_blocks_that_came_too_late_are_a_miss() -> None:
    """Their parent was evicted meanwhile."""
    kit = Kit()
    kit.cache.prefetch(prepared("r", tokens(700)), PREFILL)
    kit.cache.fetched(RequestId("r"), chain_of_blocks(tokens(700))[1:], FetchOutcome())

    assert len(kit.index) == 0
    kit.cache.gave_up_waiting(RequestId("r"))
    _, report = kit.cache.use(prepared("r", tokens(700)))
    assert report.miss_reason == "timeout"
    assert kit.cache.misses == {"timeout": 1}


@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 2)), max_size=8), st.integers(0, 1500))
def test_never_another_prompts_kv(asked: list[tuple[int, int]], budget_tokens: int) -> None:
    """K02: whatever was asked before and whatever was evicted, what is used is KV of the very tokens asked for."""
    kit = Kit(budget_tokens=budget_tokens)
    for count, first in asked:
        token_ids = tokens(count, first)
        match, _ = kit.cache.use(prepared("r", token_ids))
        used = [token for use in match.uses for token in use.block.payload[: use.tokens]]
        assert used == token_ids[: len(used)]
        assert len(used) < count
        kit.ask(token_ids)
        kit.cache.check()


# --- disk: what is written, and when ----------------------------------------------------------------------------------


def test_a_conversation_is_not_written_turn_by_turn() -> None:
    """Its blocks are hot; they go to disk when RAM lets them go, since they were used again."""
    kit = Kit(budget_tokens=1200)
    for turn in range(1, 4):
        kit.ask(tokens(300 * turn))
    assert kit.disk.stored == []

    kit.ask(tokens(600, first=1))

    assert kit.disk.stored != []
    assert all(block.touches for block in kit.disk.stored)


def test_in_memory_retention_keeps_a_prompt_off_the_disk() -> None:
    """Whatever the policy and whatever happens; until somebody uses the same block who does not mind."""
    kit = Kit("through")
    secret = prepared("r", tokens(600), retention="in_memory")
    kit.keep(secret, tokens(600), 0, 600)
    kit.cache.request_over(secret, tokens(600), ())
    assert kit.cache.store_everything() == 0

    kit.ask(tokens(600))

    assert len(kit.disk.stored) == 3


def test_a_pin_is_refused_when_too_much_is_pinned() -> None:
    """Half of the tier stays for everybody else; the prefix is kept all the same."""
    kit = Kit(budget_tokens=1000)
    for name, count in (("small", 300), ("large", 400)):
        warm = prepared(name, tokens(count, first=count), pin=Pin(name=name))
        kit.keep(warm, warm.token_ids, 0, count)
        kit.cache.warmed(warm, now=0.0)

    assert [pin.name for pin in kit.cache.pins(now=0.0)] == ["small"]
    assert kit.cache.misses["pin_refused"] == 1


def test_a_pin_ends_when_its_time_has_come() -> None:
    """Or when it is unpinned."""
    kit = Kit()
    warm = prepared("w", tokens(300), pin=Pin(name="repo", ttl_seconds=60.0))
    kit.keep(warm, warm.token_ids, 0, 300)
    kit.cache.warmed(warm, now=100.0)
    (pin,) = kit.cache.pins(now=130.0)
    assert (pin.tokens, pin.expires_seconds) == (300, 30.0)

    kit.cache.expire_pins(now=160.0)

    assert kit.cache.pins(now=160.0) == ()
    assert all(not block.pinned_by for block in kit.index.blocks())


def test_forgetting_takes_one_owners_blocks() -> None:
    """Another's stay."""
    kit = Kit()
    for owner, first in (("ada", 1), ("bob", 2)):
        request = prepared("r", tokens(300, first), owner=owner)
        kit.keep(request, request.token_ids, 0, 300)

    assert kit.cache.forget("ada") == 2
    assert {block.owner for block in kit.index.blocks()} == {"bob"}
    assert kit.cache.forget(None) == 2


def test_what_is_on_its_way_to_or_from_the_disk_is_forgotten_too() -> None:
    """What waits to be written is not written; blocks that were read before they were forgotten do not come in, those
    that were asked for afterwards do; another's are left alone."""
    kit = Kit("through")
    asked = {owner: prepared(owner, tokens(300, first), owner=owner) for owner, first in (("ada", 1), ("bob", 2))}
    for request in asked.values():
        kit.keep(request, request.token_ids, 0, 300)
        kit.cache.request_over(request, request.token_ids, ())
    assert kit.cache.forget("ada") == 2
    assert {block.owner for block in kit.disk.stored} == {"bob"}

    read = {"ada": chain_of_blocks(tokens(600, 1)), "bob": chain_of_blocks(tokens(600, 2))}
    late = {owner: prepared(owner, tokens(600, first), owner=owner) for owner, first in (("ada", 1), ("bob", 2))}
    for request in late.values():
        assert kit.cache.prefetch(request, PREFILL)
    kit.cache.forget("ada")
    assert kit.cache.prefetch(late["ada"], PREFILL)
    kit.cache.fetched(RequestId("ada"), read["ada"][:2], FetchOutcome())
    kit.cache.fetched(RequestId("bob"), read["bob"][:2], FetchOutcome())
    assert kit.cache.use(late["ada"])[1].miss_reason == "forgotten"
    assert kit.cache.use(late["bob"])[0].tokens == 512
    kit.cache.fetched(RequestId("ada"), read["ada"][:2], FetchOutcome())
    assert kit.cache.use(late["ada"])[0].tokens == 512


# --- why not more -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [("", "absent"), ("absent", "absent"), ("disk_slower", "disk_slower"), ("integrity", "integrity")],
)
def test_a_miss_names_its_reason(outcome: str, reason: str) -> None:
    """As the disk gave it, if it gave one."""
    kit = Kit()
    request = prepared("r", tokens(300))
    kit.cache.prefetch(request, PREFILL)
    kit.cache.fetched(request.request_id, (), FetchOutcome(outcome))
    _, report = kit.cache.use(request)

    assert report.miss_reason == reason
    assert kit.cache.misses == {reason: 1}


def test_what_was_evicted_is_called_so() -> None:
    """So an operator knows that the hot tier is too small."""
    kit = Kit(budget_tokens=700)
    kit.ask(tokens(600))
    kit.ask(tokens(600, first=1))
    _, report = kit.cache.use(prepared("r", tokens(600)))

    assert report.miss_reason == "evicted"


@pytest.mark.parametrize(("refusal", "reason"), [("write_budget", "budget"), ("quota", "quota"), ("", "evicted")])
def test_what_the_disk_refused_is_missed_for_that(refusal: str, reason: str) -> None:
    """The first block that is not there counts: it was used twice, was to be on disk, and was evicted from RAM."""
    kit = Kit("through", budget_tokens=700)
    kit.ask(tokens(600))
    for block in list(kit.disk.stored):
        kit.cache.was_refused(block.key, refusal)
    kit.disk.stored.clear()
    kit.ask(tokens(600, first=1))
    _, report = kit.cache.use(prepared("r", tokens(600)))

    assert report.miss_reason == reason


def test_tokens_from_ram_and_from_disk_are_told_apart() -> None:
    """Their sum is what was not computed."""
    kit = Kit()
    request = prepared("r", tokens(700))
    kit.keep(request, tokens(700), 0, 300)
    kit.cache.prefetch(request, PREFILL)
    blocks = chain_of_blocks(tokens(640))[1:]
    kit.cache.fetched(request.request_id, blocks, FetchOutcome(restored_bytes=9, restore_seconds=0.5))
    match, report = kit.cache.use(request)

    assert (report.ram_tokens, report.disk_tokens, match.tokens) == (300, 340, 640)
    assert (report.restored_bytes, report.restore_seconds) == (9, 0.5)


# --- what a write is worth --------------------------------------------------------------------------------------------


def test_what_is_slower_to_read_than_to_compute_is_not_written() -> None:
    """By the rates measured: it would not be read. Each block is counted once; when the disk is fast again it is
    written."""
    kit = Kit("through")
    kit.disk.read_bytes_per_second = 500.0  # of 10 bytes a token: 50 tokens a second
    request = prepared("r", tokens(300))
    kit.cache.prefetch(request, PREFILL)
    kit.keep(request, request.token_ids, 0, 300)
    for _ in range(3):
        kit.cache.request_over(request, request.token_ids, ())
    assert kit.disk.stored == []
    assert kit.cache.not_written == {"disk_slower": 2}

    kit.disk.read_bytes_per_second = 2000.0
    assert kit.cache.store_everything() == 2


def _with_state(kit: Kit, count: int, state_bytes: int) -> Prepared:
    """A prompt that was computed, with a state at its end, of a model that can be taken up again only there."""
    request = prepared("r", tokens(count))
    kit.cache.prefetch(request, PREFILL)
    start = kit.keep(request, request.token_ids, 0, count)
    assert start == count // BLOCK_TOKENS * BLOCK_TOKENS
    kit.cache.keep_state(request, request.token_ids, count, State((), state_bytes), lambda a, b: ((), (b - a) * 10))
    return request


@pytest.mark.parametrize("leaves", ["request_over", "store_everything"])
@pytest.mark.parametrize(("count", "stored"), [(608, 0), (4000, 16)])
def test_a_state_saves_all_the_tokens_before_it(count: int, stored: int, leaves: str) -> None:
    """It is as large after a thousand tokens as after ten thousand. Weighed against its own block's tokens alone, it
    would be refused and leave a chain on disk that nobody can use; if it is not worth it, no block of its chain is."""
    kit = Kit("through", boundary="states", budget_tokens=100_000)
    kit.disk.read_bytes_per_second = 10_000.0  # of 10 bytes a token: a tenth of what computing takes
    request = _with_state(kit, count, 300_000)  # 30 seconds; a tail alone is computed in one or two
    if leaves == "request_over":
        kit.cache.request_over(request, request.token_ids, ())
    else:
        assert kit.cache.store_everything() == stored

    assert len(kit.disk.stored) == stored
    assert kit.cache.not_written["disk_slower"] == (0 if stored else 3)


@pytest.mark.parametrize("position", [None, 600])
def test_what_no_prompt_can_be_taken_up_from_is_not_written(position: int | None) -> None:
    """Such a model needs a state, and finds it on disk only where a grain ends. That is no fault of the disk."""
    kit = Kit("through", boundary="states")
    request = prepared("r", tokens(610))
    kit.cache.prefetch(request, PREFILL)
    kit.keep(request, request.token_ids, 0, 610)
    if position is not None:
        state: State[Kv] = State((), 10)
        kit.cache.keep_state(request, request.token_ids, position, state, lambda a, b: ((), (b - a) * 10))

    assert kit.cache.store_everything() == 0
    assert kit.cache.not_written == {}


def test_a_chain_has_no_holes_when_the_rate_moves() -> None:
    """RAM lets the end of a chain go while the disk is fast, and the rest when it is slow: all of it is written."""
    kit = Kit(budget_tokens=5000)
    kit.disk.read_bytes_per_second = 2000.0
    kit.ask(tokens(900))
    kit.ask([*tokens(900), 1, 2])
    kit.cache.prefetch(prepared("r", tokens(1000)), PREFILL)
    assert kit.disk.stored == []
    kit.cache.set_budget(7000)
    written = [block.start for block in kit.disk.stored]
    assert 0 < len(written) < 4

    kit.disk.read_bytes_per_second = 1.0
    kit.cache.set_budget(0)
    assert {block.start for block in kit.disk.stored} == {0, 256, 512, 768}


def test_what_is_warmed_is_written_anyway() -> None:
    """Whoever asks for it wants it there, whatever it costs to read by today's rates."""
    kit = Kit()
    kit.disk.read_bytes_per_second = 1.0
    request = prepared("r", tokens(300), pin=Pin(name="p"))
    kit.cache.prefetch(request, PREFILL)
    kit.keep(request, request.token_ids, 0, 300)
    assert len(kit.cache.warmed(request, now=0.0)) == len(kit.disk.stored) == 2


def test_what_a_full_queue_refuses_is_counted() -> None:
    """And asked again when its time comes: it is not durable."""
    kit = Kit("through")
    request = prepared("r", tokens(300))
    kit.keep(request, request.token_ids, 0, 300)
    taken = kit.disk.store
    kit.disk.store = lambda block: False  # pyright: ignore[reportAttributeAccessIssue]
    kit.cache.request_over(request, request.token_ids, ())
    assert kit.cache.not_written == {"staging_full": 2}
    kit.disk.store = taken  # pyright: ignore[reportAttributeAccessIssue]
    assert kit.cache.store_everything() == 2
