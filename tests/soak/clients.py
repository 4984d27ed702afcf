"""The clients of the soak: each asks in turn, in every dialect, and now and then hangs up. What they saw is written
down request by request."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import httpx
from msgspec import Struct

from tests.fakes.dialect_calls import DIALECTS, PATHS, Dialect, error_code, events, request_body

LatencyClass = Literal["interactive", "standard", "batch"]
CLASSES: tuple[LatencyClass, ...] = ("interactive", "standard", "batch")
SCRIPT_TAGS = ("SC04", "SC07", "SC15", "SC19", "SC20")
NO_END_SECONDS = 240.0
"""A request that has neither ended nor said anything for so long has no end."""

SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "pair",
        "schema": {
            "type": "object",
            "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class Plan(Struct, frozen=True, kw_only=True):
    """One request as it was drawn. `leaves_after` seconds its client hangs up; None: it stays to the end."""

    dialect: Dialect
    model: str
    latency_class: LatencyClass
    mode: Literal["stream", "whole"]
    said: str
    max_tokens: int
    fields: dict[str, Any]
    leaves_after: float | None


class Outcome(Struct, frozen=True, kw_only=True):
    """How one request went. `end` is "good", "left", "no end", or the error's code.

    `longest_gap` is the longest time between two events of a stream that mean something, or before the first one;
    `longest_silence` counts every line, keepalives too.
    """

    plan: Plan
    request_id: str
    began: float
    seconds: float
    end: str
    longest_gap: float = 0.0
    longest_silence: float = 0.0
    gap_ended: float = 0.0
    status: int = 0


class Waiting(Struct, kw_only=True):
    """A request that is open now, as its client sees it."""

    plan: Plan
    request_id: str = ""
    last_event: float = 0.0


def draw(dice: random.Random, models: tuple[str, ...]) -> Plan:
    """A request of any kind that clients make, short ones more often than long ones."""
    dialect = dice.choice(DIALECTS)
    model = dice.choice(models)
    said = dice.choice(SCRIPT_TAGS) if model.startswith("script") else dice.choice(("Say hi", "Count to ten", "Why?"))
    if dialect == "completions" and model.startswith("script"):
        said = f"<|{said}|>"
    if dice.random() < 0.3:  # a long prompt; half of them share their beginning
        lines = dice.choice((40, 60))
        seed = dice.randrange(3) if dice.random() < 0.5 else dice.randrange(10**6)
        said = "".join(f"Note {number} of book {seed}.\n" for number in range(lines)) + said
    fields: dict[str, Any] = {}
    if dialect == "chat" and dice.random() < 0.2:
        fields = {"response_format": SCHEMA}
    return Plan(
        dialect=dialect,
        model=model,
        latency_class=dice.choice(CLASSES),
        mode=dice.choice(("stream", "stream", "whole")),
        said=said,
        max_tokens=dice.choice((1, 8, 40, 150)),
        fields=fields,
        leaves_after=dice.uniform(0.0, 3.0) if dice.random() < 0.3 else None,
    )


class Soaker(threading.Thread):
    """One client, from its start until `stop` is set and its last request has ended."""

    def __init__(
        self,
        make_client: Callable[[], httpx.Client],
        *,
        seed: int,
        models: tuple[str, ...],
        stop: threading.Event,
        record: Callable[[Outcome], None],
    ) -> None:
        super().__init__(daemon=True, name=f"soaker-{seed}")
        self._make_client = make_client
        self._dice = random.Random(seed)
        self._models = models
        self._over = stop
        self._record = record
        self.waiting: Waiting | None = None

    def run(self) -> None:
        while not self._over.is_set():
            plan = draw(self._dice, self._models)
            # A client of its own for each: its connection is closed when it leaves, as a user's is.
            with self._make_client() as client:
                outcome = self._ask(client, plan)
            self.waiting = None
            self._record(outcome)
            if outcome.status in (429, 503):
                self._over.wait(1.0)  # what retry-after asks for, or less

    def _ask(self, client: httpx.Client, plan: Plan) -> Outcome:
        fields = {**plan.fields, "stream": plan.mode == "stream"}
        body = request_body(plan.dialect, plan.model, plan.said, max_tokens=plan.max_tokens, **fields)
        headers = {"x-mlxd-class": plan.latency_class}
        began = time.monotonic()
        self.waiting = Waiting(plan=plan, last_event=began)
        patience = NO_END_SECONDS if plan.leaves_after is None else plan.leaves_after + 0.01
        watch = _Watch(plan, self.waiting, began)
        try:
            with client.stream(
                "POST", PATHS[plan.dialect], json=body, headers=headers, timeout=httpx.Timeout(30.0, read=patience)
            ) as response:
                watch.request_id = self.waiting.request_id = _request_id(response)
                watch.status = response.status_code
                if response.status_code != 200:
                    response.read()
                    return watch.ended(error_code(response.json()))
                if plan.mode == "whole":
                    response.read()
                    return watch.ended("good")
                return watch.follow(response)
        except httpx.ReadTimeout:
            return watch.ended("no end" if patience == NO_END_SECONDS else "left")
        except (httpx.RemoteProtocolError, httpx.ReadError) as error:
            return watch.ended(f"broken connection: {type(error).__name__}")


class _Watch:
    """Keeps the time of one request."""

    def __init__(self, plan: Plan, waiting: Waiting, began: float) -> None:
        self._plan = plan
        self._waiting = waiting
        self._began = self._last_line = began
        self._longest_gap = self._longest_silence = self._gap_ended = 0.0
        self.request_id = ""
        self.status = 0

    def follow(self, response: httpx.Response) -> Outcome:
        """Read a stream to its end, or until this client has had enough."""
        leaves_at = None if self._plan.leaves_after is None else self._began + self._plan.leaves_after
        for line in response.iter_lines():
            now = time.monotonic()
            self._longest_silence = max(self._longest_silence, now - self._last_line)
            self._last_line = now
            for seen in events(self._plan.dialect, (line,)):
                if seen.end == "good":
                    return self.ended("good")
                if seen.end == "bad":
                    return self.ended(seen.error)
                if seen.text:
                    self._progress(now)
            if leaves_at is not None and now >= leaves_at:
                return self.ended("left")
            if now - self._waiting.last_event > NO_END_SECONDS:
                return self.ended("no end")
        return self.ended("no last event")

    def _progress(self, now: float) -> None:
        gap = now - self._waiting.last_event
        if gap > self._longest_gap:
            self._longest_gap, self._gap_ended = gap, now
        self._waiting.last_event = now

    def ended(self, end: str) -> Outcome:
        now = time.monotonic()
        self._progress(now)
        return Outcome(
            plan=self._plan,
            request_id=self.request_id,
            began=self._began,
            seconds=now - self._began,
            end=end,
            longest_gap=self._longest_gap,
            longest_silence=self._longest_silence,
            gap_ended=self._gap_ended,
            status=self.status,
        )


def _request_id(response: httpx.Response) -> str:
    return response.headers.get("x-request-id") or response.headers.get("request-id") or ""
