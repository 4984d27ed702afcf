"""Gateway → worker commands and worker → gateway events.

Life of a request: `Generate` → `Queued` → `Prefilling`… → `Delta`, `Reasoning` or the events of a call… → exactly one
of `Finished` or `Failed`. `Failed` may come at any point, `Queued` or not. After its last event a request id is never
mentioned again. A `Warm`, `Tokenize`, `Detokenize`, `Check`, `Embed` or `Rerank` ends with the event of its name or
`Failed`.
"""

import enum
from typing import Any, Literal

from msgspec import Struct

from protocol.failures import Failure
from protocol.handshake import Hello, Refused, Welcome
from protocol.ids import Grain, RequestId
from protocol.kv_storage import KVStorage
from protocol.latency import LatencyClass
from protocol.sampling import Sampling
from protocol.tools import Constraint, Tool, ToolUse

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
    """Messages for the model's own chat template.

    `ending` "continue" leaves the last message, the assistant's, open: the answer goes on from its text.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    template_arguments: dict[str, Any] = {}
    ending: Literal["new_message", "continue"] = "new_message"


class TextPrompt(Struct, frozen=True, kw_only=True, tag=True):
    """Text that the tokenizer takes as it is, special tokens included.

    With a `suffix` the answer is what stands between the two, of a model that was made to fill in code.
    """

    text: str
    suffix: str = ""


class TokenPrompt(Struct, frozen=True, kw_only=True, tag=True):
    """Token ids."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt

# --- cache use -----------------------------------------------------------------------------------------------------


class CacheUse(Struct, frozen=True, kw_only=True):
    """How a request may use the prefix cache.

    `scope` is the secret salt of whoever may share this prefix; equal prefixes of two scopes never meet. `owner` is a
    public id (see `protocol.scopes`) by which an owner's blocks can be forgotten. `retention` "in_memory" keeps the
    prompt off the disk. `disk_ttl_seconds` is how long an unused block of this owner stays there; None is for ever.
    """

    scope: bytes = b""
    owner: str = ""
    retention: Literal["disk", "in_memory"] = "disk"
    disk_ttl_seconds: float | None = None


class Pin(Struct, frozen=True, kw_only=True):
    """Keep a prefix from being evicted, under a name that is unique within its owner. `ttl_seconds` None: for ever."""

    name: str
    ttl_seconds: float | None = None


# --- commands ------------------------------------------------------------------------------------------------------


class Generate(Struct, frozen=True, kw_only=True, tag=True):
    """Run one row.

    `max_tokens` None means up to the context's end. `top_logprobs` None means no logprobs, 0 the chosen token's only.
    `latency_class` is what the caller's key allows of what was asked; inside a class `tenant`s (a key's name) share
    by their weights. `tool_use` None: no part of the text is a call. `reasoning` "split" tells it apart from the
    answer, "keep" leaves the text as the model wrote it; at most `reasoning_budget_tokens` of it are drawn (None: no
    bound), then the worker ends it. `ignore_end` goes on after the model's end-of-turn token.
    """

    request_id: RequestId
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    latency_class: LatencyClass = LatencyClass.STANDARD
    tenant: str = ""
    tenant_weight: float = 1.0
    cache: CacheUse = CacheUse()
    tool_use: ToolUse | None = None
    constraint: Constraint | None = None
    reasoning: Literal["split", "keep"] = "keep"
    reasoning_budget_tokens: int | None = None
    ignore_end: Literal["no", "yes"] = "no"


class Warm(Struct, frozen=True, kw_only=True, tag=True):
    """Compute a prompt's prefix and keep it, draw nothing. Runs when nobody waits. Ends with `Warmed` or `Failed`."""

    request_id: RequestId
    prompt: Prompt
    cache: CacheUse = CacheUse()
    pin: Pin | None = None


class Tokenize(Struct, frozen=True, kw_only=True, tag=True):
    """Say which tokens a prompt is. Needs no row and no weights; answered as soon as the tokenizer is loaded."""

    request_id: RequestId
    prompt: Prompt
    special_tokens: Literal["add", "leave"] = "add"


class Detokenize(Struct, frozen=True, kw_only=True, tag=True):
    """Say which text these tokens are. As `Tokenize`."""

    request_id: RequestId
    token_ids: tuple[int, ...]


