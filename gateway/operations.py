"""Routes about the service itself: alive, ready, which models, and what the operator asks."""

import os
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec
from litestar import Request, Response, Router, get, route
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.exceptions import NotAuthorizedException
from litestar.handlers import BaseRouteHandler
from msgspec import UNSET, Struct, UnsetType

from gateway.anthropic.models import ModelInfo, model_info, model_page
from gateway.catalog import ModelEntry
from gateway.catalog_snapshot import CatalogSnapshot
from gateway.error_envelopes import SpokenApi, error_answer, spoken_api
from gateway.profiles import NO_PROFILES, Profiles, listed_names, profile_of
from gateway.status import (
    AdminModel,
    AdminStatus,
    GatewayStatus,
    ModelState,
    ModelStatus,
    ServiceStatus,
    StatusSource,
)
from protocol.failures import Failure, FailureKind
from protocol.generation import Capability, Ready
from protocol.ids import ModelName, RequestId
from protocol.kv_storage import KVReading, KVStorage
from protocol.model_kind import capabilities_of

_MODELS_PREFIX = "/v1/models/"

Asking = Request[object, object, State]


class Health(Struct, frozen=True, kw_only=True):
    """The process lives. Says nothing about models: `/ready` does."""

    status: Literal["ok"] = "ok"


class StuckModel(Struct, frozen=True, kw_only=True):
    """A model that has work and does not get on with it."""

    model: ModelName
    reason: str


class Readiness(Struct, frozen=True, kw_only=True):
    """Whether every loaded model gets on with its work."""

    status: Literal["ready", "stuck"]
    stuck: tuple[StuckModel, ...] = ()


class ReuseObject(Struct, frozen=True, kw_only=True):
    """Prefix reuse as the load's self-test found it; `available` is null while the model is not loaded."""

    available: bool | None
    reason: str


class KVObject(Struct, frozen=True, kw_only=True):
    """How keys and values are kept. `bits` null: in the model's own type. `reading` is what a decode step reads:
    dequantized is slower. `reason` says why it is not as the settings ask, or why steps are slower. `bytes_per_token`
    is what a request takes for each token, in the layers that keep all of them."""

    bits: int | None
    group_size: int | None
    reading: KVReading | None
    bytes_per_token: int
    reason: str


class ModelExtension(Struct, frozen=True, kw_only=True):
    """What mlxd knows beyond OpenAI's object. `kv` is there once a model that generates is loaded, `profile_of` for a
    profile's name: the folder it stands for."""

    state: ModelState
    problem: str | None
    prefix_reuse: ReuseObject
    kv: KVObject | UnsetType = UNSET
    profile_of: ModelName | UnsetType = UNSET


class ModelObject(Struct, frozen=True, kw_only=True):
    """OpenAI's model object. The context's length goes by three names, since clients look for different ones."""

    id: ModelName
    created: int
    mlxd: ModelExtension
    object: Literal["model"] = "model"
    owned_by: Literal["mlxd"] = "mlxd"
    context_length: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    max_input_tokens: int | UnsetType = UNSET
    capabilities: tuple[Capability, ...] = ()


class ModelList(Struct, frozen=True, kw_only=True):
    """OpenAI's list of models."""

    data: tuple[ModelObject, ...]
    object: Literal["list"] = "list"


# --- deciders --------------------------------------------------------------------------------------------------------


def readiness(status: ServiceStatus) -> Readiness:
    """Stuck when any model has work that does not get on. A process that somebody holds while it has none is no reason:
    the service does all that it is asked for."""
    stuck = tuple(
        StuckModel(model=model.name, reason=model.stuck_reason)
        for model in status.models
        if model.stuck_reason is not None
    )
    return Readiness(status="stuck" if stuck else "ready", stuck=stuck)


def model_object(
    entry: ModelEntry, status: ModelStatus | None, *, shown_as: ModelName | None = None, context_limit: int | None
) -> ModelObject:
    """One model as `/v1/models` shows it. `context_limit` is the operator's own, below the model's; `shown_as` another
    name than its own if a profile gives it that."""
    limits = None if status is None else status.limits
    context = _context_tokens(entry, status, context_limit)
    shown = UNSET if context is None else context
    reuse = (
        ReuseObject(available=None, reason="known once the model is loaded")
        if limits is None
        else ReuseObject(available=limits.prefix_reuse.available, reason=limits.prefix_reuse.reason)
    )
    return ModelObject(
        id=shown_as or entry.name,
        created=entry.created_unix,
        mlxd=ModelExtension(
            state="absent" if status is None else status.state,
            problem=_problem(entry, status),
            prefix_reuse=reuse,
            kv=UNSET if limits is None or limits.kv is None else _kv_object(limits.kv),
            profile_of=UNSET if shown_as in (None, entry.name) else entry.name,
        ),
        context_length=shown,
        max_model_len=shown,
        max_input_tokens=shown,
        capabilities=_capabilities(entry, limits),
    )


def anthropic_model(
    entry: ModelEntry, status: ModelStatus | None, *, shown_as: ModelName | None = None, context_limit: int | None
) -> ModelInfo:
    """The same for clients of Anthropic's API."""
    limits = None if status is None else status.limits
    return model_info(
        shown_as or entry.name,
        created_unix=entry.created_unix,
        context_tokens=_context_tokens(entry, status, context_limit),
        capabilities=None if limits is None else limits.capabilities,
    )


def _context_tokens(entry: ModelEntry, status: ModelStatus | None, context_limit: int | None) -> int | None:
    if status is not None and status.limits is not None:
        return status.limits.context_tokens
    return min((limit for limit in (entry.context_tokens, context_limit) if limit is not None), default=None)


