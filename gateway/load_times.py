"""How long a model still loads: as its last load did, or by how fast bytes are read. Decides only."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from protocol.generation import Loading
from protocol.ids import ModelName

_KEPT_RATES = 8


class LoadTimes:
    """Loads that ended well, of every model since the gateway started."""

    def __init__(self) -> None:
        self._last_seconds: dict[ModelName, float] = {}
        self._bytes_per_second: deque[float] = deque(maxlen=_KEPT_RATES)

    def loaded(self, model: ModelName, *, size_bytes: int | None, seconds: float) -> None:
        """A process of this model was ready so long after its start."""
        self._last_seconds[model] = seconds
        if size_bytes and seconds > 0:
            self._bytes_per_second.append(size_bytes / seconds)

    def seconds_left(self, model: ModelName, *, loading: Loading | None, elapsed_seconds: float) -> float | None:
        """Of a load that began so long ago (below 0: will begin in so long) and has read so much; None when nobody can
        say.

        What this model took last goes first, then how far this load is, then what others took for as many bytes. Each
        is asked only until it is past.
        """
        estimates = (self._last_seconds.get(model), *_totals(loading, elapsed_seconds, self._bytes_per_second))
        left = (total - elapsed_seconds for total in estimates if total is not None)
        return next((seconds for seconds in left if seconds > 0), None)


def _totals(loading: Loading | None, elapsed_seconds: float, rates: Sequence[float]) -> tuple[float | None, ...]:
    """Of the whole load, by its own progress and by others' rates."""
    if loading is None or loading.total_bytes <= 0:
        return ()
    by_progress = elapsed_seconds * loading.total_bytes / loading.done_bytes if loading.done_bytes > 0 else None
    return by_progress, loading.total_bytes / median(rates) if rates else None
