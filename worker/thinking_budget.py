"""How many tokens a row may think: when they are drawn, the end of its reasoning is forced. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from worker.row_answer import RowAnswer
from worker.sequence import Matcher

_LONGEST_CHARACTER_TOKENS = 4
"""A character of UTF-8 has four bytes at most, each of which may be a token."""


class TokenTexts(Protocol):
    """A row's tokens as text: what `worker.detokenizer` makes."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class ThinkingBudget:
    """A `Matcher` around another, or around none.

    At most `most_tokens` of reasoning are drawn as the model likes, as `answer` counts them, but for the few that make
    a half character whole. Then the tokens of `closing` come one after the other, on top of them, and what follows is
    free again, or `inner`'s. A block of reasoning that the model opens after that is closed at once. Where one token
    ends a call and opens that block, the next one is drawn by then and stands before its end.

    `answer` and `texts` are this budget's own: it reads the row's tokens as the client's answer is read.
    """

    def __init__(
        self,
        *,
        most_tokens: int,
        closing: Sequence[int],
        answer: RowAnswer,
        texts: TokenTexts,
        inner: Matcher | None = None,
    ) -> None:
        self._most_tokens = most_tokens
        self._closing = tuple(closing)
        self._answer = answer
        self._texts = texts
        self._inner = inner
        self._forced: deque[int] = deque()
        self._textless_tokens = 0
        self._force_if_spent()

    @property
    def binds(self) -> bool:
        """One token before it must force, since the next step is drawn before that token is read."""
        if self._forced or (self._inner is not None and self._inner.binds):
            return True
        is_spent_soon = self._answer.reasoning_tokens + 1 >= self._most_tokens
        return is_spent_soon and self._answer.may_think

    def consume(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.consume(token_id)
        text = self._texts.push(token_id)
        self._textless_tokens = 0 if text else self._textless_tokens + 1
        self._answer.drew()
        self._answer.push(text)
        if self._forced and token_id == self._forced[0]:
            self._forced.popleft()
        else:  # drawn before anything was forced
            self._forced.clear()
        self._force_if_spent()

    def next_mask(self) -> bytes | None:
        if self._forced:
            token_id = self._forced[0]
            return bytes(token_id // 8) + bytes([1 << token_id % 8])
        return None if self._inner is None else self._inner.next_mask()

    def _force_if_spent(self) -> None:
        is_spent = self._answer.is_thinking and self._answer.reasoning_tokens >= self._most_tokens
        is_mid_character = 0 < self._textless_tokens < _LONGEST_CHARACTER_TOKENS
        if is_spent and not self._forced and not is_mid_character:
            self._forced.extend(self._closing)


def closing_tokens(
    text: str, encode: Callable[[str], Sequence[int]], texts: TokenTexts, vocabulary_size: int
) -> tuple[int, ...]:
    """The tokens of the text that ends reasoning. Empty if this tokenizer cannot write it."""
    token_ids = tuple(encode(text))
    written = "".join(texts.push(token_id) for token_id in token_ids) + texts.flush()
    is_faithful = written.strip() == text.strip()
    return token_ids if is_faithful and all(token_id < vocabulary_size for token_id in token_ids) else ()
