"""What the tests of the HTTP side share: an app with a scripted generator, and a client for it."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from gateway.app import create_app
from gateway.catalog import Catalog
from gateway.config import Settings, settings_from
from gateway.gate import DrainFlag, Gate
from gateway.keys import Keyring, add_key
from gateway.replies import Reply
from gateway.status import ModelStatus, ServiceStatus
from protocol.generation import Delta, Finished, FinishReason, Generate, Queued, Timings, Usage
from protocol.ids import ModelName

ADMIN_TOKEN = "admin-token-of-the-tests"
LOCAL_SCOPE = b"local-scope"


@dataclass
class AnsweringGenerator:
    """Answers every request with one word, and remembers what it was asked."""

    asked: list[Generate] = field(default_factory=list)

    def submit(self, model: ModelName, generate: Generate) -> Reply:
        self.asked.append(generate)
        reply = Reply(generate.request_id, lambda _: None)
        reply.put(Queued(request_id=generate.request_id, prompt_tokens=3))
        reply.put(Delta(request_id=generate.request_id, text="word", tokens=1))
        reply.put(
            Finished(
                request_id=generate.request_id,
                reason=FinishReason.STOP,
                usage=Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=0),
                timings=Timings(queue_seconds=0, prefill_seconds=0, decode_seconds=0, prefill_slices=1),
            )
        )
        return reply


@dataclass
class FixedStatus:
    """Says what it was told."""

    models: Sequence[ModelStatus] = ()

    def status(self) -> ServiceStatus:
        return ServiceStatus(models=tuple(self.models))


@dataclass
class House:
    """A whole HTTP side over one home directory."""

    home: Path
    settings: Settings
    app: Gate
    generator: AnsweringGenerator
    status: FixedStatus
    drain: DrainFlag

    def add_key(self, name: str) -> str:
        return add_key(self.settings.keys_path, name, now_unix=0)

    def client(self, **headers: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://localhost:8321",
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )


def build_house(home: Path, **document: object) -> House:
    home.mkdir(parents=True, exist_ok=True)
    settings = settings_from(document, home=home, base=home, user_id=0)
    generator, status, drain = AnsweringGenerator(), FixedStatus(), DrainFlag()
    app = create_app(
        settings=settings,
        keyring=Keyring(settings.keys_path),
        catalog=Catalog([Path(directory) for directory in settings.models_directories]),
        generator=generator,
        status_source=status,
        admin_token=ADMIN_TOKEN,
        local_scope=LOCAL_SCOPE,
        drain=drain,
    )
    return House(home=home, settings=settings, app=app, generator=generator, status=status, drain=drain)


def make_model(folder: Path) -> Path:
    """A folder that the catalog finds nothing wrong with."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    return folder