class Check(Struct, frozen=True, kw_only=True, tag=True):
    """Say whether this `Generate` would be accepted, and run nothing. As `Tokenize`: while the weights are not loaded,
    what the tokenizer and the context's length decide is checked. `request_id` is the check's own."""

    request_id: RequestId
    generate: Generate


class Embed(Struct, frozen=True, kw_only=True, tag=True):
    """Give a vector for each input, of unit length if the model is made so. With `dimensions` it is cut to these, and
    then always of unit length. `overlong` "cut" drops the end of an input that does not fit."""

    request_id: RequestId
    inputs: tuple[TextPrompt | TokenPrompt, ...]
    dimensions: int | None = None
    overlong: Literal["refuse", "cut"] = "refuse"
    latency_class: LatencyClass = LatencyClass.STANDARD
    tenant: str = ""
    tenant_weight: float = 1.0


class Rerank(Struct, frozen=True, kw_only=True, tag=True):
    """Say how relevant each document is for the query. `overlong` as for `Embed`, for documents."""

    request_id: RequestId
    query: str
    documents: tuple[str, ...]
    overlong: Literal["refuse", "cut"] = "refuse"
    latency_class: LatencyClass = LatencyClass.STANDARD
    tenant: str = ""
    tenant_weight: float = 1.0


Work = Generate | Warm | Tokenize | Detokenize | Check | Embed | Rerank
"""The commands that have a request id, events of their own, and an end."""


class Unpin(Struct, frozen=True, kw_only=True, tag=True):
    """Let a pinned prefix age like any other. An unknown name is fine."""

    owner: str
    name: str


class SetBudget(Struct, frozen=True, kw_only=True, tag=True):
    """Change how much RAM the hot tier may take, now."""

    hot_cache_bytes: int


class ForgetHot(Struct, frozen=True, kw_only=True, tag=True):
    """Drop hot blocks: those of one owner, or all. Rows that run keep what they copied."""

    owner: str | None = None


class Cancel(Struct, frozen=True, kw_only=True, tag=True):
    """Nobody reads this request any more. Idempotent; an unknown id is fine. Answered by `Failed(cancelled)`."""

    request_id: RequestId


class Drain(Struct, frozen=True, kw_only=True, tag=True):
    """Finish what runs, refuse what comes, make dirty cache blocks durable, then exit 0."""

    deadline_seconds: float


class Ping(Struct, frozen=True, kw_only=True, tag=True):
    """Asked of the step loop itself; a helper thread's answer would prove nothing."""

    nonce: int


WorkerCommand = (
    Generate
    | Warm
    | Tokenize
    | Detokenize
    | Check
    | Embed
    | Rerank
    | Cancel
    | Drain
    | Ping
    | Unpin
    | SetBudget
    | ForgetHot
    | Welcome
    | Refused
)

# --- events --------------------------------------------------------------------------------------------------------


class PrefixReuse(Struct, frozen=True, kw_only=True):
    """Whether this model's prefixes can be reused; `reason` is empty when they can."""

    available: bool
    reason: str = ""


Capability = Literal["chat", "completions", "tools", "reasoning", "structured_output", "embeddings", "rerank"]
"""What a model can be asked for."""


class TokenizerReady(Struct, frozen=True, kw_only=True, tag=True):
    """`Tokenize` and `Detokenize` can be asked from now on, though the weights are not loaded. Once, before Ready."""


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """Weights are loaded and the first kernels compiled. Carries the limits as resolved, not as asked for. `kv`
    None: it keeps none."""

    context_tokens: int
    max_rows: int
    weight_bytes: int
    load_seconds: float
    prefix_reuse: PrefixReuse
    fingerprint: str
    capabilities: tuple[Capability, ...] = ("chat", "completions")
    kv: KVStorage | None = None


class Loading(Struct, frozen=True, kw_only=True, tag=True):
    """Progress of a load."""

    done_bytes: int
    total_bytes: int


class Queued(Struct, frozen=True, kw_only=True, tag=True):
    """The text plane accepted the request: its prompt renders and fits. From here on a 200 may be sent.

    `message_starts` are the positions where each message's text begins in the prompt's tokens, where that is known;
    `grains` the prompt's chain (see `protocol.ids.Grain`), by which two prompts can be compared without their text.
    """

    request_id: RequestId
    prompt_tokens: int
    message_starts: tuple[int, ...] = ()
    grains: tuple[Grain, ...] = ()


