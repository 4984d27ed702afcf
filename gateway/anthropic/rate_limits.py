"""What a limited key has left, in this API's headers. Decides only."""

from gateway.admission import KeyLimits, Load
from gateway.anthropic.instants import rfc3339

Header = tuple[bytes, bytes]


def rate_headers(load: Load, limits: KeyLimits) -> tuple[Header, ...]:
    """None for an unlimited key. Requests are those open at once, tokens the day's.

    A day's tokens are one purse for prompts and answers: what is left of it is left for either, so the headers of both
    say the same. `load` has the request in it that is answered.
    """
    headers: list[Header] = []
    if limits.max_queued is not None:
        held = load.key_open if limits.max_running is not None else load.key_queued
        most = limits.max_queued + (limits.max_running or 0)
        headers += _rate(b"requests", most, held, load.unix_now + (load.key_next_seconds if held else 0.0))
    if limits.tokens_per_day is not None:
        end_of_day = load.unix_now + load.day_left_seconds
        for what in (b"tokens", b"input-tokens", b"output-tokens"):
            headers += _rate(what, limits.tokens_per_day, load.key_tokens_today, end_of_day)
    return tuple(headers)


def _rate(what: bytes, limit: int, held: int, reset_unix: float) -> list[Header]:
    return [
        (b"anthropic-ratelimit-" + what + b"-limit", b"%d" % limit),
        (b"anthropic-ratelimit-" + what + b"-remaining", b"%d" % max(0, limit - held)),
        (b"anthropic-ratelimit-" + what + b"-reset", rfc3339(reset_unix).encode()),
    ]
