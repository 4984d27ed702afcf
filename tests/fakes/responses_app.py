"""The Responses routes behind a stand-in for the gate, with a store in a file; and the events of their streams."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gateway.answering import Answering, Patience
from gateway.front_desk import FrontDesk
from gateway.ports import Generator
from gateway.request_recorder import RequestRecorder
from gateway.responses.routes import responses_router
from gateway.responses.store import ResponseStore, StoreLimits
from tests.fakes.gated_app import GatedApp
from tests.fakes.openai_app import ALICE, BROKEN, CREATED, MAX_BODY_BYTES, MODEL, call, make_desk
from tests.fakes.scripted_generator import FewModels, KnownModel

RESPONSES = "/v1/responses"
LIMITS = StoreLimits(keep_seconds=3600.0, holder_responses=100, holder_bytes=2**20, total_bytes=2**22)
ENDS = ("response.completed", "response.incomplete", "response.failed")


class SetClock:
    """Unix time as a test sets it."""

    def __init__(self) -> None:
        self.now = float(CREATED)

    def __call__(self) -> float:
        return self.now


def make_store(
    folder: Path, *, limits: StoreLimits = LIMITS, clock: Callable[[], float] | None = None
) -> ResponseStore:
    return ResponseStore(folder / "responses.sqlite3", limits, unix_clock=clock or SetClock())


class ResponsesApp(GatedApp):
    """An ASGI app. `caller` may be changed between requests."""

    def __init__(
        self,
        generator: Generator,
        store: ResponseStore,
        *,
        keepalive_seconds: float = 10.0,
        headers_seconds: float = 30.0,
        desk: FrontDesk | None = None,
        recorder: RequestRecorder | None = None,
    ) -> None:
        answering = Answering(
            generator,
            FewModels(KnownModel(MODEL), KnownModel(BROKEN, problem="model.safetensors is missing")),
            desk or make_desk(),
            max_body_bytes=MAX_BODY_BYTES,
            unix_clock=lambda: CREATED + 0.5,
            patience=Patience(keepalive_seconds=keepalive_seconds, headers_seconds=headers_seconds),
        )
        routers = [responses_router(answering, store, recorder, max_body_bytes=MAX_BODY_BYTES)]
        super().__init__(routers, ALICE, id_format="req_{:032x}")


def asking(said: object = "hi", **fields: Any) -> dict[str, Any]:
    """A request's body. None leaves the input out."""
    return {"model": MODEL, **({} if said is None else {"input": said}), **fields}


def events_in(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, having held what every stream must: only named events and comments, events numbered one
    more than the last, from 0; named as their type says; created first, exactly one end, last."""
    assert stream.endswith(b"\n\n")
    events: list[dict[str, Any]] = []
    for block in stream.decode().split("\n\n")[:-1]:
        if block.startswith(":"):  # why it waits
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert [event["type"] in ENDS for event in events] == [False] * (len(events) - 1) + [True]
    return events


def types_in(events: Sequence[dict[str, Any]]) -> list[str]:
    """Without the common beginning."""
    return [event["type"].removeprefix("response.") for event in events]


async def whole(app: Any, **fields: Any) -> dict[str, Any]:
    """A whole response."""
    answer = await call(app, RESPONSES, asking(**fields))
    assert answer.status == 200, answer.body
    return answer.json


async def streamed(app: Any, **fields: Any) -> list[dict[str, Any]]:
    """A stream's events."""
    answer = await call(app, RESPONSES, asking(**fields, stream=True))
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_in(answer.body)