class Prefilling(Struct, frozen=True, kw_only=True, tag=True):
    """How far the prompt is. `cached_tokens` of `total_tokens` need no work."""

    request_id: RequestId
    done_tokens: int
    total_tokens: int
    cached_tokens: int
    eta_seconds: float | None = None


class Waiting(Struct, frozen=True, kw_only=True, tag=True):
    """Where a request stands that cannot run yet, or is held. Sent when that changes, at most once a second.

    `ahead` requests of this worker go first. `eta_seconds` until its first token, or the next one of a row that gives
    way, by measured rates and by the lengths of the latest answers; None is unknown.
    `held_by` says who it waits for: `rows` (all are taken), `higher_class`, `other_model` (its prefill has the device),
    `disk` (its prefix is being fetched), `memory`; empty: its turn has not come. The gateway itself says `restart`: the
    process is being replaced.
    """

    request_id: RequestId
    ahead: int
    eta_seconds: float | None = None
    held_by: str = ""


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


class Reasoning(Struct, frozen=True, kw_only=True, tag=True):
    """More of what the model thinks before it answers. As `Delta`."""

    request_id: RequestId
    text: str
    tokens: int
    logprobs: tuple[ChosenLogprob, ...] = ()


class CallStarted(Struct, frozen=True, kw_only=True, tag=True):
    """The answer calls a tool. Calls are numbered from 0 and one ends before the next starts. `call_id` is unique."""

    request_id: RequestId
    index: int
    call_id: str
    name: str


class CallArguments(Struct, frozen=True, kw_only=True, tag=True):
    """More of a call's arguments, JSON as text: joined they are what the model meant, valid or not."""

    request_id: RequestId
    index: int
    text: str
    tokens: int = 0
    logprobs: tuple[ChosenLogprob, ...] = ()


class CallEnded(Struct, frozen=True, kw_only=True, tag=True):
    """A call is whole. A call that the answer's end cut off has no such event."""

    request_id: RequestId
    index: int


