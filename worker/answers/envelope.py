"""One envelope of calls, from the marker that opened it to its end, as text comes in. Pure.

States, in order: `header` (up to the arguments' `{`), `arguments`, `tail` (what must follow them), and out again, or
back to `header` where another call follows. Whatever is not as it should be goes to `whole`: wait for the marker that
closes the envelope and read all of it. Once arguments have gone out there is no way back, so then it is `loose` (the
arguments are broken JSON: they go on to the closing marker) or `stray` (something stands between them and that marker).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, assert_never

from worker.answers.call_writer import CallWriter
from worker.answers.formats import CallFormat
from worker.answers.json_calls import is_json_object
from worker.answers.json_scanner import JsonScanner
from worker.answers.markers import earliest, held_back
from worker.answers.parts import AnswerEnd
from worker.answers.readings import Reading

STREAMED_FROM_CHARACTERS = 64
"""Arguments longer than this are sent as they come. Shorter ones are sent when their envelope is closed, so that a call
which never ends is still text."""

LONGEST_HEADER_CHARACTERS = 512

_LAYOUT = " \t\r\n}])"


class Over(NamedTuple):
    """The envelope ended. `text` of it is visible text; `rest` comes after it and is not looked at yet."""

    became: Literal["calls", "text"]
    text: str
    rest: str


ReadWhole = Callable[[str, Literal["strict", "mend"]], Reading | None]


class Envelope:
    """`opened` is the marker that opened it, empty for a call without one.

    `trust` "whole" reads nothing before the envelope is closed: so it is after an envelope whose inside misled us, else
    an answer could make us look at its text over and over.
    """

    def __init__(
        self, form: CallFormat, opened: str, writer: CallWriter, read: ReadWhole, trust: Literal["header", "whole"]
    ) -> None:
        self._form = form
        self._opened = opened
        self._writer = writer
        self._read = read
        self._state: Literal["header", "arguments", "tail", "whole", "loose", "stray"]
        self._state = "header" if form.header is not None and trust == "header" else "whole"
        self._text = ""
        self._seen: list[str] = []
        self._searched = ""
        self._name = ""
        self._is_sent = False
        self._scanner = JsonScanner()
        self._arguments: list[str] = []
        self.is_misleading = False
        """Whether it had to be read again from its beginning."""

    def push(self, text: str) -> Over | None:
        """Take text; gives what came out when the envelope is over."""
        self._text += text
        while True:
            state = self._state
            match state:
                case "header":
                    over = self._header()
                case "arguments":
                    over = self._argument_text()
                case "tail":
                    over = self._tail()
                case "whole":
                    over = self._whole()
                case "loose":
                    over = self._loose()
                case "stray":
                    over = self._stray()
                case _:
                    assert_never(state)
            if over is not None or self._state == state:
                return over

    def finish(self, end: AnswerEnd) -> Over:
        """No more text comes."""
        match self._state:
            case "arguments" if self._is_sent:
                self._writer.more(self._scanner.take_held())
                self._writer.cut()
                return Over("calls", "", "")
            case "loose":
                self._writer.more(self._text)
                if self._form.closes or end != "stop":
                    self._writer.cut()
                else:
                    self._writer.end()
                return Over("calls", "", "")
            case "tail":
                self._end_call()
                return Over("calls", "", "")
            case "stray":
                self._end_call()
                return Over("calls", self._text if self._text.strip(_LAYOUT) else "", "")
            case _:
                return self._finish_whole(end)

    # --- a call with a header ----------------------------------------------------------------------------------------

    def _header(self) -> Over | None:
        found = self._form.header.match(self._text, partial=True) if self._form.header is not None else None
        is_too_long = len(self._text) > LONGEST_HEADER_CHARACTERS
        if found is None or (found.partial and is_too_long) or found.end() > LONGEST_HEADER_CHARACTERS:
            self._become_whole()
        elif not found.partial:
            begin = found.end() - 1
            self._name = found.groupdict()["name"] or ""
            self._seen.append(self._text[:begin])
            self._text = self._text[begin:]
            self._scanner, self._arguments, self._is_sent = JsonScanner(), [], False
            self._state = "arguments"
        return None

    def _argument_text(self) -> Over | None:
        text, taken = self._scanner.feed(self._text)
        self._seen.append(self._text[:taken])
        self._text = self._text[taken:]
        if self._is_sent:
            self._writer.more(text)
        else:
            self._arguments.append(text)
            if sum(map(len, self._arguments)) > STREAMED_FROM_CHARACTERS:
                self._send()
        if self._scanner.state == "done":
            self._state = "tail"
            if not self._is_sent and not is_json_object("".join(self._arguments)):
                self._become_whole()
        elif self._scanner.state == "broken":
            if self._is_sent:
                self._writer.more(self._scanner.take_held())
                self._state = "loose"
            else:
                self._become_whole()
        return None

    def _tail(self) -> Over | None:
        found = self._form.item_end.match(self._text, partial=True) if self._form.item_end is not None else None
        if found is None or (found.partial and len(self._text) > LONGEST_HEADER_CHARACTERS):
            if self._is_sent:
                self._state = "stray"
            else:
                self._become_whole()
            return None
        if found.partial:
            return None
        self._end_call()
        rest = self._text[found.end() :]
        if found.groupdict().get("again"):
            self._text = rest
            self._seen, self._opened = [], ""
            self._state = "header"
            return None
        return Over("calls", "", rest)

    def _send(self) -> None:
        self._writer.begin(self._name)
        self._writer.more("".join(self._arguments))
        self._is_sent = True

    def _end_call(self) -> None:
        if not self._is_sent:
            self._send()
        if self._scanner.is_mended:
            self._writer.warn("tool_call_repaired")  # before the end: a writer may be full after it
        self._writer.end()

    # --- what is not as it should be ---------------------------------------------------------------------------------

    def _become_whole(self) -> None:
        """Begin again from where this call began, and look for the marker only."""
        self._text = "".join([*self._seen, self._text])
        self.is_misleading = bool(self._seen)
        self._seen = []
        self._state = "whole"

    def _whole(self) -> Over | None:
        """Text goes from `_text` to `_seen`; `_searched` is the end of what was seen, long enough for a cut marker."""
        while self._form.closes:
            looked_at = self._searched + self._text
            found = earliest(looked_at, self._form.closes)
            if found is None:
                break
            end = found.end - len(self._searched)
            inside = "".join([*self._seen, self._text[:end]])[: -len(found.marker)]
            if self._form.goes_on is not None and self._form.goes_on(inside):
                self._seen.append(self._text[:end])
                self._text, self._searched = self._text[end:], ""
                continue
            return self._closed(inside, found.marker, self._text[end:])
        self._seen.append(self._text)
        longest = max(map(len, self._form.closes), default=1) - 1
        self._searched = (self._searched + self._text)[-longest:] if longest else ""
        self._text = ""
        return None

    def _closed(self, inside: str, marker: str, rest: str) -> Over:
        if self._wrote(self._read(inside, "mend")):
            return Over("calls", "", rest)
        self._writer.warn("tool_call_unparsed")
        return Over("text", self._opened + inside + marker, rest)

    def _wrote(self, reading: Reading | None) -> bool:
        if reading is None:
            return False
        if reading.quality == "mended":
            self._writer.warn("tool_call_repaired")
        for call in reading.calls:
            self._writer.whole(call)
        return True

    def _loose(self) -> Over | None:
        found = earliest(self._text, self._form.closes)
        if found is not None:
            self._writer.more(self._text[: found.start])
            self._writer.end()
            return Over("calls", "", self._text[found.end :])
        keep = held_back(self._text, self._form.closes)
        self._writer.more(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return None

    def _stray(self) -> Over | None:
        """Brackets too many are dropped, anything else is text."""
        found = earliest(self._text, self._form.closes)
        if found is not None and found.end <= LONGEST_HEADER_CHARACTERS:
            self._end_call()
            stray = self._text[: found.start]
            return Over("calls", stray if stray.strip(_LAYOUT) else "", self._text[found.end :])
        if not self._form.closes or len(self._text) > LONGEST_HEADER_CHARACTERS:
            self._end_call()
            return Over("calls", "", self._text)
        return None

    # --- the answer ends here ----------------------------------------------------------------------------------------

    def _finish_whole(self, end: AnswerEnd) -> Over:
        inside = "".join([*self._seen, self._text])
        first = earliest(inside, self._form.closes)
        if first is not None and end == "stop":
            # It looked like a part of a value, which then never ended: so it was none.
            self.is_misleading = True
            return self._closed(inside[: first.start], first.marker, inside[first.end :])
        if end == "stop" or self._form.inside == "ends_itself":
            # Where no marker closes an envelope, the model's own end does.
            may_mend = end == "stop" and not self._form.closes
            if self._wrote(self._read(inside, "mend" if may_mend else "strict")):
                return Over("calls", "", "")
        if self._opened or self._state != "header":
            self._writer.warn("tool_call_unparsed" if end == "stop" else "tool_call_cut")
        return Over("text", self._opened + inside, "")
