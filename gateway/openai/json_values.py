"""JSON of a client's own making, such as schemas and arguments: what of it can travel to a worker. Pure."""

from typing import Any

import msgspec

from gateway.openai.refusals import invalid

_DEPTH_MAX = 64


def plain(value: dict[str, Any], at: str) -> dict[str, Any]:
    """The same object, if it can travel: integers of 64 bits, and no deep nesting. Raises Refusal."""
    level: list[Any] = [value]
    for _ in range(_DEPTH_MAX):
        level = [child for item in level for child in _children(item, at)]
        if not level:
            return value
    raise invalid(at, f"is nested deeper than {_DEPTH_MAX} levels. Send a flatter object.")


def object_in(text: str) -> dict[str, Any] | None:
    """The JSON object that this text is, whether it can travel or not; None if it is anything else."""
    try:
        return msgspec.json.decode(text.encode(), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return None


def _children(value: Any, at: str) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return value  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise invalid(at, "holds an integer of more than 64 bits. Send it as a string.")
    return []
