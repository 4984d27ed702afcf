"""A day in ten minutes: eight clients, two models, three classes, every dialect, hang-ups, and a worker killed now and
then. `make soak`, or `python -m tests.soak --seconds 600`. Exits with 1 when a law was broken, and says which.

The laws: every request ends; no stream is silent for longer than its keepalive; where no event came for
`EXPLAINED_SECONDS`, the service's status says why; nothing is restarted but what was killed; afterwards the books are
empty and no file or socket is left open.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.script_model import make_script_model
from tests.soak.clients import Outcome, Soaker

EXPLAINED_SECONDS = 30.0
"""From here on a gap between two events needs a reason that the status gives."""

SILENCE_SECONDS = 25.0
"""Keepalives come every 10 s; a machine that is busy with other things may be late with one."""

_BROKEN_BY_KILLS = frozenset({"worker_died", "api_error", "server_error", "overloaded_error"})
_REFUSED = frozenset({429, 503, 529})
_EXPLAINED = ("queued", "waiting_for_model")


class Log:
    """What happened, with the seconds since the start."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def say(self, *words: object) -> None:
        print(f"{time.monotonic() - self.started:8.1f}", *words, flush=True)  # noqa: T201 - this is its output


class Watchman(threading.Thread):
    """Looks at those who wait for long: what the status says of them, and, if it says nothing, at their worker."""

    def __init__(self, service: LiveService, soakers: list[Soaker], log: Log, stop: threading.Event) -> None:
        super().__init__(daemon=True, name="watchman")
        self._service = service
        self._soakers = soakers
        self._log = log
        self._over = stop
        self._looked: set[str] = set()
        self._moved: dict[str, tuple[object, float]] = {}
        self.reasons: dict[str, list[str]] = {}
        self.unexplained: list[str] = []

    def run(self) -> None:
        with self._service.client() as client:
            while not self._over.wait(1.0):
                now = time.monotonic()
                waiting = [(w, now - w.last_event) for soaker in self._soakers if (w := soaker.waiting) is not None]
                late = [(w, seconds) for w, seconds in waiting if seconds > 3.0 and w.request_id]
                if late:
                    views = {view["id"]: view for view in client.get("/v1/requests").json()["data"]}
                    for one, seconds in late:
                        self._look(one.request_id, one.plan.model, seconds, views.get(one.request_id))

    def _look(self, request_id: str, model: str, seconds: float, view: dict[str, object] | None) -> None:
        words = "ended" if view is None else f"{view['phase']}/{view['held_by']}/{view['progress']}"
        self.reasons.setdefault(request_id, []).append(f"{seconds:.0f}s {words}")
        is_explained = view is None or view["phase"] in _EXPLAINED or view["held_by"] != "" or self._moves(view)
        if seconds > EXPLAINED_SECONDS and not is_explained and request_id not in self._looked:
            self._looked.add(request_id)
            process = self._service.model(model)
            self._log.say("LATE", request_id, model, f"{seconds:.0f} s", view, process)
            if process.pid is not None:
                dump = _stack(process.pid)
                self._log.say(dump)
            self.unexplained.append(request_id)

    def _moves(self, view: dict[str, object]) -> bool:
        """Whether its prompt or its answer is longer than it was some seconds ago."""
        name, now = str(view["id"]), time.monotonic()
        standing = (view["progress"], view["completion_tokens"])
        before, since = self._moved.get(name, (None, now))
        if standing != before:
            self._moved[name] = (standing, now)
            return True
        return now - since < 10.0


def _stack(pid: int) -> str:
    """What the threads of a process do, if py-spy is installed."""
    try:
        seen = subprocess.run(
            [str(Path(sys.executable).parent / "py-spy"), "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except OSError as why:
        return f"no stack: {why}"
    return seen.stdout + seen.stderr


def soak(
    service: LiveService, *, models: tuple[str, ...], clients: int, seconds: float, kill_every: float, seed: int
) -> int:
    """Run it. Gives the number of broken laws."""
    log, stop, outcomes = Log(), threading.Event(), list[Outcome]()
    with service.client() as client:
        for model in models:
            answer = client.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 1})
            assert answer.status_code == 200, answer.text
    files_before = _open_files(service)
    log.say("loaded", models, "gateway's files", files_before)
    soakers = [
        Soaker(service.client, seed=seed + number, models=models, stop=stop, record=outcomes.append)
        for number in range(clients)
    ]
    watchman = Watchman(service, soakers, log, stop)
    for thread in (*soakers, watchman):
        thread.start()
    kills = _kill_now_and_then(service, models, log, seconds=seconds, every=kill_every, seed=seed)
    stop.set()
    for thread in soakers:
        thread.join(300)
    log.say("clients are done")
    broken = [f"client {thread.name} has not ended" for thread in soakers if thread.is_alive()]
    broken += _judge(outcomes, watchman, kills, log)
    broken += _judge_books(service, models, kills, files_before, log)
    for words in broken:
        log.say("BROKEN", words)
    return len(broken)


