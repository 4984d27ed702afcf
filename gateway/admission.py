"""Whether a request may come in, by the bounds of its key and of its class, and when to come back if not.

Decides only: moments are arguments. Days are UTC's.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import assert_never

from msgspec import Struct

from gateway.latency_class import WorkClass
from protocol.failures import Failure, FailureKind

DAY_SECONDS = 86_400

_UNMEASURED_SECONDS = 5.0
_LONGEST_SECONDS = 60.0
"""SDKs that are told to wait longer than one or two minutes do not listen, or give up."""


class KeyLimits(Struct, frozen=True, kw_only=True):
    """The most that one key may have at once, and use in a day. None: no limit of the key's own.

    At most `max_running` are given to a model's process at a time; more of them wait, up to `max_queued`.
    `tokens_per_day` counts prompt and completion tokens, as `usage` does; a request that began may go over it.
    """

    max_running: int | None = None
    max_queued: int | None = None
    tokens_per_day: int | None = None


class ClassBounds(Struct, frozen=True, kw_only=True):
    """The most that a class may have at once, and use in a day, over all models and keys: as for a key."""

    max_running: int | None = None
    max_queued: int = 128
    tokens_per_day: int | None = None


class ClassLimits(Struct, frozen=True, kw_only=True):
    """The bounds of each class."""

    interactive: ClassBounds = ClassBounds()
    standard: ClassBounds = ClassBounds()
    batch: ClassBounds = ClassBounds()
    warm: ClassBounds = ClassBounds()

    def of(self, work_class: WorkClass) -> ClassBounds:
        match work_class:
            case "interactive":
                return self.interactive
            case "standard":
                return self.standard
            case "batch":
                return self.batch
            case "warm":
                return self.warm
            case _:
                assert_never(work_class)


class Load(Struct, frozen=True, kw_only=True):
    """What there is at the moment of a decision, without the request in question.

    The tokens of today have those of open requests in them. What only warms is none of the key's requests: it must not
    keep the answers out that it is meant to hasten. Three say when things get better: when a request
    of this key, and one of this class, will probably have ended, and when the day is over. They count from `unix_now`.
    """

    key_open: int = 0
    key_queued: int = 0
    class_queued: int = 0
    key_tokens_today: int = 0
    class_tokens_today: int = 0
    key_next_seconds: float = _UNMEASURED_SECONDS
    class_next_seconds: float = _UNMEASURED_SECONDS
    day_left_seconds: float = DAY_SECONDS
    unix_now: float = 0.0


def refusal(
    load: Load, *, key_name: str, limits: KeyLimits, work_class: WorkClass, class_limits: ClassLimits
) -> Failure | None:
    """Why this request may not come in now: the limit by its name, and when to come back. None: it may."""
    if limits.tokens_per_day is not None and load.key_tokens_today >= limits.tokens_per_day:
        return _come_back(
            FailureKind.RATE_LIMITED,
            f"The key {key_name} has used {load.key_tokens_today} tokens today, of {limits.tokens_per_day} "
            "(tokens_per_day). Come back after midnight UTC, or ask the owner of the server for more.",
            load.day_left_seconds,
        )
    bounds = class_limits.of(work_class)
    if bounds.tokens_per_day is not None and load.class_tokens_today >= bounds.tokens_per_day:
        return _come_back(
            FailureKind.RATE_LIMITED,
            f"Requests of the class {work_class} have used {load.class_tokens_today} tokens today, of "
            f"{bounds.tokens_per_day} (tokens_per_day_{work_class}). Come back after midnight UTC, or ask for another "
            "class.",
            load.day_left_seconds,
        )
    if limits.max_queued is not None and work_class != "warm":
        if limits.max_running is not None:
            is_full = load.key_open >= limits.max_running + limits.max_queued
            bound = f"max_running {limits.max_running} and max_queued {limits.max_queued}"
            held = f"{load.key_open} requests open"
        else:
            is_full = load.key_queued >= limits.max_queued
            bound = f"max_queued {limits.max_queued}"
            held = f"{load.key_queued} requests waiting"
        if is_full:
            return _come_back(
                FailureKind.RATE_LIMITED,
                f"The key {key_name} has {held}, which is its limit ({bound}). "
                f"Send this again in about {math.ceil(load.key_next_seconds)} s, or fewer at a time.",
                load.key_next_seconds,
            )
    if load.class_queued >= bounds.max_queued:
        return _come_back(
            FailureKind.OVERLOADED,
            f"{load.class_queued} requests of the class {work_class} wait here, which is the limit "
            f"(max_queued_{work_class} {bounds.max_queued}). "
            f"Send this again in about {math.ceil(load.class_next_seconds)} s.",
            load.class_next_seconds,
        )
    return None


def model_refusal(model: str, *, ahead: int, max_queued: int, rows: int, next_seconds: float) -> Failure | None:
    """Why a model takes no further request now: `ahead` go before it, of which `rows` run. None: it does."""
    if ahead < max_queued + rows:
        return None
    bound = f"max_queued_requests {max_queued}" + (f", beside the {rows} that run together" if rows else "")
    return _come_back(
        FailureKind.OVERLOADED,
        f"{ahead} requests for the model {model} go before this one, which is the limit ({bound}). "
        f"Send this again in about {math.ceil(next_seconds)} s.",
        next_seconds,
    )


def rate_headers(load: Load, limits: KeyLimits) -> tuple[tuple[bytes, bytes], ...]:
    """OpenAI's rate-limit headers for what this key is limited in; none for an unlimited key. Requests are those open
    at once. `load` has the request in it that is answered."""
    headers: list[tuple[bytes, bytes]] = []
    if limits.max_queued is not None:
        held = load.key_open if limits.max_running is not None else load.key_queued
        most = limits.max_queued + (limits.max_running or 0)
        headers += _rate(b"requests", most, held, load.key_next_seconds if held else 0.0)
    if limits.tokens_per_day is not None:
        headers += _rate(b"tokens", limits.tokens_per_day, load.key_tokens_today, load.day_left_seconds)
    return tuple(headers)


def reset_text(seconds: float) -> str:
    """As OpenAI writes it: `1s`, `6m0s`, `23h59m1s`."""
    minutes, rest = divmod(max(0, math.ceil(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class RecentEnds:
    """When requests of each name (a key's, a class's, a model's) ended lately, to say when the next one will: the
    measured queue, not a constant."""

    def __init__(self, *, keep: int = 256, keep_seconds: float = 600.0) -> None:
        self._ends: deque[_End] = deque(maxlen=keep)
        self._keep_seconds = keep_seconds

    def ended(self, name: str, *, seconds: float, now: float) -> None:
        """A request of this name ended that was open for `seconds`."""
        self._ends.append(_End(at=now, name=name, seconds=seconds))

    def next_of(self, name: str, now: float) -> float:
        """In how many seconds one of this name will probably end."""
        ends = [end for end in self._ends if end.name == name and now - end.at <= self._keep_seconds]
        if not ends:
            seconds = _UNMEASURED_SECONDS
        elif len(ends) == 1:
            seconds = ends[0].seconds
        else:
            # The time since the last end counts, too: a service that stands still promises less and less.
            seconds = (now - ends[0].at) / len(ends)
        return min(max(seconds, 1.0), _LONGEST_SECONDS)


class DayBook(Struct, frozen=True, kw_only=True):
    """A day, as its number since 1970, and its tokens: all of them by key, and all of them by class."""

    day: int = 0
    tokens: Mapping[str, int] = {}
    class_tokens: Mapping[str, int] = {}


class DayTokens:
    """How many tokens each key and each class used today. `changes` grows with every charge."""

    def __init__(self, book: DayBook | None = None) -> None:
        book = book or DayBook()
        self._day = book.day
        self._tokens = dict(book.tokens)
        self._class_tokens = dict(book.class_tokens)
        self.changes = 0

    def charge(self, key_name: str, work_class: WorkClass, tokens: int, *, unix_now: float) -> None:
        self._turn(unix_now)
        if tokens > 0:
            self._tokens[key_name] = self._tokens.get(key_name, 0) + tokens
            self._class_tokens[work_class] = self._class_tokens.get(work_class, 0) + tokens
            self.changes += 1

    def used(self, key_name: str, *, unix_now: float) -> int:
        self._turn(unix_now)
        return self._tokens.get(key_name, 0)

    def used_by_class(self, work_class: WorkClass, *, unix_now: float) -> int:
        self._turn(unix_now)
        return self._class_tokens.get(work_class, 0)

    def book(self) -> DayBook:
        return DayBook(day=self._day, tokens=dict(self._tokens), class_tokens=dict(self._class_tokens))

    def _turn(self, unix_now: float) -> None:
        """A new day begins at nothing. A clock that is set back does not give a day's tokens again."""
        day = day_of(unix_now)
        if day > self._day:
            self._day, self._tokens, self._class_tokens = day, {}, {}


def day_of(unix_now: float) -> int:
    """The UTC day's number since 1970."""
    return int(unix_now // DAY_SECONDS)


def day_left_seconds(unix_now: float) -> float:
    """Until midnight UTC."""
    return DAY_SECONDS - unix_now % DAY_SECONDS


class _End(Struct, frozen=True, kw_only=True):
    at: float
    name: str
    seconds: float


def _come_back(kind: FailureKind, message: str, seconds: float) -> Failure:
    return Failure(kind=kind, message=message, retry_after_seconds=seconds)


def _rate(what: bytes, limit: int, held: int, reset_seconds: float) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % max(0, limit - held)),
        (b"x-ratelimit-reset-" + what, reset_text(reset_seconds).encode()),
    ]
