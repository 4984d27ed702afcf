"""The text thread of a worker that embeds or reranks: it tokenizes beside the step loop."""

from collections.abc import Callable
from typing import assert_never

from protocol.failures import Failure, FailureKind
from protocol.generation import (
    Check,
    Detokenize,
    Detokenized,
    Embed,
    Failed,
    Generate,
    Queued,
    Rerank,
    Tokenize,
    Tokenized,
    Warm,
    Work,
)
from protocol.model_kind import ModelKind, capabilities_of
from worker.embedding.inputs import Inputs
from worker.embedding.rows import PreparedRows
from worker.prompts import PromptRefused
from worker.text_thread import TextThread
from worker.tokenizing import TokenQuestions


class EmbeddingTextPlane:
    """Turns each `Embed` and `Rerank` into `PreparedRows` for the loop and a `Queued`, or into a `Failed`."""

    def __init__(
        self,
        *,
        questions: TokenQuestions,
        kind: ModelKind,
        deliver: Callable[[PreparedRows], None],
        send: Callable[[Queued | Tokenized | Detokenized | Failed], None],
        clock: Callable[[], float],
    ) -> None:
        self._questions = questions
        self._kind: ModelKind = kind
        self._deliver = deliver
        self._send = send
        self._inputs: Inputs | None = None
        self._thread: TextThread[Work] = TextThread(self._answer, send=send, clock=clock)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Work) -> None:
        self._thread.submit(work)

    def weights_loaded(self, inputs: Inputs) -> None:
        """From now on rows can be prepared."""
        self._inputs = inputs

    def _answer(self, work: Work, arrived: float) -> None:
        match work:
            case Tokenize() | Detokenize():
                self._send(self._questions.answer(work))
            case Embed() | Rerank():
                prepared = self._prepared(work, arrived)
                self._send(Queued(request_id=work.request_id, prompt_tokens=prepared.prompt_tokens))
                self._deliver(prepared)
            case Generate() | Warm() | Check():
                message = f"this model cannot generate text; it can do {', '.join(capabilities_of(self._kind))}"
                raise PromptRefused(Failure(kind=FailureKind.UNSUPPORTED, message=message, param="model"))
            case _:
                assert_never(work)

    def _prepared(self, work: Embed | Rerank, arrived: float) -> PreparedRows:
        if self._inputs is None:
            raise PromptRefused(
                Failure(kind=FailureKind.MODEL_UNAVAILABLE, message="the model is not loaded yet; send it again")
            )
        return self._inputs.prepare(work, arrived)
