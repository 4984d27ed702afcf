# pyright: basic
"""What the gateway itself costs: milliseconds per request and per token, and how many tokens it can pass on.

    python -m tests.bench.gateway_bench [--streams N…] [--seconds N] [--tokens-per-second N] [--picture]

The real `mlxd serve` with a synthetic worker (`tests/bench/synthetic_worker.py`): a process that computes nothing and
answers at once, or streams so many tokens a second to each request. What is measured is HTTP, parsing, admission, the
way to the worker and back, and rendering.

1. Requests one after another, each answered at once with one token, not streamed: the median is the gateway's cost, the
   same over a raw socket to a uvicorn app that only answers is what any gateway would cost.
2. N streams at the asked rate for some seconds: tokens that arrived against tokens that were sent, how late they were
   (from the worker's clock, the same machine's), and how much of one core the gateway took.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from msgspec import Struct

from tests.bench.measuring import print_head, print_table, save_bars, spread, versions
from tests.fakes.live_service import LiveService

PICTURE = Path(__file__).parent / "pictures" / "gateway.png"
REQUESTS = 400
WARM_UP = 50
_MOMENT = re.compile(rb" ([0-9]+\.[0-9]{6})")
WORKER = Path(__file__).parent / "synthetic_worker.py"


class Load(Struct, frozen=True, kw_only=True):
    """One number of streams."""

    streams: int
    sent_per_second: float
    arrived_per_second: float
    late_p50_ms: float
    late_p99_ms: float
    gateway_cores: float


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


async def request_milliseconds(client: httpx.AsyncClient, path: str) -> float:
    """The median of requests one after another."""
    body = {"model": "bench", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    taken: list[float] = []
    for _ in range(REQUESTS + WARM_UP):
        started = time.perf_counter()
        answer = await client.post(path, json=body)
        taken.append(1000 * (time.perf_counter() - started))
        answer.raise_for_status()
    return statistics.median(taken[WARM_UP:])


async def read_stream(port: int, seconds: float, lateness: list[float]) -> int:
    """One stream for so long. Of each piece only the last token's moment is read: this reader must not be the limit."""
    body = json.dumps(
        {
            "model": "bench",
            "messages": [{"role": "user", "content": "stream"}],
            "max_tokens": 1_000_000,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answered = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in answered.split(b"\r\n", 1)[0]:
        raise RuntimeError(answered.decode(errors="replace"))
    tokens = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        piece = await reader.read(2**16)
        if not piece:
            raise RuntimeError("a stream ended early")
        moments = _MOMENT.findall(piece)
        tokens += len(moments)
        if moments:
            lateness.append(1000 * (time.monotonic() - float(moments[-1])))
    writer.close()
    return tokens


async def one_load(service: LiveService, streams: int, seconds: float, rate: float) -> Load:
    """All streams at once, in this process: the reader has the other core."""
    lateness: list[float] = []
    process = psutil.Process(service.pid)
    port = int(service.base_url.rpartition(":")[2])
    before = process.cpu_times()
    started = time.monotonic()
    counts = await asyncio.gather(*(read_stream(port, seconds, lateness) for _ in range(streams)))
    taken = time.monotonic() - started
    after = process.cpu_times()
    ordered = sorted(lateness)
    return Load(
        streams=streams,
        sent_per_second=streams * rate,
        arrived_per_second=sum(counts) / taken,
        late_p50_ms=ordered[len(ordered) // 2],
        late_p99_ms=ordered[int(0.99 * (len(ordered) - 1))],
        gateway_cores=(after.user + after.system - before.user - before.system) / taken,
    )


async def measure(
    service: LiveService, streams: list[int], seconds: float, rate: float
) -> tuple[list[float], list[Load]]:
    whole: list[float] = []
    async with httpx.AsyncClient(base_url=service.base_url, timeout=30.0, trust_env=False) as client:
        for _ in range(3):
            whole.append(await request_milliseconds(client, "/v1/chat/completions"))
    health: list[float] = []
    async with httpx.AsyncClient(base_url=service.base_url, timeout=30.0, trust_env=False) as client:
        taken: list[float] = []
        for _ in range(REQUESTS):
            started = time.perf_counter()
            (await client.get("/health")).raise_for_status()
            taken.append(1000 * (time.perf_counter() - started))
        health.append(statistics.median(taken))
    print(f"a request that is answered at once: {spread(whole).text()} ms; GET /health: {health[0]:.2f} ms", flush=True)
    return [await one_load(service, count, seconds, rate) for count in streams]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 10, 100, 500])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--tokens-per-second", type=float, default=20.0)
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} under pictures/")
    arguments = parser.parse_args()
    print_head("the gateway alone, with a worker that computes nothing")
    with tempfile.TemporaryDirectory(prefix="mlxdb") as directory:
        command = json.dumps([sys.executable, str(WORKER), str(arguments.tokens_per_second)])
        settings = (
            f"worker_command = {command}\n[limits]\nmax_queued_requests = 1000\nmax_queued_standard = 1000\n"
            "[worker]\nmax_rows = 256\n"
        )
        service = LiveService({"bench": model_folder(Path(directory))}, settings)
        try:
            service.start()
            rate = arguments.tokens_per_second
            loads = asyncio.run(measure(service, arguments.streams, arguments.seconds, rate))
        finally:
            service.end()
    columns = ["streams", "sent, tok/s", "arrived", "late p50, ms", "late p99, ms", "gateway, cores", "µs/token"]
    rows = [
        [
            str(load.streams),
            f"{load.sent_per_second:.0f}",
            f"{load.arrived_per_second:.0f}",
            f"{load.late_p50_ms:.1f}",
            f"{load.late_p99_ms:.1f}",
            f"{load.gateway_cores:.2f}",
            f"{1e6 * load.gateway_cores / max(1.0, load.arrived_per_second):.0f}",
        ]
        for load in loads
    ]
    print_table(f"streams of {arguments.tokens_per_second:.0f} tokens per second each", columns, rows)
    if arguments.picture:
        series = {
            "sent": [load.sent_per_second for load in loads],
            "arrived": [load.arrived_per_second for load in loads],
        }
        groups = [f"{load.streams} streams" for load in loads]
        save_bars(PICTURE, "Tokens through the gateway", "tokens per second", groups, series, versions())


if __name__ == "__main__":
    main()
