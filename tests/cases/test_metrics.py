"""GET /metrics of a real service: its numbers are those that clients were told."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.control import read_admin_token
from tests.cases.conftest import MODEL
from tests.fakes.http_answers import CHAT, COMPLETIONS, ask, body, user
from tests.fakes.live_service import LiveService, live_service, until

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def scraped(script_model: Path) -> Iterator[LiveService]:
    """Two models, one of which nobody asks; metrics that a scraper may read without the token."""
    with live_service({MODEL: script_model, "other": script_model}, settings_toml='metrics.access = "open"\n') as live:
        yield live


def scrape(live: LiveService) -> Samples:
    with live.client() as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels, and perhaps more."""
    wanted = {(label.rstrip("_"), text) for label, text in labels.items()}
    return sum(number for (known, have), number in samples.items() if known == f"mlxd_{name}" and wanted <= have)


def test_numbers_are_those_that_clients_were_told(scraped: LiveService) -> None:
    """Requests by dialect and outcome, tokens as billed, one first token for each answer, an interval for every other
    token, nobody open afterwards, and nothing of a model that nobody asked."""
    before = scrape(scraped)
    with scraped.client() as client:
        answers = [ask(client, body(MODEL, said="SC19", max_tokens=50)), ask(client, body(MODEL, said="SC15"))]
        text = client.post(COMPLETIONS, json={"model": MODEL, "prompt": "<|SC04|>", "max_tokens": 3}).json()
        message = client.post("/v1/messages", json={"model": MODEL, "max_tokens": 9, "messages": user("SC04")}).json()
        too_long: dict[str, Any] = body(MODEL, said="x" * 40_000)
        assert client.post(CHAT, json=too_long).status_code == 400
    scraped.until_idle(MODEL)
    after = until("all have left", lambda: _ended(scrape(scraped), 7))

    def grew(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    # `ask` asks twice, whole and streamed.
    assert grew("requests_total", model=MODEL, dialect="chat", class_="standard", outcome="length") == 2
    assert grew("requests_total", model=MODEL, dialect="chat", outcome="stop") == 2
    assert grew("requests_total", dialect="chat", outcome="context_length_exceeded") == 1
    assert grew("requests_total", dialect="completions") == 1
    assert grew("requests_total", dialect="messages") == 1
    completion = 2 * sum(answer.completion_tokens for answer in answers)
    completion += text["usage"]["completion_tokens"] + message["usage"]["output_tokens"]
    assert grew("generation_tokens_total", model=MODEL, class_="standard") == completion
    reasoning = answers[1].usage["completion_tokens_details"]["reasoning_tokens"] if answers[1].usage else 0
    assert reasoning > 0
    assert grew("reasoning_tokens_total", model=MODEL) == 2 * reasoning
    prompts = 2 * sum(answer.prompt_tokens for answer in answers) + text["usage"]["prompt_tokens"]
    usage = message["usage"]
    prompts += usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert grew("prompt_tokens_total", model=MODEL) == prompts
    assert grew("time_to_first_token_seconds_count", model=MODEL) == 6
    assert grew("e2e_request_latency_seconds_count", model=MODEL) == 7
    assert grew("request_queue_time_seconds_count", model=MODEL) == 6
    told = grew("inter_token_latency_seconds_count", model=MODEL)
    assert completion - 2 * 6 <= told <= completion - 6  # an end's own token may come without an event
    assert value(after, "requests_running", model=MODEL, class_="standard") == 0
    assert value(after, "requests_waiting", model=MODEL, class_="standard") == 0
    assert value(after, "model_state", model=MODEL, state="ready") == 1
    assert value(after, "requests_total", model="other") == 0


def _ended(samples: Samples, count: int) -> Samples | None:
    return samples if value(samples, "requests_total") >= count else None


def test_who_runs_and_who_left(scraped: LiveService) -> None:
    """An open stream is running; its client leaves, and it was cancelled."""
    before = value(scrape(scraped), "requests_total", outcome="cancelled")
    with scraped.client() as client:
        asked = body(MODEL, said="SC20", stream=True, max_tokens=100_000)
        with client.stream("POST", CHAT, json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)  # kept: a reader that is dropped hangs up
            until("it runs", lambda: value(scrape(scraped), "requests_running", model=MODEL, class_="standard") == 1)
    until("it left", lambda: value(scrape(scraped), "requests_total", outcome="cancelled") == before + 1)
    assert value(scrape(scraped), "requests_running", model=MODEL) == 0


def test_workers_and_disk(scraped: LiveService) -> None:
    """What the processes say of themselves is what the status says."""
    with scraped.client() as client:
        assert ask(client, body(MODEL, said="SC04")).finish == "stop"
    books = until("its books came", lambda: scraped.model(MODEL).books)
    samples = scrape(scraped)
    assert value(samples, "worker_memory_bytes", model=MODEL) > 0
    assert value(samples, "hot_cache_budget_bytes", model=MODEL) == books.hot_cache_budget_bytes
    assert value(samples, "live_kv_budget_bytes", model=MODEL) == books.live_kv_budget_bytes
    assert value(samples, "worker_restarts_total", model=MODEL) == 0
    store = scraped.status().cachestore
    assert store is not None
    assert store.books is not None
    assert value(samples, "cachestore_state", state="ready") == 1
    assert value(samples, "cachestore_quota_bytes") == store.books.quota_bytes


def test_by_default_it_takes_the_token(service: LiveService) -> None:
    """A service without keys lets everybody local generate, and only its owner read the metrics."""
    token = read_admin_token(service.settings)
    with service.client() as client:
        assert client.get("/metrics").status_code == 401
        answer = client.get("/metrics", headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 200
    assert isinstance(answer, httpx.Response)
    assert "mlxd_build_info" in answer.text
