"""The calls of one answer as they are found: their parts, their numbers and what is to be said of them. Pure."""

from collections.abc import Sequence

from protocol.generation import OutputWarning
from protocol.tools import Tool
from worker.answers.parts import ArgumentsText, CallBegan, CallDone, Part, Text, Thought, joined
from worker.answers.readings import ReadCall
from worker.answers.validity import are_arguments_valid


class CallWriter:
    """Collects parts in order. One call is written at a time: begin, more…, then end or cut.

    After `most_calls` whole ones it is full, and takes nothing more.
    """

    def __init__(self, tools: Sequence[Tool], most_calls: int | None = None) -> None:
        self.whole_calls = 0
        self._tools = tools
        self._most_calls = most_calls
        self._parts: list[Part] = []
        self._begun = 0
        self._name = ""
        self._arguments: list[str] = []
        self._warnings: dict[OutputWarning, None] = {}

    @property
    def is_full(self) -> bool:
        return self._most_calls is not None and self.whole_calls >= self._most_calls

    @property
    def warnings(self) -> tuple[OutputWarning, ...]:
        """Each once, in the order in which they came up."""
        return tuple(self._warnings)

    def take_parts(self) -> list[Part]:
        """What was written since the last time."""
        parts, self._parts = self._parts, []
        return joined(parts)

    def text(self, text: str) -> None:
        self._append(Text(text))

    def thought(self, text: str) -> None:
        self._append(Thought(text))

    def begin(self, name: str) -> None:
        self._name, self._arguments = name, []
        self._append(CallBegan(self._begun, name))
        self._begun += 1

    def more(self, arguments: str) -> None:
        self._arguments.append(arguments)
        self._append(ArgumentsText(self._begun - 1, arguments))

    def end(self) -> None:
        if self.is_full:
            return
        self._append(CallDone(self._begun - 1))
        self.whole_calls += 1
        if not are_arguments_valid(self._name, "".join(self._arguments), self._tools):
            self._warnings["arguments_invalid"] = None

    def cut(self) -> None:
        """The call that was begun never ended."""
        self.warn("tool_call_cut")

    def whole(self, call: ReadCall) -> None:
        self.begin(call.name)
        self.more(call.arguments)
        self.end()

    def warn(self, warning: OutputWarning) -> None:
        if not self.is_full:
            self._warnings[warning] = None

    def _append(self, part: Part) -> None:
        if not self.is_full:
            self._parts.append(part)
