"""The text thread: renders and tokenizes prompts beside the step loop, which never waits for it."""

from collections.abc import Callable
from typing import NamedTuple

from protocol.failures import Failure, FailureKind
from protocol.generation import (
    ChatPrompt,
    Check,
    Checked,
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
from protocol.sampling import Sampling
from worker import hashing
from worker.answers.plan import AnswerFormats, AnswerPlan, plan
from worker.answers.thinking import end_of_thinking
from worker.constrained import Compiler, matcher_for
from worker.detokenizer import Detokenizer
from worker.prompts import PromptRefused, PromptTokenizer, boundaries, prompt_tokens, resolve_max_tokens
from worker.row_answer import RowAnswer
from worker.sequence import Matcher, Prepared
from worker.text_thread import TextThread
from worker.thinking_budget import ThinkingBudget, closing_tokens
from worker.tokenizing import TokenQuestions


class LoadedWeights(NamedTuple):
    """What a prompt's preparation must know of the weights. Without a `compiler` no answer can be constrained.

    A row of more than `row_tokens` never fits into memory; None: there is no such bound.
    """

    vocabulary_size: int
    fingerprint: str
    compiler: Compiler | None = None
    row_tokens: int | None = None


class TextPlane:
    """Turns each `Generate` into a `Prepared` for the loop and a `Queued` for the gateway, or into a `Failed`.

    `Tokenize`, `Detokenize` and `Check` it answers from its start; the rest it can do once it knows the weights.
    """

    def __init__(
        self,
        *,
        tokenizer: PromptTokenizer,
        questions: TokenQuestions,
        context_tokens: int,
        deliver: Callable[[Prepared], None],
        send: Callable[[Queued | Tokenized | Detokenized | Checked | Failed], None],
        clock: Callable[[], float],
        formats: AnswerFormats | None = None,
        make_detokenizer: Callable[[], Detokenizer] | None = None,
    ) -> None:
        """`formats` are those in which this model writes reasoning and calls; without, it is taken to know neither.
        Without `make_detokenizer` no reasoning is held to a budget."""
        self._make_detokenizer = make_detokenizer
        self._formats = formats or AnswerFormats()
        self._tokenizer = tokenizer
        self._questions = questions
        self._context_tokens = context_tokens
        self._deliver = deliver
        self._send = send
        self._weights: LoadedWeights | None = None
        self._thread: TextThread[Work] = TextThread(self._answer, send=send, clock=clock)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Work) -> None:
        self._thread.submit(request)

    def weights_loaded(self, weights: LoadedWeights) -> None:
        """Say what was loaded, before any `Generate` or `Warm` is submitted."""
        self._weights = weights

    def _answer(self, request: Work, arrived: float) -> None:
        if isinstance(request, Tokenize | Detokenize):
            self._send(self._questions.answer(request))
            return
        if isinstance(request, Check):
            count = self._checked_tokens(request.generate, arrived)
            self._send(Checked(request_id=request.request_id, prompt_tokens=count))
            return
        if isinstance(request, Embed | Rerank):
            raise PromptRefused(
                Failure(
                    kind=FailureKind.UNSUPPORTED,
                    message="this model generates text; it cannot embed or rerank",
                    param="model",
                )
            )
        prepared = self.prepare(request, arrived)
        self._send(
            Queued(
                request_id=request.request_id,
                prompt_tokens=len(prepared.token_ids),
                message_starts=prepared.message_starts,
                grains=prepared.grains,
            )
        )
        self._deliver(prepared)

    def _checked_tokens(self, generate: Generate, arrived: float) -> int:
        """How many tokens the prompt of an acceptable request has. Raises PromptRefused."""
        if self._weights is not None:
            return len(self.prepare(generate, arrived).token_ids)
        size = self._questions.vocabulary_size
        prompt = prompt_tokens(self._tokenizer, generate.prompt, size, syntax=self._formats.syntax)
        resolve_max_tokens(generate, len(prompt.token_ids), self._context_tokens)
        return len(prompt.token_ids)

    def prepare(self, asked: Generate | Warm, arrived: float) -> Prepared:
        """Pure but for the tokenizer. Raises PromptRefused."""
        if self._weights is None:
            raise PromptRefused(
                Failure(kind=FailureKind.MODEL_UNAVAILABLE, message="the model is not loaded yet; send it again")
            )
        vocabulary_size, fingerprint, compiler, row_tokens = self._weights
        warm = asked if isinstance(asked, Warm) else None
        if isinstance(asked, Warm):
            sampling = Sampling(temperature=0.0)
            request = Generate(
                request_id=asked.request_id, prompt=asked.prompt, sampling=sampling, max_tokens=1, cache=asked.cache
            )
        else:
            request = asked
        out_of_range = [token for token in request.sampling.logit_bias if not 0 <= token < vocabulary_size]
        if out_of_range:
            raise PromptRefused(
                Failure(
                    kind=FailureKind.INVALID_REQUEST,
                    message=f"token id {out_of_range[0]} is outside the vocabulary of {vocabulary_size}",
                    param="logit_bias",
                )
            )
        splits = request.reasoning == "split" and self._formats.thinking is not None
        prompt = prompt_tokens(
            self._tokenizer,
            request.prompt,
            vocabulary_size,
            tail="wanted" if splits else "unwanted",
            syntax=self._formats.syntax,
        )
        token_ids = prompt.token_ids
        max_tokens = resolve_max_tokens(request, len(token_ids), self._context_tokens, row_tokens)
        answer = plan(
            self._formats,
            tools=request.prompt.tools if isinstance(request.prompt, ChatPrompt) else (),
            tool_use=request.tool_use,
            told_by=prompt.told_by,
            reasoning=request.reasoning,
            tail=prompt.tail,
        )
        matcher = matcher_for(request, answer, compiler)
        budget_tokens = request.reasoning_budget_tokens
        is_bounded = budget_tokens is not None and budget_tokens < max_tokens
        held = self._budget(request, answer, matcher, vocabulary_size) if is_bounded else None
        root = hashing.root(fingerprint, request.cache.scope)
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
            answer=answer,
            matcher=held or matcher,
            warnings=("thinking_budget_not_held",) if is_bounded and held is None else (),
        )

    def _budget(
        self, request: Generate, answer: AnswerPlan, matcher: Matcher | None, vocabulary_size: int
    ) -> ThinkingBudget | None:
        """What holds the row's reasoning to its budget, and its answer to `matcher`. None: nothing can."""
        most_tokens, parser = request.reasoning_budget_tokens, answer.parser()
        if most_tokens is None or answer.thinking is None or parser is None or self._make_detokenizer is None:
            return None
        closing = closing_tokens(
            end_of_thinking(answer.thinking, "answer" if answer.form is None and matcher is None else "anything"),
            lambda text: self._tokenizer.encode(text, add_special_tokens=False),
            self._make_detokenizer(),
            vocabulary_size,
        )
        if not closing:
            return None
        return ThinkingBudget(
            most_tokens=most_tokens,
            closing=closing,
            answer=RowAnswer(request.request_id, parser, lambda: ""),
            texts=self._make_detokenizer(),
            inner=matcher,
        )
