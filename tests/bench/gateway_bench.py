# pyright: basic
"""What the gateway itself costs: milliseconds per request and per token, and how many tokens it can pass on.

    python -m tests.bench.gateway_bench [--repeats N] [--streams N…] [--seconds N] [--tokens-per-second N] [--picture]

The real `mlxd serve` with a synthetic worker (`synthetic_worker.py`): a process that computes nothing and answers at
once, or streams so many tokens a second to each request. What is measured is HTTP, parsing, admission, the way to the
worker and back, and rendering.

1. Requests one after another over one raw socket, each answered at once with one token, whole or streamed, until its
   last byte. The same to a uvicorn app that only answers (`bare_app.py`) is what any gateway would cost; the rest is
   mlxd's. Both take turns.
2. N streams at the asked rate. For some seconds, once all of them flow: how many tokens the worker sent meanwhile, by
   its own count; how many of those due in that time arrived, at the latest a second after it; how late each one was,
   those that came together included; whether they are later at the end than at the beginning; how much of one core the
   gateway took.
   The worker and this reader share what the machine has besides that core, and their own lateness is in the figures.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from msgspec import Struct

from tests.bench.gateway_picture import PICTURE, save_gateway
from tests.bench.measuring import (
    Bound,
    Spread,
    percentile,
    print_bounds,
    print_head,
    print_table,
    spread,
    versions,
)
from tests.bench.request_cost import ANSWERS, Answer, Caller, bare_app
from tests.bench.servers import BenchFailed
from tests.fakes.live_service import LiveService, until

REQUESTS = 200
WARM_UP = 50
SETTLE_SECONDS = 2.0
FLOW_SECONDS = 60.0
GRACE_SECONDS = 1.0
GROWN_MS = 20
QUARTERS = 4
MLXD, BARE = "mlxd", "an app that only answers"
WORKER = Path(__file__).parent / "synthetic_worker.py"
_MOMENT = re.compile(rb"[0-9]+\.[0-9]{6}")


class Load(Struct, frozen=True, kw_only=True):
    """One number of streams. `late_ms` in the order of arrival, one per token."""

    streams: int
    asked_per_second: float
    sent_per_second: float
    arrived_per_second: float
    late_ms: tuple[float, ...]
    gateway_cores: float

    @property
    def grown_ms(self) -> float:
        """How much later tokens are in the last quarter than in the first."""
        quarter = len(self.late_ms) // QUARTERS
        return statistics.median(self.late_ms[-quarter:]) - statistics.median(self.late_ms[:quarter])


class Reading:
    """How late each token was of all that were due from `began` to `ended`."""

    def __init__(self, streams: int) -> None:
        self.began = self.ended = float("inf")
        self.all_flow = asyncio.Event()
        self._silent = streams
        self.late_ms: list[float] = []

    def flows(self) -> None:
        """Another stream has brought its first token."""
        self._silent -= 1
        if not self._silent:
            self.all_flow.set()

    def take(self, due: Sequence[bytes]) -> None:
        now = time.monotonic()
        moments = [float(moment) for moment in due]
        self.late_ms += [1000 * (now - moment) for moment in moments if self.began <= moment < self.ended]


def model_folder(directory: Path) -> Path:
    """What the catalog takes for a model; the synthetic worker reads none of it."""
    folder = directory / "synthetic"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 32768}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    return folder


def request_costs(port: int, repeats: int) -> dict[str, dict[Answer, list[float]]]:
    """The median of each repeat, by who answered and how."""
    costs: dict[str, dict[Answer, list[float]]] = {name: {answer: [] for answer in ANSWERS} for name in (MLXD, BARE)}
    with bare_app() as bare_port:
        callers = {MLXD: Caller(port), BARE: Caller(bare_port)}
        for repeat in range(repeats):
            for answer in ANSWERS:
                for name, caller in callers.items():
                    for _ in range(0 if repeat else WARM_UP):
                        caller.milliseconds(answer)
                    taken = [caller.milliseconds(answer) for _ in range(REQUESTS)]
                    costs[name][answer].append(statistics.median(taken))
        for caller in callers.values():
            caller.close()
    return costs


async def read_stream(port: int, reading: Reading) -> None:
    """One stream to the end of the reading. Tokens are picked out of the bytes: this reader must not be the limit."""
    asked = {"model": "bench", "messages": [{"role": "user", "content": "stream"}], "max_tokens": 1_000_000}
    body = json.dumps({**asked, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answered = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in answered.split(b"\r\n", 1)[0]:
        raise BenchFailed(answered.decode(errors="replace"))
    rest = last = b""
    flows = False
    while time.monotonic() < reading.ended + GRACE_SECONDS:
        piece = await reader.read(2**16)
        if not piece:
            raise BenchFailed(f"a stream ended early; its last bytes: {last[-400:]!r}")
        last = piece
        whole, newline, tail = (rest + piece).rpartition(b"\n")  # a number may be cut in two
        rest = tail
        due = _MOMENT.findall(whole + newline)
        if due and not flows:
            flows = True
            reading.flows()
        reading.take(due)
    writer.close()


async def one_load(service: LiveService, counts: Path, streams: int, seconds: float, rate: float) -> Load:
    """All streams at once, in this process: the reader has the other core."""
    reading = Reading(streams)
    process = psutil.Process(service.pid)
    port = int(service.base_url.rpartition(":")[2])
    readers = [asyncio.create_task(read_stream(port, reading)) for _ in range(streams)]
    async with asyncio.timeout(FLOW_SECONDS):
        await reading.all_flow.wait()
    await asyncio.sleep(SETTLE_SECONDS)  # what piled up while they began is gone
    before = process.cpu_times()
    reading.began = time.monotonic()
    reading.ended = reading.began + seconds
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    await asyncio.gather(*readers)
    if len(reading.late_ms) < QUARTERS:
        raise BenchFailed(f"{streams} streams: of what was due in {seconds} s nothing arrived, and none a second later")
    return Load(
        streams=streams,
        asked_per_second=streams * rate,
        sent_per_second=(_sent_by(counts, reading.ended) - _sent_by(counts, reading.began)) / seconds,
        arrived_per_second=len(reading.late_ms) / seconds,
        late_ms=tuple(reading.late_ms),
        gateway_cores=(after.user + after.system - before.user - before.system) / seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="of the requests; each number of streams runs once")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 10, 100, 500])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens-per-second", type=float, default=20.0)
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} under pictures/")
    arguments = parser.parse_args()
    rate: float = arguments.tokens_per_second
    print_head("the gateway alone, with a worker that computes nothing")
    with tempfile.TemporaryDirectory(prefix="mlxdb") as directory:
        counts = Path(directory) / "counts"
        command = json.dumps([sys.executable, str(WORKER), str(rate), str(counts)])
        settings = (
            f"worker_command = {command}\n[limits]\nmax_queued_requests = 1000\nmax_queued_standard = 1000\n"
            "[worker]\nmax_rows = 256\n"
        )
        service = LiveService({"bench": model_folder(Path(directory))}, settings)
        try:
            service.start()
            costs = request_costs(int(service.base_url.rpartition(":")[2]), arguments.repeats)
            loads: list[Load] = []
            for streams in arguments.streams:
                loads.append(asyncio.run(one_load(service, counts, streams, arguments.seconds, rate)))
                until("the worker has nothing to do", lambda: service.books("bench").running_rows == 0, seconds=30.0)
        finally:
            service.end()
    print_costs(costs)
    print_loads(loads, rate)
    print_bounds(bounds_of(costs, loads))
    if arguments.picture:
        late = {f"{load.streams} of {rate:.0f} tok/s": load.late_ms for load in loads}
        bars = {name: {answer: spread(costs[name][answer]).median for answer in ANSWERS} for name in costs}
        save_gateway(bars, late, versions())


def print_costs(costs: Mapping[str, Mapping[Answer, Sequence[float]]]) -> None:
    rows = [[name, *(spread(by[answer]).text() for answer in ANSWERS)] for name, by in costs.items()]
    rows.append(["added by mlxd", *(_added(costs, answer).text() for answer in ANSWERS)])
    print_table("milliseconds of a request that is answered at once, median (least-most)", ["", *ANSWERS], rows)


def print_loads(loads: Sequence[Load], rate: float) -> None:
    late = ["late p50, ms", "p99", "most", "grown"]
    columns = ["streams", "asked, tok/s", "sent", "arrived", *late, "cores", "µs/token"]
    rows = [
        [
            str(load.streams),
            f"{load.asked_per_second:.0f}",
            f"{load.sent_per_second:.0f}",
            f"{load.arrived_per_second:.0f}",
            *(f"{percentile(load.late_ms, percent):.1f}" for percent in (50, 99, 100)),
            f"{load.grown_ms:+.1f}",
            f"{load.gateway_cores:.2f}",
            f"{1e6 * load.gateway_cores / max(1.0, load.arrived_per_second):.0f}",
        ]
        for load in loads
    ]
    print_table(f"streams of {rate:.0f} tokens per second each; every token counts", columns, rows)


def bounds_of(costs: Mapping[str, Mapping[Answer, Sequence[float]]], loads: Sequence[Load]) -> list[Bound]:
    """What is wanted: the whole request under 3 ms, and nothing falling behind on one core."""
    bounds = [
        Bound(what=f"a {answer} request, client and all, ms", got=spread(costs[MLXD][answer]), side="at most", wanted=3)
        for answer in ANSWERS
    ]
    for load in loads:
        what = f"{load.streams} streams:"
        arrived = load.arrived_per_second / load.asked_per_second
        bounds += [
            Bound(what=f"{what} arrived / asked", got=spread([arrived]), side="at least", wanted=0.99, digits=3),
            Bound(what=f"{what} later at the end, ms", got=spread([load.grown_ms]), side="at most", wanted=GROWN_MS),
            Bound(what=f"{what} cores of the gateway", got=spread([load.gateway_cores]), side="at most", wanted=1),
        ]
    return bounds


def _added(costs: Mapping[str, Mapping[Answer, Sequence[float]]], answer: Answer) -> Spread:
    pairs = zip(costs[MLXD][answer], costs[BARE][answer], strict=True)
    return spread([ours - bare for ours, bare in pairs])


def _sent_by(counts: Path, moment: float) -> float:
    """The worker's own count then, between its two nearest notes."""
    earlier_at, earlier = 0.0, 0
    for line in counts.read_text(encoding="ascii").splitlines():
        at, count = float(line.split()[0]), int(line.split()[1])
        if at >= moment:
            share = (moment - earlier_at) / (at - earlier_at)
            return earlier + share * (count - earlier)
        earlier_at, earlier = at, count
    return float(earlier)


if __name__ == "__main__":
    main()
