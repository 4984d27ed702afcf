# pyright: basic
"""A worker that computes nothing: what remains is the gateway's own cost. Started by `gateway_bench.py`.

    python synthetic_worker.py TOKENS_PER_SECOND COUNTS_FILE

A request of one token is answered at once. Any other gets tokens at that rate until it is cancelled; each token's text
is the moment at which it was due, by the machine's monotonic clock, so whatever comes after that is late. How many were
sent is appended to COUNTS_FILE ten times a second, as `MOMENT COUNT`.
"""

import contextlib
import os
import sys
import time
from collections import deque
from pathlib import Path

import msgspec

from protocol.addresses import gateway_socket
from protocol.failures import Failure, FailureKind
from protocol.generation import (
    Cancel,
    Delta,
    Drain,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Ping,
    Pong,
    PrefixReuse,
    Queued,
    Ready,
    Timings,
    Usage,
    WorkerCommand,
    WorkerEvent,
)
from protocol.handshake import PROTOCOL_VERSION, Hello
from protocol.ids import RequestId
from protocol.launch import WorkerLaunch
from protocol.sockets import Peer, PeerGone

COUNT_SECONDS = 0.1


class Outgoing:
    """Events in order. When the gateway is behind and the socket's queue is full, they wait here and become late."""

    def __init__(self, peer: Peer[WorkerCommand, WorkerEvent]) -> None:
        self._peer = peer
        self._events: deque[WorkerEvent] = deque()
        self.tokens_sent = 0

    def send(self, event: WorkerEvent) -> None:
        self._events.append(event)
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(PeerGone):
            while self._events:
                self._peer.send(self._events[0])
                if isinstance(self._events.popleft(), Delta):
                    self.tokens_sent += 1


def main() -> None:
    period = 1.0 / float(sys.argv[1])
    launch = msgspec.json.decode(sys.stdin.readline(), type=WorkerLaunch)
    peer: Peer[WorkerCommand, WorkerEvent] = Peer(
        gateway_socket(Path(launch.runtime_directory)), f"w{launch.incarnation}".encode(), WorkerCommand
    )
    peer.send(
        Hello(protocol_version=PROTOCOL_VERSION, model=launch.model, incarnation=launch.incarnation, pid=os.getpid())
    )
    peer.send(
        Ready(
            context_tokens=32768,
            max_rows=launch.max_rows,
            weight_bytes=1,
            load_seconds=0.0,
            prefix_reuse=PrefixReuse(available=True),
            fingerprint="synthetic",
        )
    )
    due: dict[RequestId, float] = {}
    outgoing = Outgoing(peer)
    steps = 0
    counts = Path(sys.argv[2]).open("a", buffering=1, encoding="ascii")  # noqa: SIM115 - as long as the process
    counted = 0.0
    while True:
        now = time.monotonic()
        wait = max(0.0, min(due.values()) - now) if due else 1.0
        for command in peer.receive(wait):
            match command:
                case Generate(request_id=request_id, max_tokens=max_tokens):
                    outgoing.send(Queued(request_id=request_id, prompt_tokens=1))
                    if max_tokens == 1:
                        outgoing.send(Delta(request_id=request_id, text="hi", tokens=1))
                        outgoing.send(_finished(request_id))
                    else:
                        # Spread over the period, as rows of different arrival are.
                        due[request_id] = time.monotonic() + period * (len(due) % 97) / 97
                case Cancel(request_id=request_id):
                    due.pop(request_id, None)
                    failure = Failure(kind=FailureKind.CANCELLED, message="cancelled")
                    outgoing.send(Failed(request_id=request_id, failure=failure))
                case Ping(nonce=nonce):
                    steps += 1
                    outgoing.send(
                        Pong(
                            nonce=nonce,
                            steps=steps,
                            running_rows=len(due),
                            waiting_requests=0,
                            active_bytes=0,
                            hot_cache_bytes=0,
                            hot_cache_blocks=0,
                        )
                    )
                case Drain():
                    return
                case _:
                    pass
        outgoing.flush()
        now = time.monotonic()
        for request_id, at in due.items():
            if at <= now:
                outgoing.send(Delta(request_id=request_id, text=f" {at:.6f}", tokens=1))
                due[request_id] = at + period
        if now - counted > COUNT_SECONDS:
            counts.write(f"{time.monotonic():.6f} {outgoing.tokens_sent}\n")
            counted = now


def _finished(request_id: RequestId) -> Finished:
    return Finished(
        request_id=request_id,
        reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
        timings=Timings(queue_seconds=0, prefill_seconds=0, decode_seconds=0, prefill_slices=1),
    )


if __name__ == "__main__":
    main()
