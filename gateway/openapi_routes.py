"""GET /openapi.json. It needs a key like every route: who may not come in learns nothing about the service."""

from functools import cache

import msgspec
from litestar import Response, Router, route

from gateway.openapi import openapi_document
from gateway.operations import mlxd_version
from gateway.public_routes import PUBLIC_ROUTES


def openapi_router() -> Router:
    """The document is made when it is first asked for: it takes longer than a start should."""

    @route("/openapi.json", http_method=["GET", "HEAD"])
    async def show() -> Response[bytes]:
        """What this service can be asked, and what it answers."""
        return Response(_document(), media_type="application/json")

    return Router("/", route_handlers=[show])


@cache
def _document() -> bytes:
    return msgspec.json.encode(openapi_document(PUBLIC_ROUTES, version=mlxd_version()))
