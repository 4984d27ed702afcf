"""Which latency class a request gets: what it asks for in any of four ways, clamped by its key. Decides only."""

from typing import Literal, TypeGuard, assert_never

from msgspec import Struct

from protocol.latency import LatencyClass

CLASS_HEADER = b"x-mlxd-class"
CLIENT_HEADER = b"x-app"
SUBAGENT_HEADER = b"x-claude-code-agent-id"

ServiceTier = Literal["priority", "default", "flex"]
"""OpenAI's words for what was granted."""

WorkClass = Literal["interactive", "standard", "batch", "warm"]
"""The latency classes and, behind them, what only fills the cache: the books and the bounds know it as a class."""

_WORK_CLASSES: dict[LatencyClass, WorkClass] = {
    LatencyClass.INTERACTIVE: "interactive",
    LatencyClass.STANDARD: "standard",
    LatencyClass.BATCH: "batch",
}

_OF_TIER = {"priority": LatencyClass.INTERACTIVE, "fast": LatencyClass.INTERACTIVE, "flex": LatencyClass.BATCH}


_TIERS_KNOWN = frozenset({*_OF_TIER, "auto", "default", "scale"})

PriorityAsked = int | float | str
"""What a body may hold there. Only whole numbers say something."""


class ClassRights(Struct, frozen=True, kw_only=True):
    """What a key's requests are unless they say otherwise, and the most that they can be."""

    default: LatencyClass = LatencyClass.STANDARD
    highest: LatencyClass = LatencyClass.INTERACTIVE


class ClassAsked(Struct, frozen=True, kw_only=True):
    """All that a request says about its urgency. `client` is where a client says that nobody looks at the screen."""

    header: str = ""
    service_tier: str | None = None
    priority: int | None = None
    client: Literal["foreground", "background"] = "foreground"


def class_asked(
    headers: tuple[tuple[bytes, bytes], ...], *, service_tier: str | None, priority: PriorityAsked | None
) -> ClassAsked:
    """Gather it from a request's headers (names in lower case) and the two fields of its body."""
    values = {name: value.decode("latin-1").strip().lower() for name, value in headers}
    is_background = values.get(CLIENT_HEADER) == "cli-bg" or bool(values.get(SUBAGENT_HEADER))
    return ClassAsked(
        header=values.get(CLASS_HEADER, ""),
        service_tier=service_tier,
        priority=int(priority) if _is_whole(priority) else None,
        client="background" if is_background else "foreground",
    )


def not_understood(
    headers: tuple[tuple[bytes, bytes], ...], *, service_tier: str | None, priority: PriorityAsked | None
) -> tuple[str, ...]:
    """Where a request names an urgency that nobody knows, so that it fell to the default: names of the header and of
    the body's fields."""
    header = next((value.decode("latin-1").strip().lower() for name, value in headers if name == CLASS_HEADER), "")
    unknown = (
        (CLASS_HEADER.decode(), bool(header) and header not in tuple(LatencyClass)),
        ("service_tier", service_tier is not None and service_tier not in _TIERS_KNOWN),
        ("priority", priority is not None and not _is_whole(priority)),
    )
    return tuple(name for name, is_unknown in unknown if is_unknown)


def granted_class(asked: ClassAsked, rights: ClassRights) -> LatencyClass:
    """The first that says something counts: the header, OpenAI's `service_tier`, vLLM's `priority` (lower is sooner).

    A name nobody knows says nothing: a wrong class must cost a little time, not an answer. A client that only says it
    works in the background gets the key's default, and at most `standard`. Whatever it is, the key's ceiling holds.
    """
    return _lower(_wanted(asked, rights.default), rights.highest)


def work_class(latency_class: LatencyClass) -> WorkClass:
    """The class of work that generates something."""
    return _WORK_CLASSES[latency_class]


def service_tier_of(latency_class: LatencyClass) -> ServiceTier:
    """The class in OpenAI's words."""
    match latency_class:
        case LatencyClass.INTERACTIVE:
            return "priority"
        case LatencyClass.STANDARD:
            return "default"
        case LatencyClass.BATCH:
            return "flex"
        case _:
            assert_never(latency_class)


def _wanted(asked: ClassAsked, default: LatencyClass) -> LatencyClass:
    for latency_class in LatencyClass:
        if asked.header == latency_class.value:
            return latency_class
    of_tier = _OF_TIER.get(asked.service_tier or "")
    if of_tier is not None:
        return of_tier
    if asked.priority:
        return LatencyClass.INTERACTIVE if asked.priority < 0 else LatencyClass.BATCH
    return _lower(default, LatencyClass.STANDARD) if asked.client == "background" else default


def _is_whole(priority: PriorityAsked | None) -> TypeGuard[int | float]:
    return isinstance(priority, int) or (isinstance(priority, float) and priority.is_integer())


def _lower(one: LatencyClass, other: LatencyClass) -> LatencyClass:
    return max(one, other, key=lambda latency_class: latency_class.rank)
