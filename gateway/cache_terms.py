"""Bodies and answers of the cache routes. Decides only."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.openai.schema import ChatRequest, CompletionRequest, ModelId
from gateway.status import ModelState, ServiceStatus
from protocol.blocks import Described
from protocol.generation import CacheReport, Pin, Pong, Timings, Warm, Warmed
from protocol.ids import ModelName, RequestId

PinName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
PositiveSeconds = Annotated[float, Meta(gt=0, le=10 * 365 * 86_400)]
KeyName = Annotated[str, Meta(min_length=1, max_length=64)]
OwnerId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class PinRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keep what is warmed under this name. Without `ttl_seconds` until it is unpinned."""

    name: PinName
    ttl_seconds: PositiveSeconds | None = None


class WarmChat(ChatRequest, frozen=True, kw_only=True):
    """The body of POST /v1/cache/warm with messages: any chat request will do; how to draw is not looked at."""

    pin: PinRequest | None = None


class WarmCompletion(CompletionRequest, frozen=True, kw_only=True):
    """Likewise with a prompt."""

    pin: PinRequest | None = None


class CacheWarm(Struct, frozen=True, kw_only=True):
    """What a warm did. `durable_blocks` of the `blocks` are on disk now; more may follow."""

    id: str
    model: ModelName
    prompt_tokens: int
    cached_tokens: int
    blocks: int
    bytes: int
    durable_blocks: int
    pin: PinRequest | None
    timings: Timings
    cache: CacheReport
    object: Literal["cache.warm"] = "cache.warm"


class PinObject(Struct, frozen=True, kw_only=True):
    """A pinned prefix: in the memory of `models`, and on disk. `expires_unix` None: never."""

    name: str
    models: tuple[ModelName, ...]
    tokens: int
    hot_bytes: int
    disk_blocks: int
    disk_bytes: int
    expires_unix: float | None
    object: Literal["cache.pin"] = "cache.pin"


class PinList(Struct, frozen=True, kw_only=True):
    """One owner's pins, by name."""

    data: tuple[PinObject, ...]
    object: Literal["list"] = "list"


class PinDeleted(Struct, frozen=True, kw_only=True):
    """`deleted` is false for a name that was not pinned."""

    name: str
    deleted: bool
    object: Literal["cache.pin"] = "cache.pin"


class CacheForgotten(Struct, frozen=True, kw_only=True):
    """What was dropped. `models` are those whose memory was told to; `disk` is `off` when there is no cache on disk."""

    models: tuple[ModelName, ...]
    disk: Literal["forgotten", "off"]
    disk_blocks: int
    disk_bytes: int
    object: Literal["cache.forgotten"] = "cache.forgotten"


class OwnForgetRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/cache/forget: empty, or an age in which case only the disk is looked at."""

    unused_for_seconds: Annotated[float, Meta(ge=0)] | None = None


class ForgetRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /admin/cache/forget. Criteria add up; `all` stands alone, so that nothing is purged by a typo.

    `unused_for_seconds` is about the disk: what lies in memory unused leaves by itself.
    """

    model: ModelId | None = None
    key: KeyName | None = None
    owner: OwnerId | None = None
    unused_for_seconds: Annotated[float, Meta(ge=0)] | None = None
    all: Literal[True] | None = None


class BudgetRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /admin/cache/budget."""

    model: ModelId
    hot_cache_bytes: Annotated[int, Meta(ge=0, le=2**50)]


class BudgetSet(Struct, frozen=True, kw_only=True):
    """From when on it holds."""

    model: ModelName
    hot_cache_bytes: int
    holds: Literal["now", "from_next_load"]


class UnpinRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /admin/cache/unpin: somebody's pin, named by key or owner."""

    name: PinName
    key: KeyName | None = None
    owner: OwnerId | None = None


class OwnerObject(Struct, frozen=True, kw_only=True):
    """Whose blocks go by which owner id. Keys that share a cache have one."""

    key: str
    owner: str


class AdminModelCache(Struct, frozen=True, kw_only=True):
    """A model's hot tier; `books` is None while it is not loaded."""

    model: ModelName
    state: ModelState
    fingerprint: str | None
    books: Pong | None


