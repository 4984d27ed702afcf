"""A request's events → the parts of its answer, for every dialect's whole answers and last events. Decides only."""

from typing import assert_never

from msgspec import Struct

from protocol.generation import (
    AnswerEvent,
    CallArguments,
    CallEnded,
    CallStarted,
    ChosenLogprob,
    Delta,
    Finished,
    Queued,
    Reasoning,
    Warmed,
)


class TextPart(Struct, kw_only=True):
    """Text that the client sees."""

    text: str
    logprobs: list[ChosenLogprob]


class ReasoningPart(Struct, kw_only=True):
    """What the model thought before it went on."""

    text: str
    logprobs: list[ChosenLogprob]


class CallPart(Struct, kw_only=True):
    """A tool call. `arguments` is JSON as text, valid or not; `is_whole` is false when the answer's end cut it off."""

    index: int
    call_id: str
    name: str
    arguments: str
    is_whole: bool
    logprobs: list[ChosenLogprob]


Part = TextPart | ReasoningPart | CallPart


class Collected(Struct, frozen=True, kw_only=True):
    """One answer: its parts in order, how it ended, and what was said of its prompt. A warm's has no parts."""

    parts: tuple[Part, ...]
    end: Finished | Warmed
    queued: Queued | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def calls(self) -> tuple[CallPart, ...]:
        return tuple(part for part in self.parts if isinstance(part, CallPart))

    @property
    def logprobs(self) -> tuple[ChosenLogprob, ...]:
        """Of all tokens, in order."""
        return tuple(logprob for part in self.parts for logprob in part.logprobs)


class Parts:
    """Collects an answer's parts, event by event. Neighbouring pieces of one kind become one part."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._pieces: list[str] = []

    def add(self, event: AnswerEvent) -> None:
        """Take the next event of the answer."""
        match event:
            case Delta():
                self._add_text(TextPart, event)
            case Reasoning():
                self._add_text(ReasoningPart, event)
            case CallStarted():
                self._close()
                self._parts.append(
                    CallPart(
                        index=event.index,
                        call_id=event.call_id,
                        name=event.name,
                        arguments="",
                        is_whole=False,
                        logprobs=[],
                    )
                )
            case CallArguments():
                last = self._parts[-1]
                self._pieces.append(event.text)
                last.logprobs.extend(event.logprobs)
            case CallEnded():
                self._close()
                last = self._parts[-1]
                if isinstance(last, CallPart):
                    last.is_whole = True
            case _:
                assert_never(event)

    def collected(self, end: Finished | Warmed, queued: Queued | None = None) -> Collected:
        """The whole answer. Parts without any text and logprobs are left out; calls never are."""
        self._close()
        kept = (part for part in self._parts if isinstance(part, CallPart) or part.text or part.logprobs)
        return Collected(parts=tuple(kept), end=end, queued=queued)

    def _add_text(self, kind: type[TextPart] | type[ReasoningPart], event: Delta | Reasoning) -> None:
        if event.text or not self._parts:
            if not self._parts or not isinstance(self._parts[-1], kind):
                self._close()
                self._parts.append(kind(text="", logprobs=[]))
            self._pieces.append(event.text)
        # A token that brings no text, half a character for instance, begins no part: none would be seen of it.
        self._parts[-1].logprobs.extend(event.logprobs)

    def _close(self) -> None:
        """Join what the last part consists of: once, since text that grows by `+=` costs its square."""
        if not self._pieces:
            return
        text = "".join(self._pieces)
        self._pieces.clear()
        last = self._parts[-1]
        if isinstance(last, CallPart):
            last.arguments += text
        else:
            last.text += text
