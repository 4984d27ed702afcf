"""Routes about the service: models by any id, readiness that names who is stuck, one status for the operator."""

from pathlib import Path

import msgspec
import openai
import pytest

from gateway.catalog import ModelEntry
from gateway.gate import AnswerCutShort, Gate, GateSecrets, Receive, Scope, Send
from gateway.keys import Keyring
from gateway.operations import admin_status, model_object, readiness
from gateway.status import AdminStatus, GatewayStatus, LastExit, ModelStatus, ServiceStatus
from protocol.generation import PrefixReuse, Ready
from protocol.ids import ModelName
from protocol.kv_storage import KVQuantization, KVStorage
from tests.gateway.http_parts import ADMIN_TOKEN, House, build_house, make_model

IDS = ["flat", "org/name", "org/name:tag", "org/sub/name", "with space", "ünïcode/模型", "100%", "a+b", "q?mark#hash"]


@pytest.fixture
def house(tmp_path: Path) -> House:
    for name in IDS:
        make_model(tmp_path / "models" / name)
    return build_house(tmp_path)


def running(name: str, **changes: object) -> ModelStatus:
    limits = Ready(
        context_tokens=2048,
        max_rows=4,
        weight_bytes=10,
        load_seconds=1.0,
        prefix_reuse=PrefixReuse(available=False, reason="sliding window"),
        fingerprint="f",
        kv=KVStorage(quantization=KVQuantization(bits=8, group_size=32), bytes_per_token=4352),
    )
    status = ModelStatus(name=ModelName(name), state="ready", since_unix=1.0, pid=7, limits=limits)
    return msgspec.structs.replace(status, **changes)


