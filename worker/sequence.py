"""One request's progress through the engine. Arithmetic as properties, so the scheduler reads as prose."""

from dataclasses import dataclass
from typing import Literal

from protocol.generation import Generate, Warm
from protocol.ids import Grain, RequestId
from worker.hashing import Root


class BooksDoNotAddUp(Exception):
    """An invariant of the worker's own state is broken: a fault of ours, and no state to go on from."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the text plane makes of a `Generate`: its tokens, its end, and the names of its prefix.

    `message_starts` are the positions at which the messages' texts begin, if that is known.
    `boundaries` are positions in the prompt at which a later prompt is likely to part from it, ascending, multiples of
    GRAIN_TOKENS. `warm` is set when the request only fills the cache; `request` then draws nothing.
    `max_tokens` is resolved: never beyond the context. `arrived` is on the worker's monotonic clock, in seconds.
    """

    request: Generate
    token_ids: tuple[int, ...]
    max_tokens: int
    root: Root
    grains: tuple[Grain, ...]
    arrived: float
    message_starts: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    warm: Warm | None = None

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id


Priority = Literal["normal", "warm"]
"""`warm` only fills the cache, when nobody waits."""


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
    boundaries: tuple[int, ...] = ()
    priority: Priority = "normal"
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
    def next_boundary(self) -> int | None:
        """The next position at which a slice must end, so that a state can be kept there."""
        return next((position for position in self.boundaries if position > self.prefilled), None)

    @property
    def has_started(self) -> bool:
        return self.prefill_started is not None

    @property
    def is_decoding(self) -> bool:
        return self.decode_started is not None
