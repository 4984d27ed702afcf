"""One text of a request, or one pair of texts: what a batch is made of. And what the model that runs batches offers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from protocol.generation import Embed, Rerank
from protocol.ids import RequestId


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """The tokens of one row. `type_ids` tell the two texts of a pair apart, where the model wants that."""

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedRows:
    """What the text plane makes of a request. `arrived` is on the worker's monotonic clock, in seconds."""

    request: Embed | Rerank
    rows: tuple[TokenRow, ...]
    arrived: float

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


BetweenSlices = Callable[[], Literal["go_on", "stop"]]
"""Called between two slices of a row that is too long for one; it may take its time."""


class BatchModel(Protocol):
    """Owned by the step thread. After an exception out of it the device's state is unknown: the worker must end."""

    def run(self, rows: Sequence[TokenRow], *, slice_tokens: int, between: BetweenSlices) -> list[bytes] | None:
        """Float32, little-endian, of each row: its vector, or its one score from 0 to 1. None when it was stopped.

        What a row gives does not depend on the others. A single row is run in slices of `slice_tokens` where the model
        can do that.
        """
        ...

    @property
    def active_bytes(self) -> int:
        """Memory held by arrays, in bytes."""
        ...
