"""One request's progress through the engine. Arithmetic as properties, so the scheduler reads as prose."""

from dataclasses import dataclass

from protocol.generation import Generate
from protocol.ids import Grain, RequestId
from worker.hashing import Root


class BooksDoNotAddUp(Exception):
    """An invariant of the worker's own state is broken: a fault of ours, and no state to go on from."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the text plane makes of a `Generate`: its tokens, its end, and the names of its prefix.

    `max_tokens` is resolved: never beyond the context. `arrived` is on the worker's monotonic clock, in seconds.
    """

    request: Generate
    token_ids: tuple[int, ...]
    max_tokens: int
    root: Root
    grains: tuple[Grain, ...]
    arrived: float

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id


@dataclass(kw_only=True)
class Sequence:
    """A request the scheduler knows.

    `prefilled` tokens of the prompt are in its KV cache, `cached` of them came from the prefix cache. The last
    prompt token is never prefilled: it is the first input of decode.
    """

    request_id: RequestId
    prompt_tokens: int
    arrived: float
    blocks_deadline: float | None = None
    prefilled: int = 0
    cached: int = 0
    slices: int = 0
    prefill_started: float | None = None
    decode_started: float | None = None

    @property
    def prefill_total(self) -> int:
        return self.prompt_tokens - 1

    @property
    def prefill_left(self) -> int:
        return self.prefill_total - self.prefilled

    @property
    def has_started(self) -> bool:
        return self.prefill_started is not None

    @property
    def is_decoding(self) -> bool:
        return self.decode_started is not None
