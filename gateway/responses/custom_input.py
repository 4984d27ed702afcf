"""The arguments of a custom tool's call, piece by piece → its input, piece by piece. Decides only.

The model writes `{"input": "…"}`; the client wants the text inside, as it comes. What was given out cannot be taken
back, so whatever follows, the input is the pieces joined. Arguments of any other form are the input as they stand.
"""

import re
from typing import Literal

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEAD_STEPS = re.compile(r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?')
_TAIL = re.compile(r"\s*\}?\s*")
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = re.compile(r"[0-9A-Fa-f]*")
_UNIT_CHARACTERS = 6


class CustomInput:
    """One call's. `feed` gives what is new; `end` what was held back, for a call that is whole or cut off."""

    def __init__(self) -> None:
        self._state: Literal["head", "text", "tail", "raw"] = "head"
        self._held = ""
        self._is_over = False
        self._arguments: list[str] = []
        self._has_more = False

    @property
    def arguments(self) -> str | None:
        """All that the model wrote, if that is more than the input; else None."""
        return "".join(self._arguments) if self._has_more else None

    def feed(self, piece: str) -> str:
        """The next piece of the arguments → the next of the input."""
        self._arguments.append(piece)
        self._held += piece
        return self._taken()

    def end(self) -> str:
        """Nothing follows."""
        self._is_over = True
        return self._taken()

    def _taken(self) -> str:
        if self._state == "head":
            self._read_head()
        out: list[str] = []
        if self._state == "text":
            self._read_text(out)
        if self._state == "raw":
            out.append(self._held)
            self._held = ""
        if self._state == "tail" and not _TAIL.fullmatch(self._held):
            self._has_more = True
        return "".join(out)

    def _read_head(self) -> None:
        head = _HEAD.match(self._held)
        if head is not None:
            self._held = self._held[head.end() :]
            self._state = "text"
        elif self._is_over or not _HEAD_STEPS.fullmatch(self._held):
            self._state = "raw"

    def _read_text(self, out: list[str]) -> None:
        """Up to the closing quote, or to an escape that is not whole yet."""
        at = 0
        while at < len(self._held):
            plain = _PLAIN.match(self._held, at)
            if plain is not None:
                out.append(plain[0])
                at = plain.end()
                continue
            if self._held[at] == '"':
                self._state = "tail"
                at += 1
                break
            read = _escape(self._held[at : at + 2 * _UNIT_CHARACTERS])
            if read is None and not self._is_over:
                break
            text, length = read or ("\\", 1)
            out.append(text)
            at += length
        self._held = self._held[at:]


def _escape(text: str) -> tuple[str, int] | None:
    """What an escape stands for, and its length. None when more of it may come.

    What is none in JSON stands for itself: models write a bare backslash now and then, mostly in patterns.
    """
    if len(text) == 1:
        return None
    if text[1] in _ESCAPES:
        return _ESCAPES[text[1]], 2
    if text[1] != "u":
        return "\\", 1
    unit = _unit(text)
    if unit is None:
        return None
    if unit < 0:
        return "\\", 1
    if not 0xD800 <= unit < 0xE000:
        return chr(unit), _UNIT_CHARACTERS
    if unit < 0xDC00:
        rest = text[_UNIT_CHARACTERS:]
        if rest in ("", "\\"):
            return None
        second = _unit(rest) if rest.startswith("\\u") else -1
        if second is None:
            return None
        if 0xDC00 <= second < 0xE000:
            return chr(0x10000 + ((unit - 0xD800) << 10) + (second - 0xDC00)), 2 * _UNIT_CHARACTERS
    return "\N{REPLACEMENT CHARACTER}", _UNIT_CHARACTERS


def _unit(text: str) -> int | None:
    """The number of an escape that begins with a backslash and a u: None when more may come, -1 when it is none."""
    digits = text[2:_UNIT_CHARACTERS]
    if not _HEX.fullmatch(digits):
        return -1
    return int(digits, 16) if len(digits) == _UNIT_CHARACTERS - 2 else None
