"""The operator's routes that load and unload: who may, what they answer, and that nothing else reaches a process."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.status import ModelStatus
from protocol.failures import Failure, FailureKind
from protocol.ids import ModelName
from tests.gateway.http_parts import ADMIN_TOKEN, House, build_house, make_model

ADMIN = {"authorization": f"Bearer {ADMIN_TOKEN}"}


@pytest.fixture
def house(tmp_path: Path) -> House:
    make_model(tmp_path / "models" / "org" / "name")
    return build_house(tmp_path)


@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_an_order_is_carried_out_and_answered_with_the_state(house: House, verb: str) -> None:
    """The id goes in the body, since it may hold slashes."""
    house.status.models = [ModelStatus(name=ModelName("org/name"), state="ready", since_unix=0.0)]
    async with house.client(**ADMIN) as client:
        response = await client.post(f"/admin/models/{verb}", json={"model": "org/name"})
    assert (response.status_code, response.json()) == (200, {"model": "org/name", "state": "ready"})
    assert house.models.ordered == [(verb, "org/name")]


@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_what_comes_of_it_is_told_in_the_failures_own_words(house: House, verb: str) -> None:
    """As a request to the model would hear it, with the time to come back."""
    house.models.failure = Failure(kind=FailureKind.MODEL_UNAVAILABLE, message="it died", retry_after_seconds=30.0)
    async with house.client(**ADMIN) as client:
        response = await client.post(f"/admin/models/{verb}", json={"model": "org/name"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "30")
    assert response.json()["error"]["message"] == "it died"


@pytest.mark.parametrize("name", ["", "no/such", "org", "../org/name", "x" * 10_000])
async def test_an_unknown_model_cannot_be_unloaded(house: House, name: str) -> None:
    """404 by the exact id."""
    async with house.client(**ADMIN) as client:
        response = await client.post("/admin/models/unload", json={"model": name})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert house.models.ordered == []


async def test_a_model_whose_folder_is_gone_can_still_be_unloaded(house: House) -> None:
    """It runs, so it must be possible to end it."""
    shutil.rmtree(house.home / "models" / "org")
    house.status.models = [ModelStatus(name=ModelName("org/name"), state="ready", since_unix=0.0)]
    async with house.client(**ADMIN) as client:
        assert (await client.post("/admin/models/unload", json={"model": "org/name"})).status_code == 200
    assert house.models.ordered == [("unload", "org/name")]


@pytest.mark.parametrize(
    ("status", "request_fields"),
    [
        (400, {"content": b"{"}),
        (400, {"content": b""}),
        (400, {"content": b"\xff"}),
        (400, {"json": {}}),
        (400, {"json": {"model": 1}}),
        (400, {"json": {"model": "org/name", "force": True}}),
        (400, {"json": ["org/name"]}),
        (413, {"json": {"model": "x" * 100_000}}),
        (415, {"content": b"model=org/name", "headers": {"content-type": "application/x-www-form-urlencoded"}}),
    ],
)
async def test_a_bad_order_reaches_no_process(house: House, status: int, request_fields: dict[str, Any]) -> None:
    """Refused in OpenAI's envelope, as every bad body is."""
    async with house.client(**ADMIN) as client:
        for verb in ("load", "unload"):
            response = await client.post(f"/admin/models/{verb}", **request_fields)
            assert response.status_code == status, response.text
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert house.models.ordered == []


async def test_only_the_operator_orders(house: House) -> None:
    """S01: no key, a valid key, and another method are refused."""
    key = house.add_key("ann")
    for headers, method, status in (
        ({}, "POST", 401),
        ({"authorization": f"Bearer {key}"}, "POST", 401),
        (ADMIN, "GET", 405),
    ):
        async with house.client(**headers) as client:
            for verb in ("load", "unload"):
                response = await client.request(method, f"/admin/models/{verb}", json={"model": "org/name"})
                assert response.status_code == status
    assert house.models.ordered == []