class AdminCache(Struct, frozen=True, kw_only=True):
    """GET /admin/cache: the books, pins, misses and budgets of all tiers. `disk` is None when it is off or silent."""

    models: tuple[AdminModelCache, ...]
    disk_state: ModelState | Literal["off"]
    disk: Described | None
    owners: tuple[OwnerObject, ...]


def cache_warm(model: ModelName, warmed: Warmed, pin: PinRequest | None) -> CacheWarm:
    """The answer to a warm."""
    return CacheWarm(
        id=f"warm-{warmed.request_id.removeprefix('req_')}",
        model=model,
        prompt_tokens=warmed.prompt_tokens,
        cached_tokens=warmed.cached_tokens,
        blocks=warmed.blocks,
        bytes=warmed.size_bytes,
        durable_blocks=warmed.durable_blocks,
        pin=pin,
        timings=warmed.timings,
        cache=warmed.cache,
    )


def pin_of(request: PinRequest | None) -> Pin | None:
    """What a worker is told."""
    return None if request is None else Pin(name=request.name, ttl_seconds=request.ttl_seconds)


def warm_key(model: ModelName, warm: Warm) -> bytes:
    """Equal for warms that do the same, whoever's connection they came on; the scope is a part of it."""
    same = msgspec.structs.replace(warm, request_id=RequestId(""))
    return hashlib.blake2b(msgspec.msgpack.encode((model, same)), digest_size=16).digest()


def pins_of_owner(
    owner: str, status: ServiceStatus, disk: Described | None, *, unix_now: float
) -> tuple[PinObject, ...]:
    """Both tiers' books joined by name."""
    hot = [
        (model.name, model.books, model.seconds_since_pong or 0.0) for model in status.models if model.books is not None
    ]
    return tuple(pin for whose, pin in _pins(hot, disk, unix_now=unix_now) if whose == owner)


def pins_of_all(books: AdminCache, *, unix_now: float) -> tuple[tuple[str, PinObject], ...]:
    """Every pin with its owner."""
    hot = [(row.model, row.books, 0.0) for row in books.models if row.books is not None]
    return _pins(hot, books.disk, unix_now=unix_now)


def _pins(
    hot: Iterable[tuple[ModelName, Pong, float]], disk: Described | None, *, unix_now: float
) -> tuple[tuple[str, PinObject], ...]:
    """By owner and name. Books are some seconds old, and so are their times to live."""
    pins: dict[tuple[str, str], PinObject] = {}
    for model, books, age_seconds in hot:
        for pin in books.pins:
            before = pins.get((pin.owner, pin.name)) or _no_pin(pin.name)
            expires = None if pin.expires_seconds is None else unix_now - age_seconds + pin.expires_seconds
            pins[pin.owner, pin.name] = msgspec.structs.replace(
                before,
                models=(*before.models, model),
                tokens=max(before.tokens, pin.tokens),
                hot_bytes=before.hot_bytes + pin.size_bytes,
                expires_unix=expires,
            )
    for pin in disk.pins if disk else ():
        before = pins.get((pin.owner, pin.name))
        if before is None:
            before = msgspec.structs.replace(_no_pin(pin.name), expires_unix=pin.expires_unix)
        pins[pin.owner, pin.name] = msgspec.structs.replace(before, disk_blocks=pin.blocks, disk_bytes=pin.file_bytes)
    return tuple((owner, pin) for (owner, _), pin in sorted(pins.items(), key=lambda item: item[0]))


def admin_cache(
    status: ServiceStatus, disk: Described | None, scopes: Mapping[str, str], names: Iterable[ModelName]
) -> AdminCache:
    """All of it. `scopes` are owner ids by key name, `names` the models of the catalog."""
    known = {model.name: model for model in status.models}
    rows: list[AdminModelCache] = []
    for name in dict.fromkeys((*names, *known)):
        model = known.get(name)
        rows.append(
            AdminModelCache(
                model=name,
                state=model.state if model else "absent",
                fingerprint=model.limits.fingerprint if model and model.limits else None,
                books=model.books if model else None,
            )
        )
    return AdminCache(
        models=tuple(rows),
        disk_state=status.cachestore.state if status.cachestore else "off",
        disk=disk,
        owners=tuple(OwnerObject(key=key, owner=owner) for key, owner in scopes.items()),
    )


def _no_pin(name: str) -> PinObject:
    return PinObject(name=name, models=(), tokens=0, hot_bytes=0, disk_blocks=0, disk_bytes=0, expires_unix=None)
