"""GET /metrics at the door: who may read it, and in which format."""

from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.http_parts import ADMIN_TOKEN, House, build_house, make_model

CHAT = {"model": "m", "messages": [{"role": "user", "content": "a secret of a client"}]}


@pytest.fixture
def house(tmp_path: Path) -> House:
    built = build_house(tmp_path)
    make_model(tmp_path / "models" / "m")
    return built


def open_house(tmp_path: Path) -> House:
    return build_house(tmp_path, metrics={"access": "open"})


async def test_the_admin_token_alone_opens_it(house: House) -> None:
    """In either header; a caller's key does not, nor does being local."""
    key = house.add_key("ann")
    async with house.client() as client:
        for headers in ({"authorization": f"Bearer {ADMIN_TOKEN}"}, {"x-api-key": ADMIN_TOKEN}):
            assert (await client.get("/metrics", headers=headers)).status_code == 200
        for path in ("/metrics", "/metrics/", "/%6detrics"):
            for headers in ({}, {"authorization": f"Bearer {key}"}):
                assert (await client.get(path, headers=headers)).status_code == 401


async def test_open_metrics_open_nothing_else(tmp_path: Path) -> None:
    """Without a key one may read the metrics, write nothing, and see no other route; also while the service stops."""
    house = open_house(tmp_path)
    house.add_key("ann")
    async with house.client() as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.head("/metrics")).status_code == 200
        assert (await client.post("/metrics")).status_code == 401
        for path in ("/v1/models", "/admin/status", "/metrics/more", "/v1/requests"):
            assert (await client.get(path)).status_code == 401
        house.drain.start()
        assert (await client.get("/metrics")).status_code == 200


async def test_no_web_page_reads_it(tmp_path: Path) -> None:
    """A page of a listed origin may call the API; the metrics are none of its business."""
    house = build_house(tmp_path, metrics={"access": "open"}, allowed_origins=["https://chat.example.org"])
    async with house.client(origin="https://chat.example.org") as client:
        answer = await client.get("/metrics")
        assert "access-control-allow-origin" not in answer.headers


async def test_both_formats(house: House) -> None:
    """Prometheus' text by default, OpenMetrics where it is asked for, each as its own parser reads it."""
    async with house.client(authorization=f"Bearer {ADMIN_TOKEN}") as client:
        plain = await client.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=")
        names = {family.name for family in text_string_to_metric_families(plain.text)}
        openmetrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
        assert {family.name for family in openmetrics_families(openmetrics.text)} == names
        assert {"mlxd_requests", "mlxd_time_to_first_token_seconds", "mlxd_model_state"} <= names


async def test_refusals_are_counted_and_nobody_is_named(house: House) -> None:
    """By reason and by status; no key, key's name, prompt, path of a client nor model that is none is a label."""
    key = house.add_key("ann-of-the-third-floor")
    async with house.client() as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        unknown = {**CHAT, "model": "no-such-model"}
        assert (await client.post("/v1/chat/completions", json=unknown, headers=headers)).status_code == 404
        bad = {**CHAT, "messages": "none"}
        assert (await client.post("/v1/messages", json=bad, headers=headers)).status_code == 400
        assert (await client.get("/private/path", headers=headers)).status_code == 404
        text = (await client.get("/metrics", headers={"x-api-key": ADMIN_TOKEN})).text
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["mlxd_requests_rejected_total", (("reason", "unauthenticated"),)] == 1
    assert samples["mlxd_requests_rejected_total", (("reason", "model_not_found"),)] == 1
    assert samples["mlxd_requests_rejected_total", (("reason", "invalid_request"),)] == 1
    route = (("method", "POST"), ("route", "/v1/chat/completions"))
    assert samples["mlxd_http_requests_total", (*route, ("status", "200"))] == 1
    assert samples["mlxd_http_requests_total", (*route, ("status", "404"))] == 1
    for secret in (key, "ann-of", "a secret of", "no-such-model", "/private"):
        assert secret not in text
