"""Who has how much memory, and what would have to leave for each model that is not loaded. Decides only."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, assert_never

from msgspec import Struct

from gateway.residency import Fits, FitsAfter, MemoryTerms, NeverFits, Resident, need_of, room_for
from gateway.status import ModelStatus
from protocol.ids import ModelName
from protocol.model_kind import ModelKind

Verdict = Literal["has_memory", "fits", "fits_after", "never_fits"]


class Known(Protocol):
    """A model of the catalog."""

    @property
    def name(self) -> ModelName: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kind(self) -> ModelKind: ...

    @property
    def problem(self) -> str | None: ...


class PlannedModel(Struct, frozen=True, kw_only=True):
    """One model. Of `need_bytes` the four parts follow; `memory_bytes` is what its process holds, where it has one.

    `after` are those that have to leave, or to finish, before it can load; `reason` says why it never can.
    """

    id: ModelName
    verdict: Verdict
    need_bytes: int
    weight_bytes: int
    hot_cache_bytes: int
    live_kv_bytes: int
    working_bytes: int
    memory_bytes: int | None
    pinned: bool
    idle_seconds: float | None
    after: tuple[ModelName, ...] = ()
    reason: str = ""


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """The ledger. What is reserved is counted from before a load to the end of its process."""

    limit_bytes: int | None
    reserved_bytes: int
    models: tuple[PlannedModel, ...]


def memory_plan(
    entries: Iterable[Known],
    residents: Sequence[Resident],
    status: Mapping[ModelName, ModelStatus],
    terms: MemoryTerms,
    *,
    now: float,
) -> MemoryPlan:
    """Of every model that could be served. `now` is on the clock of the residents' `idle_since`."""
    having = {resident.model: resident for resident in residents if resident.state != "waiting"}
    models = tuple(
        _planned(entry, having.get(entry.name), residents, status.get(entry.name), terms, now)
        for entry in entries
        if entry.problem is None
    )
    return MemoryPlan(
        limit_bytes=terms.limit_bytes,
        reserved_bytes=sum(resident.need_bytes for resident in having.values()),
        models=models,
    )


def _planned(
    entry: Known,
    resident: Resident | None,
    residents: Sequence[Resident],
    status: ModelStatus | None,
    terms: MemoryTerms,
    now: float,
) -> PlannedModel:
    need = need_of(entry.weight_bytes, terms, entry.kind)
    verdict: Verdict = "has_memory"
    after: tuple[ModelName, ...] = ()
    reason = ""
    if resident is None:
        room = room_for(entry.name, need.total_bytes, residents, terms)
        match room:
            case Fits():
                verdict = "fits"
            case FitsAfter(evict=evict, waits_for=waits_for):
                verdict, after = "fits_after", tuple(dict.fromkeys((*evict, *waits_for)))
            case NeverFits(failure=failure):
                verdict, reason = "never_fits", failure.message
            case _:
                assert_never(room)
    idle_since = resident.idle_since if resident is not None else None
    return PlannedModel(
        id=entry.name,
        verdict=verdict,
        need_bytes=need.total_bytes,
        weight_bytes=need.weight_bytes,
        hot_cache_bytes=need.hot_cache_bytes,
        live_kv_bytes=need.live_kv_bytes,
        working_bytes=need.working_bytes,
        memory_bytes=status.memory_bytes if status is not None else None,
        pinned=entry.name in terms.pinned,
        idle_seconds=None if idle_since is None else round(now - idle_since, 1),
        after=after,
        reason=reason,
    )
