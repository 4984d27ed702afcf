"""The operator's routes that load and unload models."""

from typing import assert_never

import msgspec
from litestar import Request, Response, Router, post
from litestar.datastructures import State
from msgspec import Struct

from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS, failure_response
from gateway.json_body import ClientGone, read_json_body
from gateway.operations import requires_admin
from gateway.ports import ModelControl, ModelLookup
from gateway.status import ModelState, StatusSource
from protocol.failures import Failure, FailureKind
from protocol.ids import ModelName

Asking = Request[object, object, State]

_BODY_BYTES = 64 * 1024


class ModelOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model is meant, by the id that it is served under."""

    model: str


class ModelOrdered(Struct, frozen=True, kw_only=True):
    """What came of it: the model's state when the order was carried out."""

    model: ModelName
    state: ModelState


def model_admin_router(*, models: ModelLookup, control: ModelControl, status_source: StatusSource) -> Router:
    """`POST /admin/models/load` and `/unload`: each answers when it is done, which may take minutes."""

    @post("/load", status_code=200)
    async def load(request: Asking) -> Response[bytes]:
        """Ready, or the failure that a request to the model would get."""
        asked = await _read(request)
        if isinstance(asked, Failure):
            return failure_response(asked)
        model = ModelName(asked.model)
        return _answer(model, await control.load_and_wait(model), status_source)

    @post("/unload", status_code=200)
    async def unload(request: Asking) -> Response[bytes]:
        """Open requests may end first, within the drain's time. Also ends a given-up state."""
        asked = await _read(request)
        if isinstance(asked, Failure):
            return failure_response(asked)
        model = ModelName(asked.model)
        if models.find(model) is None and _state(model, status_source) is None:
            return failure_response(
                Failure(
                    kind=FailureKind.MODEL_NOT_FOUND,
                    message="There is no model of this id. GET /v1/models lists the ids.",
                    param="model",
                )
            )
        return _answer(model, await control.unload_and_wait(model), status_source)

    return Router(
        "/admin/models",
        route_handlers=[load, unload],
        guards=[requires_admin],
        exception_handlers=OPENAI_EXCEPTION_HANDLERS,
    )


async def _read(request: Asking) -> ModelOrder | Failure:
    body = await read_json_body(request.scope["headers"], request.receive, max_body_bytes=_BODY_BYTES)
    match body:
        case ClientGone():
            return Failure(kind=FailureKind.CANCELLED, message="the client is gone")
        case Failure():
            return body
        case bytes():
            pass
        case _:
            assert_never(body)
    try:
        return msgspec.json.decode(body, type=ModelOrder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Failure(
            kind=FailureKind.INVALID_REQUEST, message='Send a body like {"model": "my-model"}.', param="model"
        )


def _state(model: ModelName, status_source: StatusSource) -> ModelState | None:
    return next((known.state for known in status_source.status().models if known.name == model), None)


def _answer(model: ModelName, failure: Failure | None, status_source: StatusSource) -> Response[bytes]:
    if failure is not None:
        return failure_response(failure)
    ordered = ModelOrdered(model=model, state=_state(model, status_source) or "absent")
    return Response(msgspec.json.encode(ordered), media_type="application/json")
