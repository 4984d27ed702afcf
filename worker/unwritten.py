"""Which blocks the disk refused, and why: so that a later miss can say that its prefix was to be there. Pure."""

from collections import OrderedDict
from collections.abc import Iterable

from protocol.ids import BlockKey

_REMEMBERED = 8192

_TOLD_AS = {
    "write_budget": "budget",
    "quota": "quota",
    "no_space": "no_space",
    "read_only": "read_only",
}
"""Refusals that an operator can do something about, by what a request is told. The others are passing troubles."""


class Unwritten:
    """Told what is sent to the disk and what became of it. Remembers the last refusals only."""

    def __init__(self) -> None:
        self._sent: dict[BlockKey, BlockKey] = {}
        self._refused: OrderedDict[BlockKey, str] = OrderedDict()

    def sent(self, key: BlockKey, last_grain: BlockKey) -> None:
        """Each is to be answered once."""
        self._sent[key] = last_grain

    def answered(self, key: BlockKey, refusal: str) -> None:
        """`refusal` is the store's own word; empty when the block is on disk. Blocks that were not sent are ignored."""
        last_grain = self._sent.pop(key, None)
        if last_grain is None:
            return
        self._refused.pop(last_grain, None)
        if refusal in _TOLD_AS:
            self._refused[last_grain] = _TOLD_AS[refusal]
            while len(self._refused) > _REMEMBERED:
                self._refused.popitem(last=False)

    def why(self, grains: Iterable[bytes]) -> str:
        """Why the first of the blocks that end with one of these grains was refused. Empty when none was."""
        return next((why for grain in grains if (why := self._refused.get(BlockKey(grain)))), "")
