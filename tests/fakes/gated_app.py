"""Routes behind a stand-in for the gate, which puts into a request's state what routes rest on."""

import itertools
from collections.abc import Sequence
from typing import Any

from litestar import Litestar, Router

from gateway.caller import Caller
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from protocol.ids import RequestId


class GatedApp:
    """An ASGI app. `caller` may be changed between requests; `log_fields` is what each of them left for the log."""

    def __init__(self, routers: Sequence[Router], caller: Caller, *, id_format: str = "req_{}") -> None:
        self.caller = caller
        self.log_fields: list[dict[str, Any]] = []
        self._id_format = id_format
        self._numbers = itertools.count(1)
        self._inner = Litestar(
            routers, exception_handlers=OPENAI_EXCEPTION_HANDLERS, openapi_config=None, logging_config=None
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request_id = RequestId(self._id_format.format(next(self._numbers)))
        if scope["type"] == "http":
            fields: dict[str, Any] = {}
            self.log_fields.append(fields)
            scope = {**scope, "state": {"request_id": request_id, "caller": self.caller, "log_fields": fields}}
        await self._inner(scope, receive, send)
