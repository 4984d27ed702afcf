"""What reaches the step loop's inbox from this worker's own threads, beside the gateway's commands."""

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from protocol.generation import Cancel, Drain, ForgetHot, Ping, SetBudget, Unpin
from protocol.ids import BlockKey, RequestId
from worker.prefix_cache import FetchOutcome
from worker.prefix_index import Block
from worker.sequence import Prepared

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class BlocksFetched(Generic[Payload]):
    """The answer to a fetch: blocks from disk, in order, and what it took or why there are no more."""

    request_id: RequestId
    blocks: tuple[Block[Payload], ...]
    outcome: FetchOutcome = field(default_factory=FetchOutcome)


@dataclass(frozen=True)
class BlockStored:
    """The answer to a store: whether the block is on disk now; if the store would not have it, its word for why."""

    key: BlockKey
    outcome: Literal["durable", "refused"]
    refusal: str = ""


InboxMessage = Prepared | Cancel | Drain | Ping | Unpin | SetBudget | ForgetHot | BlocksFetched[Any] | BlockStored
