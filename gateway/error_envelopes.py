"""In which API's words a failure is told where no route has been chosen yet, or where one route serves two. Decides
only."""

from collections.abc import Iterable
from typing import Literal

from gateway.anthropic_errors import anthropic_error
from gateway.error_answers import ErrorAnswer, openai_error
from protocol.failures import Failure
from protocol.ids import RequestId

SpokenApi = Literal["openai", "anthropic"]

VERSION_HEADER = b"anthropic-version"


def spoken_api(path: str, header_names: Iterable[bytes]) -> SpokenApi:
    """Which API's client this is. The routes of models are both APIs'; only a header tells there.

    `header_names` are in lower case. However the path is spelled: the router forgives doubled slashes.
    """
    parts = [part for part in path.split("/") if part]
    if parts[:2] == ["v1", "messages"]:
        return "anthropic"
    if parts[:2] == ["v1", "models"] and VERSION_HEADER in header_names:
        return "anthropic"
    return "openai"


def error_answer(failure: Failure, *, api: SpokenApi, request_id: RequestId) -> ErrorAnswer:
    """The answer to a request that fails before its status line."""
    return anthropic_error(failure, request_id) if api == "anthropic" else openai_error(failure)
