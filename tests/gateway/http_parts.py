"""What the tests of the HTTP side share: an app with a scripted generator, and a client for it."""

import json
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import httpx

from gateway.admission import DayTokens
from gateway.app import create_app
from gateway.cache_doors import CacheAccess
from gateway.cachestore_child import CachestoreSilent
from gateway.catalog import Catalog
from gateway.catalog_snapshot import CatalogSnapshot
from gateway.config import Settings, settings_from
from gateway.gate import DrainFlag, Gate, GateSecrets
from gateway.keys import Keyring, add_key
from gateway.open_requests import OpenRequest
from gateway.ports import CacheOrder, CacheQuestion
from gateway.replies import Reply
from gateway.request_recorder import RequestRecorder
from gateway.residency import Resident
from gateway.status import CachestoreStatus, ModelStatus, ServiceStatus
from protocol.blocks import BlockReply
from protocol.failures import Failure
from protocol.generation import Delta, Finished, FinishReason, Generate, Queued, Timings, Usage, Warm, Warmed, Work
from protocol.ids import Incarnation, ModelName, RequestId

ADMIN_TOKEN = "admin-token-of-the-tests"
LOCAL_SCOPE = b"local-scope"


@dataclass
class FixedStatus:
    """Says what it was told."""

    models: Sequence[ModelStatus] = ()
    cachestore: CachestoreStatus | None = None

    def status(self) -> ServiceStatus:
        return ServiceStatus(models=tuple(self.models), cachestore=self.cachestore)


TIMINGS = Timings(queue_seconds=0, prefill_seconds=0, decode_seconds=0, prefill_slices=1)


@dataclass
class AnsweringGenerator:
    """Answers every request with one word, and remembers what it was asked, as a worker and dispatch would.

    A warm waits for the test to `land` it when `warms` is `held`.
    """

    recorder: RequestRecorder
    asked: list[Generate | Warm] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    warms: Literal["answered", "held"] = "answered"
    replies: list[Reply] = field(default_factory=list)

    def submit(self, model: ModelName, work: Work) -> Reply:
        assert isinstance(work, Generate | Warm)
        generate = work
        request_id = generate.request_id
        self.asked.append(generate)
        reply = Reply(request_id, self.cancelled.append)
        self.replies.append(reply)
        queued = Queued(request_id=request_id, prompt_tokens=3)
        reply.put(queued)
        if isinstance(generate, Warm):
            if self.warms == "answered":
                self.land()
            return reply
        reply.put(Delta(request_id=request_id, text="word", tokens=1))
        end = Finished(
            request_id=request_id,
            reason=FinishReason.STOP,
            usage=Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=0),
            timings=TIMINGS,
        )
        reply.put(end)
        self.recorder.finished(OpenRequest(model=model, work=generate, reply=reply, queued=queued), Incarnation(1), end)
        return reply

    def land(self) -> None:
        """End every warm."""
        for reply in self.replies:
            reply.put(
                Warmed(
                    request_id=reply.request_id,
                    prompt_tokens=300,
                    cached_tokens=256,
                    blocks=2,
                    size_bytes=4096,
                    durable_blocks=1,
                    timings=TIMINGS,
                )
            )


@dataclass
class ToldCaches:
    """Remembers what the caches were told. The cachestore answers what the test puts into `answers`, by question."""

    status_source: FixedStatus
    told: list[tuple[ModelName, CacheOrder]] = field(default_factory=list)
    asked: list[CacheQuestion] = field(default_factory=list)
    orders: Literal["followed", "unknown"] = "followed"
    answers: dict[type, BlockReply | CachestoreSilent | None] = field(default_factory=dict)

    def tell(self, model: ModelName, order: CacheOrder) -> Literal["told", "not_loaded"]:
        self.told.append((model, order))
        return "told" if any(known.name == model for known in self.status_source.models) else "not_loaded"

    async def orders_followed(self) -> Literal["followed", "unknown"]:
        return self.orders

    async def fresh_status(self) -> ServiceStatus:
        return self.status_source.status()

    async def ask_cachestore(self, question: CacheQuestion) -> BlockReply | None:
        self.asked.append(question)
        answer = self.answers.get(type(question))
        if isinstance(answer, CachestoreSilent):
            raise answer
        return answer


@dataclass
class OrderedModels:
    """Remembers what was ordered; ends it with the failure that the test sets, if any."""

    ordered: list[tuple[str, ModelName]] = field(default_factory=list)
    failure: Failure | None = None

    async def load_and_wait(self, model: ModelName) -> Failure | None:
        self.ordered.append(("load", model))
        return self.failure

    async def unload_and_wait(self, model: ModelName) -> Failure | None:
        self.ordered.append(("unload", model))
        return self.failure

    def residents(self) -> tuple[Resident, ...]:
        return ()


@dataclass
class House:
    """A whole HTTP side over one home directory."""

    home: Path
    settings: Settings
    app: Gate
    generator: AnsweringGenerator
    status: FixedStatus
    drain: DrainFlag
    caches: "ToldCaches"
    recorder: RequestRecorder
    models: "OrderedModels"
    tokens: DayTokens

    def add_key(self, name: str, *, share_cache_with: str | None = None, cache_ttl_seconds: float | None = None) -> str:
        return add_key(
            self.settings.keys_path,
            name,
            now_unix=0,
            share_cache_with=share_cache_with,
            cache_ttl_seconds=cache_ttl_seconds,
        )

    def client(self, **headers: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://localhost:8321",
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )


def build_house(home: Path, **document: object) -> House:
    home.mkdir(parents=True, exist_ok=True)
    settings = settings_from(document, home=home, base=home, user_id=0)
    status, drain = FixedStatus(), DrainFlag()
    caches = ToldCaches(status)
    recorder = RequestRecorder(keep_seconds=600.0, clock=time.monotonic, unix_clock=time.time)
    generator = AnsweringGenerator(recorder)
    models = OrderedModels()
    keyring = Keyring(settings.keys_path)
    app = create_app(
        settings=settings,
        keyring=keyring,
        catalog=CatalogSnapshot(Catalog([Path(directory) for directory in settings.models_directories])),
        generator=generator,
        status_source=status,
        secrets=GateSecrets(admin_token=ADMIN_TOKEN, local_scope=LOCAL_SCOPE),
        drain=drain,
        cache=CacheAccess(control=caches, recorder=recorder),
        response_store=Mock(),
        model_control=models,
    )
    return House(
        home=home,
        settings=settings,
        app=app,
        generator=generator,
        status=status,
        drain=drain,
        caches=caches,
        recorder=recorder,
        models=models,
        tokens=keyring.tokens,
    )


def make_model(folder: Path) -> Path:
    """A folder that the catalog finds nothing wrong with."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    return folder
