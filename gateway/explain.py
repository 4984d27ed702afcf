"""Why a request reused no more of its prompt than it did. Decides only: records in, an explanation out."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from gateway.request_ring import (
    GRAIN_MARK_BYTES,
    MessageMark,
    MessageRole,
    RequestRecord,
    common_messages,
    common_tokens,
)
from gateway.volatile_heads import VolatileKind, volatile_words
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, ModelName, RequestId

Tier = Literal["ram", "disk", "none"]

Reason = Literal[
    "reused",
    "extended",
    "first_request",
    "model_changed",
    "scope",
    "volatile",
    "system_changed",
    "tools_changed",
    "messages_changed",
    "rendering_changed",
    "below_block",
    "evicted",
    "restarted",
]
"""What the comparison with earlier requests finds. The worker's own reasons come on top: see WORKER_REASONS."""

WORKER_REASONS = {
    "absent": "nothing of this prefix was in the cache",
    "below_block": f"what is missing ends inside a block of {BLOCK_TOKENS} tokens, and only whole ones were kept",
    "busy": "too much of the cache on disk was being read just then, so the prefix was computed instead",
    "budget": "the day's write budget of the disk is spent, so the prefix was not kept there: raise `daily_write`",
    "disk_slower": "the prefix is on disk, and to read it would have taken longer than to compute it again",
    "evicted": "the prefix was dropped to make room: raise the cache's budget (`mlxd cache budget`), or pin the prefix",
    "failed": "the cachestore could not look it up; its log says why",
    "forgotten": "the blocks of this key were forgotten while this request's were read from disk",
    "hybrid_boundary": "this model keeps state that cannot be cut anywhere; reuse ends at its last checkpoint",
    "integrity": "a block's checksum was wrong, so it and all after it were computed again; the log names it",
    "missing": "a block's file was gone, so it and all after it were computed again; the log names it",
    "no_space": "the cache's volume is full: make room",
    "off": "prefix reuse is off for this model; GET /v1/models says why",
    "quota": "the cache on disk is full: raise `quota` in mlxd.toml",
    "read_only": "the cache's volume is mounted read-only: mount it for writing",
    "reconciling": "the cachestore had just started and was still looking through its files",
    "restarted": "the model's process was restarted in between, and the prefix was in its memory only",
    "timeout": "the cachestore did not answer in time, so the prefix was computed instead",
    "unavailable": "the cachestore was not there, so the prefix was computed; `mlxd cache status` shows its state",
    "unexpected_reply": "the cachestore answered something else than was asked: restart the service (`mlxd serve`)",
    "unreadable": "a block on disk could not be read, so it and all after it were computed again; the log names it",
}
"""In plain words. `absent` is no reason of its own: the comparison knows better, when there is something to compare."""

_VAGUE = frozenset({"", "absent"})


class TierRange(Struct, frozen=True, kw_only=True):
    """Where these tokens of the prompt came from; `none` were computed."""

    from_token: int
    to_token: int
    tier: Tier


class DivergentMessage(Struct, frozen=True, kw_only=True):
    """The first message that is not the earlier request's. Counted from 0."""

    index: int
    role: MessageRole


class Explanation(Struct, frozen=True, kw_only=True):
    """The answer. `first_divergent_token` is a half-open range of one grain: the divergence lies inside it."""

    request_id: RequestId
    model: ModelName
    prompt_tokens: int
    cached_tokens: int
    tiers: tuple[TierRange, ...]
    reason: str
    reason_text: str
    compared_with: RequestId | None = None
    common_tokens: int = 0
    first_divergent_message: DivergentMessage | None = None
    first_divergent_token: tuple[int, int] | None = None
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    expected_restore_seconds: float | None = None
    expected_compute_seconds: float | None = None
    object: Literal["request.explanation"] = "request.explanation"


