"""Which models may be in memory: one ledger for the machine, and what has to leave before another comes. Decides only.

A model is counted with its weights, the most that its prefixes may take, the most that the KV of what runs may take,
and scratch; workers keep to these budgets. All is reserved before its load starts, so two loads can never race for the
same bytes, and until its process has ended.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from protocol.failures import Failure, FailureKind
from protocol.ids import ModelName
from protocol.model_kind import ModelKind

LIVE_KV_SHARE = 0.125
"""Of what all models may have, the part that each may take for live KV where the settings do not say."""

WORKING_SHARE = 0.05
"""Of a model's weights, counted as working memory beside the fixed part: activations grow with the model."""

_GIB = 1024**3


class MemoryTerms(Struct, frozen=True, kw_only=True):
    """What the ledger knows of the machine and of every worker.

    `limit_bytes` None: no limit. `live_kv_bytes` are for the KV of requests that run (None: the worker has no bound
    and nothing is counted), `working_bytes` and `working_share` of the weights for scratch.
    A model that is not `pinned` leaves after `unload_after_seconds` without work; None: only when its memory is wanted.
    """

    limit_bytes: int | None = None
    hot_cache_bytes: int = 0
    live_kv_bytes: int | None = None
    working_bytes: int = 0
    working_share: float = 0.0
    pinned: frozenset[ModelName] = frozenset()
    unload_after_seconds: float | None = None
    wait_seconds: float = 600.0


class Need(Struct, frozen=True, kw_only=True):
    """What one model is counted with."""

    weight_bytes: int
    hot_cache_bytes: int
    live_kv_bytes: int
    working_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.hot_cache_bytes + self.live_kv_bytes + self.working_bytes


class Resident(Struct, frozen=True, kw_only=True):
    """A model that has memory, or is about to.

    `idle_since` is set when it serves and has no work; only then may it be asked to leave.
    """

    model: ModelName
    need_bytes: int
    state: Literal["loading", "serving", "leaving", "waiting"]
    idle_since: float | None = None
    is_pinned: bool = False


class Fits(Struct, frozen=True, kw_only=True):
    """It may load now."""


class FitsAfter(Struct, frozen=True, kw_only=True):
    """It may load when others have gone: `evict` have no work and go now, `waits_for` must go, or finish, first."""

    evict: tuple[ModelName, ...]
    waits_for: tuple[ModelName, ...]


class NeverFits(Struct, frozen=True, kw_only=True):
    """It cannot be loaded on this machine with these settings."""

    failure: Failure


Verdict = Fits | FitsAfter | NeverFits


def need_of(weight_bytes: int, terms: MemoryTerms, kind: ModelKind = "generation") -> Need:
    """What a model of so many bytes of weights is counted with. One that embeds or reranks has no KV."""
    return Need(
        weight_bytes=weight_bytes,
        hot_cache_bytes=terms.hot_cache_bytes if kind == "generation" else 0,
        live_kv_bytes=(terms.live_kv_bytes or 0) if kind == "generation" else 0,
        working_bytes=terms.working_bytes + int(terms.working_share * weight_bytes),
    )


def room_for(model: ModelName, need_bytes: int, residents: Sequence[Resident], terms: MemoryTerms) -> Verdict:
    """Whether this model may load beside `residents`, which hold nothing of the model itself.

    Those that wait for memory and came first are among them: nobody overtakes into the room that they wait for.
    """
    if terms.limit_bytes is None:
        return Fits()
    others = [resident for resident in residents if resident.model != model]
    pinned_bytes = sum(resident.need_bytes for resident in others if resident.is_pinned)
    if need_bytes + pinned_bytes > terms.limit_bytes:
        return NeverFits(failure=_never(model, need_bytes, pinned_bytes, terms.limit_bytes))
    free_bytes = terms.limit_bytes - sum(resident.need_bytes for resident in others)
    if need_bytes <= free_bytes:
        return Fits()
    short_bytes = need_bytes - free_bytes
    leaving_bytes = sum(resident.need_bytes for resident in others if resident.state == "leaving")
    evict: list[ModelName] = []
    gained_bytes = leaving_bytes
    for resident in _idle_longest_first(others):
        if gained_bytes >= short_bytes:
            break
        evict.append(resident.model)
        gained_bytes += resident.need_bytes
    if gained_bytes < short_bytes:
        # Whoever has no work goes only if that is enough: else it would have gone for nothing.
        return FitsAfter(evict=(), waits_for=tuple(resident.model for resident in others if not resident.is_pinned))
    leaving = tuple(resident.model for resident in others if resident.state == "leaving")
    return FitsAfter(evict=tuple(evict), waits_for=(*leaving, *evict))


def waited_too_long(model: ModelName, waits_for: Sequence[ModelName], seconds: float) -> Failure:
    """What a request hears whose model found no room in time."""
    names = ", ".join(waits_for) or "other models"
    return Failure(
        kind=FailureKind.MODEL_UNAVAILABLE,
        message=f"model {model} waited {seconds:.0f} s for memory, which {names} had in use; send the request again "
        "later, or ask the operator to unload one of them",
        retry_after_seconds=30.0,
    )


def _idle_longest_first(residents: Iterable[Resident]) -> list[Resident]:
    idle = [(resident.idle_since, resident) for resident in residents if resident.idle_since is not None]
    return [
        resident
        for _, resident in sorted(idle, key=lambda pair: pair[0])
        if resident.state == "serving" and not resident.is_pinned
    ]


def _never(model: ModelName, need_bytes: int, pinned_bytes: int, limit_bytes: int) -> Failure:
    beside = f", {_gib(pinned_bytes)} of it kept by pinned models" if pinned_bytes else ""
    return Failure(
        kind=FailureKind.INVALID_REQUEST,
        message=f"model {model} never fits: it needs {_gib(need_bytes)} and models may have {_gib(limit_bytes)} "
        f"here{beside}; use a smaller model or quantization, or ask the operator to change [memory], hot_cache or "
        "live_kv",
        param="model",
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
