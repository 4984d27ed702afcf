"""A worker's events → one response, streamed or whole. Decides only: the same events give the same bytes."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from gateway.answer_details import DetailsObject
from gateway.answer_parts import Collected
from gateway.in_flight import RequestView
from gateway.responses.answers import (
    CacheDiagnostics,
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseObject,
    ResponseUsage,
)
from gateway.responses.events import Completed, Created, Event, Failed, Incomplete, InProgress, Queued, event_bytes
from gateway.responses.failures import stream_error
from gateway.responses.output import ItemMaker, Output, output_items
from protocol.failures import Failure
from protocol.generation import AnswerEvent, Finished, FinishReason, Prefilling, RequestEvent, Waiting, Warmed
from protocol.ids import RequestId

_encode = msgspec.json.Encoder().encode


class Envelope(Struct, frozen=True, kw_only=True):
    """What one response is made of besides what the model says. `frame` is the response before it has any output.

    `diagnose` says, once it has ended, why not more of its prompt was reused; unset for who did not ask.
    """

    frame: ResponseObject
    maker: ItemMaker
    details_of: RequestId | None
    diagnose: Callable[[], CacheDiagnostics | UnsetType]


class ResponseRendering:
    """One response. `final` is what it was in the end, which is what may be stored."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._frame = envelope.frame
        self._next_number = 0
        self._output = Output(envelope.maker, self._number)
        self._phase: Literal["new", "waiting", "working", "over"] = "new"
        self._end: Finished | Warmed | None = None
        self._form: Literal["stream", "whole"] = "stream"
        self._last_number = 0
        self.final: ResponseObject | None = None

    @property
    def id(self) -> str:
        return self._frame.id

    @property
    def frame(self) -> ResponseObject:
        """The response before it has any output."""
        return self._frame

    def opening(self) -> bytes:
        """`response.created`, once."""
        if self._phase != "new":
            return b""
        self._phase = "waiting"
        return self._bytes(Created(sequence_number=self._number(), response=self._frame))

    def encode(self, event: RequestEvent, choice: int) -> bytes:
        """The bytes that this event adds to the stream, perhaps none."""
        del choice  # there is one only
        match event:
            case Waiting():
                return self._queued() if self._phase == "waiting" else b""
            case Finished():
                self._end = event
                return self._working() + self._bytes(*self._output.end(_last_status(event)))
            case Warmed():
                self._end = event
                return self._working()
            case _ if isinstance(event, AnswerEvent):
                return self._working() + self._bytes(*self._output.add(event))
            case _:  # nothing that this API has a word for
                return b""

    def progress(self, event: Prefilling, prefill_seconds: float) -> bytes:
        """It is worked on; how far it is, keepalives say."""
        del event, prefill_seconds
        return self._working()

    def keepalive(self, view: RequestView) -> bytes:
        """A whole event: there are clients that count only those as a sign of life."""
        match self._phase:
            case "waiting":
                return self._queued(view)
            case "working":
                return self._bytes(InProgress(sequence_number=self._number(), response=self._frame, mlxd=view))
            case "new" | "over":
                return b""

    def failed(self, failure: Failure) -> bytes:
        """`response.failed`, with what there is of the output."""
        opening = self.opening()
        self.final = replace(self._frame, status="failed", error=stream_error(failure), output=self._output.so_far())
        return opening + self._ending()

    def closing(self) -> bytes:
        """`response.completed` or `response.incomplete`."""
        self.final = self._ended(self._output.items)
        return self._ending()

    def whole(self, answers: Sequence[Collected]) -> bytes:
        """The whole response."""
        (answer,) = answers
        self._end, self._form = answer.end, "whole"
        items: tuple[OutputItem, ...] = ()
        if isinstance(answer.end, Finished):
            items = output_items(answer.parts, self._envelope.maker, last_status=_last_status(answer.end))
        self.final = self._ended(items)
        return self._last_bytes()

    def unkept(self) -> bytes:
        """The last bytes again, of a response that was to be stored and could not be: it says so."""
        assert self.final is not None  # noqa: S101 - there are no last bytes to make again
        self.final = replace(self.final, store=False)
        return self._last_bytes()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _bytes(self, *events: Event) -> bytes:
        return b"".join(event_bytes(event) for event in events)

    def _queued(self, view: RequestView | None = None) -> bytes:
        waits = replace(self._frame, status="queued")
        return self._bytes(Queued(sequence_number=self._number(), response=waits, mlxd=UNSET if view is None else view))

    def _working(self) -> bytes:
        if self._phase != "waiting":
            return b""
        self._phase = "working"
        return self._bytes(InProgress(sequence_number=self._number(), response=self._frame))

    def _ending(self) -> bytes:
        self._phase = "over"
        self._last_number = self._number()
        return self._last_bytes()

    def _last_bytes(self) -> bytes:
        final = self.final
        assert final is not None  # noqa: S101 - set by all callers
        if self._form == "whole":
            return _encode(final)
        kind = {"incomplete": Incomplete, "failed": Failed}.get(final.status, Completed)
        return self._bytes(kind(sequence_number=self._last_number, response=final))

    def _ended(self, items: tuple[OutputItem, ...]) -> ResponseObject:
        end = self._end
        assert end is not None  # noqa: S101 - no rendering is asked for its good end without one
        is_cut = isinstance(end, Finished) and end.reason is FinishReason.LENGTH
        return replace(
            self._frame,
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            output=items,
            usage=_usage(end),
            prompt_cache_diagnostics=self._envelope.diagnose(),
            mlxd=self._details(end),
        )

    def _details(self, end: Finished | Warmed) -> DetailsObject | UnsetType:
        warnings = (end.warnings if isinstance(end, Finished) else ()) or UNSET
        asked_by = self._envelope.details_of
        if asked_by is None:
            return UNSET if warnings is UNSET else DetailsObject(warnings=warnings)
        return DetailsObject(request_id=asked_by, timings=end.timings, cache=end.cache, warnings=warnings)


def _last_status(end: Finished) -> Literal["completed", "incomplete"]:
    return "incomplete" if end.reason is FinishReason.LENGTH else "completed"


def _usage(end: Finished | Warmed) -> ResponseUsage:
    if isinstance(end, Warmed):
        prompt_tokens, cached_tokens, output_tokens, reasoning_tokens = end.prompt_tokens, end.cached_tokens, 0, 0
    else:
        usage = end.usage
        prompt_tokens, cached_tokens = usage.prompt_tokens, usage.cached_tokens
        output_tokens, reasoning_tokens = usage.completion_tokens, usage.reasoning_tokens
    return ResponseUsage(
        input_tokens=prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached_tokens),
        output_tokens=output_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
        total_tokens=prompt_tokens + output_tokens,
    )
