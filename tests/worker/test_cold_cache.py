"""The worker's side of the cachestore: every call has a deadline, and every failure is a miss that says why."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from cachestore.loop import run as run_cachestore
from cachestore.service import Service
from protocol.addresses import cachestore_socket
from protocol.block_file import parse_metadata
from protocol.blocks import (
    BlockReply,
    BlockRequest,
    CacheFailed,
    Declined,
    Fetch,
    Forget,
    Forgotten,
    Found,
    FoundBlock,
    Leased,
    LeasedBlock,
    Lookup,
    Publish,
    Published,
    Release,
    Released,
    Stage,
    Staged,
)
from protocol.failures import Failure, FailureKind
from protocol.generation import Pin
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey, Incarnation, LeaseId
from protocol.launch import CachestoreLaunch
from protocol.sockets import Listener, Peer
from tests.fakes.fake_store import Answer, FakeStore
from tests.worker.parts import FINGERPRINT, chain_of_blocks, prepared
from worker.chain_reading import BlockDamaged
from worker.cold_cache import ColdCache
from worker.cost_model import PrefillCost
from worker.messages import BlocksFetched, BlockStored
from worker.mlx_block_files import BlockFile, write_block
from worker.prefix_cache import Fetch as PrefixFetch
from worker.prefix_index import Block, BlockParts, State

Kv = tuple[int, ...]
DEADLINE_SECONDS = 20.0
CHECKSUM = b"c" * 16
FILE_BYTES = 100_000


class PlainReading:
    """A block file that is only a path; what is in it is known by its name."""

    def __init__(self, leased: LeasedBlock) -> None:
        self._leased = leased

    @property
    def file_bytes(self) -> int:
        return FILE_BYTES

    def finish(self) -> BlockParts[Kv]:
        match self._leased.path:
            case "/damaged":
                raise BlockDamaged("not a block")
            case "/gone":
                raise FileNotFoundError
            case "/unlucky":
                raise MemoryError
            case _:
                tokens = self._leased.grains * GRAIN_TOKENS
                return BlockParts(tuple(range(tokens)), tokens * 10, {})

    def checksum(self) -> bytes:
        return b"another" if self._leased.path == "/flipped" else CHECKSUM


class Worker:
    """A cold cache whose block files are plain text, and what it delivered."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.delivered: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.written: list[str] = []
        settings: dict[str, Any] = {"begin": PlainReading, "write": self._write, "clock": time.monotonic, **changes}
        self.cache: ColdCache[Kv] = ColdCache(
            connect=lambda: Peer(cachestore_socket(directory), b"worker", BlockReply),
            fingerprint=FINGERPRINT,
            deliver=self.delivered.put,
            **settings,
        )
        self.cache.start()

    def _write(self, path: str, block: Block[Kv], tokens: int, metadata: dict[str, str]) -> None:
        if path == "/full":
            raise OSError("no space")
        assert parse_metadata(metadata).fingerprint == FINGERPRINT
        self.written.append(path)

    def fetch(self, token_ids: list[int], hot_blocks: int = 0, hot_tokens: int = 0) -> BlocksFetched[Kv]:
        self.cache.fetch(PrefixFetch(prepared("r", token_ids), hot_blocks, hot_tokens, computing(1)))
        fetched = self.delivered.get(timeout=DEADLINE_SECONDS)
        assert isinstance(fetched, BlocksFetched)
        return fetched


Make = Callable[..., tuple[FakeStore, Worker]]


