# pyright: basic
"""Milliseconds of requests that are answered at once, one after another over one raw socket."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Literal

from tests.bench.servers import BenchFailed

Answer = Literal["whole", "streamed"]
ANSWERS: tuple[Answer, ...] = ("whole", "streamed")
_TIMEOUT_SECONDS = 30.0


class Caller:
    """A connection that is kept, with as little of a client as there can be: its own time is in every figure."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def milliseconds(self, answer: Answer) -> float:
        """Until the last byte of the answer. Raises BenchFailed when it is no good one."""
        request = self._request(answer)
        started = time.perf_counter()
        self._socket.sendall(request)
        received = b""
        while not _is_whole(received):
            piece = self._socket.recv(2**16)
            if not piece:
                raise BenchFailed(f"the connection was closed after {received[:300]!r}")
            received += piece
        taken = time.perf_counter() - started
        if b" 200 " not in received.split(b"\r\n", 1)[0]:
            raise BenchFailed(received[:500].decode(errors="replace"))
        return 1000 * taken

    def close(self) -> None:
        self._socket.close()

    def _request(self, answer: Answer) -> bytes:
        asked = {"model": "bench", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        body = json.dumps({**asked, "stream": answer == "streamed"}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def bare_app() -> Generator[int]:
    """The port of an app that only answers (`bare_app.py`), in a process of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        command = [sys.executable, str(Path(__file__).parent / "bare_app.py"), str(listener.fileno())]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
        try:
            yield int(listener.getsockname()[1])
        finally:
            process.kill()
            process.wait()


def _is_whole(received: bytes) -> bool:
    head, ended, body = received.partition(b"\r\n\r\n")
    if not ended:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return body.endswith(b"0\r\n\r\n")
