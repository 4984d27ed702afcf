"""One row's text → the events of its answer: each of its tokens is counted in exactly one of them. Pure."""

from collections.abc import Callable
from typing import assert_never

from protocol.generation import (
    AnswerEvent,
    CallArguments,
    CallEnded,
    CallStarted,
    ChosenLogprob,
    Delta,
    OutputWarning,
    Reasoning,
)
from protocol.ids import RequestId
from worker.answers.parser import AnswerParser
from worker.answers.parts import AnswerEnd, ArgumentsText, CallBegan, CallDone, Part, Text, Thought


class RowAnswer:
    """`parser` None: all text is the answer, and nothing is looked at. `new_call_id` gives an id that is used once.

    Tell it of each token with `drew`, then of the text that became certain with `push`; once, at the end, `finish`.
    Tokens whose text is held back go with the next event that carries any.
    """

    def __init__(self, request_id: RequestId, parser: AnswerParser | None, new_call_id: Callable[[], str]) -> None:
        self.reasoning_tokens = 0
        self._request_id = request_id
        self._parser = parser
        self._new_call_id = new_call_id
        self._uncounted = 0
        self._unsent_tokens = 0
        self._unsent_logprobs: tuple[ChosenLogprob, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the answer has all the calls that it may have."""
        return self._parser is not None and self._parser.is_over

    @property
    def is_thinking(self) -> bool:
        """Whether the next character would be reasoning, as far as is known."""
        return self._parser is not None and self._parser.is_thinking

    @property
    def may_think(self) -> bool:
        """Whether the next character is reasoning, or a block of it may begin before any text."""
        return self._parser is not None and self._parser.may_think

    @property
    def has_whole_call(self) -> bool:
        return self._parser is not None and self._parser.whole_calls > 0

    @property
    def warnings(self) -> tuple[OutputWarning, ...]:
        return () if self._parser is None else self._parser.warnings

    def drew(self) -> None:
        """A token more, of whichever part."""
        self._uncounted += 1
        self._unsent_tokens += 1

    def scored(self, logprob: ChosenLogprob) -> None:
        """What the last token was worth, where that was asked for."""
        self._unsent_logprobs += (logprob,)

    def push(self, text: str) -> list[AnswerEvent]:
        """The events that are certain now."""
        if self._parser is None:
            return self._plain(text)
        was_thinking = self._parser.is_thinking
        parts = self._parser.push(text)
        if was_thinking or self._parser.is_thinking:
            self.reasoning_tokens += self._uncounted
        self._uncounted = 0
        return self._events(parts)

    def finish(self, text: str, end: AnswerEnd) -> list[AnswerEvent]:
        """The last text and all that was held back."""
        if self._parser is None:
            return self._plain(text)
        events = [*self.push(text), *self._events(self._parser.finish(end))]
        if self._unsent_logprobs:
            events += self._plain("")
        return events

    def _plain(self, text: str) -> list[AnswerEvent]:
        if not text and not self._unsent_logprobs:
            return []
        tokens, logprobs = self._take_unsent()
        return [Delta(request_id=self._request_id, text=text, tokens=tokens, logprobs=logprobs)]

    def _events(self, parts: list[Part]) -> list[AnswerEvent]:
        return [self._event(part) for part in parts]

    def _event(self, part: Part) -> AnswerEvent:
        request_id = self._request_id
        match part:
            case Text(text=text):
                tokens, logprobs = self._take_unsent()
                return Delta(request_id=request_id, text=text, tokens=tokens, logprobs=logprobs)
            case Thought(text=text):
                tokens, logprobs = self._take_unsent()
                return Reasoning(request_id=request_id, text=text, tokens=tokens, logprobs=logprobs)
            case CallBegan(index=index, name=name):
                return CallStarted(request_id=request_id, index=index, call_id=self._new_call_id(), name=name)
            case ArgumentsText(index=index, text=text):
                tokens, logprobs = self._take_unsent()
                return CallArguments(request_id=request_id, index=index, text=text, tokens=tokens, logprobs=logprobs)
            case CallDone(index=index):
                return CallEnded(request_id=request_id, index=index)
            case _:
                assert_never(part)

    def _take_unsent(self) -> tuple[int, tuple[ChosenLogprob, ...]]:
        unsent = self._unsent_tokens, self._unsent_logprobs
        self._unsent_tokens, self._unsent_logprobs = 0, ()
        return unsent
