"""Text pieces → what a client may see: stop strings are found in *text* and never leak. Pure.

Matching token sequences would miss a stop string that the model spells with other tokens; so it is done on text,
and text is held back only while it really is the beginning of a stop string.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Emitted:
    """`text` may go out now. `matched` is the stop string that ended the row, if one did."""

    text: str
    matched: str | None = None


class StopStrings:
    """Finds the first of several stop strings in a text that arrives in pieces.

    The joined `text` of all results is the input up to the earliest match, or all of it after `flush`, whatever the
    pieces. Of two stops that begin at the same place the one that completes first wins.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, piece: str) -> Emitted:
        """Take the next piece. After a match, push no more."""
        if not self._stops:
            return Emitted(piece)
        text = self._held + piece
        matches = [(at, len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            # The earliest *end* is what a reader of single characters would have stopped at.
            at, _, stop = min(matches, key=lambda match: (match[0] + match[1], match[0]))
            self._held = ""
            return Emitted(text[:at], stop)
        keep = max(_held_back(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return Emitted(text[: len(text) - keep])

    def flush(self) -> str:
        """The row ended otherwise: what was held back is text after all."""
        held, self._held = self._held, ""
        return held


def _held_back(text: str, stop: str) -> int:
    """How many of the last characters of `text` could be the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
