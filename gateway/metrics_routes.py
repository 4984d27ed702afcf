"""GET /metrics: what Prometheus scrapes."""

from litestar import Request, Response, Router, route
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.exceptions import NotAuthorizedException
from litestar.handlers import BaseRouteHandler
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from gateway.front_desk import FrontDesk
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from gateway.metrics_exposition import ServiceCollector
from gateway.status import StatusSource

Asking = Request[object, object, State]


def requires_scraper(connection: "ASGIConnection[object, object, object, State]", _: BaseRouteHandler) -> None:
    """The gate decides by path; this holds even if a path should be spelled in a way it misses."""
    if connection.scope["state"].get("role") not in ("admin", "scraper"):
        raise NotAuthorizedException


def metrics_router(desk: FrontDesk, status_source: StatusSource) -> Router:
    """The route. Its text is Prometheus's, or OpenMetrics where that is asked for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServiceCollector(desk, status_source))

    @route("/metrics", http_method=["GET", "HEAD"], guards=[requires_scraper])
    async def metrics(request: Asking) -> Response[bytes]:
        """Everything that is counted here."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return Router("/", route_handlers=[metrics], exception_handlers=OPENAI_EXCEPTION_HANDLERS)
