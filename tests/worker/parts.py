"""Values that the worker's tests are made of."""

from collections.abc import Sequence
from typing import Literal

from protocol.generation import CacheUse, Generate, Pin, TokenPrompt, Warm
from protocol.ids import BLOCK_TOKENS, BlockKey, RequestId
from protocol.latency import LatencyClass
from protocol.sampling import Sampling
from worker import hashing, sequence
from worker.prefix_index import Block
from worker.scheduler import Scheduler
from worker.sequence import Matcher, Prepared

FINGERPRINT = "f" * 32
GREEDY = Sampling(temperature=0.0)


def prepared(
    name: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int = 16,
    sampling: Sampling = GREEDY,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    top_logprobs: int | None = None,
    scope: bytes = b"",
    owner: str = "",
    retention: Literal["disk", "in_memory"] = "disk",
    pin: Pin | None = None,
    latency_class: LatencyClass = LatencyClass.STANDARD,
    arrived: float = 1000.0,
    matcher: Matcher | None = None,
) -> Prepared:
    """A request as the text plane hands it on."""
    request = Generate(
        request_id=RequestId(name),
        prompt=TokenPrompt(token_ids=tuple(token_ids)),
        sampling=sampling,
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        top_logprobs=top_logprobs,
        latency_class=latency_class,
        cache=CacheUse(scope=scope, owner=owner, retention=retention),
    )
    root = hashing.root(FINGERPRINT, scope)
    return Prepared(
        request=request,
        token_ids=tuple(token_ids),
        max_tokens=max_tokens,
        root=root,
        grains=hashing.grains(root.secret, root.digest, token_ids),
        arrived=arrived,
        warm=None if pin is None else Warm(request_id=RequestId(name), prompt=request.prompt, pin=pin),
        matcher=matcher,
    )


def chain_of_blocks(
    token_ids: Sequence[int], *, scope: bytes = b"", bytes_per_token: int = 10
) -> list[Block[tuple[int, ...]]]:
    """The blocks of a token sequence, the last of them a tail if it is not whole. The payload is the tokens."""
    root = hashing.root(FINGERPRINT, scope)
    parent = root.digest
    blocks: list[Block[tuple[int, ...]]] = []
    for start in range(0, len(token_ids), BLOCK_TOKENS):
        tokens = tuple(token_ids[start : start + BLOCK_TOKENS])
        grains = hashing.grains(root.secret, parent, tokens)
        key = hashing.block_key(root.secret, parent, grains, tokens)
        blocks.append(
            Block(
                key=key,
                parent=BlockKey(parent),
                start=start,
                token_ids=tokens,
                grains=grains,
                payload=tokens,
                kv_bytes=len(tokens) * bytes_per_token,
            )
        )
        parent = key
    return blocks


def everybody(scheduler: Scheduler) -> list[sequence.Sequence]:
    """Whom it knows, wherever they stand."""
    places = scheduler.places
    return [*places.waiting(), *places.parked.values(), *places.decoding.values()]
