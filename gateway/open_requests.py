"""The requests that have not ended: who waits for which model, who is in which process's hands.

Decides only. Owned by the dispatch task.
"""

from typing import Literal, TypeVar, assert_never

from msgspec import Struct

from gateway.replies import Reply
from protocol.failures import Failure
from protocol.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    Check,
    Checked,
    Delta,
    Detokenize,
    Detokenized,
    Embedded,
    Failed,
    Finished,
    Prefilling,
    Queued,
    Reasoning,
    RequestEvent,
    Reranked,
    Tokenize,
    Tokenized,
    Waiting,
    Warm,
    Warmed,
    Work,
)
from protocol.ids import Incarnation, ModelName, RequestId
from protocol.latency import LatencyClass

Key = TypeVar("Key", ModelName, Incarnation)

Phase = Literal["waiting", "sent", "accepted", "streaming", "cancelled"]
"""`sent`: the process has it and said nothing yet. `cancelled`: the client is gone, the process has yet to say so."""


class OpenRequest(Struct, kw_only=True):
    """One request on its way. Only `OpenRequests` changes it. `queued` is what its process said of the prompt;
    `arrived` is by the gateway's monotonic clock."""

    model: ModelName
    work: Work
    reply: Reply
    arrived: float = 0.0
    phase: Phase = "waiting"
    queued: Queued | None = None
    incarnation: Incarnation | None = None
    deaths: int = 0

    @property
    def request_id(self) -> RequestId:
        return self.work.request_id

    @property
    def latency_class(self) -> LatencyClass | None:
        """None is a warm's: behind all classes. What needs no row goes with the first."""
        match self.work:
            case Warm():
                return None
            case Tokenize() | Detokenize() | Check():
                return LatencyClass.INTERACTIVE
            case work:
                return work.latency_class

    @property
    def has_no_answer(self) -> bool:
        """Whether another process may begin it from the start: of the answer itself nothing was said yet."""
        return self.phase in ("sent", "accepted")

    @property
    def needs_weights(self) -> bool:
        """Whether it has to wait until its model is loaded."""
        return not isinstance(self.work, Tokenize | Detokenize | Check)

    @property
    def takes_place(self) -> bool:
        """Whether it is counted among those that wait for its model, which is loaded for it: a check only learns early
        what will be known anyhow."""
        return not isinstance(self.work, Check)

    def fail(self, failure: Failure) -> None:
        """End the reply with a failure; nothing when it has ended. The books stay as they are."""
        self.reply.put(Failed(request_id=self.request_id, failure=failure))


class OpenRequests:
    """Both books, kept in order of arrival. Every request is in one of them until it is taken out."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, OpenRequest] = {}
        self._waiting: dict[ModelName, dict[RequestId, OpenRequest]] = {}
        self._sent: dict[Incarnation, dict[RequestId, OpenRequest]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, request_id: RequestId) -> OpenRequest | None:
        return self._by_id.get(request_id)

    def waiting(self, model: ModelName) -> tuple[OpenRequest, ...]:
        return tuple(self._waiting.get(model, {}).values())

    def sent_to(self, incarnation: Incarnation) -> tuple[OpenRequest, ...]:
        return tuple(self._sent.get(incarnation, {}).values())

    def everything(self) -> tuple[OpenRequest, ...]:
        return tuple(self._by_id.values())

    def wait(self, request: OpenRequest) -> None:
        """Enter a new request, or put one back whose process is gone: behind those that wait already."""
        self.remove(request)
        request.phase, request.incarnation = "waiting", None
        self._by_id[request.request_id] = request
        self._waiting.setdefault(request.model, {})[request.request_id] = request

    def send(self, request: OpenRequest, incarnation: Incarnation) -> None:
        """A process gets it."""
        self.remove(request)
        request.phase, request.incarnation = "sent", incarnation
        self._by_id[request.request_id] = request
        self._sent.setdefault(incarnation, {})[request.request_id] = request

    def cancel(self, request: OpenRequest) -> None:
        """The client is gone. Stays in its process's book until that answers."""
        request.phase = "cancelled"

    def remove(self, request: OpenRequest) -> None:
        """Take it out of both books. Idempotent."""
        self._by_id.pop(request.request_id, None)
        if request.incarnation is None:
            _pop(self._waiting, request.model, request.request_id)
        else:
            _pop(self._sent, request.incarnation, request.request_id)

    def advance(self, incarnation: Incarnation, event: RequestEvent) -> OpenRequest | None:
        """The request that a process's event belongs to, moved on by it; None when the event makes no sense.

        None for a request that this process does not have, for a second `Queued`, for progress after text.
        """
        request = self._by_id.get(event.request_id)
        if request is None or request.incarnation != incarnation:
            return None
        match event:
            case Finished() | Warmed() | Tokenized() | Detokenized() | Checked() | Embedded() | Reranked() | Failed():
                self.remove(request)
            case Queued() if request.phase == "sent":
                request.phase = "accepted"
                request.queued = event
            case Prefilling() if request.phase in ("sent", "accepted"):
                request.phase = "accepted"
            case Waiting() if request.phase in ("sent", "accepted"):
                request.phase = "accepted"
            case Waiting() if request.phase == "streaming":
                pass  # a row that gives way for a while
            case Delta() | Reasoning() | CallStarted() | CallArguments() | CallEnded() if request.phase in (
                "sent",
                "accepted",
                "streaming",
            ):
                request.phase = "streaming"
            case (
                Queued()
                | Waiting()
                | Prefilling()
                | Delta()
                | Reasoning()
                | CallStarted()
                | CallArguments()
                | CallEnded()
            ):
                return request if request.phase == "cancelled" else None
            case _:
                assert_never(event)
        return request


def _pop(book: dict[Key, dict[RequestId, OpenRequest]], key: Key, request_id: RequestId) -> None:
    requests = book.get(key, {})
    requests.pop(request_id, None)
    if not requests:
        book.pop(key, None)
