"""The worker's side of the cachestore, on a thread of its own: every call has a deadline, every failure is a miss.

Fetches go before stores. When the daemon does not answer, calls are refused at once for a while instead of making
each request wait; it is asked again by itself after that.
"""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from protocol.block_file import block_metadata
from protocol.blocks import (
    BlockReply,
    BlockRequest,
    CacheFailed,
    Declined,
    Fetch,
    Found,
    Leased,
    Lookup,
    Publish,
    Published,
    Release,
    Stage,
    Staged,
)
from protocol.framing import MalformedMessage
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey, LeaseId
from protocol.sockets import Peer, PeerGone
from worker.messages import BlockDurable, BlocksFetched
from worker.prefix_index import Block
from worker.sequence import Prepared

Payload = TypeVar("Payload")

LOOKUP_SECONDS = 0.5
"""How long the index may take to answer; it needs about a millisecond. A request waits for this one."""

CALL_SECONDS = 5.0
"""How long any other call may take: fetching verifies files, publishing waits for the disk (fsync)."""

REST_SECONDS = 5.0
"""How long a silent daemon is left alone."""

_HEADER_SLACK_BYTES = 64 * 1024

log = structlog.get_logger()


class ColdCacheUnavailable(Exception):
    """No usable answer in time; the message is the reason to count."""


@dataclass(frozen=True)
class _FetchJob:
    prepared: Prepared
    hot_blocks: int
    hot_tokens: int


@dataclass(frozen=True)
class _StopJob:
    pass


