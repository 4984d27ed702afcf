"""Two workers of one model on one runtime directory, with this process as their gateway."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from protocol.addresses import gateway_socket
from protocol.framing import MalformedMessage
from protocol.generation import (
    Cancel,
    Delta,
    Drain,
    Failed,
    Finished,
    Generate,
    LastWords,
    Ready,
    TokenPrompt,
    WorkerCommand,
    WorkerEvent,
)
from protocol.ids import Incarnation, ModelName, RequestId
from protocol.latency import LatencyClass
from protocol.launch import NeighbourPolicy, WorkerLaunch
from protocol.sampling import Sampling
from protocol.sockets import Listener

DEADLINE_SECONDS = 120.0


class PairFailed(Exception):
    """A worker did not do what was expected. Says what, with the last lines of both."""


class Pair:
    """Workers 1 and 2. `banned_token_ids` are never drawn, so that rows go on for as long as they are let."""

    def __init__(
        self,
        folder: Path,
        policy: NeighbourPolicy,
        directory: Path,
        environment: dict[str, str],
        *,
        banned_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._listener: Listener[Any, Any] = Listener(gateway_socket(directory), WorkerEvent)
        self._events: list[tuple[float, WorkerEvent]] = []
        self._logs = [directory / "1.log", directory / "2.log"]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._requests = 0
        self.expected_exits = 0
        self._banned = dict.fromkeys(banned_token_ids, -100.0)
        for number, log_path in enumerate(self._logs, start=1):
            launch = WorkerLaunch(
                model=ModelName("m"),
                model_path=str(folder),
                runtime_directory=str(directory),
                incarnation=Incarnation(number),
                hot_cache_bytes=0,
                persist="off",
                neighbours=policy,
            )
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "worker"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
            self.processes.append(process)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            process.stdin.flush()
        self.until(lambda: sum(isinstance(event, Ready) for _, event in self._events) == 2)

    def generate(
        self,
        worker: int,
        token_ids: tuple[int, ...],
        max_tokens: int,
        latency_class: LatencyClass = LatencyClass.INTERACTIVE,
    ) -> RequestId:
        """Ask worker 1 or 2 for a row."""
        self._requests += 1
        request_id = RequestId(f"r{self._requests}")
        sampling = Sampling(temperature=0.0, logit_bias=self._banned)
        self._send(
            worker,
            Generate(
                request_id=request_id,
                prompt=TokenPrompt(token_ids=token_ids),
                sampling=sampling,
                max_tokens=max_tokens,
                latency_class=latency_class,
            ),
        )
        return request_id

    def cancel(self, worker: int, request_id: RequestId) -> None:
        self._send(worker, Cancel(request_id=request_id))
        self.end(request_id)

    def end(self, request_id: RequestId) -> tuple[float, WorkerEvent]:
        """When it ended, and how."""
        self.until(lambda: any(isinstance(event, Finished | Failed) for _, event in self.of(request_id)))
        return self.of(request_id)[-1]

    def tokens(self, request_id: RequestId) -> list[tuple[float, int]]:
        """When how many tokens came."""
        return [(at, event.tokens) for at, event in self.of(request_id) if isinstance(event, Delta)]

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not holds():
            received = self._listener.receive(0.05)
            if received is not None:
                _, event = received
                if isinstance(event, LastWords | MalformedMessage):
                    raise PairFailed(f"{event}\n{self._last_lines()}")
                self._events.append((time.monotonic(), event))
            ended = [process.returncode for process in self.processes if process.poll() is not None]
            if len(ended) > self.expected_exits or time.monotonic() > deadline:
                why = f"a worker exited: {ended}" if ended else f"waited {DEADLINE_SECONDS} s"
                raise PairFailed(f"{why}\n{self._last_lines()}")

    def drain(self) -> list[int]:
        """Exit codes."""
        for worker in (1, 2):
            self._send(worker, Drain(deadline_seconds=5.0))
        return [process.wait(DEADLINE_SECONDS) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._listener.close()

    def of(self, request_id: RequestId) -> list[tuple[float, WorkerEvent]]:
        return [(at, event) for at, event in self._events if getattr(event, "request_id", None) == request_id]

    def _send(self, worker: int, command: WorkerCommand) -> None:
        self._listener.send(f"w{worker}".encode(), command)

    def _last_lines(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1000:] for path in self._logs)
