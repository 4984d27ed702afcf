"""Gateway → worker commands and worker → gateway events.

Life of a request: `Generate` → `Queued` → `Prefilling`… → `Delta`… → exactly one of `Finished` or `Failed`.
`Failed` may come at any point, `Queued` or not. After its last event a request id is never mentioned again.
"""

import enum
from typing import Any, Literal

from msgspec import Struct

from protocol.failures import Failure
from protocol.handshake import Hello, Refused, Welcome
from protocol.ids import RequestId
from protocol.sampling import Sampling

# --- prompts -------------------------------------------------------------------------------------------------------


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call the assistant made earlier. `arguments` is the decoded object: templates want a mapping."""

    id: str
    name: str
    arguments: dict[str, Any]


class ChatMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation, the same for all dialects. Absent content is empty text, never the word None."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class ChatPrompt(Struct, frozen=True, kw_only=True, tag=True):
    """Messages for the model's own chat template."""

    messages: tuple[ChatMessage, ...]
    template_arguments: dict[str, Any] = {}


class TextPrompt(Struct, frozen=True, kw_only=True, tag=True):
    """Text that the tokenizer takes as it is, special tokens included."""

    text: str


class TokenPrompt(Struct, frozen=True, kw_only=True, tag=True):
    """Token ids."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt

# --- commands ------------------------------------------------------------------------------------------------------


class Generate(Struct, frozen=True, kw_only=True, tag=True):
    """Run one row.

    `max_tokens` None means up to the context's end. `top_logprobs` None means no logprobs, 0 the chosen token's only.
    `cache_scope` is the secret salt of whoever may share this prefix; equal prefixes of two scopes never meet.
    """

    request_id: RequestId
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    cache_scope: bytes = b""


class Cancel(Struct, frozen=True, kw_only=True, tag=True):
    """Nobody reads this request any more. Idempotent; an unknown id is fine. Answered by `Failed(cancelled)`."""

    request_id: RequestId


class Drain(Struct, frozen=True, kw_only=True, tag=True):
    """Finish what runs, refuse what comes, make dirty cache blocks durable, then exit 0."""

    deadline_seconds: float


class Ping(Struct, frozen=True, kw_only=True, tag=True):
    """Asked of the step loop itself; a helper thread's answer would prove nothing."""

    nonce: int


WorkerCommand = Generate | Cancel | Drain | Ping | Welcome | Refused

# --- events --------------------------------------------------------------------------------------------------------


class PrefixReuse(Struct, frozen=True, kw_only=True):
    """Whether this model's prefixes can be reused; `reason` is empty when they can."""

    available: bool
    reason: str = ""


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """Weights are loaded and the first kernels compiled. Carries the limits as resolved, not as asked for."""

    context_tokens: int
    max_rows: int
    weight_bytes: int
    load_seconds: float
    prefix_reuse: PrefixReuse
    fingerprint: str


class Loading(Struct, frozen=True, kw_only=True, tag=True):
    """Progress of a load."""

    done_bytes: int
    total_bytes: int


class Queued(Struct, frozen=True, kw_only=True, tag=True):
    """The text plane accepted the request: its prompt renders and fits. From here on a 200 may be sent."""

    request_id: RequestId
    prompt_tokens: int


class Prefilling(Struct, frozen=True, kw_only=True, tag=True):
    """How far the prompt is. `cached_tokens` of `total_tokens` need no work."""

    request_id: RequestId
    done_tokens: int
    total_tokens: int
    cached_tokens: int


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """A token with its natural-log probability under the unmodified model. `token_bytes` may be part of a character."""

    token: str
    token_bytes: bytes
    logprob: float


class ChosenLogprob(Struct, frozen=True, kw_only=True):
    """The drawn token and, best first, the alternatives asked for."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Delta(Struct, frozen=True, kw_only=True, tag=True):
    """More text: whole characters, free of stop strings. `tokens` is how many tokens it took, `text` may be empty."""

    request_id: RequestId
    text: str
    tokens: int
    logprobs: tuple[ChosenLogprob, ...] = ()


class FinishReason(enum.StrEnum):
    """Why a row ended well."""

    STOP = "stop"
    """End-of-turn token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the context's end."""


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of one request. `cached_tokens` is a part of `prompt_tokens`: what was really skipped."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Timings(Struct, frozen=True, kw_only=True):
    """Where the time went, by the worker's monotonic clock."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prefill_slices: int


class Finished(Struct, frozen=True, kw_only=True, tag=True):
    """The good end."""

    request_id: RequestId
    reason: FinishReason
    usage: Usage
    timings: Timings
    matched_stop: str | None = None


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """The bad end."""

    request_id: RequestId
    failure: Failure


class Pong(Struct, frozen=True, kw_only=True, tag=True):
    """The step loop's own answer, with its books.

    `steps` counts engine steps since start. `misses` counts why prefix blocks were not used, by reason.
    """

    nonce: int
    steps: int
    running_rows: int
    waiting_requests: int
    active_bytes: int
    hot_cache_bytes: int
    hot_cache_blocks: int
    misses: dict[str, int] = {}


class LastWords(Struct, frozen=True, kw_only=True, tag=True):
    """The worker knows it is about to exit non-zero, and why."""

    failure: Failure


WorkerEvent = Hello | Ready | Loading | Queued | Prefilling | Delta | Finished | Failed | Pong | LastWords

RequestEvent = Queued | Prefilling | Delta | Finished | Failed
"""The events that belong to one request."""
