"""What a dialect is: how the bodies of one API become work for a model, and its events bytes. Types and pure functions.

`gateway.answering` does the rest, the same for all of them.
"""

from collections.abc import Sequence
from typing import Generic, Literal, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gateway.admission import KeyLimits, Load
from gateway.answer_parts import Collected
from gateway.caller import Caller
from gateway.error_answers import ErrorAnswer
from gateway.in_flight import RequestView
from gateway.latency_class import WorkClass, work_class
from gateway.request_tallies import Dialect as DialectName
from protocol.failures import Failure, FailureKind
from protocol.generation import Generate, Prefilling, RequestEvent, Warm
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass

Body = TypeVar("Body")
Header = tuple[bytes, bytes]

CONSTRAINT_FIELD = "response_format"
"""What a worker calls it when a constraint cannot be enforced."""

_NAMES_MAX = 16
_NAME_MAX_CHARACTERS = 48


class Asked(Struct, frozen=True, kw_only=True):
    """Who asks, and all that belongs to the asking rather than to the body. `headers` have names in lower case."""

    request_id: RequestId
    caller: Caller
    headers: tuple[Header, ...]
    created_unix: int
    system_fingerprint: str | None
    details: Literal["asked", "unasked"]


class Accepted(Struct, Generic[Body], frozen=True, kw_only=True):
    """A request that its dialect has understood.

    `work` is one command for each choice; the first has the request's own id. Class and tenant are filled in later.
    `constraint_field` is where it says what the answer must be, if it does. `service_tier` and `priority` are what the
    body says of its urgency. `ignored` are fields that nothing is done with.
    """

    request: Body
    model: ModelName
    work: tuple[Generate | Warm, ...]
    answer: Literal["stream", "whole"]
    service_tier: str | None = None
    priority: int | float | str | None = None
    constraint_field: str = CONSTRAINT_FIELD
    ignored: tuple[str, ...] = ()
    latency_class: LatencyClass = LatencyClass.STANDARD

    @property
    def work_class(self) -> WorkClass:
        """By which class it is counted: what only fills the cache is a class of its own."""
        return "warm" if all(isinstance(command, Warm) for command in self.work) else work_class(self.latency_class)


class Rendering(Protocol):
    """One answer in its dialect's bytes. Pure, and used for one answer only."""

    def opening(self) -> bytes:
        """What a stream may begin with before anything is known; sent once."""
        ...

    def encode(self, event: RequestEvent, choice: int) -> bytes:
        """What this event adds to a stream, perhaps nothing. Never sees a Failed."""
        ...

    def progress(self, event: Prefilling, prefill_seconds: float) -> bytes:
        """Like `encode`, for a prompt's progress in a stream. `prefill_seconds` is since it was first worked on."""
        ...

    def keepalive(self, view: RequestView) -> bytes:
        """What tells a client of a stream that it waits, and what for."""
        ...

    def failed(self, failure: Failure) -> bytes:
        """How a stream says that it ends badly. Nothing follows."""
        ...

    def closing(self) -> bytes:
        """What follows when all choices have ended well."""
        ...

    def whole(self, answers: Sequence[Collected]) -> bytes:
        """The body of an answer that is no stream, of one answer for each choice."""
        ...


class Dialect(Protocol[Body]):
    """One API's way to ask and to answer. `prompt_field` is where its clients look for a text that was too long; `name`
    is what the metrics call it."""

    @property
    def name(self) -> DialectName: ...

    @property
    def prompt_field(self) -> str: ...

    def accept(self, body: bytes, asked: Asked) -> Accepted[Body] | Failure:
        """What the body asks for, or why it cannot be done."""
        ...

    def rendering(self, accepted: Accepted[Body], asked: Asked) -> Rendering:
        """Its answer's renderer."""
        ...

    def error(self, failure: Failure, request_id: RequestId) -> ErrorAnswer:
        """The answer to what fails before its status line."""
        ...

    def rate_headers(self, load: Load, limits: KeyLimits) -> tuple[Header, ...]:
        """What a limited key has left."""
        ...


def names_header(names: Sequence[str]) -> str:
    """Names of fields, made fit for a response header: few, short, and of token characters only."""
    shown = ["".join(_token(character) for character in name[:_NAME_MAX_CHARACTERS]) for name in names[:_NAMES_MAX]]
    if len(names) > _NAMES_MAX:
        shown.append(f"+{len(names) - _NAMES_MAX}")
    return ", ".join(shown)


def _token(character: str) -> str:
    return character if character.isascii() and (character.isalnum() or character in "_.-") else "_"


def pointing_at(prompt_field: str, failure: Failure, constraint_field: str = CONSTRAINT_FIELD) -> Failure:
    """The worker does not know how this API names the prompt, nor where a client said what the answer must be."""
    if failure.param == CONSTRAINT_FIELD:
        return replace(failure, param=constraint_field)
    if failure.kind is FailureKind.CONTEXT_LENGTH_EXCEEDED:
        return replace(failure, param=prompt_field)
    return failure
