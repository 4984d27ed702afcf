"""The worker's side of the cachestore, on a thread of its own: every call has a deadline, every failure is a miss.

Fetches go before stores. When the daemon does not answer, calls are refused at once for a while instead of making
each request wait; it is asked again by itself after that.
"""

import contextlib
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, Literal, NamedTuple, TypeVar, assert_never

import structlog

from protocol.block_file import block_metadata
from protocol.blocks import (
    BlockReply,
    BlockRequest,
    CacheFailed,
    Declined,
    Fetch,
    Forget,
    Forgotten,
    Found,
    Leased,
    LeasedBlock,
    Lookup,
    PinBlocks,
    Publish,
    Published,
    Release,
    Stage,
    Staged,
    UnpinBlocks,
)
from protocol.framing import MalformedMessage
from protocol.generation import Pin
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey, LeaseId
from protocol.sockets import Peer, PeerGone
from worker.chain_reading import BlockReading, ChainRead, read_chain
from worker.messages import BlocksFetched, BlockStored
from worker.prefix_cache import Fetch as PrefixFetch
from worker.prefix_cache import FetchOutcome
from worker.prefix_index import Block, BlockParts, Boundary
from worker.read_rate import ReadRate
from worker.sequence import Prepared

Payload = TypeVar("Payload")

STATEFUL_PARTS = 4
"""How many blocks that share the last part of a prompt are read for a model that needs a state in one of them."""

LOOKUP_SECONDS = 0.5
"""How long the index may take to answer; it needs about a millisecond. A request waits for this one."""

CALL_SECONDS = 5.0
"""How long any other call may take: publishing waits for the disk (fsync), and others for whoever publishes."""

STOP_LOOKS_SECONDS = 0.05
"""How late at most it is seen that all is written."""

REST_SECONDS = 5.0
"""How long a silent daemon is left alone."""

PIECE_BLOCKS = 32
"""How many blocks are leased at once. A lease ends after a minute, and the next one is taken before this is read."""

_HEADER_SLACK_BYTES = 64 * 1024
_GRAINS = BLOCK_TOKENS // GRAIN_TOKENS

log = structlog.get_logger()


class ColdCacheUnavailable(Exception):
    """No usable answer in time; the message is the reason to count."""


@dataclass(frozen=True)
class _PinJob:
    request: PinBlocks | UnpinBlocks


@dataclass(frozen=True)
class _ForgetJob:
    owner: str | None


@dataclass(frozen=True)
class _StopJob:
    pass


class _WaitingChain(NamedTuple, Generic[Payload]):
    """What waits to be written of a prompt: whole blocks, and behind them perhaps one that shares its next tokens.

    With it and with what is hot, `whole_blocks` and `held_tokens` of the prompt are in memory.
    """

    blocks: tuple[Block[Payload], ...]
    whole_blocks: int
    held_tokens: int


class _PiecesRead(NamedTuple):
    """What blocks were made of, in bytes; what was read for that; and why there is no more."""

    restored_bytes: int
    file_bytes: int
    end: str


_Job = PrefixFetch[Payload] | Block[Payload] | _PinJob | _ForgetJob