async def test_every_listed_id_can_be_retrieved(house: House):
    """C11: slashes, tags, spaces and more, with the slash escaped or not, through the SDK as well."""
    async with house.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == sorted(IDS)
        sdk = openai.AsyncOpenAI(api_key="none", base_url="http://localhost:8321/v1", http_client=client)
        for name in IDS:
            assert (await sdk.models.retrieve(name)).id == name
        for path in ("org%2Fname%3Atag", "org/name%3Atag", "org/name:tag"):
            assert (await client.get(f"/v1/models/{path}")).json()["id"] == "org/name:tag"
        assert (await client.head("/v1/models/org/name")).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["no/such", "..%2F..%2Fetc", "%2Fetc", "org", "org%2F", "org/name/", "org//name", "%2Forg%2Fname", "a%00b", "~x",
     "x" * 10_000],
)  # fmt: skip
async def test_an_unknown_id_is_model_not_found(house: House, path: str):
    """C11, S03: 404 with OpenAI's code at once, for near misses and paths too."""
    async with house.client() as client:
        response = await client.get(f"/v1/models/{path}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("model", ["", "no/such", "../../etc", "/etc", "a\0b", "~x", "x" * 10_000])
async def test_an_unknown_model_generates_nothing(house: House, model: str):
    """C11, S03: never the default model, never another one."""
    async with house.client() as client:
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code in (400, 404)
    assert house.generator.asked == []


async def test_a_model_says_what_it_can(house: House):
    """Before it is loaded: the configuration's limit. After: the resolved one, its state, and whether prefixes help."""
    async with house.client() as client:
        before = (await client.get("/v1/models/flat")).json()
        house.status.models = [running("flat")]
        after = (await client.get("/v1/models/flat")).json()
    assert before["object"] == "model"
    assert before["owned_by"] == "mlxd"
    assert before["context_length"] == before["max_model_len"] == before["max_input_tokens"] == 4096
    assert before["mlxd"]["state"] == "absent"
    assert before["mlxd"]["prefix_reuse"]["available"] is None
    assert "kv" not in before["mlxd"]
    assert after["context_length"] == 2048
    assert after["mlxd"] == {
        "state": "ready",
        "problem": None,
        "prefix_reuse": {"available": False, "reason": "sliding window"},
        "kv": {"bits": 8, "group_size": 32, "reading": "quantized", "bytes_per_token": 4352, "reason": ""},
    }


async def test_a_broken_model_is_listed_and_refused_with_its_reason(house: House):
    """E06: flagged in the list; a request for it names the file; the others are served."""
    (house.home / "models" / "flat" / "model.safetensors").unlink()
    async with house.client() as client:
        problems = {model["id"]: model["mlxd"]["problem"] for model in (await client.get("/v1/models")).json()["data"]}
        assert "no weights" in problems.pop("flat")
        assert set(problems.values()) == {None}
        messages = [{"role": "user", "content": "hello"}]
        refused = await client.post("/v1/chat/completions", json={"model": "flat", "messages": messages})
        assert refused.status_code == 503
        assert "model*.safetensors" in refused.json()["error"]["message"]
        served = await client.post("/v1/chat/completions", json={"model": "org/name", "messages": messages})
        assert served.status_code == 200


def test_the_operators_limit_bounds_what_is_shown():
    """A limit of the settings shows before the load; an unknown one is left out, not guessed."""
    entry = ModelEntry(name=ModelName("m"), path="/m", created_unix=0, context_tokens=4096)
    assert model_object(entry, None, context_limit=1000).context_length == 1000
    unknown = msgspec.structs.replace(entry, context_tokens=None)
    assert b"context_length" not in msgspec.json.encode(model_object(unknown, None, context_limit=None))
    given_up = running("m", state="given_up", limits=None)
    assert "mlxd status" in (model_object(entry, given_up, context_limit=None).mlxd.problem or "")


async def test_ready_names_who_is_stuck(house: House):
    """Liveness and readiness are two questions; the second needs a key like everything else."""
    async with house.client() as client:
        assert (await client.get("/ready")).json() == {"status": "ready", "stuck": []}
        house.status.models = [running("a"), running("b", stuck_reason="no step for 60 s with 2 rows open")]
        response = await client.get("/ready")
        assert response.status_code == 503
        assert response.json()["stuck"] == [{"model": "b", "reason": "no step for 60 s with 2 rows open"}]
        assert (await client.get("/health")).json() == {"status": "ok"}


def test_a_held_process_without_work_is_no_reason_to_be_unready():
    """The service does all that it is asked for; the status says that somebody holds it."""
    assert readiness(ServiceStatus(models=(running("a", held_reason="stopped since 5 s"),))).status == "ready"


def test_an_idle_service_is_ready():
    """Nothing loaded is nothing stuck."""
    assert readiness(ServiceStatus()).status == "ready"


async def test_the_operator_sees_everything(house: House):
    """One answer joins the catalog with what runs, reads back as the struct, and keeps a model whose folder went."""
    died = LastExit(reason="killed by signal 9", signal=9, stderr_tail=("last line",), at_unix=5.0)
    house.status.models = [running("flat", restarts=1, last_exit=died), running("gone")]
    async with house.client(authorization=f"Bearer {ADMIN_TOKEN}") as client:
        answer = msgspec.json.decode((await client.get("/admin/status")).content, type=AdminStatus)
    models = {model.name: model for model in answer.models}
    assert set(models) == {*IDS, "gone"}
    assert models[ModelName("flat")].process == house.status.models[0]
    assert models[ModelName("flat")].weight_bytes > 0
    assert models[ModelName("org/name")].process is None
    assert "gone" in (models[ModelName("gone")].problem or "")
    assert answer.gateway.pid > 0
    assert answer.gateway.uptime_seconds >= 0


def test_status_is_a_pure_join():
    """Order: the catalog's, then leftovers."""
    entries = tuple(ModelEntry(name=ModelName(name), path=name, created_unix=0) for name in ("a", "b"))
    gateway = GatewayStatus(pid=1, version="0", uptime_seconds=0.0)
    joined = admin_status(entries, ServiceStatus(models=(running("x"), running("b"))), gateway)
    assert [(model.name, model.process is not None) for model in joined.models] == [
        ("a", False),
        ("b", True),
        ("x", True),
    ]


async def test_an_answer_cut_short_is_not_ended_as_if_whole(house: House):
    """If the app raises after its status line, the server is told to break the connection, without the words."""

    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("a prompt")

    gate = Gate(
        breaks,
        settings=house.settings,
        keyring=Keyring(house.settings.keys_path),
        secrets=GateSecrets(admin_token="", local_scope=b""),
        drain=house.drain,
    )
    house.app = gate
    with pytest.raises(AnswerCutShort) as caught:
        async with house.client() as client:
            await client.get("/anything")
    assert "a prompt" not in str(caught.value)
    assert caught.value.__suppress_context__


async def test_websockets_are_closed(house: House):
    """No route is reachable by upgrading."""
    sent: list[object] = []

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    async def send(message: object) -> None:
        sent.append(message)

    await house.app({"type": "websocket", "path": "/v1/models", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008, "reason": "no websockets here"}]