def admin_status(entries: tuple[ModelEntry, ...], status: ServiceStatus, gateway: GatewayStatus) -> AdminStatus:
    """Join the catalog with what runs."""
    processes = {model.name: model for model in status.models}
    models = [
        AdminModel(
            name=entry.name,
            path=entry.path,
            weight_bytes=entry.weight_bytes,
            context_tokens=entry.context_tokens,
            problem=entry.problem,
            process=processes.pop(entry.name, None),
        )
        for entry in entries
    ]
    models += [
        AdminModel(
            name=name,
            path="",
            weight_bytes=0,
            context_tokens=None,
            problem="its folder is gone from the models directories",
            process=process,
        )
        for name, process in processes.items()
    ]
    return AdminStatus(gateway=gateway, models=tuple(models), cachestore=status.cachestore)


def _kv_object(kv: KVStorage) -> KVObject:
    terms = kv.quantization
    return KVObject(
        bits=None if terms is None else terms.bits,
        group_size=None if terms is None else terms.group_size,
        reading=None if terms is None else kv.reading,
        bytes_per_token=kv.bytes_per_token,
        reason=kv.reason,
    )


def _capabilities(entry: ModelEntry, limits: Ready | None) -> tuple[Capability, ...]:
    """What it can be asked for: as its process said, else what every model of its kind can do."""
    if limits is not None:
        return limits.capabilities
    return () if entry.problem is not None else capabilities_of(entry.kind)


def _problem(entry: ModelEntry, status: ModelStatus | None) -> str | None:
    if entry.problem is not None:
        return entry.problem
    if status is not None and status.state == "given_up":
        return "its process keeps failing; the server's owner sees why with `mlxd status`"
    return None


# --- routes ----------------------------------------------------------------------------------------------------------


def mlxd_version() -> str:
    """The installed version."""
    try:
        return version("mlxd")
    except PackageNotFoundError:
        return "uninstalled"


def requires_admin(connection: "ASGIConnection[object, object, object, State]", _: BaseRouteHandler) -> None:
    """The gate checks the token by path; this holds even if a path should one day be spelled in a way it misses."""
    if connection.scope["state"].get("role") != "admin":
        raise NotAuthorizedException


def operations_router(
    *,
    catalog: CatalogSnapshot,
    status_source: StatusSource,
    context_limit: int | None,
    profiles: Profiles = NO_PROFILES,
) -> Router:
    """`context_limit` is the operator's `worker.context_tokens`."""
    started = time.monotonic()

    @route("/", http_method=["GET", "HEAD"])
    async def root() -> Response[bytes]:
        """That somebody is there, and nothing else."""
        return Response(b"", media_type="text/plain")

    @route("/health", http_method=["GET", "HEAD"])
    async def health() -> Health:
        return Health()

    @route("/ready", http_method=["GET", "HEAD"])
    async def ready() -> Response[Readiness]:
        answer = readiness(status_source.status())
        return Response(answer, status_code=200 if answer.status == "ready" else 503)

    @route("/v1/models", http_method=["GET", "HEAD"])
    async def list_models(request: Asking) -> Response[bytes]:
        processes = {model.name: model for model in status_source.status().models}
        entries = {entry.name: entry for entry in catalog.entries()}
        names = (*((name, name) for name in entries), *listed_names(profiles, tuple(entries)))
        if _api(request) == "anthropic":
            infos = [
                anthropic_model(entries[name], processes.get(name), shown_as=shown_as, context_limit=context_limit)
                for shown_as, name in names
            ]
            page = model_page(infos, dict(request.query_params.items()))
            return _failed(request, page) if isinstance(page, Failure) else _json(page)
        objects = (
            model_object(entries[name], processes.get(name), shown_as=shown_as, context_limit=context_limit)
            for shown_as, name in names
        )
        return _json(ModelList(data=tuple(objects)))

    @route(_MODELS_PREFIX + "{model_id:path}", http_method=["GET", "HEAD"])
    async def retrieve_model(request: Asking) -> Response[bytes]:
        # Not the path parameter: Litestar folds slashes in it, and a name must match exactly or not at all.
        asked: str = request.scope["state"]["path"]
        name = asked.removeprefix(_MODELS_PREFIX)
        profile = profile_of(profiles, name, lambda known: catalog.find(known) is not None)
        entry = catalog.find(name if profile is None else profile.model)
        if entry is None:
            failure = Failure(
                kind=FailureKind.MODEL_NOT_FOUND,
                message="There is no model of this id. GET /v1/models lists the ids.",
                param="model",
            )
            return _failed(request, failure)
        processes = {model.name: model for model in status_source.status().models}
        show = anthropic_model if _api(request) == "anthropic" else model_object
        shown = show(entry, processes.get(entry.name), shown_as=ModelName(name), context_limit=context_limit)
        return _json(shown)

    @get("/admin/status", guards=[requires_admin])
    async def show_status() -> AdminStatus:
        gateway = GatewayStatus(
            pid=os.getpid(), version=mlxd_version(), uptime_seconds=round(time.monotonic() - started, 3)
        )
        return admin_status(catalog.entries(), status_source.status(), gateway)

    return Router(path="/", route_handlers=[root, health, ready, list_models, retrieve_model, show_status])


def _api(request: Asking) -> SpokenApi:
    return spoken_api(request.scope["path"], {name.lower() for name, _ in request.scope["headers"]})


def _json(answer: Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _failed(request: Asking, failure: Failure) -> Response[bytes]:
    request_id: RequestId = request.scope["state"]["request_id"]
    answer = error_answer(failure, api=_api(request), request_id=request_id)
    return Response(answer.body, status_code=answer.status, media_type="application/json")
