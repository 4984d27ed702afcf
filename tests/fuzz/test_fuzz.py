"""Whatever bytes come: a good answer or a 4xx in the API's envelope, never a 500, and the service goes on.

By default some hundred requests, always the same ones. `make fuzz` sends ten thousand other ones each time.
"""

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.fakes.http_answers import assert_serves
from tests.fakes.live_service import LiveService, live_service
from tests.fuzz.bodies import Route, body_for
from tests.fuzz.checks import check_answer, check_refusal
from tests.fuzz.routes import CHAT, COMPLETIONS, MESSAGES, MODEL, RESPONSES, ROUTES

REQUESTS = int(os.environ.get("MLXD_FUZZ_REQUESTS", "200"))
ANSWER_SECONDS = 60.0
ASK_EVERY = 100

_SETTINGS = "[worker]\ncontext_tokens = 1024\nmax_rows = 16\n"
"""Short: a change may take away what bounded an answer."""


class Fuzzed:
    """A service under fuzz. It must serve a good request now and then."""

    def __init__(self, service: LiveService) -> None:
        self._service = service
        self._sent = itertools.count(1)
        self.client = service.client()
        self.statuses: dict[tuple[str, int], int] = {}

    def post(self, path: str, data: bytes) -> httpx.Response:
        response = self.client.post(
            path, content=data, headers={"content-type": "application/json"}, timeout=ANSWER_SECONDS
        )
        counted = (path, response.status_code)
        self.statuses[counted] = self.statuses.get(counted, 0) + 1
        if next(self._sent) % ASK_EVERY == 0:
            assert_serves(self._service, MODEL)
        return response


@pytest.fixture(scope="module")
def fuzzed(script_model: Path) -> Iterator[Fuzzed]:
    """Afterwards it must serve, its worker must be the one that it began with, and nothing may be left running."""
    with live_service({MODEL: script_model}, settings_toml=_SETTINGS) as live:
        assert_serves(live, MODEL)
        first = live.worker_pid(MODEL)
        fuzz = Fuzzed(live)
        yield fuzz
        fuzz.client.close()
        live.until_idle(MODEL, seconds=30.0)
        assert_serves(live, MODEL)
        assert live.worker_pid(MODEL) == first
        assert live.model(MODEL).restarts == 0
        for (path, status), count in sorted(fuzz.statuses.items()):
            print(f"{path} {status}: {count}")  # noqa: T201 - shown with -s: how deep the bodies got


@pytest.mark.timeout(60 + REQUESTS)
@settings(
    max_examples=REQUESTS,
    database=None,
    deadline=None,
    derandomize="MLXD_FUZZ_REQUESTS" not in os.environ,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(st.data())
def test_any_body_is_answered(fuzzed: Fuzzed, data: st.DataObject) -> None:
    """No 500, no connection lost, no answer that does not end, one envelope for every refusal."""
    route: Route = data.draw(st.sampled_from([*ROUTES, *[CHAT] * 4, COMPLETIONS, MESSAGES, RESPONSES]))
    body = data.draw(body_for(route))
    note(f"{route.path} {body[:2000]!r}")
    started = time.monotonic()
    response = fuzzed.post(route.path, body)
    assert time.monotonic() - started < ANSWER_SECONDS
    if response.status_code == 200:
        check_answer(route, response)
    else:
        check_refusal(route, response)
