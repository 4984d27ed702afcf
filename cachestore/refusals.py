"""Which requests make no sense, and what a request hears that the disk does not allow. Decides only."""

import math
from typing import assert_never

from cachestore.layout import GRAINS_PER_BLOCK, is_digest, is_fingerprint
from cachestore.pins import StageLease
from protocol.blocks import (
    BlockReply,
    BlockRequest,
    CacheFailed,
    Declined,
    Describe,
    Fetch,
    Forget,
    Found,
    Leased,
    Lookup,
    PinBlocks,
    Publish,
    Release,
    Released,
    Stage,
    UnpinBlocks,
)
from protocol.failures import Failure, FailureKind
from protocol.ids import LeaseId

NO_LEASE = LeaseId(0)
"""In the answer to a Fetch that found nothing. Releasing it is allowed and does nothing."""

_MAX_NAME_LETTERS = 200
_MAX_PINNED_KEYS = 16384
"""Of one set: four million tokens."""


def unserved(request: BlockRequest, reason: str) -> BlockReply:
    """The answer to a request that the disk does not allow: a miss or a decline wherever there is one."""
    match request:
        case Lookup():
            return Found(call_id=request.call_id, blocks=())
        case Fetch():
            return Leased(call_id=request.call_id, lease=NO_LEASE, blocks=(), miss_reason=reason)
        case Stage() | Publish():
            return Declined(call_id=request.call_id, reason=reason)
        case Release():
            return Released(call_id=request.call_id)
        case Forget() | PinBlocks() | UnpinBlocks() | Describe():
            message = f"the cache directory cannot be used ({reason}): see the cachestore's log, then try again"
            failure = Failure(kind=FailureKind.INTERNAL, message=message)
            return CacheFailed(call_id=request.call_id, failure=failure)
        case _:
            assert_never(request)


def is_block(request: Publish, stage: StageLease) -> bool:
    """Whether what was written is a block of this cache, and the one that was staged."""
    return (
        1 <= len(request.grains) <= GRAINS_PER_BLOCK
        and all(is_digest(grain) for grain in request.grains)
        and len(set(request.grains)) == len(request.grains)
        and request.grains[-1] == stage.key
        and (not request.parent or is_digest(request.parent))
        and request.parent not in request.grains
    )


def is_stage(request: Stage) -> bool:
    """Whether such a block could be one of this cache."""
    return (
        is_fingerprint(request.fingerprint)
        and is_digest(request.key)
        and request.file_bytes > 0
        and len(request.owner) <= _MAX_NAME_LETTERS
        and _is_ttl(request.ttl_seconds)
    )


def is_pin(request: PinBlocks) -> bool:
    """Whether such a pin could be kept."""
    return (
        all(is_digest(key) for key in request.keys)
        and len(request.keys) <= _MAX_PINNED_KEYS
        and 1 <= len(request.name) <= _MAX_NAME_LETTERS
        and len(request.owner) <= _MAX_NAME_LETTERS
        and _is_ttl(request.ttl_seconds)
    )


def _is_ttl(ttl_seconds: float | None) -> bool:
    return ttl_seconds is None or 0 < ttl_seconds < math.inf
