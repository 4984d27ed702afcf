"""The HTTP side put together: routes, error envelopes, and the gate around them."""

import time

from litestar import Litestar

from gateway.catalog import Catalog
from gateway.config import Settings
from gateway.gate import DrainNotice, Gate
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from gateway.keys import Keyring
from gateway.openai.routes import openai_router
from gateway.operations import operations_router
from gateway.ports import Generator
from gateway.status import StatusSource


def create_app(
    *,
    settings: Settings,
    keyring: Keyring,
    catalog: Catalog,
    generator: Generator,
    status_source: StatusSource,
    admin_token: str,
    local_scope: bytes,
    drain: DrainNotice,
) -> Gate:
    """The ASGI app to serve. `local_scope` is the cache scope of callers without a key."""
    return Gate(
        create_routes(settings=settings, catalog=catalog, generator=generator, status_source=status_source),
        settings=settings,
        keyring=keyring,
        admin_token=admin_token,
        local_scope=local_scope,
        drain=drain,
    )


def create_routes(
    *, settings: Settings, catalog: Catalog, generator: Generator, status_source: StatusSource
) -> Litestar:
    """What lies behind the gate. Never serve it without one: it lets everybody in."""
    return Litestar(
        route_handlers=[
            operations_router(
                catalog=catalog, status_source=status_source, context_limit=settings.worker.context_tokens
            ),
            openai_router(generator, catalog, max_body_bytes=settings.limits.max_body_bytes, unix_clock=time.time),
        ],
        exception_handlers=OPENAI_EXCEPTION_HANDLERS,
        request_max_body_size=settings.limits.max_body_bytes,
        openapi_config=None,
        cors_config=None,
        logging_config=None,
        debug=False,
    )
