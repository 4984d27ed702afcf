"""An answer's text, as it comes in → reasoning, visible text and calls. Pure.

What is found depends on the whole text alone, never on how it was cut into pieces; a piece costs what its own length
does. No character is dropped, but for markers, and for white space between a marker and what it stands beside.
"""

from collections.abc import Sequence
from typing import Literal

from protocol.generation import OutputWarning
from protocol.tools import Tool
from worker.answers.call_writer import CallWriter
from worker.answers.envelope import LONGEST_HEADER_CHARACTERS, Envelope, Over, ReadWhole
from worker.answers.flow import Flow
from worker.answers.formats import CallFormat
from worker.answers.markers import earliest, held_back
from worker.answers.parts import AnswerEnd, Part
from worker.answers.thinking import Start, ThinkSyntax


class AnswerParser:
    """One row's. `push` pieces until `is_over` or the text ends, then `finish` once.

    Reasoning is a block at the answer's beginning, or right behind a call or another block; markers elsewhere are text.
    A block that is never closed is reasoning to the end. `most_calls` 1 ends the answer after its first whole call.
    """

    def __init__(
        self,
        *,
        thinking: ThinkSyntax | None,
        starts: Start,
        form: CallFormat | None,
        tools: Sequence[Tool],
        read: ReadWhole,
        most_calls: int | None = None,
    ) -> None:
        self._thinking = thinking
        self._form = form
        self._names = frozenset(tool.name for tool in tools)
        self._read = read
        self._writer = CallWriter(tools, most_calls)
        self._mode: Literal["thinking", "answer", "call", "over"] = starts
        self._flow = Flow("after_marker" if starts == "thinking" else "answer")
        self._is_fresh = True
        self._follows_call = False
        self._pending: str = ""
        self._envelope: Envelope | None = None
        self._trust: Literal["header", "whole"] = "header"
        layout = thinking.layout if thinking is not None else ()
        opens = (*form.opens, *form.sections) if form is not None else ()
        self._markers = (*opens, *layout)

    @property
    def is_thinking(self) -> bool:
        """Whether the next character would be reasoning, as far as is known."""
        return self._mode == "thinking"

    @property
    def may_think(self) -> bool:
        """Whether the next character is reasoning, or a block of it may begin before any text."""
        return self.is_thinking or (self._thinking is not None and self._mode == "answer" and self._is_fresh)

    @property
    def is_over(self) -> bool:
        """Whether the answer has all the calls that were asked for, so that the row may end."""
        return self._mode == "over"

    @property
    def whole_calls(self) -> int:
        return self._writer.whole_calls

    @property
    def warnings(self) -> tuple[OutputWarning, ...]:
        return self._writer.warnings

    def push(self, text: str) -> list[Part]:
        """The parts that are certain with this piece."""
        self._pending += text
        while self._advance():
            pass
        return self._writer.take_parts()

    def finish(self, end: AnswerEnd) -> list[Part]:
        """The rest. Text that was held back because it might have become a marker is text."""
        while self._envelope is not None:
            self._envelope.push(self._take_pending())
            self._envelope_over(self._envelope.finish(end))
            while self._advance():
                pass
        if self._mode == "thinking":
            self._writer.thought(self._flow.add(self._take_pending()) + self._flow.flush())
        elif self._mode == "answer":
            self._writer.text(self._flow.add(self._take_pending()) + self._flow.flush())
        return self._writer.take_parts()

    def _advance(self) -> bool:
        """Take a step in the pending text; False when more text is needed for one."""
        match self._mode:
            case "thinking":
                return self._think()
            case "answer":
                return self._begin() if self._is_fresh else self._answer()
            case "call":
                return self._call()
            case "over":
                self._pending = ""
                return False

    def _take_pending(self) -> str:
        pending, self._pending = self._pending, ""
        return pending

    # --- reasoning ---------------------------------------------------------------------------------------------------

    def _think(self) -> bool:
        if self._thinking is None:
            raise AssertionError("an answer that cannot think thinks")
        if self._is_fresh:
            # The prompt opened the block, and some models open it once more.
            blank, rest = _split_blank(self._pending)
            self._writer.thought(self._flow.add(blank))
            self._pending = rest
            opened = next((marker for marker in self._thinking.opens if rest.startswith(marker)), None)
            if opened is not None:
                self._pending = rest[len(opened) :]
                self._is_fresh = False
                return True
            if not rest or any(marker.startswith(rest) for marker in self._thinking.opens):
                return False
            self._is_fresh = False
        found = earliest(self._pending, self._thinking.closes)
        if found is None:
            self._writer.thought(self._flow.add(self._take_up_to_held(self._thinking.closes)))
            return False
        self._writer.thought(self._flow.add(self._pending[: found.start]))
        self._pending = self._pending[found.end :]
        self._mode = "answer"
        self._follows_call = False
        self._after_marker()
        return True

    # --- the visible answer ------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Only white space came since the answer's beginning or a marker: a block or a bare call may begin here."""
        blank, rest = _split_blank(self._pending)
        self._writer.text(self._flow.add(blank))
        self._pending = rest
        if not rest:
            return False
        opens = self._thinking.opens if self._thinking is not None else ()
        opened = next((marker for marker in opens if rest.startswith(marker)), None)
        if opened is not None:
            self._pending = rest[len(opened) :]
            self._mode = "thinking"
            self._flow = Flow("after_marker")
            self._is_fresh = False
            return True
        bare = self._bare_call(rest)
        if bare == "yes":
            self._open_envelope("")
            return True
        may_be = (marker for marker in (*opens, *self._markers) if len(marker) > len(rest))
        if bare == "perhaps" or any(marker.startswith(rest) for marker in may_be):
            return False
        self._is_fresh = False
        return True

    def _bare_call(self, rest: str) -> Literal["yes", "no", "perhaps"]:
        if self._form is None or self._form.bare is None:
            return "no"
        found = self._form.bare.match(rest, partial=True)
        if found is None or found.end() > LONGEST_HEADER_CHARACTERS:
            return "no"
        if found.partial:
            return "perhaps"
        known = found.groupdict().get("known_name")
        return "yes" if known is None or known in self._names else "no"

    def _answer(self) -> bool:
        found = earliest(self._pending, self._markers)
        if found is None:
            self._show(self._take_up_to_held(self._markers))
            return False
        self._show(self._pending[: found.start])
        self._pending = self._pending[found.end :]
        form = self._form
        if form is not None and found.marker in form.opens:
            self._open_envelope(found.marker)
        elif form is not None and found.marker in form.sections:
            if not (self._follows_call and found.marker == form.sections[-1]):
                self._flow.hold(found.marker)
            self._is_fresh = True
        else:
            self._is_fresh = True
        return True

    def _show(self, text: str) -> None:
        shown = self._flow.add(text)
        if shown:
            self._follows_call = False
            self._writer.text(shown)

    def _take_up_to_held(self, markers: Sequence[str]) -> str:
        keep = held_back(self._pending, markers)
        ready = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(self._pending) - keep :]
        return ready

    def _after_marker(self) -> None:
        self._flow = Flow("after_marker")
        self._is_fresh = True

    # --- calls -------------------------------------------------------------------------------------------------------

    def _open_envelope(self, opened: str) -> None:
        if self._form is None:
            raise AssertionError("an answer without calls calls")
        self._envelope = Envelope(self._form, opened, self._writer, self._read, self._trust)
        self._mode = "call"

    def _call(self) -> bool:
        if self._envelope is None:
            raise AssertionError("no envelope is open")
        over = self._envelope.push(self._take_pending())
        if over is None:
            return self._has_all_calls()
        self._envelope_over(over)
        return True

    def _envelope_over(self, over: Over) -> None:
        if self._envelope is not None and self._envelope.is_misleading:
            self._trust = "whole"
        self._envelope = None
        self._mode = "answer"
        self._pending = over.rest
        if over.became == "calls":
            self._follows_call = True
            self._after_marker()
            self._show(over.text)
        else:
            self._is_fresh = False
            self._follows_call = False
            self._writer.text(self._flow.add(self._flow.take_held() + over.text))
        self._has_all_calls()

    def _has_all_calls(self) -> bool:
        if not self._writer.is_full:
            return False
        self._mode = "over"
        self._envelope = None
        return True


def _split_blank(text: str) -> tuple[str, str]:
    rest = text.lstrip()
    return text[: len(text) - len(rest)], rest