class ColdCache(Generic[Payload]):
    """`fetch`, `store`, `is_storing` are the step thread's; `deliver` is called on this object's thread.

    `read(path, tokens)` gives a payload with its size; `write(path, payload, tokens, metadata)` makes a block file.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Peer[BlockReply, BlockRequest]],
        fingerprint: str,
        read: Callable[[str, int], tuple[Payload, int]],
        write: Callable[[str, Payload, int, dict[str, str]], None],
        deliver: Callable[[BlocksFetched[Payload] | BlockDurable], None],
        clock: Callable[[], float],
        staging_budget_bytes: int = 1024**3,
    ) -> None:
        self._connect = connect
        self._fingerprint = fingerprint
        self._read = read
        self._write = write
        self._deliver = deliver
        self._clock = clock
        self._staging_budget_bytes = staging_budget_bytes
        self._jobs: queue.PriorityQueue[tuple[int, int, _FetchJob | Block[Payload] | _StopJob]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._calls = itertools.count(1)
        self._lock = threading.Lock()
        self._storing: dict[BlockKey, int] = {}
        self._resting_until = 0.0
        self._last_refusal = ""
        self.stored_blocks = 0
        self._thread = threading.Thread(target=self._run, name="cold-cache", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fetch(self, prepared: Prepared, hot_blocks: int, hot_tokens: int) -> None:
        self._jobs.put((0, next(self._order), _FetchJob(prepared, hot_blocks, hot_tokens)))

    def store(self, block: Block[Payload]) -> None:
        with self._lock:
            if sum(self._storing.values()) + block.size_bytes > self._staging_budget_bytes:
                return
            self._storing[block.key] = block.size_bytes
        self._jobs.put((1, next(self._order), block))

    def is_storing(self, key: BlockKey) -> bool:
        with self._lock:
            return key in self._storing

    def stop(self, timeout_seconds: float) -> int:
        """Finish what is queued, within the time. Returns how many blocks were not stored."""
        self._jobs.put((2, next(self._order), _StopJob()))
        self._thread.join(timeout_seconds)
        with self._lock:
            return len(self._storing)

    def _run(self) -> None:
        peer = self._connect()
        try:
            while True:
                _, _, job = self._jobs.get()
                match job:
                    case _StopJob():
                        return
                    case _FetchJob():
                        self._deliver(self._fetched(peer, job))
                    case Block():
                        self._stored(peer, job)
        finally:
            peer.close()

    def _fetched(self, peer: Peer[BlockReply, BlockRequest], job: _FetchJob) -> BlocksFetched[Payload]:
        prepared = job.prepared
        blocks: list[Block[Payload]] = []
        try:
            if not self._is_worth_fetching(peer, job):
                return BlocksFetched(prepared.request_id, (), "absent")
            reply = self._call(
                peer,
                Fetch(
                    call_id=next(self._calls),
                    fingerprint=self._fingerprint,
                    grains=prepared.grains,
                    skip_blocks=job.hot_blocks,
                ),
                CALL_SECONDS,
            )
            if not isinstance(reply, Leased):
                return BlocksFetched(prepared.request_id, (), _reason(reply))
            try:
                for slot, leased in enumerate(reply.blocks, job.hot_blocks):
                    blocks.append(self._block(prepared, slot, leased.grains, leased.path))
            finally:
                self._send_release(peer, reply.lease)
            missed = "" if blocks else reply.miss_reason
        except ColdCacheUnavailable as why:
            missed = str(why)
        except Exception as why:  # noqa: BLE001 - a file or a reply that is not what the store promised: a miss, whatever it raises
            log.warning("block_unreadable", request_id=prepared.request_id, error=type(why).__name__)
            missed = "unreadable"
        return BlocksFetched(prepared.request_id, tuple(blocks), missed)

    def _is_worth_fetching(self, peer: Peer[BlockReply, BlockRequest], job: _FetchJob) -> bool:
        """Whether the disk holds more of this prompt than RAM does."""
        lookup = Lookup(
            call_id=next(self._calls),
            fingerprint=self._fingerprint,
            grains=job.prepared.grains,
            skip_blocks=job.hot_blocks,
        )
        reply = self._call(peer, lookup, LOOKUP_SECONDS)
        if not isinstance(reply, Found):
            raise ColdCacheUnavailable(_reason(reply))
        on_disk = job.hot_blocks * BLOCK_TOKENS + sum(block.grains for block in reply.blocks) * GRAIN_TOKENS
        return on_disk > job.hot_tokens

    def _block(self, prepared: Prepared, slot: int, grain_count: int, path: str) -> Block[Payload]:
        first_grain = slot * BLOCK_TOKENS // GRAIN_TOKENS
        chain = prepared.grains[first_grain : first_grain + grain_count]
        if not 0 < len(chain) == grain_count <= BLOCK_TOKENS // GRAIN_TOKENS:
            raise ValueError("the store leased a block that is not in this prompt")
        tokens = grain_count * GRAIN_TOKENS
        payload, size_bytes = self._read(path, tokens)
        return Block(
            key=BlockKey(chain[-1]),
            parent=BlockKey(prepared.grains[first_grain - 1]) if first_grain else prepared.root.digest,
            start=slot * BLOCK_TOKENS,
            token_ids=prepared.token_ids[slot * BLOCK_TOKENS : slot * BLOCK_TOKENS + tokens],
            grains=chain,
            payload=payload,
            size_bytes=size_bytes,
            is_durable=True,
        )

    def _stored(self, peer: Peer[BlockReply, BlockRequest], block: Block[Payload]) -> None:
        try:
            self._publish(peer, block)
        except ColdCacheUnavailable as why:
            self._report_refusal(str(why))
        except Exception as why:  # noqa: BLE001 - counted and logged; the next block may fare better
            self._report_refusal(f"write_failed_{type(why).__name__}")
        else:
            self.stored_blocks += 1
            self._last_refusal = ""
        finally:
            with self._lock:
                self._storing.pop(block.key, None)

    def _report_refusal(self, reason: str) -> None:
        """One line when the reason changes, not one per block."""
        if reason != self._last_refusal:
            log.warning("blocks_not_stored", reason=reason)
        self._last_refusal = reason

    def _publish(self, peer: Peer[BlockReply, BlockRequest], block: Block[Payload]) -> None:
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
            ),
            CALL_SECONDS,
        )
        if isinstance(staged, Declined) and staged.reason == "present":
            self._deliver(BlockDurable(block.key))
            return
        if not isinstance(staged, Staged):
            raise ColdCacheUnavailable(_reason(staged))
        metadata = block_metadata(
            fingerprint=self._fingerprint, key=key, parent=parent, grains=block.grains, tokens=tokens
        )
        try:
            self._write(staged.path, block.payload, tokens, metadata)
        except BaseException:
            self._send_release(peer, staged.lease)
            raise
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
        self._deliver(BlockDurable(block.key))

    def _call(self, peer: Peer[BlockReply, BlockRequest], request: BlockRequest, timeout_seconds: float) -> BlockReply:
        """One request and its reply. Raises ColdCacheUnavailable when none comes in time."""
        if self._clock() < self._resting_until:
            raise ColdCacheUnavailable("unavailable")
        deadline = self._clock() + timeout_seconds
        try:
            peer.send(request)
        except PeerGone:
            raise ColdCacheUnavailable("unavailable") from None
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

    def _send_release(self, peer: Peer[BlockReply, BlockRequest], lease: LeaseId) -> None:
        with contextlib.suppress(PeerGone):  # its leases end by themselves
            peer.send(Release(call_id=next(self._calls), lease=lease))


def _reason(reply: BlockReply) -> str:
    match reply:
        case Declined(reason=reason):
            return reason
        case CacheFailed():
            return "failed"
        case _:
            return "unexpected_reply"
