"""A route whose model answers with one event: what it says of a body, and of that event. Types only."""

from collections.abc import Iterator
from typing import Generic, Literal, Protocol, TypeVar

from msgspec import Struct

from protocol.failures import Failure
from protocol.generation import Detokenize, Embed, RequestEvent, Rerank, Tokenize
from protocol.ids import ModelName, RequestId

Body = TypeVar("Body")


class SingleWork(Struct, Generic[Body], frozen=True, kw_only=True):
    """What a body asks for. Class and tenant of `work`, and `details`, are filled in later; the rest is as in
    `dialects.Accepted`."""

    request: Body
    model: ModelName
    work: Embed | Rerank | Tokenize | Detokenize
    service_tier: str | None = None
    priority: int | float | str | None = None
    ignored: tuple[str, ...] = ()
    details: Literal["asked", "unasked"] = "unasked"


class SingleRoute(Protocol[Body]):
    """In what the routes differ. Pure."""

    def accept(self, body: bytes, request_id: RequestId) -> SingleWork[Body] | Failure:
        """What the body asks for, or why it cannot be done."""
        ...

    def answer(self, asked: SingleWork[Body], end: RequestEvent) -> Iterator[bytes]:
        """The pieces of the answer's body, out of the event that ended the request well. Its timings are the whole
        request's."""
        ...

    def failure(self, asked: SingleWork[Body], failure: Failure) -> Failure:
        """The worker's failure in this API's field names."""
        ...
