"""A cachestore with answers of the test's choosing, over the real socket."""

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol.addresses import cachestore_socket
from protocol.blocks import BlockReply, BlockRequest
from protocol.sockets import Listener, PeerGone

Answer = BlockReply | dict[str, int] | None

_DEADLINE_SECONDS = 20.0


class FakeStore:
    """A real socket, with answers of the test's choosing: None is silence, a dict is no message at all."""

    def __init__(self, directory: Path, answer: Callable[[BlockRequest], Answer]) -> None:
        self.answer = answer
        self.requests: queue.SimpleQueue[BlockRequest] = queue.SimpleQueue()
        self._stop = threading.Event()
        path = cachestore_socket(directory)
        self._listener: Listener[BlockRequest, Any] = Listener(path, BlockRequest)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if (received := self._listener.receive(0.02)) is not None:
                peer, request = received
                self.requests.put(request)  # pyright: ignore[reportArgumentType]
                answer = self.answer(request)  # pyright: ignore[reportArgumentType]
                if answer is not None:
                    with contextlib.suppress(PeerGone):  # a worker may stop before its Release is answered
                        self._listener.send(peer, answer)

    def next(self, kind: type[Any]) -> Any:
        """The next request of this kind."""
        while not isinstance(request := self.requests.get(timeout=_DEADLINE_SECONDS), kind):
            pass
        return request

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()
