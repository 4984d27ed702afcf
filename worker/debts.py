"""What slices owe the rows that decode, by the lane of the slice. Pure."""

from worker.sequence import LANES, Lane


class DecodeDebts:
    """In seconds of decode. Who owes pays before the next slice of his lane or of a lower one."""

    def __init__(self) -> None:
        self._seconds = [0.0 for _ in LANES]

    @property
    def most_seconds(self) -> float:
        return max(self._seconds)

    def owe(self, lane: Lane, seconds: float) -> None:
        """A slice on behalf of this lane ran beside rows."""
        self._seconds[lane] += seconds

    def pay(self, seconds: float, *, but: Lane | None = None) -> None:
        """Rows had so much: it pays all lanes at once, `but` one, if there is one whose slices count it already."""
        for lane in LANES:
            if lane is not but:
                self._seconds[lane] = max(0.0, self._seconds[lane] - seconds)

    def forgive(self) -> None:
        """A debt to nobody is none."""
        self._seconds = [0.0 for _ in LANES]

    def highest_owing(self, payable_seconds: float) -> Lane | None:
        """The highest lane that owes at least what can be paid at a time: it and all below do not run a slice."""
        return next((lane for lane in LANES if 0 < self._seconds[lane] >= payable_seconds), None)
