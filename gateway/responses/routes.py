"""OpenAI's Responses API: POST /v1/responses, what belongs to it, and what is stored of it.

Nothing is stored unless `store: true` asks for it: OpenAI's default is the other way round, but here the file is on
somebody's machine, and an agent that keeps its own conversation needs none.
"""

from litestar import Request, Response, Router, get, post, route
from litestar.datastructures import State
from litestar.types import ASGIApp

from gateway.answering import Answering
from gateway.caller import Caller
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from gateway.request_recorder import RequestRecorder
from gateway.responses.doors import ResponseDoors, failed, invalid
from gateway.responses.store import ResponseStore

Asking = Request[object, object, State]


def responses_router(
    answering: Answering, store: ResponseStore, recorder: RequestRecorder | None, *, max_body_bytes: int
) -> Router:
    """The routes. The gate before them has put `request_id`, `caller` and `log_fields` into the scope's state."""
    doors = ResponseDoors(answering, store, recorder, max_body_bytes=max_body_bytes)

    @post("/", status_code=200)
    async def create() -> ASGIApp:
        """Make a response."""
        return doors.create

    @post("/input_tokens", status_code=200)
    async def input_tokens() -> ASGIApp:
        """Count what a request's prompt would have."""
        return doors.count

    @post("/compact", status_code=200)
    async def compact() -> Response[bytes]:
        """Not offered: a summary by the model would pass for the conversation itself."""
        return failed(
            invalid(None, "Compaction is not offered here. Leave old items out of `input`, or sum them up yourself.")
        )

    # One handler for both, since of two the router's answer to OPTIONS names only the first's method.
    @route("/{response_id:str}", http_method=["GET", "DELETE"], status_code=200)
    async def stored(request: Asking) -> Response[bytes]:
        """A stored response, as it is now; or forget it, and cancel it if it is still made."""
        if request.method == "DELETE":
            return await doors.remove(_caller(request), _response_id(request))
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            return failed(invalid("stream", "`stream`: a stored response is not streamed again. Ask without it."))
        return await doors.show(_caller(request), _response_id(request))

    @post("/{response_id:str}/cancel", status_code=200)
    async def cancel(request: Asking) -> Response[bytes]:
        """End a response in the background."""
        return await doors.cancel(_caller(request), _response_id(request))

    @get("/{response_id:str}/input_items")
    async def list_input_items(request: Asking) -> Response[bytes]:
        """What a stored response was made of."""
        return await doors.input_items(_caller(request), _response_id(request), dict(request.query_params))

    return Router(
        "/v1/responses",
        route_handlers=[create, input_tokens, compact, stored, cancel, list_input_items],
        exception_handlers=OPENAI_EXCEPTION_HANDLERS,
    )


def _caller(request: Asking) -> Caller:
    return request.scope["state"]["caller"]


def _response_id(request: Asking) -> str:
    return str(request.path_params["response_id"])
