"""Whether a JSON value of a client's can travel to a worker. Decides only."""

from typing import Any

DEPTH_MAX = 64


def why_not_plain(value: dict[str, Any]) -> str | None:
    """What is wrong with it, to follow its field's name; None when it is all right.

    Integers must have 64 bits at most, as msgpack's do, and nothing may be nested so deep that a template overflows.
    """
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
            elif isinstance(item, list):
                below += item
            elif isinstance(item, int) and not -(2**63) <= item < 2**64:
                return "holds an integer of more than 64 bits. Send it as a string."
        if not below:
            return None
        level = below
    return f"is nested deeper than {DEPTH_MAX} levels. Send a flatter object."
