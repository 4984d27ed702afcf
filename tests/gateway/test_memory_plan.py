"""The plan says what the ledger would: who has memory, what fits beside, what never will."""

from msgspec import Struct

from gateway.memory_plan import memory_plan
from gateway.residency import MemoryTerms, Resident
from protocol.ids import ModelName
from protocol.model_kind import ModelKind

TERMS = MemoryTerms(limit_bytes=100, hot_cache_bytes=10, live_kv_bytes=5, pinned=frozenset({ModelName("a")}))


class Entry(Struct, frozen=True, kw_only=True):
    """A model of the catalog, as much of it as the plan reads."""

    name: ModelName
    weight_bytes: int
    kind: ModelKind = "generation"
    problem: str | None = None


def entry(name: str, weight_bytes: int, kind: ModelKind = "generation", problem: str | None = None) -> Entry:
    return Entry(name=ModelName(name), weight_bytes=weight_bytes, kind=kind, problem=problem)


def test_the_plan_is_the_ledgers() -> None:
    """Each verdict with its reason; a model with a problem is left out; idle time is by the residents' clock."""
    entries = [
        entry("a", 30),
        entry("b", 40),
        entry("fits", 0, "embedder"),
        entry("after", 30),
        entry("never", 60),
        entry("broken", 1, problem="a file is missing"),
    ]
    residents = [
        Resident(model=ModelName("a"), need_bytes=45, state="serving", idle_since=3.0, is_pinned=True),
        Resident(model=ModelName("b"), need_bytes=55, state="serving"),
    ]
    plan = memory_plan(entries, residents, {}, TERMS, now=10.0)
    models = {model.id: model for model in plan.models}
    assert (plan.limit_bytes, plan.reserved_bytes, list(models)) == (100, 100, ["a", "b", "fits", "after", "never"])
    assert (models["a"].verdict, models["a"].idle_seconds, models["a"].pinned) == ("has_memory", 7.0, True)
    assert (models["b"].verdict, models["b"].idle_seconds) == ("has_memory", None)
    assert models["fits"].verdict == "fits"
    assert (models["after"].verdict, models["after"].after) == ("fits_after", ("b",))
    assert (models["never"].verdict, "never fits" in models["never"].reason) == ("never_fits", True)


def test_what_only_embeds_is_counted_without_prefixes_and_live_kv() -> None:
    """As its load would be: the plan must not say that an embedder does not fit which then loads."""
    (planned,) = memory_plan([entry("e", 80, "embedder")], [], {}, TERMS, now=0.0).models
    assert (planned.hot_cache_bytes, planned.live_kv_bytes, planned.need_bytes) == (0, 0, 80)
