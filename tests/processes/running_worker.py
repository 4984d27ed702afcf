"""Real worker processes over the real socket, with the test as their gateway."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.blas import worker_environment
from protocol.addresses import gateway_socket
from protocol.generation import (
    ChatMessage,
    ChatPrompt,
    Delta,
    Failed,
    Finished,
    Generate,
    Ping,
    Pong,
    Ready,
    TokenPrompt,
    WorkerCommand,
    WorkerEvent,
)
from protocol.ids import Incarnation, ModelName, RequestId
from protocol.launch import WorkerLaunch
from protocol.sampling import Sampling
from protocol.sockets import Listener

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 60.0
GREEDY = Sampling(temperature=0.0)
REAL_PROGRAM = ("-m", "worker")

Event = TypeVar("Event")


def gateway_environment(blas_directory: Path) -> dict[str, str]:
    """What the gateway starts workers with."""
    base = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    return worker_environment(base, blas_directory).environment


class WorkerProcess:
    """One worker and this test as its gateway."""

    def __init__(self, process: "subprocess.Popen[bytes]", listener: Listener[Any, Any], log_path: Path) -> None:
        self.process = process
        self.events: list[WorkerEvent] = []
        self._listener = listener
        self._log_path = log_path
        self._peer = b""
        self._seen = 0

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def send(self, command: WorkerCommand | dict[str, int]) -> None:
        self._listener.send(self._peer, command)

    def receive(self) -> None:
        """Take one event, or fail with the worker's last lines."""
        received = self._listener.receive(DEADLINE_SECONDS)
        assert received is not None, f"the worker said nothing for {DEADLINE_SECONDS} s:\n{self.log[-2000:]}"
        self._peer, event = received
        self.events.append(event)

    def next(self, kind: type[Event]) -> Event:
        """The next event of this kind that no earlier call has passed."""
        while True:
            while self._seen == len(self.events):
                self.receive()
            event = self.events[self._seen]
            self._seen += 1
            if isinstance(event, kind):
                return event

    def generate(self, name: str, prompt: Any, **more: Any) -> RequestId:
        request_id = RequestId(name)
        if isinstance(prompt, str):
            prompt = ChatPrompt(messages=(ChatMessage(role="user", content=prompt),))
        elif isinstance(prompt, list):
            prompt = TokenPrompt(token_ids=tuple(prompt))
        sampling = more.pop("sampling", GREEDY)
        self.send(Generate(request_id=request_id, prompt=prompt, sampling=sampling, **more))
        return request_id

    def of(self, name: str) -> list[Any]:
        return [event for event in self.events if getattr(event, "request_id", None) == name]

    def text(self, name: str) -> str:
        return "".join(event.text for event in self.of(name) if isinstance(event, Delta))

    def ends(self, names: Sequence[str]) -> dict[str, Finished | Failed]:
        """Wait for the end of each; there must be one, and nothing after it."""
        missing = set(names) - {e.request_id for e in self.events if isinstance(e, Finished | Failed)}
        while missing:
            self.receive()
            last = self.events[-1]
            if isinstance(last, Finished | Failed):
                missing.discard(last.request_id)
        found: dict[str, Finished | Failed] = {}
        for name in names:
            ends = [event for event in self.of(name) if isinstance(event, Finished | Failed)]
            assert len(ends) == 1
            assert self.of(name)[-1] is ends[0]
            found[name] = ends[0]
        return found

    def end(self, name: str) -> Finished | Failed:
        return self.ends([name])[name]

    def ask(self, name: str, prompt: Any, **more: Any) -> str:
        self.generate(name, prompt, **more)
        end = self.end(name)
        assert isinstance(end, Finished), end
        return self.text(name)

    def pong(self) -> Pong:
        self._seen = len(self.events)
        self.send(Ping(nonce=1))
        return self.next(Pong)

    def until(self, holds: Callable[[Pong], bool]) -> Pong:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not holds(pong := self.pong()):
            assert time.monotonic() < deadline, pong
        return pong

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)


Start = Callable[..., WorkerProcess]


@contextmanager
def started(runtime_directory: Path, environment: dict[str, str], logs: Path) -> Generator[Start]:
    """Gives what starts workers; at the end those that still run are killed."""
    listener: Listener[Any, Any] = Listener(gateway_socket(runtime_directory), WorkerEvent)
    processes: list[subprocess.Popen[bytes]] = []

    def start_one(
        model: Path, *, until: type[Any] = Ready, program: Sequence[str] = REAL_PROGRAM, **settings: Any
    ) -> WorkerProcess:
        number = len(processes) + 1
        launch = WorkerLaunch(
            model=ModelName("m"),
            model_path=str(model),
            runtime_directory=str(runtime_directory),
            incarnation=Incarnation(number),
            **settings,
        )
        log_path = logs / f"{number}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", *program], stdin=subprocess.PIPE, stderr=log, stdout=log, env=environment
            )
        processes.append(process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
        worker = WorkerProcess(process, listener, log_path)
        worker.next(until)
        return worker

    try:
        yield start_one
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
        listener.close()
