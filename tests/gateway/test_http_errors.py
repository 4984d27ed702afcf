"""Every failure has a status, an envelope and an honest word on coming back."""

import asyncio
import json

import pytest
import structlog
from litestar import Litestar, get, post

from gateway.error_answers import openai_error
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS, unexpected_failure
from protocol.failures import Failure, FailureKind
from tests.fakes.openai_app import call

STATUS = {
    FailureKind.INVALID_REQUEST: (400, "invalid_request_error", None),
    FailureKind.UNSUPPORTED: (400, "invalid_request_error", "unsupported"),
    FailureKind.CONTEXT_LENGTH_EXCEEDED: (400, "invalid_request_error", "context_length_exceeded"),
    FailureKind.UNAUTHENTICATED: (401, "invalid_request_error", "invalid_api_key"),
    FailureKind.FORBIDDEN: (403, "invalid_request_error", "forbidden"),
    FailureKind.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    FailureKind.MODEL_NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    FailureKind.METHOD_NOT_ALLOWED: (405, "invalid_request_error", "method_not_allowed"),
    FailureKind.BODY_TOO_LARGE: (413, "invalid_request_error", "body_too_large"),
    FailureKind.UNSUPPORTED_MEDIA_TYPE: (415, "invalid_request_error", "unsupported_media_type"),
    FailureKind.RATE_LIMITED: (429, "rate_limit_error", "rate_limit_exceeded"),
    FailureKind.OVERLOADED: (429, "rate_limit_error", "rate_limit_exceeded"),
    FailureKind.CANCELLED: (499, "invalid_request_error", "cancelled"),
    FailureKind.INTERNAL: (500, "server_error", "internal_error"),
    FailureKind.MODEL_UNAVAILABLE: (503, "server_error", "model_unavailable"),
    FailureKind.CACHE_UNAVAILABLE: (503, "server_error", "cache_unavailable"),
    FailureKind.WORKER_DIED: (503, "server_error", "worker_died"),
    FailureKind.SHUTTING_DOWN: (503, "server_error", "shutting_down"),
    FailureKind.OUT_OF_MEMORY: (503, "server_error", "out_of_memory"),
}


@pytest.mark.parametrize("kind", list(FailureKind))
def test_every_kind_of_failure_has_its_status_and_a_whole_envelope(kind: FailureKind) -> None:
    """Each kind has a status, and all four keys are in the envelope, null or not."""
    answer = openai_error(Failure(kind=kind, message="Do this.", param="model"))
    status, type_, code = STATUS[kind]
    assert answer.status == status
    assert json.loads(answer.body) == {"error": {"message": "Do this.", "type": type_, "param": "model", "code": code}}
    assert ("content-type", "application/json") in answer.headers


@pytest.mark.parametrize(
    ("kind", "seconds", "retry_after", "should_retry"),
    [
        (FailureKind.OVERLOADED, 2.1, "3", "true"),
        (FailureKind.OVERLOADED, None, "1", "true"),
        (FailureKind.WORKER_DIED, None, "1", "true"),
        (FailureKind.SHUTTING_DOWN, 30.0, "30", "true"),
        (FailureKind.MODEL_UNAVAILABLE, None, None, "false"),
        (FailureKind.MODEL_UNAVAILABLE, 12.0, "12", "true"),
        (FailureKind.OUT_OF_MEMORY, None, None, "false"),
        (FailureKind.INVALID_REQUEST, None, None, None),
    ],
)
def test_the_client_hears_whether_coming_back_helps(
    kind: FailureKind, seconds: float | None, retry_after: str | None, should_retry: str | None
) -> None:
    """SDKs retry each 429 and 5xx twice unless told: what time does not mend says so, the rest says when."""
    headers = dict(openai_error(Failure(kind=kind, message="m", retry_after_seconds=seconds)).headers)
    assert headers.get("retry-after") == retry_after
    assert headers.get("x-should-retry") == should_retry


def test_a_fault_of_ours_is_logged_without_its_words() -> None:
    """An exception's message may quote a prompt: the log has the type, the place and the request id only."""
    prompt = "my " + "secret".upper()  # so that source lines in the log do not hold it
    with structlog.testing.capture_logs() as lines:
        try:
            try:
                raise KeyError(prompt)
            except KeyError as cause:
                raise ValueError(prompt) from cause
        except ValueError as error:
            failure = unexpected_failure(error, "req_1")
    (line,) = lines
    assert "SECRET" not in str(line)
    assert line["error_type"] == "ValueError"
    assert line["request_id"] == "req_1"
    assert "test_http_errors" in str(line["chain"])
    assert "req_1" in failure.message
    assert "SECRET" not in failure.message


def test_what_litestar_refuses_has_the_same_envelope() -> None:
    """Unknown routes, wrong methods and raising handlers answer in OpenAI's envelope, and 405 names what is allowed."""

    @post("/only-post")
    async def only_post() -> None:
        return None

    @get("/raises")
    async def raises() -> None:
        raise RuntimeError("my secret prompt")

    app = Litestar(
        [only_post, raises], exception_handlers=OPENAI_EXCEPTION_HANDLERS, openapi_config=None, logging_config=None
    )
    unknown = asyncio.run(call(app, "/nowhere", b"", method="GET"))
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
    wrong_method = asyncio.run(call(app, "/only-post", b"", method="GET"))
    assert (wrong_method.status, wrong_method.error["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong_method.headers["allow"]
    with structlog.testing.capture_logs():
        raising = asyncio.run(call(app, "/raises", b"", method="GET"))
    assert (raising.status, raising.error["type"]) == (500, "server_error")
    assert "secret" not in raising.body.decode()
    for answer in (unknown, wrong_method, raising):
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert answer.headers["content-type"] == "application/json"
