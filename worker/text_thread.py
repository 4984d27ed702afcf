"""A thread for work on text, beside the thread that runs the model: neither waits for the other."""

import queue
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import structlog

from protocol.failures import Failure, FailureKind
from protocol.generation import Failed
from protocol.ids import RequestId
from worker.prompts import PromptRefused

log = structlog.get_logger()


class _HasRequestId(Protocol):
    @property
    def request_id(self) -> RequestId: ...


Request = TypeVar("Request", bound=_HasRequestId)


class TextThread(Generic[Request]):
    """Hands one request after the other to `answer(request, arrived)`. What it raises is the Failed of that request."""

    def __init__(
        self,
        answer: Callable[[Request, float], None],
        *,
        send: Callable[[Failed], None],
        clock: Callable[[], float],
    ) -> None:
        self._answer = answer
        self._send = send
        self._clock = clock
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="text-plane", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Safe from any thread."""
        self._requests.put(request)

    def _run(self) -> None:
        while True:
            request = self._requests.get()
            try:
                self._answer(request, self._clock())
            except PromptRefused as refused:
                self._send(Failed(request_id=request.request_id, failure=refused.failure))
            except Exception as why:  # noqa: BLE001 - answered and logged, but without its message: that may quote the prompt
                where = traceback.extract_tb(why.__traceback__)[-1]
                raised_at = f"{Path(where.filename).name}:{where.lineno}"
                log.error("prompt_failed", request_id=request.request_id, error=type(why).__name__, raised_at=raised_at)
                failure = Failure(
                    kind=FailureKind.INTERNAL, message=f"preparing the prompt raised {type(why).__name__}"
                )
                self._send(Failed(request_id=request.request_id, failure=failure))
