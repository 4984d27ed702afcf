"""Services that many cases share. After every case they must still serve."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.http_answers import assert_serves
from tests.fakes.live_service import LiveService, live_service

MODEL = "script"
TAGGED = "org/name:tag"


@pytest.fixture(scope="module")
def service(script_model: Path) -> Iterator[LiveService]:
    """The script model under two names, no keys, default settings. For cases that leave it as it was.

    Not for the whole session: tests that come later look for children that nobody ended.
    """
    with live_service({MODEL: script_model, TAGGED: script_model}) as live:
        yield live


@pytest.fixture
def client(service: LiveService) -> Iterator[httpx.Client]:
    """Talks to the shared service; afterwards that must list its models and generate."""
    with service.client() as made:
        yield made
    assert_serves(service, MODEL)
