"""Visible text between markers: the line breaks that only set a call or a thought apart are no part of it. Pure."""

from typing import Literal

_MOST_HELD_CHARACTERS = 256


class Flow:
    """Holds back white space until it is known what follows it: text, which it belongs to, or a marker, which drops it.

    `begins` "after_marker": line breaks that come first are layout and dropped. "answer": kept if text follows.
    No more than the last 256 characters of white space are held: a model that writes nothing else still streams.
    """

    def __init__(self, begins: Literal["answer", "after_marker"]) -> None:
        self._is_trimming = begins == "after_marker"
        self._is_dropped_at_end = begins == "after_marker"
        self._held = ""

    def add(self, text: str) -> str:
        """Take text; gives what of it, and of what was held, may go out."""
        if self._is_trimming:
            text = text.lstrip("\r\n")
            if not text:
                return ""
            self._is_trimming = False
        body = text.rstrip()
        if body:
            self._is_dropped_at_end = False
            ready = self._held + body
            self._held = text[len(body) :]
        else:
            ready = ""
            self._held += text
        over = len(self._held) - _MOST_HELD_CHARACTERS
        if over > 0:
            self._is_dropped_at_end = False
            ready += self._held[:over]
            self._held = self._held[over:]
        return ready

    def hold(self, layout: str) -> None:
        """A marker that is layout if a call follows and text if text follows."""
        self._is_trimming = False
        self._is_dropped_at_end = False
        self._held += layout

    def take_held(self) -> str:
        """What is held; the flow has it no more."""
        held, self._held = self._held, ""
        return held

    def flush(self) -> str:
        """The answer is over: what is held is text, unless nothing but white space came since a marker."""
        held = self.take_held()
        return "" if self._is_dropped_at_end else held
