"""Lengths of time as people write them: `90`, `90s`, `30m`, `8h`, `7d`. Decides only."""

import re

_DURATION = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([smhdw]?)\s*")
_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def parse_duration_seconds(text: str) -> float:
    """Seconds of `8h`. Raises ValueError that says what is allowed."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _UNIT_SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{text[:20]!r} is no length of time: write for instance 90s, 30m, 8h or 7d")
    return seconds


def duration_text(seconds: float) -> str:
    """The two largest units, for people: `7 h 59 min`."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
