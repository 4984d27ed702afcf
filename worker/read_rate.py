"""How fast blocks come from disk, by what was measured lately. Pure.

A bad measurement keeps blocks from being read, and what is not read is not measured again: so belief in a slow disk
fades, until it is asked once more. A fast one is measured at each read, and needs no such thing.
"""

from math import exp, log

BELIEVED_BYTES_PER_SECOND = 1e9
"""What a disk is believed to read before it was measured."""

FADING_SECONDS = 300.0
"""After so long without a measurement, a third of the distance (in orders of magnitude) to that belief is left."""

_WEIGHT = 0.3


class ReadRate:
    """Tell it what was read; `now` is on any clock that never goes back."""

    def __init__(self) -> None:
        self._bytes_per_second = BELIEVED_BYTES_PER_SECOND
        self._measured_at = 0.0

    def measured(self, file_bytes: int, seconds: float, now: float) -> None:
        if seconds > 0:
            self._bytes_per_second += _WEIGHT * (file_bytes / seconds - self._bytes_per_second)
            self._measured_at = now

    def bytes_per_second(self, now: float) -> float:
        slowness = log(BELIEVED_BYTES_PER_SECOND / max(self._bytes_per_second, 1.0))
        if slowness <= 0:
            return self._bytes_per_second
        left = slowness * exp(-max(0.0, now - self._measured_at) / FADING_SECONDS)
        return BELIEVED_BYTES_PER_SECOND / exp(left)