class ColdCache(Generic[Payload]):
    """`fetch`, `store`, `forget`, `is_storing` are the step thread's; `deliver` is called on both threads.

    `begin(leased)` begins to read a block file; `write(path, block, tokens, metadata)` makes one.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Peer[BlockReply, BlockRequest]],
        fingerprint: str,
        begin: Callable[[LeasedBlock], BlockReading[Payload]],
        write: Callable[[str, Block[Payload], int, dict[str, str]], None],
        deliver: Callable[[BlocksFetched[Payload] | BlockStored], None],
        clock: Callable[[], float],
        boundary: Boundary = "any_token",
        staging_budget_bytes: int = 1024**3,
    ) -> None:
        self._connect = connect
        self._fingerprint = fingerprint
        self._begin = begin
        self._write = write
        self._deliver = deliver
        self._clock = clock
        self._boundary: Boundary = boundary
        self._parts = 1 if boundary == "any_token" else STATEFUL_PARTS
        self._staging_budget_bytes = staging_budget_bytes
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job[Payload] | _StopJob]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._calls = itertools.count(1)
        self._lock = threading.Lock()
        self._storing: dict[BlockKey, Block[Payload]] = {}
        self._read_rate = ReadRate()
        self._resting_until = 0.0
        self._last_refusal = ""
        self.stored_blocks = 0
        self._thread = threading.Thread(target=self._run, name="cold-cache", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def read_bytes_per_second(self) -> float:
        """How fast blocks came from disk lately, the daemon's checks included."""
        return self._read_rate.bytes_per_second(self._clock())

    def fetch(self, fetch: PrefixFetch[Payload]) -> None:
        self._jobs.put((0, next(self._order), fetch))

    def store(self, block: Block[Payload]) -> bool:
        with self._lock:
            waiting_bytes = sum(waiting.size_bytes for waiting in self._storing.values())
            if waiting_bytes + block.size_bytes > self._staging_budget_bytes:
                return False
            self._storing[block.key] = block
        self._jobs.put((1, next(self._order), block))
        return True

    def pin(self, keys: Sequence[BlockKey], owner: str, pin: Pin) -> None:
        request = PinBlocks(
            call_id=next(self._calls),
            fingerprint=self._fingerprint,
            keys=tuple(keys),
            owner=owner,
            name=pin.name,
            ttl_seconds=pin.ttl_seconds,
        )
        self._jobs.put((2, next(self._order), _PinJob(request)))

    def unpin(self, owner: str, name: str) -> None:
        request = UnpinBlocks(call_id=next(self._calls), owner=owner, name=name)
        self._jobs.put((2, next(self._order), _PinJob(request)))

    def forget(self, owner: str | None) -> None:
        """What waits to be written, of one owner or of all, is not written, and answered as refused; what is on disk of
        this model is deleted, before anything that is asked for from now on.

        The gateway has the store forget, too. That may be before what is being written here just now is published.
        """
        with self._lock:
            gone = [key for key, block in self._storing.items() if owner is None or block.owner == owner]
            for key in gone:
                del self._storing[key]
        for key in gone:
            self._deliver(BlockStored(key, "refused"))
        if gone or self.stored_blocks:  # a process that wrote nothing has nothing to take back
            self._jobs.put((0, next(self._order), _ForgetJob(owner)))

    def lift_staging_budget(self) -> None:
        """Before the model leaves memory: its blocks are there already, so queueing them costs nothing."""
        self._staging_budget_bytes = sys.maxsize

    def is_storing(self, key: BlockKey) -> bool:
        with self._lock:
            return key in self._storing

    def stop(self, timeout_seconds: float, meanwhile: Callable[[float], object] | None = None) -> int:
        """Finish what is queued, within the time. Returns how many blocks were not stored.

        `meanwhile(seconds)` is called again and again until then, and may take so long: what it hears of may concern
        what is queued.
        """
        self._jobs.put((3, next(self._order), _StopJob()))
        until = self._clock() + timeout_seconds
        while meanwhile is not None and self._thread.is_alive() and (left := until - self._clock()) > 0:
            meanwhile(min(left, STOP_LOOKS_SECONDS))
        self._thread.join(max(0.0, until - self._clock()))
        with self._lock:
            return len(self._storing)

    def _run(self) -> None:
        peer = self._connect()
        checks = ThreadPoolExecutor(1, thread_name_prefix="block-checks")
        try:
            while True:
                _, _, job = self._jobs.get()
                if isinstance(job, _StopJob):
                    return
                try:
                    self._do(peer, checks, job)
                except Exception:
                    log.exception("cold_cache_failed", job=type(job).__name__)
        finally:
            checks.shutdown()
            peer.close()

    def _do(self, peer: Peer[BlockReply, BlockRequest], checks: Executor, job: _Job[Payload]) -> None:
        """Fetches and stores are answered in any case, once."""
        match job:
            case PrefixFetch():
                self._deliver(self._fetched(peer, checks, job))
            case Block():
                self._stored(peer, job)
            case _PinJob(request=request):
                with contextlib.suppress(ColdCacheUnavailable):
                    self._call(peer, request, CALL_SECONDS)
            case _ForgetJob(owner=owner):
                self._delete(peer, owner)
            case _:
                assert_never(job)

    def _fetched(
        self, peer: Peer[BlockReply, BlockRequest], checks: Executor, fetch: PrefixFetch[Payload]
    ) -> BlocksFetched[Payload]:
        request_id = fetch.prepared.request_id
        blocks: list[Block[Payload]] = []
        try:
            # What waits to be written was evicted from RAM perhaps, but not from here: it needs no reading.
            waiting = self._waiting_chain(fetch)
            blocks += waiting.blocks
            outcome = self._read_chain(peer, checks, fetch, waiting, blocks)
        except ColdCacheUnavailable as why:
            outcome = FetchOutcome(str(why))
        except Exception:
            log.exception("fetch_failed", request_id=request_id)
            outcome = FetchOutcome("unreadable")
        return BlocksFetched(request_id, tuple(blocks), outcome)

    def _waiting_chain(self, fetch: PrefixFetch[Payload]) -> _WaitingChain[Payload]:
        chain: list[Block[Payload]] = []
        grains = fetch.prepared.grains
        with self._lock:
            for last in range((fetch.hot_blocks + 1) * _GRAINS, len(grains) + 1, _GRAINS):
                block = self._storing.get(BlockKey(grains[last - 1]))
                if block is None or not block.is_whole:
                    break
                chain.append(_apart(block))
            start = (fetch.hot_blocks + len(chain)) * BLOCK_TOKENS
            parent = BlockKey(grains[start // GRAIN_TOKENS - 1]) if start else fetch.prepared.root.digest
            usable = {
                block.key: (self._usable_tokens(block, fetch.prepared.token_ids), block)
                for block in self._storing.values()
                if block.parent == parent and block.start == start
            }
        whole_blocks, held = fetch.hot_blocks + len(chain), max(fetch.hot_tokens, start)
        tokens, last = max(usable.values(), key=lambda one: one[0], default=(0, None))
        if last is not None and start + tokens > held:
            held = start + tokens
            chain.append(_apart(last))
        return _WaitingChain(tuple(chain), whole_blocks, held)

    def _usable_tokens(self, block: Block[Payload], token_ids: Sequence[int]) -> int:
        pairs = zip(block.token_ids, token_ids[block.start :], strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._boundary == "any_token":
            return common
        return max((tokens for tokens in list(block.states) if tokens <= common), default=0)

    def _read_chain(
        self,
        peer: Peer[BlockReply, BlockRequest],
        checks: Executor,
        fetch: PrefixFetch[Payload],
        waiting: _WaitingChain[Payload],
        blocks: list[Block[Payload]],
    ) -> FetchOutcome:
        """Append what is read to `blocks`. Raises ColdCacheUnavailable when the daemon does not answer."""
        prepared = fetch.prepared
        first_slot, held = waiting.whole_blocks, waiting.held_tokens
        found = self._call(
            peer,
            Lookup(
                call_id=next(self._calls),
                fingerprint=self._fingerprint,
                grains=prepared.grains,
                skip_blocks=first_slot,
                parts=self._parts,
            ),
            LOOKUP_SECONDS,
        )
        if not isinstance(found, Found):
            raise ColdCacheUnavailable(_reason(found))
        whole = sum(block.grains == _GRAINS for block in found.blocks)
        part = max((block.grains for block in found.blocks if block.grains < _GRAINS), default=0)
        gained = (first_slot + whole) * BLOCK_TOKENS + part * GRAIN_TOKENS - held
        if gained <= 0:
            return FetchOutcome("" if blocks else "absent")
        file_bytes = sum(block.file_bytes for block in found.blocks)
        restore_seconds = file_bytes / self.read_bytes_per_second
        compute_seconds = fetch.prefill.seconds(gained, held)
        if restore_seconds > compute_seconds:
            return FetchOutcome(
                "disk_slower",
                expected_restore_seconds=restore_seconds,
                expected_compute_seconds=compute_seconds,
            )
        started = self._clock()
        read = self._read_pieces(peer, checks, prepared, blocks, first_slot)
        now = self._clock()
        seconds = now - started
        if read.file_bytes:
            self._read_rate.measured(read.file_bytes, seconds, now)
        return FetchOutcome(
            read.end if read.restored_bytes == 0 or read.end != "absent" else "",
            restored_bytes=read.restored_bytes,
            restore_seconds=seconds,
            expected_restore_seconds=restore_seconds,
            expected_compute_seconds=compute_seconds,
        )

    def _read_pieces(
        self,
        peer: Peer[BlockReply, BlockRequest],
        checks: Executor,
        prepared: Prepared,
        blocks: list[Block[Payload]],
        slot: int,
    ) -> _PiecesRead:
        """Read what there is from `slot` on, piece by piece, and append it.

        The next piece is asked for before this one is read, so that nothing waits for the daemon in between.
        """

        def ask(from_slot: int) -> BlockRequest:
            fetch = Fetch(
                call_id=next(self._calls),
                fingerprint=self._fingerprint,
                grains=prepared.grains,
                skip_blocks=from_slot,
                parts=self._parts,
                most_blocks=PIECE_BLOCKS,
            )
            self._send(peer, fetch)
            return fetch

        restored_bytes = file_bytes = 0
        asked = ask(slot)
        while True:
            reply = self._reply(peer, asked, CALL_SECONDS)
            if not isinstance(reply, Leased):
                return _PiecesRead(restored_bytes, file_bytes, _reason(reply))
            if not _is_of_chain(reply.blocks, len(prepared.grains) - slot * _GRAINS):
                self._send_release(peer, reply.lease)
                raise ValueError("the store leased a block that is not in this prompt")
            whole = sum(leased.grains == _GRAINS for leased in reply.blocks)
            may_go_on = len(reply.blocks) == PIECE_BLOCKS and whole > 0
            # Parts of the slot after the last whole block come once more with the next piece, if they were cut off.
            taken = reply.blocks[:whole] if may_go_on else reply.blocks
            ahead = ask(slot + whole) if may_go_on else None
            read = read_chain(taken, self._begin, checks)
            self._send_release(peer, reply.lease, read)
            file_bytes += read.file_bytes
            for leased, parts in zip(taken, read.parts, strict=False):
                blocks.append(self._block(prepared, slot, leased.grains, parts))
                restored_bytes += blocks[-1].size_bytes
                slot += leased.grains == _GRAINS
            if read.failed is not None:
                key, reason, why = read.failed
                log.warning(
                    "block_not_read", request_id=prepared.request_id, key=bytes(key).hex(), reason=reason, why=why
                )
                if ahead is not None:
                    self._give_back(peer, ahead)
                return _PiecesRead(restored_bytes, file_bytes, reason)
            if ahead is None:
                return _PiecesRead(restored_bytes, file_bytes, reply.miss_reason)
            asked = ahead

    def _give_back(self, peer: Peer[BlockReply, BlockRequest], asked: BlockRequest) -> None:
        """Wait for a lease that nobody wants any more, and end it."""
        with contextlib.suppress(ColdCacheUnavailable):
            reply = self._reply(peer, asked, CALL_SECONDS)
            if isinstance(reply, Leased):
                self._send_release(peer, reply.lease)

    def _block(self, prepared: Prepared, slot: int, grain_count: int, parts: BlockParts[Payload]) -> Block[Payload]:
        first_grain = slot * _GRAINS
        chain = prepared.grains[first_grain : first_grain + grain_count]
        tokens = grain_count * GRAIN_TOKENS
        return Block(
            key=BlockKey(chain[-1]),
            parent=BlockKey(prepared.grains[first_grain - 1]) if first_grain else prepared.root.digest,
            start=slot * BLOCK_TOKENS,
            token_ids=prepared.token_ids[slot * BLOCK_TOKENS : slot * BLOCK_TOKENS + tokens],
            grains=chain,
            payload=parts.payload,
            kv_bytes=parts.kv_bytes,
            states=parts.states,
            owner=prepared.request.cache.owner,
            ttl_seconds=prepared.request.cache.disk_ttl_seconds,
            is_durable=True,
        )

    def _stored(self, peer: Peer[BlockReply, BlockRequest], block: Block[Payload]) -> None:
        outcome: Literal["durable", "refused"] = "refused"
        refusal = ""
        try:
            if not self._is_wanted(block):
                return  # forgotten while it waited, and answered then
            self._publish(peer, block)
        except ColdCacheUnavailable as why:
            refusal = str(why)
            self._report_refusal(refusal)
        except Exception as why:  # noqa: BLE001 - counted and logged; the next block may fare better
            self._report_refusal(f"write_failed_{type(why).__name__}")
        else:
            self.stored_blocks += 1
            self._last_refusal = ""
            outcome = "durable"
        finally:
            with self._lock:
                was_wanted = self._storing.get(block.key) is block
                if was_wanted:
                    del self._storing[block.key]
            if was_wanted:
                self._deliver(BlockStored(block.key, outcome, refusal))

    def _is_wanted(self, block: Block[Payload]) -> bool:
        with self._lock:
            return self._storing.get(block.key) is block

    def _delete(self, peer: Peer[BlockReply, BlockRequest], owner: str | None) -> None:
        forget = Forget(call_id=next(self._calls), fingerprint=self._fingerprint, owner=owner, asked_by="worker")
        try:
            reply = self._call(peer, forget, CALL_SECONDS)
            reason = "" if isinstance(reply, Forgotten) else _reason(reply)
        except ColdCacheUnavailable as why:
            reason = str(why)
        if reason:
            log.error("forgotten_blocks_on_disk", reason=reason, advice="forget again: mlxd cache purge")

    def _report_refusal(self, reason: str) -> None:
        """One line when the reason changes, not one per block."""
        if reason != self._last_refusal:
            log.warning("blocks_not_stored", reason=reason)
        self._last_refusal = reason

    def _publish(self, peer: Peer[BlockReply, BlockRequest], wanted: Block[Payload]) -> None:
        block = _apart(wanted)
        key = BlockKey(block.grains[-1])
        tokens = len(block.grains) * GRAIN_TOKENS
        parent = block.parent if block.start else BlockKey(b"")
        staged = self._call(
            peer,
            Stage(
                call_id=next(self._calls),
                fingerprint=self._fingerprint,
                key=key,
                file_bytes=block.size_bytes + _HEADER_SLACK_BYTES,
                owner=block.owner,
                ttl_seconds=block.ttl_seconds,
            ),
            CALL_SECONDS,
        )
        if isinstance(staged, Declined) and staged.reason == "present":
            return
        if not isinstance(staged, Staged):
            raise ColdCacheUnavailable(_reason(staged))
        metadata = block_metadata(
            fingerprint=self._fingerprint,
            key=key,
            parent=parent,
            grains=block.grains,
            tokens=tokens,
            owner=block.owner,
            ttl_seconds=block.ttl_seconds,
        )
        try:
            self._write(staged.path, block, tokens, metadata)
        except BaseException:
            self._send_release(peer, staged.lease)
            raise
        if not self._is_wanted(wanted):
            self._send_release(peer, staged.lease)
            raise ColdCacheUnavailable("forgotten")
        published = self._call(
            peer,
            Publish(
                call_id=next(self._calls),
                lease=staged.lease,
                parent=parent,
                grains=block.grains,
                supersedes=block.supersedes,
            ),
            CALL_SECONDS,
        )
        is_present = isinstance(published, Declined) and published.reason == "present"
        if not isinstance(published, Published) and not is_present:
            raise ColdCacheUnavailable(_reason(published))

    def _call(self, peer: Peer[BlockReply, BlockRequest], request: BlockRequest, timeout_seconds: float) -> BlockReply:
        """One request and its reply. Raises ColdCacheUnavailable when none comes in time."""
        self._send(peer, request)
        return self._reply(peer, request, timeout_seconds)

    def _send(self, peer: Peer[BlockReply, BlockRequest], request: BlockRequest) -> None:
        if self._clock() < self._resting_until:
            raise ColdCacheUnavailable("unavailable")
        try:
            peer.send(request)
        except PeerGone:
            raise ColdCacheUnavailable("unavailable") from None

    def _reply(self, peer: Peer[BlockReply, BlockRequest], request: BlockRequest, timeout_seconds: float) -> BlockReply:
        deadline = self._clock() + timeout_seconds
        while (left := deadline - self._clock()) > 0:
            for reply in peer.receive(left):
                if isinstance(reply, MalformedMessage):
                    continue
                if reply.call_id == request.call_id:
                    return reply
                if isinstance(reply, Leased | Staged):
                    # The answer to a call given up on: what it hands out would stay pinned while this process lives.
                    self._send_release(peer, reply.lease)
        self._resting_until = self._clock() + REST_SECONDS
        raise ColdCacheUnavailable("timeout")

    def _send_release(
        self, peer: Peer[BlockReply, BlockRequest], lease: LeaseId, read: ChainRead[Payload] | None = None
    ) -> None:
        verified = () if read is None else read.verified
        suspect = () if read is None or read.failed is None else (read.failed.key,)
        with contextlib.suppress(PeerGone):  # its leases end by themselves
            peer.send(Release(call_id=next(self._calls), lease=lease, verified=verified, suspect=suspect))


def _apart(block: Block[Payload]) -> Block[Payload]:
    """The block as it is now, for this thread: in the hot tier it goes on to get states, children and pins."""
    return replace(block, states=dict(block.states), children=set(), pinned_by=set())


def _is_of_chain(leased: Sequence[LeasedBlock], grains_left: int) -> bool:
    """Whether these can be blocks of a prompt that has so many grains left: whole ones, then parts of the next one."""
    whole = 0
    for block in leased:
        if not 0 < block.grains <= min(_GRAINS, grains_left - whole * _GRAINS):
            return False
        whole += block.grains == _GRAINS
    return True


def _reason(reply: BlockReply) -> str:
    match reply:
        case Declined(reason=reason):
            return reason
        case CacheFailed():
            return "failed"
        case _:
            return "unexpected_reply"
