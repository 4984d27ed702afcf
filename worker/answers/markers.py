"""Markers in a text that arrives in pieces: found wherever it was cut, held back only while they may come. Pure."""

from collections.abc import Iterable
from typing import NamedTuple


class Found(NamedTuple):
    """A marker and where it stands."""

    start: int
    end: int
    marker: str


def earliest(text: str, markers: Iterable[str]) -> Found | None:
    """The marker that is complete first, and of those the longest: what a reader of single characters would see."""
    found = [Found(at, at + len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, key=lambda place: (place.end, place.start), default=None)


def held_back(text: str, markers: Iterable[str]) -> int:
    """How many of the last characters of `text` could be the beginning of a marker."""
    most = 0
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0:
            if marker.startswith(text[at:]):
                most = max(most, len(text) - at)
                break
            at = text.find(marker[0], at + 1)
    return most
