"""The operator's route that shows who has how much memory."""

from collections.abc import Callable

import msgspec
from litestar import Response, Router, get

from gateway.catalog_snapshot import CatalogSnapshot
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from gateway.memory_plan import memory_plan
from gateway.operations import requires_admin
from gateway.ports import ModelControl
from gateway.residency import MemoryTerms
from gateway.status import StatusSource


def memory_admin_router(
    *,
    catalog: CatalogSnapshot,
    control: ModelControl,
    status_source: StatusSource,
    terms: MemoryTerms,
    clock: Callable[[], float],
) -> Router:
    """`GET /admin/plan`. `clock` is that of the residents' moments."""

    @get("/plan")
    async def plan() -> Response[bytes]:
        """The ledger, and what each model that is not loaded would need to have gone."""
        status = {model.name: model for model in status_source.status().models}
        answer = memory_plan(catalog.entries(), control.residents(), status, terms, now=clock())
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return Router(
        "/admin", route_handlers=[plan], guards=[requires_admin], exception_handlers=OPENAI_EXCEPTION_HANDLERS
    )
