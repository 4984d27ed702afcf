"""The HTTP side put together: routes, error envelopes, and the gate around them."""

import time

from litestar import Litestar, Request
from litestar.datastructures import State

from gateway.admission import DayTokens
from gateway.answering import Answering, Patience
from gateway.anthropic.routes import anthropic_router
from gateway.cache_doors import CacheAccess, CacheDoors
from gateway.cache_routes import cache_admin_router, cache_router
from gateway.catalog_snapshot import CatalogSnapshot, concerns_models
from gateway.config import Settings
from gateway.front_desk import FrontDesk
from gateway.gate import DrainNotice, Gate, GateSecrets
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from gateway.keys import Keyring
from gateway.machine_memory import memory_terms
from gateway.memory_routes import memory_admin_router
from gateway.metrics_routes import metrics_router
from gateway.model_routes import model_admin_router
from gateway.openai.routes import openai_router
from gateway.openapi_routes import openapi_router
from gateway.operations import operations_router
from gateway.ports import Generator, ModelControl
from gateway.profiled_models import ProfiledGenerator, ProfiledModels
from gateway.request_routes import request_admin_router, request_router
from gateway.request_tallies import RequestTallies
from gateway.responses.routes import responses_router
from gateway.responses.store import ResponseStore
from gateway.single_answers import SingleAnswers
from gateway.status import StatusSource
from gateway.tokens.routes import tokens_router
from gateway.vectors.routes import vectors_router


def create_app(  # noqa: PLR0913  (the parts of a whole service)
    *,
    settings: Settings,
    keyring: Keyring,
    catalog: CatalogSnapshot,
    generator: Generator,
    status_source: StatusSource,
    secrets: GateSecrets,
    drain: DrainNotice,
    cache: CacheAccess,
    response_store: ResponseStore,
    model_control: ModelControl,
) -> Gate:
    """The ASGI app to serve."""
    models = ProfiledModels(catalog, settings.profiles)
    tallies = RequestTallies()
    doors = CacheDoors(
        generator=ProfiledGenerator(generator, models),
        models=models,
        access=cache,
        records=lambda: keyring.records,
        model_names=lambda: (entry.name for entry in catalog.entries()),
        local_scope=secrets.local_scope,
        unix_clock=time.time,
    )
    return Gate(
        create_routes(
            settings=settings,
            catalog=catalog,
            generator=generator,
            status_source=status_source,
            cache_doors=doors,
            response_store=response_store,
            tokens=keyring.tokens,
            model_control=model_control,
            tallies=tallies,
        ),
        settings=settings,
        keyring=keyring,
        secrets=secrets,
        drain=drain,
        client_ids=cache.recorder,
        tallies=tallies,
    )


def create_routes(  # noqa: PLR0913  (the same parts)
    *,
    settings: Settings,
    catalog: CatalogSnapshot,
    generator: Generator,
    status_source: StatusSource,
    cache_doors: CacheDoors | None = None,
    tokens: DayTokens | None = None,
    model_control: ModelControl | None = None,
    response_store: ResponseStore | None = None,
    tallies: RequestTallies | None = None,
) -> Litestar:
    """What lies behind the gate. Never serve it without one: it lets everybody in."""
    models = ProfiledModels(catalog, settings.profiles)
    generator = ProfiledGenerator(generator, models)
    desk = FrontDesk(
        class_limits=settings.limits.of_classes,
        tokens=DayTokens() if tokens is None else tokens,
        status_source=status_source,
        clock=time.monotonic,
        unix_clock=time.time,
        tallies=tallies,
    )
    answering = Answering(
        generator,
        models,
        desk,
        profile=models.profile,
        max_body_bytes=settings.limits.max_body_bytes,
        unix_clock=time.time,
        patience=Patience(
            keepalive_seconds=settings.waiting.keepalive_seconds,
            headers_seconds=settings.waiting.headers_seconds,
        ),
    )
    single_answers = SingleAnswers(generator, models, desk, max_body_bytes=settings.limits.max_body_bytes)
    cache_routers = (
        []
        if cache_doors is None
        else [
            cache_router(cache_doors, desk, max_body_bytes=settings.limits.max_body_bytes),
            cache_admin_router(cache_doors),
        ]
    )
    model_routers = (
        []
        if model_control is None
        else [
            model_admin_router(models=catalog, control=model_control, status_source=status_source),
            memory_admin_router(
                catalog=catalog,
                control=model_control,
                status_source=status_source,
                terms=memory_terms(settings),
                clock=time.monotonic,
            ),
        ]
    )

    async def look_at_the_models(request: Request[object, object, State]) -> None:
        if concerns_models(request.method, request.scope["path"]):
            await catalog.refresh()

    response_routers = (
        []
        if response_store is None
        else [
            responses_router(
                answering,
                response_store,
                None if cache_doors is None else cache_doors.recorder,
                max_body_bytes=settings.limits.max_body_bytes,
            )
        ]
    )
    return Litestar(
        before_request=look_at_the_models,
        route_handlers=[
            operations_router(
                catalog=catalog,
                status_source=status_source,
                context_limit=settings.worker.context_tokens,
                profiles=settings.profiles,
            ),
            openapi_router(),
            metrics_router(desk, status_source),
            openai_router(answering),
            vectors_router(single_answers),
            tokens_router(single_answers),
            anthropic_router(answering, single_answers, earlier=None if cache_doors is None else cache_doors.recorder),
            request_router(desk),
            request_admin_router(desk),
            *response_routers,
            *cache_routers,
            *model_routers,
        ],
        exception_handlers=OPENAI_EXCEPTION_HANDLERS,
        request_max_body_size=settings.limits.max_body_bytes,
        openapi_config=None,
        cors_config=None,
        logging_config=None,
        debug=False,
    )
