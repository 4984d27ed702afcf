"""What the cache routes act through: both tiers of every model, and the owners of what lies in them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from gateway.cache_terms import (
    AdminCache,
    BudgetRequest,
    BudgetSet,
    CacheForgotten,
    CacheWarm,
    PinDeleted,
    PinList,
    PinRequest,
    admin_cache,
    cache_warm,
    pins_of_owner,
)
from gateway.cachestore_child import CachestoreSilent
from gateway.front_desk import Place
from gateway.keys import KeyRecord
from gateway.ports import CacheControl, CacheQuestion, Generator, ModelLookup
from gateway.request_recorder import RequestRecorder
from gateway.status import ServiceStatus
from gateway.warm_flights import WarmFlights
from protocol.blocks import BlockReply, Describe, Described, Forget, Forgotten, UnpinBlocks, Unpinned
from protocol.failures import Failure, FailureKind
from protocol.generation import Failed, ForgetHot, SetBudget, Unpin, Warm
from protocol.ids import ModelName
from protocol.scopes import owner_id


class CacheRefusal(Exception):
    """Carries a Failure to the handler that answers it; caught by every route."""

    def __init__(self, kind: FailureKind, message: str, param: str | None = None) -> None:
        super().__init__()
        self.failure = Failure(kind=kind, message=message, param=param)


@dataclass(frozen=True, kw_only=True)
class CacheAccess:
    """The parts of a running service that hold caches or remember requests."""

    control: CacheControl
    recorder: RequestRecorder


class CacheDoors:
    """What the routes act through. `records` are the keys as they are now, `local_scope` that of keyless callers."""

    def __init__(
        self,
        *,
        generator: Generator,
        models: ModelLookup,
        access: CacheAccess,
        records: Callable[[], Iterable[KeyRecord]],
        model_names: Callable[[], Iterable[ModelName]],
        local_scope: bytes,
        unix_clock: Callable[[], float],
    ) -> None:
        self.flights = WarmFlights(generator)
        self.models = models
        self.control = access.control
        self.recorder = access.recorder
        self.model_names = model_names
        self.unix_clock = unix_clock
        self._records = records
        self._local_scope = local_scope
        self._fingerprints: dict[str, str] = {}

    # --- owners and models -------------------------------------------------------------------------------------------

    def owners(self) -> dict[str, str]:
        """Owner ids by key name."""
        named = {record.name: owner_id(record.cache_scope) for record in self._records()}
        return named or {"local": owner_id(self._local_scope)}

    def owner(self, *, key: str | None, owner: str | None) -> str | None:
        """The owner that an operator named by key, by id, or not at all."""
        if key is None:
            return owner
        if owner is not None:
            raise CacheRefusal(FailureKind.INVALID_REQUEST, "Name the key or the owner, not both.", "owner")
        owners = self.owners()
        if key not in owners:
            raise CacheRefusal(
                FailureKind.INVALID_REQUEST,
                f"There is no such key; there are: {', '.join(owners)}. One that was removed goes by its `owner`.",
                "key",
            )
        return owners[key]

    async def fingerprint(self, model: str) -> str:
        """What its blocks are filed under. Only a load tells, so a model must have been loaded in this run."""
        for known in (await self.control.fresh_status()).models:
            if known.limits is not None:
                self._fingerprints[known.name] = known.limits.fingerprint
        if model not in self._fingerprints:
            raise CacheRefusal(
                FailureKind.INVALID_REQUEST,
                "This model was not loaded since the service started, so its blocks cannot be told from others'. "
                "Send it any request, then try again.",
                "model",
            )
        return self._fingerprints[model]

    # --- acting on both tiers ----------------------------------------------------------------------------------------

    async def ask(self, question: CacheQuestion) -> BlockReply | None:
        """Raises CacheRefusal when the cachestore does not answer."""
        try:
            return await self.control.ask_cachestore(question)
        except CachestoreSilent as why:
            raise CacheRefusal(
                FailureKind.CACHE_UNAVAILABLE, f"What is on disk was not touched, or not all of it: {why}. Try again."
            ) from None

    async def describe(self, status: ServiceStatus) -> Described | None:
        """The disk's books, fresh if it answers."""
        last = status.cachestore.books if status.cachestore else None
        try:
            reply = await self.control.ask_cachestore(Describe(call_id=0))
        except CachestoreSilent:
            return last
        return reply if isinstance(reply, Described) else last

    async def forget(
        self,
        *,
        owner: str | None = None,
        model: str | None = None,
        unused_for_seconds: float | None = None,
        asked_by: str,
    ) -> CacheForgotten:
        """Drop what matches all that is given, everything when nothing is. Raises CacheRefusal when some of it may be
        left or come back; then all else is forgotten."""
        fingerprint = None if model is None else await self.fingerprint(model)
        in_memory: Literal["followed", "unknown"] = "followed"
        told: list[ModelName] = []  # memory first: what is forgotten there cannot be written to the disk any more
        if unused_for_seconds is None:
            for known in (await self.control.fresh_status()).models:
                is_meant = model is None or known.name == model
                if is_meant and self.control.tell(known.name, ForgetHot(owner=owner)) == "told":
                    told.append(known.name)
            if told:
                # Once they have done so, no block of before can reach the disk.
                in_memory = await self.control.orders_followed()
            if owner is not None:
                self.recorder.forget(owner)
            elif model is None:
                self.recorder.forget_everything()
        reply = await self.ask(
            Forget(
                call_id=0,
                fingerprint=fingerprint,
                owner=owner,
                unused_for_seconds=unused_for_seconds,
                asked_by=asked_by,
            )
        )
        match reply:
            case None | Forgotten() if in_memory == "unknown":
                raise CacheRefusal(
                    FailureKind.CACHE_UNAVAILABLE,
                    "Not all of it could be forgotten: a model's process is too busy, or stopped, and may keep what it "
                    "has in memory, or still write it to the disk. Try again; `mlxd status` shows which one.",
                )
            case None:
                return CacheForgotten(models=tuple(told), disk="off", disk_blocks=0, disk_bytes=0)
            case Forgotten():
                return CacheForgotten(
                    models=tuple(told), disk="forgotten", disk_blocks=reply.blocks, disk_bytes=reply.file_bytes
                )
            case _:
                raise _disk_failed()

    async def unpin(self, owner: str, name: str) -> PinDeleted:
        """In both tiers. An unknown name is fine."""
        status = await self.control.fresh_status()
        was_hot = any(
            pin.owner == owner and pin.name == name
            for model in status.models
            for pin in (model.books.pins if model.books else ())
        )
        for model in status.models:
            self.control.tell(model.name, Unpin(owner=owner, name=name))
        reply = await self.ask(UnpinBlocks(call_id=0, owner=owner, name=name))
        if not isinstance(reply, Unpinned | None):
            raise _disk_failed()
        return PinDeleted(name=name, deleted=was_hot or (reply is not None and reply.blocks > 0))

    async def pins(self, owner: str) -> PinList:
        """One owner's, in both tiers."""
        status = await self.control.fresh_status()
        disk = await self.describe(status)
        return PinList(data=pins_of_owner(owner, status, disk, unix_now=self.unix_clock()))

    async def books(self) -> AdminCache:
        """All there is."""
        status = await self.control.fresh_status()
        return admin_cache(status, await self.describe(status), self.owners(), self.model_names())

    def set_budget(self, asked: BudgetRequest) -> BudgetSet:
        """For a model of the catalog, loaded or not."""
        known = self.models.find(asked.model)
        if known is None:
            raise CacheRefusal(
                FailureKind.MODEL_NOT_FOUND, "No such model. GET /v1/models lists those there are.", "model"
            )
        model = known.name
        told = self.control.tell(model, SetBudget(hot_cache_bytes=asked.hot_cache_bytes))
        return BudgetSet(
            model=model,
            hot_cache_bytes=asked.hot_cache_bytes,
            holds="now" if told == "told" else "from_next_load",
        )

    async def warm(self, model: ModelName, warm: Warm, pin: PinRequest | None, place: Place) -> CacheWarm | Failure:
        """Run it, or share the run of an equal one. Leave by cancelling, and leave the place."""
        await place.turn()
        end = await self.flights.run(model, warm, place.watch_shared(warm.request_id), place.count_run)
        if isinstance(end, Failed):
            return end.failure
        end = replace(end, timings=place.timings(end.timings, 0))
        if pin is not None:
            # A pin's name is unique within its owner: on disk it was replaced, in other models' memory it is here.
            for other in (await self.control.fresh_status()).models:
                if other.name != model:
                    self.control.tell(other.name, Unpin(owner=warm.cache.owner, name=pin.name))
        return cache_warm(model, end, pin)


def _disk_failed() -> CacheRefusal:
    """The cachestore answered with something else than it was asked for."""
    return CacheRefusal(
        FailureKind.CACHE_UNAVAILABLE, "The cachestore could not do it; its log says why. Mend that and try again."
    )