@pytest.fixture
def make(runtime_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A store with these answers and a worker beside it."""
    monkeypatch.setattr("worker.cold_cache.LOOKUP_SECONDS", 0.4)
    monkeypatch.setattr("worker.cold_cache.CALL_SECONDS", 0.4)
    monkeypatch.setattr("worker.cold_cache.REST_SECONDS", 0.4)
    with contextlib.ExitStack() as ends:

        def made(answer: Callable[[BlockRequest], Answer], **changes: Any) -> tuple[FakeStore, Worker]:
            store = FakeStore(runtime_directory, answer)
            ends.callback(store.close)
            worker = Worker(runtime_directory, **changes)
            ends.callback(worker.cache.stop, DEADLINE_SECONDS)
            return store, worker

        yield made


def computing(tokens_per_second: float) -> PrefillCost:
    return PrefillCost(fixed=0.0, token=1 / tokens_per_second, attention=0.0)


def tokens(count: int) -> list[int]:
    return list(range(count))


def key_of(path: str) -> BlockKey:
    return BlockKey(path.encode().ljust(16, b"."))


def holding(
    *paths_and_grains: tuple[str, int], file_bytes: int = 0, checksum: bytes = b""
) -> Callable[[BlockRequest], Answer]:
    """A store that has these blocks of whatever is asked."""

    def answer(request: BlockRequest) -> Answer:
        match request:
            case Lookup():
                found = tuple(
                    FoundBlock(key=key_of(path), grains=grains, file_bytes=file_bytes)
                    for path, grains in paths_and_grains
                )
                return Found(call_id=request.call_id, blocks=found)
            case Fetch():
                leased = tuple(
                    LeasedBlock(key=key_of(path), grains=g, path=path, checksum=checksum)
                    for path, g in paths_and_grains
                )
                return Leased(call_id=request.call_id, lease=LeaseId(7), blocks=leased)
            case Stage():
                return Staged(call_id=request.call_id, lease=LeaseId(9), path="/staged")
            case Publish():
                return Published(call_id=request.call_id, file_bytes=1)
            case Release():
                return Released(call_id=request.call_id)
            case Forget():
                return Forgotten(call_id=request.call_id, blocks=1, file_bytes=1)
            case _:
                raise AssertionError(request)

    return answer


# --- fetch ----------------------------------------------------------------------------------------------------------


def test_blocks_come_with_their_place_in_the_chain(make: Make) -> None:
    """Key, parent and tokens are those that the same blocks would have had in RAM; the lease is given back."""
    store, worker = make(holding(("/a", 16), ("/b", 3)))
    fetched = worker.fetch(tokens(320))

    expected = chain_of_blocks(tokens(256 + 48))
    assert [(b.key, b.parent, b.start, b.token_ids, b.grains) for b in fetched.blocks] == [
        (b.key, b.parent, b.start, b.token_ids, b.grains) for b in expected
    ]
    assert all(block.is_durable for block in fetched.blocks)
    assert fetched.outcome.miss_reason == ""
    assert store.next(Release).lease == 7


def test_hot_blocks_are_skipped(make: Make) -> None:
    """The chain starts after them."""
    store, worker = make(holding(("/b", 16)))
    fetched = worker.fetch(tokens(600), hot_blocks=1, hot_tokens=300)

    assert store.next(Lookup).skip_blocks == 1
    assert [block.start for block in fetched.blocks] == [256]
    assert fetched.blocks[0].parent == chain_of_blocks(tokens(256))[0].key


@pytest.mark.parametrize(("hot_tokens", "grains"), [(256 + 48, 3), (256 + 60, 3), (0, 0)])
def test_no_file_is_read_that_ram_has(make: Make, hot_tokens: int, grains: int) -> None:
    """A lookup costs a millisecond and no lease, a fetch is a promise to read."""
    store, worker = make(holding(*([("/b", grains)] if grains else [])))
    fetched = worker.fetch(tokens(600), hot_blocks=min(hot_tokens // 256, 1), hot_tokens=hot_tokens)

    assert fetched.blocks == ()
    assert fetched.outcome.miss_reason == "absent"
    assert isinstance(store.requests.get(timeout=DEADLINE_SECONDS), Lookup)
    assert store.requests.empty()


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/damaged", "integrity"), ("/flipped", "integrity"), ("/gone", "missing"), ("/unlucky", "unreadable")],
)
def test_a_bad_file_ends_the_run_before_it(make: Make, path: str, reason: str) -> None:
    """K06: the prefix before it is used, the reason counted, and the lease given back with what was seen."""
    store, worker = make(holding(("/a", 16), (path, 16), ("/c", 16), checksum=CHECKSUM))
    fetched = worker.fetch(tokens(900))

    assert [block.start for block in fetched.blocks] == [0]
    assert fetched.outcome.miss_reason == reason
    assert fetched.outcome.restored_bytes == 2560
    release = store.next(Release)
    assert (release.lease, release.verified, release.suspect) == (7, (key_of("/a"),), (key_of(path),))


def test_what_is_verified_is_not_hashed_again(make: Make) -> None:
    """A lease without a checksum asks for no check, and is told of none."""
    store, worker = make(holding(("/flipped", 16), ("/b", 16)))
    fetched = worker.fetch(tokens(600))

    assert len(fetched.blocks) == 2
    release = store.next(Release)
    assert (release.verified, release.suspect) == ((), ())


def test_a_long_chain_comes_in_pieces_and_each_is_given_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next piece is leased before this one is read; damage in the second ends the run there, and no lease stays."""
    monkeypatch.setattr("worker.cold_cache.PIECE_BLOCKS", 2)
    paths = [f"/{number}" for number in range(7)]
    paths[5] = "/damaged"
    everything = holding(*((path, 16) for path in paths), checksum=CHECKSUM)

    def in_pieces(request: BlockRequest) -> Answer:
        if not isinstance(request, Fetch):
            return everything(request)
        wanted = [(path, 16) for path in paths[request.skip_blocks :][: request.most_blocks]]
        answer = holding(*wanted, checksum=CHECKSUM)(request)
        assert isinstance(answer, Leased)
        return replace(answer, lease=LeaseId(100 + request.skip_blocks))

    store, worker = make(in_pieces)
    fetched = worker.fetch(tokens(7 * BLOCK_TOKENS + 1))

    assert [block.start for block in fetched.blocks] == [number * BLOCK_TOKENS for number in range(5)]
    assert fetched.outcome.miss_reason == "integrity"
    asked = [store.next(Fetch).skip_blocks]
    released: dict[int, Release] = {}
    while len(released) < 4:
        match store.requests.get(timeout=DEADLINE_SECONDS):
            case Fetch(skip_blocks=skip_blocks):
                asked.append(skip_blocks)
            case Release() as release:
                released[release.lease] = release
            case request:
                raise AssertionError(request)
    assert asked == [0, 2, 4, 6]
    assert {lease: (release.verified, release.suspect) for lease, release in released.items()} == {
        100: ((key_of("/0"), key_of("/1")), ()),
        102: ((key_of("/2"), key_of("/3")), ()),
        104: ((key_of("/4"),), (key_of("/damaged"),)),
        106: ((), ()),
    }


@pytest.mark.parametrize("grains", [0, -1, 17, 40])
def test_a_lease_of_what_was_not_asked_is_a_miss(make: Make, grains: int) -> None:
    """A store of another mind must not end this thread, nor put wrong tokens under a key."""
    answer = holding(("/a", grains))

    def lookup_is_right(request: BlockRequest) -> Answer:
        return holding(("/a", 16))(request) if isinstance(request, Lookup) else answer(request)

    _, worker = make(lookup_is_right)

    assert worker.fetch(tokens(300)).blocks == ()
    assert worker.fetch(tokens(300)).outcome.miss_reason == "unreadable"


def test_silence_is_a_miss_and_then_a_rest(make: Make) -> None:
    """The first request waits for its deadline, the next ones not at all; after the rest it is asked again."""
    store, worker = make(lambda _: None)

    assert worker.fetch(tokens(300)).outcome.miss_reason == "timeout"
    asked_at = time.monotonic()
    reason = worker.fetch(tokens(300)).outcome.miss_reason
    if time.monotonic() - asked_at < 0.1:
        assert reason == "unavailable"

    store.answer = holding(("/a", 16))
    until = time.monotonic() + DEADLINE_SECONDS
    while not (fetched := worker.fetch(tokens(300))).blocks:
        assert time.monotonic() < until
    assert fetched.outcome.miss_reason == ""


def test_no_store_at_all_is_a_miss(runtime_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache can be absent: nothing raises, nothing hangs."""
    monkeypatch.setattr("worker.cold_cache.LOOKUP_SECONDS", 0.05)
    worker = Worker(runtime_directory)

    assert worker.fetch(tokens(300)).outcome.miss_reason == "timeout"
    assert worker.fetch(tokens(300)).outcome.miss_reason == "unavailable"
    assert worker.cache.stop(DEADLINE_SECONDS) == 0


def failed(request: Any) -> Answer:
    return CacheFailed(call_id=request.call_id, failure=Failure(kind=FailureKind.INTERNAL, message="x"))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (failed, "failed"),
        (lambda request: Declined(call_id=request.call_id, reason="reconciling"), "reconciling"),
        (lambda request: Released(call_id=request.call_id), "unexpected_reply"),
        (lambda request: Released(call_id=request.call_id + 1000), "timeout"),
        (lambda request: {"no": 1}, "timeout"),
    ],
)
def test_other_answers_are_misses_that_say_why(make: Make, answer: Any, reason: str) -> None:
    """Failed, declined, of another kind, to another call, or no message at all."""
    _, worker = make(answer)

    assert worker.fetch(tokens(300)).outcome.miss_reason == reason


def test_a_fetch_answer_that_comes_too_late_is_given_back(make: Make) -> None:
    """Its files would stay pinned as long as this worker lives."""
    late: list[Answer] = []

    def slow(request: BlockRequest) -> Answer:
        answer = holding(("/a", 16))(request)
        if isinstance(request, Fetch) and not late:
            late.append(answer)
            return None
        return answer

    store, worker = make(slow)
    assert worker.fetch(tokens(300)).outcome.miss_reason == "timeout"
    store.next(Fetch)
    # The next question finds the old answer before its own.
    then = store.answer
    store.answer = lambda request: late[0] if isinstance(request, Lookup) else then(request)

    until = time.monotonic() + DEADLINE_SECONDS
    while worker.fetch(tokens(300)).outcome.miss_reason == "unavailable":
        assert time.monotonic() < until
    assert store.next(Release).lease == 7


# --- store ----------------------------------------------------------------------------------------------------------


def test_a_stored_block_is_said_to_be_durable(make: Make) -> None:
    """Written where the store said, published with its chain."""
    store, worker = make(holding())
    first, second = chain_of_blocks(tokens(300))
    second.supersedes = BlockKey(b"s" * 16)
    worker.cache.store(first)
    worker.cache.store(second)

    assert worker.delivered.get(timeout=DEADLINE_SECONDS) == BlockStored(first.key, "durable")
    assert worker.delivered.get(timeout=DEADLINE_SECONDS) == BlockStored(second.key, "durable")
    one, two = store.next(Publish), store.next(Publish)
    assert (one.parent, one.grains) == (b"", first.grains)
    assert (two.parent, two.grains, two.supersedes) == (first.key, second.grains, b"s" * 16)
    assert worker.written == ["/staged", "/staged"]
    until = time.monotonic() + DEADLINE_SECONDS
    while worker.cache.is_storing(second.key):
        assert time.monotonic() < until
    assert worker.cache.stored_blocks == 2


def test_what_the_disk_has_already_is_durable(make: Make) -> None:
    """Another worker, or an earlier one, wrote it."""
    _, worker = make(lambda request: Declined(call_id=request.call_id, reason="present"))
    (block,) = chain_of_blocks(tokens(100))
    worker.cache.store(block)

    assert worker.delivered.get(timeout=DEADLINE_SECONDS) == BlockStored(block.key, "durable")
    assert worker.written == []


def test_a_write_that_fails_gives_its_file_back(make: Make) -> None:
    """ENOSPC: serving goes on, the thread too."""

    def answer(request: BlockRequest) -> Answer:
        if isinstance(request, Stage) and request.key == full.grains[-1]:
            return Staged(call_id=request.call_id, lease=LeaseId(11), path="/full")
        return holding()(request)

    (full,) = chain_of_blocks(tokens(100))
    (fine,) = chain_of_blocks(tokens(200))
    store, worker = make(answer)
    worker.cache.store(full)
    worker.cache.store(fine)

    assert worker.delivered.get(timeout=DEADLINE_SECONDS) == BlockStored(full.key, "refused")
    assert worker.delivered.get(timeout=DEADLINE_SECONDS) == BlockStored(fine.key, "durable")
    assert store.next(Release).lease == 11
    assert not worker.cache.is_storing(full.key)


def test_staging_is_bounded(make: Make) -> None:
    """Blocks that wait for a slow disk hold memory: beyond the budget they are not taken."""
    _, worker = make(lambda _: None, staging_budget_bytes=300 * 10)
    blocks = chain_of_blocks(tokens(700))
    for block in blocks:
        worker.cache.store(block)

    assert [worker.cache.is_storing(block.key) for block in blocks[1:]] == [False, False]


def test_what_is_forgotten_while_it_waits_is_not_written(make: Make) -> None:
    """Of one owner, or of all: neither what waits nor what is being written. Each is answered."""
    gate = threading.Event()

    def answer(request: BlockRequest) -> Answer:
        gate.wait(DEADLINE_SECONDS)
        return holding()(request)

    store, worker = make(answer, clock=lambda: 0.0)
    blocks = chain_of_blocks(tokens(1000))
    for block, owner in zip(blocks, ("ada", "ada", "bob", "ada"), strict=True):
        block.owner = owner
        worker.cache.store(block)
    assert store.next(Stage).key == blocks[0].grains[-1]
    worker.cache.forget("ada")
    assert [worker.cache.is_storing(block.key) for block in blocks] == [False, False, True, False]
    gate.set()

    answers = {worker.delivered.get(timeout=DEADLINE_SECONDS) for _ in blocks}
    assert answers == {BlockStored(block.key, "durable" if block.owner == "bob" else "refused") for block in blocks}
    assert store.next(Publish).grains == blocks[2].grains
    assert worker.cache.stop(DEADLINE_SECONDS) == 0
    assert worker.delivered.empty()


def test_what_is_forgotten_while_it_is_published_is_deleted_again(make: Make) -> None:
    """The store may have done its own forgetting before this block was staged."""

    def answer(request: BlockRequest) -> Answer:
        if isinstance(request, Publish) and not forgets:
            forgets.append("ada")
            worker.cache.forget("ada")
            worker.cache.store(again)  # the same words, computed anew
        return holding()(request)

    forgets: list[str] = []
    store, worker = make(answer)
    (block,), (again,) = chain_of_blocks(tokens(100)), chain_of_blocks(tokens(100))
    block.owner = again.owner = "ada"
    worker.cache.store(block)

    assert worker.delivered.get(timeout=DEADLINE_SECONDS) == BlockStored(block.key, "refused")
    assert worker.delivered.get(timeout=DEADLINE_SECONDS) == BlockStored(block.key, "durable")
    assert worker.cache.stop(DEADLINE_SECONDS) == 0
    assert worker.delivered.empty()
    asked = [store.requests.get(timeout=DEADLINE_SECONDS) for _ in range(5)]
    assert [type(request) for request in asked] == [Stage, Publish, Forget, Stage, Publish]
    assert isinstance(asked[2], Forget)
    assert (asked[2].fingerprint, asked[2].owner) == (FINGERPRINT, "ada")


def test_what_was_written_before_is_deleted_before_anything_is_asked(make: Make) -> None:
    """A store that had done its own forgetting before that would hand it out again. A process that wrote nothing has
    nothing deleted."""
    store, worker = make(holding())
    (block,) = chain_of_blocks(tokens(100))
    worker.cache.forget(None)
    worker.cache.store(block)
    assert worker.delivered.get(timeout=DEADLINE_SECONDS) == BlockStored(block.key, "durable")
    worker.cache.forget("ada")
    worker.fetch(tokens(300))

    asked = [store.requests.get(timeout=DEADLINE_SECONDS) for _ in range(4)]
    assert [type(request) for request in asked] == [Stage, Publish, Forget, Lookup]


def test_it_is_forgotten_while_a_process_leaves(make: Make) -> None:
    """What reaches the process while it writes what it holds counts as before: not one block of it is left on disk."""
    told = threading.Event()

    def answer(request: BlockRequest) -> Answer:
        if isinstance(request, Publish):
            assert told.wait(DEADLINE_SECONDS)
        return holding()(request)

    def hear(seconds: float) -> None:
        assert 0 < seconds <= DEADLINE_SECONDS
        if not told.is_set():
            worker.cache.forget(None)
            told.set()
        time.sleep(min(seconds, 0.01))  # stands for a wait for messages

    store, worker = make(answer)
    for block in chain_of_blocks(tokens(1000)):
        worker.cache.store(block)
    assert isinstance(store.next(Publish), Publish)

    assert worker.cache.stop(DEADLINE_SECONDS, hear) == 0
    asked: list[BlockRequest] = []
    while not store.requests.empty():
        asked.append(store.requests.get())
    assert [type(request) for request in asked] == [Forget]


def test_fetches_go_before_stores(make: Make) -> None:
    """Somebody waits for a fetch."""
    gate = threading.Event()

    def answer(request: BlockRequest) -> Answer:
        gate.wait(DEADLINE_SECONDS)
        return holding()(request)

    store, worker = make(answer, clock=lambda: 0.0)
    for block in chain_of_blocks(tokens(512)):
        worker.cache.store(block)
    first = store.next(Stage)
    worker.cache.fetch(PrefixFetch(prepared("r", tokens(300)), 0, 0, computing(1)))
    gate.set()

    assert store.next(Publish).grains[-1] == first.key
    assert isinstance(store.requests.get(timeout=DEADLINE_SECONDS), Lookup)


# --- the thread ------------------------------------------------------------------------------------------------------


class _Meddling(int):
    """A state's place whose comparison stands for the step thread, which keeps another state just then."""

    states: dict[int, State[Kv]]

    def __le__(self, other: int) -> bool:
        self.states[len(self.states) + 1000] = State((), 1)
        return int(self) <= other


def test_states_may_be_kept_while_a_block_waits(make: Make) -> None:
    """The step thread keeps them in the very blocks that this thread reads."""
    _, worker = make(lambda _: None, boundary="states")
    (block,) = chain_of_blocks(tokens(200))
    block.states = {_Meddling(64): State((), 1), _Meddling(128): State((), 1)}
    for place in block.states:
        assert isinstance(place, _Meddling)
        place.states = block.states
    worker.cache.store(block)
    worker.cache.fetch(PrefixFetch(prepared("r", tokens(300)), 0, 0, computing(1)))

    (fetched,) = first_fetched(worker).blocks
    assert fetched.key == block.key
    assert fetched.states is not block.states


def test_a_fault_ends_one_job_and_not_the_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch is answered, as a miss that is counted; the next ones are served. Else every request would wait for its
    deadline for as long as this process lives."""
    _, worker = make(holding(("/a", 16)))

    def faulty(*_: object) -> None:
        raise ZeroDivisionError

    (block,) = chain_of_blocks(tokens(100))
    with monkeypatch.context() as patched:
        patched.setattr(worker.cache, "_waiting_chain", faulty)
        patched.setattr(worker.cache, "_is_wanted", faulty)
        patched.setattr(worker.cache, "_call", faulty)
        assert worker.fetch(tokens(300)).outcome.miss_reason == "unreadable"
        worker.cache.store(block)
        assert worker.delivered.get(timeout=DEADLINE_SECONDS) == BlockStored(block.key, "refused")
        worker.cache.pin([block.key], "ada", Pin(name="p"))
        assert worker.fetch(tokens(300)).outcome.miss_reason == "unreadable"
    assert len(worker.fetch(tokens(300)).blocks) == 1


# --- the real thing -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def real_store(directory: Path, cache_directory: Path) -> Iterator[None]:
    """The cachestore's own service and loop, in a thread."""
    stop = threading.Event()
    launch = CachestoreLaunch(
        directory=str(cache_directory),
        runtime_directory=str(directory),
        incarnation=Incarnation(1),
        free_floor_bytes=0,
    )
    listening = threading.Event()

    def serve() -> None:
        service = Service(launch, first_number=time.time_ns() // 1000, unix_clock=time.time)
        service.open(time.monotonic())
        with Listener[BlockRequest, BlockReply](cachestore_socket(directory), BlockRequest) as listener:  # pyright: ignore
            listening.set()
            run_cachestore(listener, service, time.monotonic, stop.is_set)
        service.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert listening.wait(DEADLINE_SECONDS)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_blocks_survive_worker_and_store(runtime_directory: Path, tmp_path: Path) -> None:
    """K01, K02 over a restart: what one worker stored, the next one finds, bit for bit, tail included."""

    def block_of(block: Block[Kv]) -> Block[Any]:
        base = mx.array(block.token_ids, mx.float32)[None, None, :, None]
        arrays = {"keys0": base + mx.zeros((3, 2, 1, 4)), "values0": base * 0.5 + mx.zeros((3, 2, 1, 2))}
        mx.eval(arrays)
        return Block(
            key=block.key,
            parent=block.parent,
            start=block.start,
            token_ids=block.token_ids,
            grains=block.grains,
            payload=arrays,
            kv_bytes=sum(array.nbytes for array in arrays.values()),
        )

    token_ids = tokens(BLOCK_TOKENS + 5 * GRAIN_TOKENS + 3)
    with real_store(runtime_directory, tmp_path / "kv"):
        first = Worker(runtime_directory, begin=BlockFile, write=write_block)
        until = time.monotonic() + DEADLINE_SECONDS
        for block in map(block_of, chain_of_blocks(token_ids)):
            # A store that still counts its files declines: try again, as the next touch would.
            stored = None
            while stored != BlockStored(block.key, "durable"):
                assert time.monotonic() < until
                first.cache.store(block)
                stored = first.delivered.get(timeout=DEADLINE_SECONDS)
        assert first.cache.stop(DEADLINE_SECONDS) == 0
    with real_store(runtime_directory, tmp_path / "kv"):
        second = Worker(runtime_directory, begin=BlockFile, write=write_block)
        fetched = second.fetch([*token_ids, 1, 2, 3])
        shorter = second.fetch(token_ids[: BLOCK_TOKENS + 40])
        other = second.fetch([9, *token_ids])
        second.cache.stop(DEADLINE_SECONDS)

    assert [len(block.token_ids) for block in fetched.blocks] == [256, 80]
    assert [len(block.token_ids) for block in shorter.blocks] == [256, 32]
    assert other.outcome.miss_reason == "absent"
    for block in [*fetched.blocks, *shorter.blocks]:
        payload: Any = block.payload
        assert payload["keys0"].shape == (3, 2, len(block.token_ids), 4)
        assert payload["keys0"][1, 1, :, 3].tolist() == list(block.token_ids)
        assert payload["values0"][2, 0, :, 1].tolist() == [token * 0.5 for token in block.token_ids]


# --- restore or recompute ---------------------------------------------------------------------------------------------


def test_a_disk_that_is_slower_than_computing_is_not_read(make: Make) -> None:
    """Both terms are told. A slow disk never makes a hit slower than a miss."""
    store, worker = make(holding(("/a", 16), ("/b", 2), file_bytes=1_500_000_000))
    worker.cache.fetch(PrefixFetch(prepared("r", tokens(300)), 0, 0, computing(1000)))
    fetched = worker.delivered.get(timeout=DEADLINE_SECONDS)

    assert isinstance(fetched, BlocksFetched)
    assert fetched.blocks == ()
    assert fetched.outcome.miss_reason == "disk_slower"
    assert fetched.outcome.expected_restore_seconds == pytest.approx(3.0)
    assert fetched.outcome.expected_compute_seconds == pytest.approx(0.288)
    assert isinstance(store.requests.get(timeout=DEADLINE_SECONDS), Lookup)
    assert store.requests.empty()


@pytest.mark.parametrize(
    ("hot", "attention", "reason"), [(0, 1e-5, "disk_slower"), (20, 1e-5, ""), (20, 0.0, "disk_slower")]
)
def test_computing_costs_more_behind_a_long_context(make: Make, hot: int, attention: float, reason: str) -> None:
    """The same block, at the start of a prompt and after twenty others."""
    _, worker = make(holding(("/a", 16), file_bytes=1_000_000_000))
    prefill = PrefillCost(fixed=0.0, token=0.001, attention=attention)
    worker.cache.fetch(PrefixFetch(prepared("r", tokens(21 * BLOCK_TOKENS + 1)), hot, hot * BLOCK_TOKENS, prefill))
    outcome = first_fetched(worker).outcome

    assert outcome.miss_reason == reason
    attended = hot * BLOCK_TOKENS + BLOCK_TOKENS / 2
    assert outcome.expected_compute_seconds == pytest.approx(BLOCK_TOKENS * (0.001 + attention * attended))


def test_what_waits_to_be_written_is_read_from_memory(make: Make) -> None:
    """A block that RAM let go stays readable until it is durable."""
    _, worker = make(lambda _: None, staging_budget_bytes=10**9)
    blocks = chain_of_blocks(tokens(600))
    for block in blocks:
        worker.cache.store(block)
    worker.cache.fetch(PrefixFetch(prepared("r", tokens(600)), 0, 0, computing(1)))
    fetched = next(
        message
        for message in iter(lambda: worker.delivered.get(timeout=DEADLINE_SECONDS), None)
        if isinstance(message, BlocksFetched)
    )

    assert [block.key for block in fetched.blocks] == [block.key for block in blocks]
    assert all(block.children == set() for block in fetched.blocks)


def first_fetched(worker: Worker) -> BlocksFetched[Kv]:
    return next(
        message
        for message in iter(lambda: worker.delivered.get(timeout=DEADLINE_SECONDS), None)
        if isinstance(message, BlocksFetched)
    )


@pytest.mark.parametrize(
    ("asked", "states", "expected"),
    [
        ([*range(300), 7, 7], (), [256, 100]),  # a tail of which a part is shared
        ([*range(200), 7, 7], (), [256]),  # a whole block likewise
        ([9, *range(300)], (), []),
        ([*range(300), 7, 7], (20, 99), [256, 100]),  # up to a state
        ([*range(270), 7, 7], (20,), [256]),  # no state that is shared
    ],
)
def test_a_tail_that_waits_is_read_from_memory(
    make: Make, asked: list[int], states: tuple[int, ...], expected: list[int]
) -> None:
    """Whatever of what waits shares most with the prompt, as in RAM; the disk is asked for what comes after it."""
    _, worker = make(lambda _: None, staging_budget_bytes=10**9, boundary="states" if states else "any_token")
    blocks = chain_of_blocks(tokens(356))
    blocks[-1].states = {after: State((), 1) for after in states}
    for block in blocks:
        worker.cache.store(block)
    worker.cache.fetch(PrefixFetch(prepared("r", asked), 0, 0, computing(1)))

    fetched = first_fetched(worker)
    assert [len(block.token_ids) for block in fetched.blocks] == expected


def test_the_disks_speed_is_that_of_whole_files(make: Make) -> None:
    """Of those read and then found damaged too, and whatever of a file is used: else a disk looks slow that is not."""
    now = [1000.0]
    measured: list[tuple[int, float]] = []

    class Timed(PlainReading):
        def finish(self) -> BlockParts[Kv]:
            now[0] += 0.5
            return super().finish()

    _, worker = make(holding(("/a", 16), ("/flipped", 16), checksum=CHECKSUM), begin=Timed, clock=lambda: now[0])
    worker.cache._read_rate.measured = lambda file_bytes, seconds, now: measured.append((file_bytes, seconds))
    outcome = worker.fetch(tokens(600)).outcome

    assert (outcome.miss_reason, outcome.restored_bytes) == ("integrity", 2560)
    assert measured == [(2 * FILE_BYTES, pytest.approx(1.0))]


def test_a_bad_time_of_the_disk_passes(make: Make) -> None:
    """Refused as slower than computing, a prefix is read again when the measurement is old."""
    now = [1000.0]
    _, worker = make(holding(("/a", 16), file_bytes=12_000_000), clock=lambda: now[0])
    for _ in range(40):
        worker.cache._read_rate.measured(3_000_000, 1.0, now[0])
    worker.cache.fetch(PrefixFetch(prepared("r", tokens(300)), 0, 0, computing(2000)))
    assert first_fetched(worker).outcome.miss_reason == "disk_slower"
    now[0] += 1800.0
    worker.cache.fetch(PrefixFetch(prepared("r", tokens(300)), 0, 0, computing(2000)))
    assert [len(block.token_ids) for block in first_fetched(worker).blocks] == [256]
