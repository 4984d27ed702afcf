# pyright: basic
"""A worker that computes nothing: what remains is the gateway's own cost. Started by `gateway_bench.py`.

A request of one token is answered at once. Any other gets tokens at the rate of the first argument until it is
cancelled; each token's text is the moment at which it was sent, by the machine's monotonic clock.
"""

import os
import sys
import time
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
from protocol.sockets import Peer


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
    steps = 0
    while True:
        now = time.monotonic()
        wait = max(0.0, min(due.values()) - now) if due else 1.0
        for command in peer.receive(wait):
            match command:
                case Generate(request_id=request_id, max_tokens=max_tokens):
                    peer.send(Queued(request_id=request_id, prompt_tokens=1))
                    if max_tokens == 1:
                        peer.send(Delta(request_id=request_id, text="hi", tokens=1))
                        peer.send(_finished(request_id))
                    else:
                        # Spread over the period, as rows of different arrival are.
                        due[request_id] = time.monotonic() + period * (len(due) % 97) / 97
                case Cancel(request_id=request_id):
                    due.pop(request_id, None)
                    failure = Failure(kind=FailureKind.CANCELLED, message="cancelled")
                    peer.send(Failed(request_id=request_id, failure=failure))
                case Ping(nonce=nonce):
                    steps += 1
                    peer.send(
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
        now = time.monotonic()
        for request_id, at in due.items():
            if at <= now:
                peer.send(Delta(request_id=request_id, text=f" {time.monotonic():.6f}", tokens=1))
                due[request_id] = at + period


def _finished(request_id: RequestId) -> Finished:
    return Finished(
        request_id=request_id,
        reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
        timings=Timings(queue_seconds=0, prefill_seconds=0, decode_seconds=0, prefill_slices=1),
    )


if __name__ == "__main__":
    main()