def _kill_now_and_then(
    service: LiveService, models: tuple[str, ...], log: Log, *, seconds: float, every: float, seed: int
) -> list[tuple[float, str]]:
    """Gives when which model's worker was killed."""
    dice, kills = random.Random(seed), list[tuple[float, str]]()
    ends = time.monotonic() + seconds
    next_kill = time.monotonic() + every
    while time.monotonic() < ends:
        time.sleep(0.5)
        if time.monotonic() < next_kill or time.monotonic() > ends - 20:
            continue
        next_kill = time.monotonic() + every * dice.uniform(0.8, 1.2)
        model = models[len(kills) % len(models)]
        status = service.model(model)
        if status.state == "ready" and status.pid is not None:
            kills.append((time.monotonic(), model))
            os.kill(status.pid, signal.SIGKILL)
            log.say("killed", model, status.pid, "with", status.open_requests, "open requests")
    return kills


def _judge(outcomes: list[Outcome], watchman: Watchman, kills: list[tuple[float, str]], log: Log) -> list[str]:
    ends = Counter(outcome.end for outcome in outcomes)
    log.say(len(outcomes), "requests", dict(ends))
    log.say("kills", len(kills))
    broken = [f"no stream event and no reason: {name}" for name in watchman.unexplained]
    for outcome in outcomes:
        words = f"{outcome.request_id} {outcome.plan.dialect} {outcome.plan.mode} {outcome.plan.model}: {outcome.end}"
        if outcome.end in ("no end", "no last event") or outcome.end.startswith("broken connection"):
            broken.append(words)
        elif outcome.end not in ("good", "left") and outcome.status not in _REFUSED:
            died = [at for at, model in kills if model == outcome.plan.model and outcome.began <= at]
            if outcome.end not in _BROKEN_BY_KILLS or not died:
                broken.append(f"{words} ({outcome.status})")
        if outcome.longest_silence > SILENCE_SECONDS:
            broken.append(f"{words}: silent for {outcome.longest_silence:.1f} s")
    streams = sorted((o for o in outcomes if o.plan.mode == "stream"), key=lambda o: -o.longest_gap)
    for one in streams[:10]:
        reasons = watchman.reasons.get(one.request_id, [])
        plan = one.plan
        log.say(
            f"gap {one.longest_gap:.1f} s, silence {one.longest_silence:.1f} s: {plan.dialect} {plan.latency_class}"
            f" {plan.model} {plan.max_tokens} tokens, {one.end}; {' | '.join(reasons[-4:])}"
        )
    return broken


def _judge_books(
    service: LiveService, models: tuple[str, ...], kills: list[tuple[float, str]], files_before: int, log: Log
) -> list[str]:
    broken: list[str] = []
    with service.client() as client:
        left = client.get("/v1/requests").json()["data"]
        if left:
            broken.append(f"requests that nobody asks any more: {left}")
    for model in models:
        service.until_idle(model, seconds=20)
        # Idle workers are asked for their books every ten seconds.
        asked = time.monotonic()
        until("fresh books", lambda m=model, t=asked: _books_age(service, m, t), seconds=30)
        status = service.model(model)
        books = status.books
        assert books is not None
        log.say(model, status.state, "restarts", status.restarts, books)
        if (books.running_rows, books.waiting_requests) != (0, 0):
            broken.append(f"{model}: books say {books.running_rows} rows, {books.waiting_requests} waiting")
        if status.restarts != sum(name == model for _, name in kills):
            broken.append(f"{model}: {status.restarts} restarts")
    until("connections are closed", lambda: _open_files(service) <= files_before + 4, seconds=15)
    log.say(
        "gateway's files", _open_files(service), "memory", psutil.Process(service.pid).memory_info().rss >> 20, "MiB"
    )
    if "Traceback" in service.log:
        broken.append("a traceback in the log")
    return broken


def _books_age(service: LiveService, model: str, asked: float) -> bool:
    age = service.model(model).seconds_since_pong
    return age is not None and age < time.monotonic() - asked


def _open_files(service: LiveService) -> int:
    return psutil.Process(service.pid).num_fds()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kill-every", type=float, default=100.0, help="seconds between two kills, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--second-model", type=Path, help="a model folder; without it, another script model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = make_script_model(Path(folder) / "script")
        models = {
            "script-a": script,
            "real" if arguments.second_model else "script-b": arguments.second_model or script,
        }
        with live_service(models) as service:
            try:
                return (
                    1
                    if soak(
                        service,
                        models=tuple(models),
                        clients=arguments.clients,
                        seconds=arguments.seconds,
                        kill_every=arguments.kill_every,
                        seed=arguments.seed,
                    )
                    else 0
                )
            except (AssertionError, httpx.HTTPError):
                sys.stderr.write(service.log[-3000:])
                raise


if __name__ == "__main__":
    sys.exit(main())
