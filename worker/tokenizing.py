"""Questions that only the tokenizer is needed for: which tokens is this, which text is that."""

from typing import Any, Protocol

from protocol.failures import Failure, FailureKind
from protocol.generation import ChatPrompt, Detokenize, Detokenized, TextPrompt, Tokenize, Tokenized, TokenPrompt
from worker.answers.call_syntax import CallSyntax
from worker.detokenizer import whole_text_decoder
from worker.prompts import PromptRefused, PromptTokenizer, prompt_tokens


class Vocabulary(Protocol):
    """What a Hugging Face tokenizer says of its tokens."""

    def get_vocab(self) -> dict[str, int]: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]: ...


class TokenQuestions:
    """Answers them by one tokenizer. Belongs to one thread. `tokenizer` is mlx-lm's, which wraps `vocabulary`.

    `syntax` is how the model writes a call, where that is known (see `render_chat`).
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        vocabulary: Vocabulary,
        *,
        context_tokens: int,
        syntax: CallSyntax | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._syntax = syntax
        self._vocabulary = vocabulary
        self._decode = whole_text_decoder(vocabulary)
        self._context_tokens = context_tokens
        self._size = 1 + max(vocabulary.get_vocab().values(), default=-1)

    @property
    def vocabulary_size(self) -> int:
        """One more than the tokenizer's last id."""
        return self._size

    def answer(self, asked: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """Raises PromptRefused. A prompt that is too long for the model has tokens all the same."""
        if isinstance(asked, Detokenize):
            self._check(asked.token_ids)
            return Detokenized(request_id=asked.request_id, text=self._decode(list(asked.token_ids)))
        token_ids = self._token_ids(asked)
        pieces: list[Any] = self._vocabulary.convert_ids_to_tokens(token_ids)
        return Tokenized(
            request_id=asked.request_id,
            token_ids=tuple(token_ids),
            tokens=tuple(piece if isinstance(piece, str) else "" for piece in pieces),
            context_tokens=self._context_tokens,
        )

    def _token_ids(self, asked: Tokenize) -> list[int]:
        match asked.prompt:
            case ChatPrompt():
                return prompt_tokens(self._tokenizer, asked.prompt, self._size, syntax=self._syntax).token_ids
            case TextPrompt(text=text):
                return self._tokenizer.encode(text, add_special_tokens=asked.special_tokens == "add")
            case TokenPrompt(token_ids=token_ids):
                self._check(token_ids)
                return list(token_ids)

    def _check(self, token_ids: tuple[int, ...]) -> None:
        bad = next((index for index, token in enumerate(token_ids) if not 0 <= token < self._size), None)
        if bad is not None:
            message = f"token id {token_ids[bad]} is outside the tokenizer's vocabulary of {self._size}"
            raise PromptRefused(Failure(kind=FailureKind.INVALID_REQUEST, message=message, param=f"tokens[{bad}]"))
