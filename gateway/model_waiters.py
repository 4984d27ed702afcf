"""Who waits for a model to be loaded, or for its process to be gone. Owned by the dispatch task."""

import asyncio

from protocol.failures import Failure
from protocol.ids import Incarnation, ModelName

Outcome = asyncio.Future[Failure | None]
"""None when what was waited for came true."""


class ModelWaiters:
    """Every future handed in here is resolved exactly once, or cancelled by whoever waits on it."""

    def __init__(self) -> None:
        self._for_load: dict[ModelName, list[Outcome]] = {}
        self._for_end: dict[Incarnation, list[Outcome]] = {}

    def wait_for_load(self, model: ModelName, outcome: Outcome) -> None:
        self._for_load.setdefault(model, []).append(outcome)

    def wait_for_end(self, incarnation: Incarnation, outcome: Outcome) -> None:
        self._for_end.setdefault(incarnation, []).append(outcome)

    def wanted(self, model: ModelName) -> bool:
        """Whether anybody still waits for this model to be loaded."""
        return any(not outcome.done() for outcome in self._for_load.get(model, ()))

    def loaded(self, model: ModelName) -> None:
        _resolve(self._for_load.pop(model, []), None)

    def not_loaded(self, model: ModelName, why: Failure) -> None:
        _resolve(self._for_load.pop(model, []), why)

    def ended(self, incarnation: Incarnation) -> None:
        _resolve(self._for_end.pop(incarnation, []), None)

    def does_not_end(self, incarnation: Incarnation, why: Failure) -> None:
        _resolve(self._for_end.pop(incarnation, []), why)

    def give_up(self, why: Failure) -> None:
        """Nothing of all this will come any more."""
        for model in tuple(self._for_load):
            self.not_loaded(model, why)
        for incarnation in tuple(self._for_end):
            self.does_not_end(incarnation, why)


def _resolve(outcomes: list[Outcome], outcome: Failure | None) -> None:
    for waiting in outcomes:
        if not waiting.done():
            waiting.set_result(outcome)
