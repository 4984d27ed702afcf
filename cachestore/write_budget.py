"""How much of the day's write budget is gone. Decides only. A day is one of UTC, whatever the machine's zone is."""

from typing import Literal

from protocol.blocks import WriteState

_DAY_SECONDS = 86400


def utc_day(unix: float) -> int:
    """The number of the day, counted from 1970."""
    return int(unix // _DAY_SECONDS)


def write_state(written_bytes: int, daily_write_bytes: int | None) -> WriteState:
    """Of what was written today; None is no budget."""
    if daily_write_bytes is None:
        return "green"
    if written_bytes >= daily_write_bytes:
        return "red"
    return "yellow" if 2 * written_bytes > daily_write_bytes else "green"


def write_permission(
    written_bytes: int, reserved_bytes: int, daily_write_bytes: int | None
) -> Literal["allowed", "write_budget"]:
    """Whether one more block may be written beside those being written: so a day ends at most one block over."""
    is_spent = write_state(written_bytes + reserved_bytes, daily_write_bytes) == "red"
    return "write_budget" if is_spent else "allowed"
