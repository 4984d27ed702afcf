"""The OpenAPI document of this service, made of the structs that its routes read and write. Pure.

Our routes read and answer by themselves, so no framework sees their types: `public_routes` lists them, and a test holds
that the list is the route table.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from gateway.anthropic_errors import ErrorBody
from gateway.error_answers import OpenAIErrorBody

OPENAPI_VERSION = "3.1.0"
_ERRORS_OF_ANY = (400, 401, 403, 404, 405, 413, 429, 500, 503)
_WORDS = {
    200: "The answer",
    400: "Something of the request cannot be done; the message says what, and what to do",
    401: "No valid API key",
    403: "This Host or Origin is not served",
    404: "No such model, or no such thing of this key",
    405: "Another method is meant",
    413: "The body is too long",
    415: "The body is not said to be JSON",
    429: "A limit is reached; Retry-After says when to come back",
    500: "A fault of this server",
    503: "Not now: the model cannot be had, or the server is stopping",
    529: "The server is full; Retry-After says when to come back",
}

Dialect = Literal["openai", "anthropic", "either"]


class Operation(Struct, frozen=True, kw_only=True):
    """One method of one path.

    `body`, `answer` and `event` are types, or tuples of types of which it is one; None is a route without. `event` is
    what a stream's data lines hold, where the body may ask for one. `errors_as` says in whose envelope a failure comes;
    of `either` the header `anthropic-version` decides. `key` "unneeded" is a probe.
    """

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    body: Any = None
    body_is: Literal["required", "optional"] = "required"
    answer: Any = None
    event: Any = None
    errors_as: Dialect = "openai"
    queries: Mapping[str, Any] = {}
    headers: Mapping[str, Any] = {}
    also: tuple[int, ...] = ()
    key: Literal["needed", "unneeded"] = "needed"


def openapi_document(operations: Sequence[Operation], *, version: str) -> dict[str, Any]:
    """The document, ready for JSON."""
    types = [kind for operation in operations for said in _said(operation) for kind in _alternatives(said)]
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = _Schemas(dict(zip(map(repr, types), found, strict=True)))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "mlxd",
            "version": version,
            "description": "Serves MLX models to a room. Fields that no schema names are ignored, and listed in the "
            "answer's header x-mlxd-ignored-params; null is the same as absent wherever a field is optional.",
        },
        "security": [{"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


class _Schemas:
    """Schemas by type. Not all types can be hashed, but all say what they are."""

    def __init__(self, by_words: Mapping[str, Any]) -> None:
        self._by_words = by_words

    def of(self, said: Any) -> dict[str, Any]:
        """Of a type, or of a tuple of types."""
        found = [self._by_words[repr(kind)] for kind in _alternatives(said)]
        return found[0] if len(found) == 1 else {"anyOf": found}


def _alternatives(said: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", said) if isinstance(said, tuple) else (said,)


def _said(operation: Operation) -> list[Any]:
    """Everything with a schema."""
    kinds = [kind for kind in (operation.body, operation.answer, operation.event) if kind is not None]
    return [*kinds, *operation.queries.values(), *operation.headers.values(), _errors(operation)]


def _errors(operation: Operation) -> Any:
    return {"openai": OpenAIErrorBody, "anthropic": ErrorBody, "either": (OpenAIErrorBody, ErrorBody)}[
        operation.errors_as
    ]


def _operation(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    made: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation, schemas)}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _path_names(operation.path)
    ]
    for place, named in (("query", operation.queries), ("header", operation.headers)):
        parameters += [
            {"name": name, "in": place, "required": False, "schema": schemas.of(kind)} for name, kind in named.items()
        ]
    if parameters:
        made["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": schemas.of(operation.body)}}
        made["requestBody"] = {"required": operation.body_is == "required", "content": content}
    if operation.key == "unneeded":
        made["security"] = []
    return made


def _responses(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    good: dict[str, Any] = {"description": _WORDS[200]}
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": schemas.of(operation.answer)}
    if operation.event is not None:
        # OpenAPI 3.1 has no word for a stream of events: the schema is of one event's data.
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-data": schemas.of(operation.event)}
    if content:
        good["content"] = content
    statuses = {*_ERRORS_OF_ANY, *operation.also}
    if operation.body is not None:
        statuses |= {415}
    if operation.errors_as == "anthropic":
        statuses |= {529}
    if operation.key == "unneeded":
        statuses = {404, 405, *operation.also}
    failed = {"application/json": {"schema": schemas.of(_errors(operation))}}
    answers: dict[str, Any] = {"200": good}
    for status in sorted(statuses):
        answers[str(status)] = {"description": _WORDS[status], "content": failed}
    if operation.answer is not None and 503 in operation.also:
        # this one answers the same when it is not well
        answers["503"] = good | {"description": _WORDS[503]}
    return answers


def _path_names(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]
