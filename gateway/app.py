"""The HTTP side put together: routes, error envelopes, and the gate around them."""

from collections.abc import Sequence

from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.router import Router

from gateway.catalog import Catalog
from gateway.config import Settings
from gateway.gate import DrainNotice, Gate
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from gateway.keys import Keyring
from gateway.operations import operations_router
from gateway.status import StatusSource


def create_app(
    *,
    settings: Settings,
    keyring: Keyring,
    catalog: Catalog,
    status_source: StatusSource,
    dialects: Sequence[Router | HTTPRouteHandler],
    admin_token: str,
    local_scope: bytes,
    drain: DrainNotice,
) -> Gate:
    """An ASGI app. `dialects` are the routes of OpenAI's API and its like."""
    return Gate(
        create_routes(settings=settings, catalog=catalog, status_source=status_source, dialects=dialects),
        settings=settings,
        keyring=keyring,
        admin_token=admin_token,
        local_scope=local_scope,
        drain=drain,
    )


def create_routes(
    *,
    settings: Settings,
    catalog: Catalog,
    status_source: StatusSource,
    dialects: Sequence[Router | HTTPRouteHandler],
) -> Litestar:
    """What lies behind the gate. Never serve it without one: it lets everybody in."""
    operations = operations_router(
        catalog=catalog, status_source=status_source, context_limit=settings.worker.context_tokens
    )
    return Litestar(
        route_handlers=[operations, *dialects],
        exception_handlers=OPENAI_EXCEPTION_HANDLERS,
        request_max_body_size=settings.limits.max_body_bytes,
        openapi_config=None,
        cors_config=None,
        logging_config=None,
        debug=False,
    )
