"""What reaches the step loop's inbox from this worker's own threads, beside the gateway's commands."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from protocol.generation import Cancel, Drain, Ping
from protocol.ids import BlockKey, RequestId
from worker.prefix_index import Block
from worker.sequence import Prepared

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class BlocksFetched(Generic[Payload]):
    """The answer to a fetch: blocks from disk, in order. None with a reason is a miss."""

    request_id: RequestId
    blocks: tuple[Block[Payload], ...]
    miss_reason: str = ""


@dataclass(frozen=True)
class BlockDurable:
    """A block is on disk now."""

    key: BlockKey


InboxMessage = Prepared | Cancel | Drain | Ping | BlocksFetched[Any] | BlockDurable