class FinishReason(enum.StrEnum):
    """Why a row ended well."""

    STOP = "stop"
    """End-of-turn token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the context's end."""
    TOOL_CALLS = "tool_calls"
    """The model's own end, after at least one whole call."""


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of one request. `cached_tokens` is a part of `prompt_tokens`: what was really skipped. `reasoning_tokens`
    is a part of `completion_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


class Timings(Struct, frozen=True, kw_only=True):
    """Where the time went, by the worker's monotonic clock. `held_seconds` of it were spent giving way, mostly to
    `held_by` (see Waiting); `held` has the seconds for each of these reasons. `preemptions` counts how often it gave up
    its KV to others and went on later."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prefill_slices: int
    held_seconds: float = 0.0
    held_by: str = ""
    held: dict[str, float] = {}
    preemptions: int = 0


class CacheReport(Struct, frozen=True, kw_only=True):
    """What the prefix cache did for one request, and why not more.

    `ram_tokens + disk_tokens` were not computed again. `miss_reason` says why the rest was: `absent`, `evicted`,
    `hybrid_boundary`, `disk_slower`, `integrity`, `timeout`, `unavailable`, `off`, … or is empty. The two expected
    times are what restore-or-recompute weighed; None when it had nothing to weigh.
    """

    ram_tokens: int = 0
    disk_tokens: int = 0
    miss_reason: str = ""
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    expected_restore_seconds: float | None = None
    expected_compute_seconds: float | None = None


OutputWarning = Literal[
    "tool_call_unparsed", "tool_call_repaired", "tool_call_cut", "arguments_invalid", "thinking_budget_not_held"
]
"""What a client may want to know of an answer: a call came back as text, or not quite as written, or no end of this
model's reasoning is known, so that no budget of it can be held."""


class Finished(Struct, frozen=True, kw_only=True, tag=True):
    """The good end."""

    request_id: RequestId
    reason: FinishReason
    usage: Usage
    timings: Timings
    cache: CacheReport = CacheReport()
    matched_stop: str | None = None
    warnings: tuple[OutputWarning, ...] = ()


class Warmed(Struct, frozen=True, kw_only=True, tag=True):
    """The good end of a `Warm`: the prefix is hot in `blocks` blocks of `size_bytes`, `durable_blocks` on disk too."""

    request_id: RequestId
    prompt_tokens: int
    cached_tokens: int
    blocks: int
    size_bytes: int
    durable_blocks: int
    timings: Timings
    cache: CacheReport = CacheReport()


class Tokenized(Struct, frozen=True, kw_only=True, tag=True):
    """The end of a `Tokenize`. `tokens` are the ids as the vocabulary spells them, in order."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    context_tokens: int


class Detokenized(Struct, frozen=True, kw_only=True, tag=True):
    """The end of a `Detokenize`."""

    request_id: RequestId
    text: str


class Checked(Struct, frozen=True, kw_only=True, tag=True):
    """The good end of a `Check`: the prompt renders and fits."""

    request_id: RequestId
    prompt_tokens: int


class Embedded(Struct, frozen=True, kw_only=True, tag=True):
    """The end of an `Embed`: `vectors` are float32, little-endian, `dimensions` for each input, one after another.

    All of its time is that of a prompt: `timings` have no decode, and a slice is a batch that had inputs of it.
    """

    request_id: RequestId
    dimensions: int
    vectors: bytes
    prompt_tokens: int
    timings: Timings | None = None


class Reranked(Struct, frozen=True, kw_only=True, tag=True):
    """The end of a `Rerank`: a score from 0 to 1 for each document, in the order in which they were asked. `timings` as
    of `Embedded`."""

    request_id: RequestId
    scores: tuple[float, ...]
    prompt_tokens: int
    timings: Timings | None = None


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """The bad end."""

    request_id: RequestId
    failure: Failure


class PinnedPrefix(Struct, frozen=True, kw_only=True):
    """A pinned prefix of this worker. `expires_seconds` from now; None is never."""

    owner: str
    name: str
    tokens: int
    size_bytes: int
    expires_seconds: float | None = None


class Pong(Struct, frozen=True, kw_only=True, tag=True):
    """The step loop's own answer, with its books.

    `steps` counts engine steps since start. `misses` counts requests that had to compute more than their last token, by
    why that was not in the prefix cache, and pins that were refused (`pin_refused`). `not_written` counts blocks that
    were to be written to disk and were not, by why: `disk_slower`, `staging_full`. The KV of rows takes
    `live_kv_bytes` and may take `live_kv_budget_bytes` (None: no bound); `preemptions` counts since start.
    """

    nonce: int
    steps: int
    running_rows: int
    waiting_requests: int
    active_bytes: int
    hot_cache_bytes: int
    hot_cache_blocks: int
    hot_cache_budget_bytes: int = 0
    prefill_tokens_per_second: float = 0.0
    read_bytes_per_second: float = 0.0
    misses: dict[str, int] = {}
    not_written: dict[str, int] = {}
    pins: tuple[PinnedPrefix, ...] = ()
    live_kv_bytes: int = 0
    live_kv_budget_bytes: int | None = None
    preemptions: int = 0


class LastWords(Struct, frozen=True, kw_only=True, tag=True):
    """The worker knows it is about to exit non-zero, and why."""

    failure: Failure


LastEvent = Finished | Warmed | Tokenized | Detokenized | Checked | Embedded | Reranked | Failed
"""Exactly one of these ends each request."""

AnswerEvent = Delta | Reasoning | CallStarted | CallArguments | CallEnded
"""What the answer itself consists of, in order."""

RequestEvent = (
    Queued
    | Waiting
    | Prefilling
    | Delta
    | Reasoning
    | CallStarted
    | CallArguments
    | CallEnded
    | Finished
    | Warmed
    | Tokenized
    | Detokenized
    | Checked
    | Embedded
    | Reranked
    | Failed
)
"""The events that belong to one request."""

WorkerEvent = (
    Hello
    | TokenizerReady
    | Ready
    | Loading
    | Queued
    | Waiting
    | Prefilling
    | Delta
    | Reasoning
    | CallStarted
    | CallArguments
    | CallEnded
    | Finished
    | Warmed
    | Tokenized
    | Detokenized
    | Checked
    | Embedded
    | Reranked
    | Failed
    | Pong
    | LastWords
)