def explain(record: RequestRecord, earlier: Sequence[RequestRecord]) -> Explanation:
    """`earlier` are the same owner's requests that finished before this one, oldest first."""
    near = _nearest(record, earlier)
    reason, text, other = _reason(record, near, _foreign(record, earlier))
    return Explanation(
        request_id=record.request_id,
        model=record.model,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=_reused(record),
        tiers=tiers(record),
        reason=reason,
        reason_text=text,
        compared_with=other.request_id if other else None,
        common_tokens=min(record.prompt_tokens, common_tokens(record, other)) if other else 0,
        first_divergent_message=_divergent_message(record, other) if other else None,
        first_divergent_token=_divergent_token(record, other) if other else None,
        restored_bytes=record.cache.restored_bytes,
        restore_seconds=record.cache.restore_seconds,
        expected_restore_seconds=record.cache.expected_restore_seconds,
        expected_compute_seconds=record.cache.expected_compute_seconds,
    )


def tiers(record: RequestRecord) -> tuple[TierRange, ...]:
    """The prompt in one to three ranges without a gap: RAM, then disk, then computed."""
    ram_end = min(record.cache.ram_tokens, record.prompt_tokens)
    disk_end = min(ram_end + record.cache.disk_tokens, record.prompt_tokens)
    ranges = (
        TierRange(from_token=0, to_token=ram_end, tier="ram"),
        TierRange(from_token=ram_end, to_token=disk_end, tier="disk"),
        TierRange(from_token=disk_end, to_token=record.prompt_tokens, tier="none"),
    )
    return tuple(part for part in ranges if part.from_token < part.to_token)


_Decision = tuple[str, str, RequestRecord | None]


def _reason(record: RequestRecord, near: RequestRecord | None, foreign: RequestRecord | None) -> _Decision:
    said, reused = record.cache.miss_reason, _reused(record)
    if reused + GRAIN_TOKENS >= record.prompt_tokens and (reused or record.prompt_tokens <= 1):
        return "reused", "everything was reused but the last tokens, which are always computed", near
    if said == "off":
        return said, WORKER_REASONS[said], near
    if near is not None and reused + GRAIN_TOKENS < common_tokens(record, near):
        return _lost(record, near)
    near_messages = common_messages(record, near) if near is not None else 0
    is_akin = near is not None and (near_messages > 0 or common_tokens(record, near) > 0 or _volatile(record, near))
    foreign_messages = common_messages(record, foreign) if foreign is not None else 0
    if near is not None and is_akin and foreign_messages <= near_messages:
        return _diverged(record, near)
    if foreign is not None and foreign_messages:
        return _foreigner(record, foreign)
    if said not in _VAGUE:
        return said, _words_of_worker(said), near
    if near is not None:
        return _diverged(record, near)
    return "first_request", "no earlier request of this key is remembered to which this one could be compared", None


def _lost(record: RequestRecord, near: RequestRecord) -> _Decision:
    """The prompts have more in common than was reused: it was computed before, and was no longer there."""
    said, reused = record.cache.miss_reason, _reused(record)
    if said not in _VAGUE:
        return said, _words_of_worker(said), near
    if near.incarnation != record.incarnation:
        return "restarted", WORKER_REASONS["restarted"], near
    if common_tokens(record, near) - reused < BLOCK_TOKENS and reused % BLOCK_TOKENS == 0:
        return "below_block", WORKER_REASONS["below_block"], near
    return "evicted", WORKER_REASONS["evicted"], near


def _diverged(record: RequestRecord, near: RequestRecord) -> _Decision:
    """All that the prompts have in common was reused; the words say where they part."""
    if kinds := _volatile(record, near):
        at = common_messages(record, near)
        what = _name_of(record.messages[at], at)
        return (
            "volatile",
            f"{what} differs from the earlier one only in {volatile_words(kinds)}: move that to the end of the "
            "conversation, or leave it out, and everything before it is reused",
            near,
        )
    divergent = _divergent_message(record, near)
    if record.tools != near.tools and (divergent is None or common_messages(record, near) > 0):
        return (
            "tools_changed",
            "the tools are not those of the earlier request, or stand in another order: most templates put them in "
            "front, so all after them is computed; keep them as they are, and let `tool_choice` say which may be used",
            near,
        )
    if divergent is None:
        if record.messages and record.messages == near.messages:
            return (
                "rendering_changed",
                "the messages are the same, but the prompt made of them is not: the template was given other "
                "arguments, or puts something of its own into it, such as today's date",
                near,
            )
        at = common_tokens(record, near)
        return "messages_changed", f"the prompts part within {GRAIN_TOKENS} tokens after token {at}", near
    if divergent.index == len(near.messages):
        return "extended", "everything in common with the earlier request was reused; the rest is new", near
    what = _name_of(record.messages[divergent.index], divergent.index)
    if divergent.role in ("system", "developer"):
        return "system_changed", f"{what} is another one than in the earlier request; all after it is computed", near
    return "messages_changed", f"{what} is another one than in the earlier request; all after it is computed", near


