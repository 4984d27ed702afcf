"""Latency classes: who waits for an answer, and how patiently. They reach from the API key to the prefill slice."""

import enum


class LatencyClass(enum.StrEnum):
    """Strict between classes, with ageing: work of a lower class runs when no higher one can, but never starves."""

    INTERACTIVE = "interactive"
    """Somebody looks at the screen."""
    STANDARD = "standard"
    """A program waits, an agent for instance."""
    BATCH = "batch"
    """Done by the morning is early enough."""

    @property
    def rank(self) -> int:
        """0 is served first."""
        return _RANKS[self]


_RANKS = {LatencyClass.INTERACTIVE: 0, LatencyClass.STANDARD: 1, LatencyClass.BATCH: 2}
