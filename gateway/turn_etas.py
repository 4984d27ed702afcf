"""When who is held back by a limit of its key or its class will probably have its turn. Decides only."""

from collections import deque
from collections.abc import Collection

from msgspec import Struct

_KEPT = 256
_KEPT_SECONDS = 3600.0


class RunTimes:
    """How long the latest requests of each name (a key's, a class's) had their turn, in seconds."""

    def __init__(self) -> None:
        self._ended: deque[_Run] = deque(maxlen=_KEPT)

    def ended(self, name: str, *, seconds: float, now: float) -> None:
        """One of this name ended well or badly, after it had its turn for so long."""
        self._ended.append(_Run(at=now, name=name, seconds=seconds))

    def of(self, name: str, now: float) -> tuple[float, ...]:
        return tuple(run.seconds for run in self._ended if run.name == name and now - run.at <= _KEPT_SECONDS)


def turn_eta(running_seconds: Collection[float], usual_seconds: Collection[float], *, ahead: int) -> float | None:
    """In how many seconds somebody has a turn whom as many may have as run now, behind `ahead` others.

    `running_seconds` are how long those run that have one, `usual_seconds` how long such ones ran lately. None when
    that tells nothing: nothing has ended yet, or what runs has outlived all that did.
    """
    left = [sum(longer) / len(longer) - ran for ran in running_seconds if (longer := _longer(usual_seconds, ran))]
    if not left:
        return None
    return min(left) + ahead * sum(usual_seconds) / len(usual_seconds) / len(running_seconds)


def _longer(usual_seconds: Collection[float], ran: float) -> list[float]:
    return [usual for usual in usual_seconds if usual > ran]


class _Run(Struct, frozen=True, kw_only=True):
    at: float
    name: str
    seconds: float
