"""Why a request could not be served: a closed list, so every dialect can render every one.

The kind answers "whose fault, and is it worth trying again?". The HTTP status is not decided here but in
`gateway.http_errors`, the only module that knows it.
"""

import enum

from msgspec import Struct


class FailureKind(enum.StrEnum):
    """The closed list of what can go wrong with a request."""

    INVALID_REQUEST = "invalid_request"
    """The client's to mend: a field is wrong, or the model's template refused the messages."""
    UNSUPPORTED = "unsupported"
    """A known option this server, or this model, cannot honour yet."""
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    """The prompt is longer than the model's context."""
    UNAUTHENTICATED = "unauthenticated"
    """No valid API key."""
    FORBIDDEN = "forbidden"
    """A valid key that may not do this, or a Host or Origin that is not allowed."""
    NOT_FOUND = "not_found"
    """No such route."""
    MODEL_NOT_FOUND = "model_not_found"
    """No model of that name in the catalog."""
    METHOD_NOT_ALLOWED = "method_not_allowed"
    """The route exists, for another method."""
    BODY_TOO_LARGE = "body_too_large"
    """The request's body is over the limit."""
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    """The body is not plain JSON."""
    RATE_LIMITED = "rate_limited"
    """The key's own limit is reached; coming back later helps."""
    OVERLOADED = "overloaded"
    """A queue is full; coming back later helps."""
    MODEL_UNAVAILABLE = "model_unavailable"
    """The model is known but cannot run now: its folder is broken, or its worker keeps crashing."""
    CACHE_UNAVAILABLE = "cache_unavailable"
    """The cachestore does not answer now. Only questions about the cache itself can fail for it, never a completion."""
    WORKER_DIED = "worker_died"
    """The model's process ended under this request. It restarts by itself."""
    SHUTTING_DOWN = "shutting_down"
    """The service is stopping."""
    OUT_OF_MEMORY = "out_of_memory"
    """No memory for this request."""
    CANCELLED = "cancelled"
    """The client is gone; nobody reads this."""
    INTERNAL = "internal"
    """A fault of ours. The log has the request id."""


class Failure(Struct, frozen=True, kw_only=True):
    """A request's bad end, in words a client can act on.

    `param` names the request field at fault, in the dialect's own spelling (`messages[2].role`).
    """

    kind: FailureKind
    message: str
    param: str | None = None
    retry_after_seconds: float | None = None
