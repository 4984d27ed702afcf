"""The text thread: renders and tokenizes prompts beside the step loop, which never waits for it."""

import queue
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import structlog

from protocol.failures import Failure, FailureKind
from protocol.generation import Failed, Generate, Queued, Warm
from protocol.sampling import Sampling
from worker import hashing
from worker.prompts import PromptRefused, PromptTokenizer, boundaries, prompt_tokens, resolve_max_tokens
from worker.sequence import Prepared

log = structlog.get_logger()


class TextPlane:
    """Turns each `Generate` into a `Prepared` for the loop and a `Queued` for the gateway, or into a `Failed`."""

    def __init__(
        self,
        *,
        tokenizer: PromptTokenizer,
        vocabulary_size: int,
        context_tokens: int,
        fingerprint: str,
        deliver: Callable[[Prepared], None],
        send: Callable[[Queued | Failed], None],
        clock: Callable[[], float],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._context_tokens = context_tokens
        self._fingerprint = fingerprint
        self._deliver = deliver
        self._send = send
        self._clock = clock
        self._requests: queue.SimpleQueue[Generate | Warm] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="text-plane", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Generate | Warm) -> None:
        self._requests.put(request)

    def _run(self) -> None:
        while True:
            request = self._requests.get()
            arrived = self._clock()
            try:
                prepared = self.prepare(request, arrived)
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
            else:
                self._send(
                    Queued(
                        request_id=request.request_id,
                        prompt_tokens=len(prepared.token_ids),
                        message_starts=prepared.message_starts,
                        grains=prepared.grains,
                    )
                )
                self._deliver(prepared)

    def prepare(self, asked: Generate | Warm, arrived: float) -> Prepared:
        """Pure but for the tokenizer. Raises PromptRefused."""
        warm = asked if isinstance(asked, Warm) else None
        if isinstance(asked, Warm):
            sampling = Sampling(temperature=0.0)
            request = Generate(
                request_id=asked.request_id, prompt=asked.prompt, sampling=sampling, max_tokens=1, cache=asked.cache
            )
        else:
            request = asked
        out_of_range = [token for token in request.sampling.logit_bias if not 0 <= token < self._vocabulary_size]
        if out_of_range:
            raise PromptRefused(
                Failure(
                    kind=FailureKind.INVALID_REQUEST,
                    message=f"token id {out_of_range[0]} is outside the vocabulary of {self._vocabulary_size}",
                    param="logit_bias",
                )
            )
        prompt = prompt_tokens(self._tokenizer, request.prompt, self._vocabulary_size)
        token_ids = prompt.token_ids
        max_tokens = resolve_max_tokens(request, len(token_ids), self._context_tokens)
        root = hashing.root(self._fingerprint, request.cache.scope)
        return Prepared(
            request=request,
            token_ids=tuple(token_ids),
            max_tokens=max_tokens,
            root=root,
            grains=hashing.grains(root.secret, root.digest, token_ids),
            arrived=arrived,
            message_starts=prompt.message_starts,
            boundaries=boundaries(prompt, request.prompt),
            warm=warm,
        )
