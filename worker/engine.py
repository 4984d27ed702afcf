"""What the step loop asks of an engine. The only implementation is `mlx_engine`; tests have a scripted one."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from protocol.generation import ChosenLogprob
from protocol.ids import RequestId
from worker.prefix_index import BlockUse, State
from worker.sequence import Prepared

Payload = TypeVar("Payload")


def nothing() -> None:
    """What is done between the parts of a pass that nobody needs to be let by."""


class Drawn(NamedTuple):
    """A row's next token. `logprob` is there when the request asked for it."""

    request_id: RequestId
    token_id: int
    logprob: ChosenLogprob | None


class Engine(Protocol[Payload]):
    """Owned by the step thread. Any exception out of it means its state is unknown: the worker must end."""

    def open(self, prepared: Prepared, uses: Sequence[BlockUse[Payload]]) -> None:
        """Make a row's KV cache, holding the tokens of `uses`. A row that drew before goes on where it was."""
        ...

    def prefill(
        self, request_id: RequestId, tokens: int, parts: int = 1, before_each: Callable[[], None] = nothing
    ) -> None:
        """Run the next `tokens` tokens of the row's prompt; returns when they are in its KV cache.

        In `parts` parts, if it has so many layers. If there are several, `before_each` is called before each of them:
        the device rests then, and anything may be done with other rows.
        """
        ...

    @property
    def mixes(self) -> bool:
        """Whether `prefill_and_decode` may be asked."""
        ...

    def prefill_and_decode(self, request_id: RequestId, tokens: int) -> list[Drawn]:
        """`prefill` and a decode step of all rows, of which none is unread, in one pass; gives the rows' tokens of this
        very step, so none is unread afterwards."""
        ...

    def join(self, request_id: RequestId) -> None:
        """All but the row's last token is in its KV cache: it takes part in decode from the next step on."""
        ...

    def park(self, request_id: RequestId) -> None:
        """Take a row, of which nothing is unread, out of the decode batch with its KV; `join` takes it back. Rows that
        are parked before the next step or join leave together."""
        ...

    def decode(self) -> list[Drawn]:
        """Run a decode step of all rows and give its tokens. Where the host goes on while the device computes: launch
        it, and give the tokens of the one before, if those are unread; a row's first token is not kept waiting for a
        launch, then this only reads."""
        ...

    def read(self) -> list[Drawn]:
        """Give the tokens of the step that was launched last, and launch none. Empty if they were read already."""
        ...

    def tokens_held(self, request_id: RequestId) -> int:
        """How many tokens of the row, prompt and drawn ones, have their KV in its cache."""
        ...

    def token_ids(self, request_id: RequestId) -> Sequence[int]:
        """The row's tokens, prompt and drawn ones. At least the first `tokens_held` of them are there."""
        ...

    def cut(self, request_id: RequestId, start: int, end: int) -> tuple[Payload, int]:
        """A detached copy of the KV of the row's tokens [start, end), and its size in bytes."""
        ...

    @property
    def keeps_states(self) -> bool:
        """Whether some layers cannot be cut at a token, so that reuse needs `state`s."""
        ...

    def state(self, request_id: RequestId) -> State[Payload]:
        """What the layers that cannot be cut hold after `tokens_held` tokens of the row, detached."""
        ...

    def drop(self, request_ids: Sequence[RequestId]) -> None:
        """These rows ended. Unknown ids are fine."""
        ...

    @property
    def live_kv_bytes(self) -> int:
        """Memory that rows' caches take, in bytes."""
        ...

    @property
    def active_bytes(self) -> int:
        """Memory held by arrays, in bytes."""
        ...