def _foreigner(record: RequestRecord, foreign: RequestRecord) -> _Decision:
    if foreign.model != record.model:
        return "model_changed", "the earlier request with these messages went to another model", foreign
    return (
        "scope",
        "the earlier request with these messages had another `cache_salt`, which keeps the two apart",
        foreign,
    )


# --- which earlier request -------------------------------------------------------------------------------------------


def _nearest(record: RequestRecord, earlier: Sequence[RequestRecord]) -> RequestRecord | None:
    """Of those whose blocks this one could have used: the one with most in common, the latest of equals."""
    usable = [other for other in earlier if other.model == record.model and other.scope == record.scope]
    return max(enumerate(usable), key=lambda at_other: _kinship(record, *at_other))[1] if usable else None


def _kinship(record: RequestRecord, at: int, other: RequestRecord) -> tuple[int, int, int, int]:
    return (
        common_tokens(record, other),
        common_messages(record, other),
        1 if _volatile(record, other) else 0,
        at,
    )


def _foreign(record: RequestRecord, earlier: Sequence[RequestRecord]) -> RequestRecord | None:
    """Of those whose blocks it could not use: likewise, by messages. Another model before another scope of this one."""
    others = [other for other in earlier if other.model != record.model or other.scope != record.scope]
    if not others:
        return None
    return max(
        enumerate(others),
        key=lambda at_other: (
            common_messages(record, at_other[1]),
            1 if at_other[1].model == record.model else 0,
            at_other[0],
        ),
    )[1]


def _volatile(record: RequestRecord, other: RequestRecord) -> tuple[VolatileKind, ...]:
    """In which kinds the first differing messages differ, if in nothing else."""
    at = common_messages(record, other)
    if at >= min(len(record.messages), len(other.messages)):
        return ()
    mine, theirs = record.messages[at].head, other.messages[at].head
    if (
        mine is None
        or theirs is None
        or mine.form != theirs.form
        or record.messages[at].role != other.messages[at].role
    ):
        return ()
    return tuple(kind for kind in mine.values if mine.values[kind] != theirs.values.get(kind))


# --- where they part -------------------------------------------------------------------------------------------------


def _divergent_message(record: RequestRecord, other: RequestRecord) -> DivergentMessage | None:
    at = common_messages(record, other)
    if at >= len(record.messages) or record.messages[at].role == "prompt":
        return None
    return DivergentMessage(index=at, role=record.messages[at].role)


def _divergent_token(record: RequestRecord, other: RequestRecord) -> tuple[int, int] | None:
    """None when nothing is known of the chain, or when the prompts are the same."""
    if not record.grains or not other.grains:
        return None
    is_same = (
        bool(record.messages) and record.messages == other.messages and record.prompt_tokens == other.prompt_tokens
    )
    start = common_tokens(record, other)
    all_of_both = (
        start
        == len(record.grains) // GRAIN_MARK_BYTES * GRAIN_TOKENS
        == len(other.grains) // GRAIN_MARK_BYTES * GRAIN_TOKENS
    )
    if start >= record.prompt_tokens or (is_same and all_of_both):
        return None
    return start, min(start + GRAIN_TOKENS, record.prompt_tokens)


def _name_of(message: MessageMark, at: int) -> str:
    if message.role == "prompt":
        return "the prompt"
    return "the system prompt" if message.role == "system" and at == 0 else f"message {at} ({message.role})"


def _reused(record: RequestRecord) -> int:
    return min(record.cache.ram_tokens + record.cache.disk_tokens, record.prompt_tokens)


def _words_of_worker(reason: str) -> str:
    return WORKER_REASONS.get(reason, f"the model's process says: {reason}")
