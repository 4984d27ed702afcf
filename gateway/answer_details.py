"""What mlxd says of an answer beyond its API: the object `mlxd` in it, the same in every dialect."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from protocol.generation import CacheReport, Embedded, OutputWarning, Reranked, Timings
from protocol.ids import RequestId


class DetailsObject(Struct, frozen=True, kw_only=True):
    """For who asks with the header `x-mlxd-details: 1`. `timings` are the first choice's; `choices` has all of
    several.

    `warnings` are there for everybody: a tool call that came back as text, or not quite as the model wrote it.
    """

    request_id: RequestId | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    choices: tuple[Timings, ...] | UnsetType = UNSET
    cache: CacheReport | UnsetType = UNSET
    warnings: tuple[OutputWarning, ...] | UnsetType = UNSET


def vectors_details(end: Embedded | Reranked, details: Literal["asked", "unasked"]) -> DetailsObject | UnsetType:
    """Of an answer that nothing was generated for, and that no cache could help."""
    if details == "unasked":
        return UNSET
    return DetailsObject(request_id=end.request_id, timings=UNSET if end.timings is None else end.timings)
