"""Routes about requests that are open now: who waits, for what, and how long still."""

import msgspec
from litestar import Request, Response, Router, get
from litestar.datastructures import State

from gateway.caller import Caller
from gateway.front_desk import FrontDesk
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS, failure_response
from gateway.in_flight import RequestView, RequestViews
from gateway.operations import requires_admin
from protocol.failures import Failure, FailureKind

Asking = Request[object, object, State]


def request_router(desk: FrontDesk) -> Router:
    """The callers' routes. Everybody sees their own requests only, the operator with the admin token all of them."""

    @get("/")
    async def list_requests(request: Asking) -> Response[bytes]:
        """The caller's own open requests."""
        return _json(RequestViews(data=desk.views(key_name=_whose(request))))

    @get("/{asked_id:str}")
    async def show_request(request: Asking) -> Response[bytes]:
        """One of them, by the id in its header x-request-id or in its answer."""
        return _found(desk.find(str(request.path_params["asked_id"]), key_name=_whose(request)))

    return Router(
        "/v1/requests", route_handlers=[list_requests, show_request], exception_handlers=OPENAI_EXCEPTION_HANDLERS
    )


def request_admin_router(desk: FrontDesk) -> Router:
    """The operator's."""

    @get("/")
    async def list_all_requests() -> Response[bytes]:
        """Everybody's open requests."""
        return _json(RequestViews(data=desk.views()))

    return Router(
        "/admin/requests",
        route_handlers=[list_all_requests],
        guards=[requires_admin],
        exception_handlers=OPENAI_EXCEPTION_HANDLERS,
    )


def _whose(request: Asking) -> str | None:
    """None: everybody's."""
    if request.scope["state"].get("role") == "admin":
        return None
    caller: Caller = request.scope["state"]["caller"]
    return caller.key_name


def _found(view: RequestView | None) -> Response[bytes]:
    if view is not None:
        return _json(view)
    failure = Failure(
        kind=FailureKind.NOT_FOUND,
        message="No such request of this key is open. GET /v1/requests lists those that are; "
        "of one that has ended, GET /v1/requests/{id}/explain tells what its prompt cost.",
    )
    return failure_response(failure)


def _json(answer: msgspec.Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(answer), media_type="application/json")
