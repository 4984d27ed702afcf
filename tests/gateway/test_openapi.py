"""The document says what the routes do: each of them, with its statuses and its types."""

import re
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from litestar import Litestar

from gateway.app import create_app
from gateway.cache_doors import CacheAccess
from gateway.config import Settings, settings_from
from gateway.gate import DrainFlag, GateSecrets
from gateway.openapi import openapi_document
from gateway.public_routes import PUBLIC_ROUTES

DOCUMENT = openapi_document(PUBLIC_ROUTES, version="1")
OPERATIONS = [(path, method) for path, item in DOCUMENT["paths"].items() for method in item]


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    return settings_from({}, home=tmp_path, base=tmp_path, user_id=0)


def test_every_route_is_documented_and_no_other(settings: Settings) -> None:
    """Of callers: those below /admin are for the command line of the same version, /metrics is for scrapers."""
    gate = create_app(
        settings=settings,
        keyring=Mock(),
        catalog=Mock(),
        generator=Mock(),
        status_source=Mock(),
        secrets=GateSecrets(admin_token="a", local_scope=b""),
        drain=DrainFlag(),
        cache=CacheAccess(control=Mock(), recorder=Mock()),
        response_store=Mock(),
        model_control=Mock(),
    )
    app = gate._app
    assert isinstance(app, Litestar)
    served = {
        (re.sub(r"{(\w+):\w+}", r"{\1}", route.path), str(method).lower())
        for route in app.routes
        for method in getattr(route, "methods", ())
        if not route.path.startswith(("/admin", "/metrics"))
    }
    assert {route for route in served if route[1] not in ("head", "options")} == set(OPERATIONS)


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(_references(inner) for inner in value.values()))
    return set().union(*map(_references, value)) if isinstance(value, list) else set()


def test_every_reference_leads_somewhere() -> None:
    """In the document as clients get it, and no schema stands there for nothing."""
    read = msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    schemas = {f"#/components/schemas/{name}" for name in read["components"]["schemas"]}
    assert _references(read) == schemas


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_needs_a_key_says_so(path: str, method: str) -> None:
    """Only the probes do not, and they alone have no 401."""
    operation = DOCUMENT["paths"][path][method]
    is_open = operation.get("security") == []
    assert is_open == (path in ("/", "/health"))
    assert ("401" in operation["responses"]) != is_open


def test_both_envelopes_are_told_apart() -> None:
    """Anthropic's clients read another error than OpenAI's, and a full server has another status for them."""
    messages = DOCUMENT["paths"]["/v1/messages"]["post"]["responses"]
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert messages["429"]["content"] != chat["429"]["content"]
    assert "529" in messages
    assert "529" not in chat
