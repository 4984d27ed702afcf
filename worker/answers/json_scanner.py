"""Finds the end of a JSON object in a text that arrives in pieces, and mends what models get wrong in strings. Pure."""

import json
from typing import Literal

_OUTSIDE = frozenset(" \t\r\n,:0123456789+-.eEtrufalsn")
"""What may stand outside a string, besides quotes and brackets: punctuation, numbers, true, false, null."""
_ESCAPABLE = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_OPENER_OF = {"}": "{", "]": "["}


class JsonScanner:
    """Give it the text from the object's `{` on.

    Its result is the text as it came, but for two faults in strings which are certain at once: a raw control character
    is written as an escape, and a backslash that escapes nothing is doubled (`is_mended` tells). `state` is "done"
    after the object's own `}`; "broken" at a character that cannot stand where it stands. Neither takes more text.
    """

    def __init__(self) -> None:
        self.state: Literal["reading", "done", "broken"] = "reading"
        self.is_mended = False
        self._open: list[str] = []
        self._is_in_string = False
        self._escape = ""

    def feed(self, text: str) -> tuple[str, int]:
        """Take text; gives the result that is certain so far and how many characters of `text` were taken."""
        result: list[str] = []
        for at, character in enumerate(text):
            if self._is_in_string:
                result.append(self._in_string(character))
            else:
                result.append(character)
                self._outside(character)
                if self.state == "broken":
                    result.pop()
                    return "".join(result), at
                if self.state == "done":
                    return "".join(result), at + 1
        return "".join(result), len(text)

    def take_held(self) -> str:
        """What an escape that never became whole held back."""
        held, self._escape = self._escape, ""
        return held

    def _outside(self, character: str) -> None:
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._open.append(character)
        elif character in "}]":
            if not self._open or self._open.pop() != _OPENER_OF[character]:
                self.state = "broken"
            elif not self._open:
                self.state = "done"
        elif character not in _OUTSIDE or not self._open:
            self.state = "broken"

    def _in_string(self, character: str) -> str:
        if not self._escape:
            if character == "\\":
                self._escape = character
                return ""
            return self._plain(character)
        if self._escape == "\\":
            if character == "u":
                self._escape = "\\u"
                return ""
            if character in _ESCAPABLE:
                return self.take_held() + character
            self._escape = ""
            self.is_mended = True
            return "'" if character == "'" else "\\\\" + self._plain(character)
        if character in _HEX:
            self._escape += character
            return self.take_held() if len(self._escape) == len("\\u0000") else ""
        self.is_mended = True
        return "\\" + self.take_held() + self._in_string(character)

    def _plain(self, character: str) -> str:
        if character == '"':
            self._is_in_string = False
        if character < " ":
            self.is_mended = True
            return json.dumps(character)[1:-1]
        return character
