"""What the HTTP dialects need from the rest of the gateway, so that each can be built and tested alone."""

from typing import Protocol

from gateway.replies import Reply
from protocol.generation import Generate, Warm
from protocol.ids import ModelName


class Generator(Protocol):
    """Runs requests."""

    def submit(self, model: ModelName, generate: Generate | Warm) -> Reply:
        """Hand a request over. Never blocks and never raises for a model's sake: the reply says how it ends."""
        ...


class KnownModel(Protocol):
    """A model of the catalog. `problem` says why it cannot be served, None when it can."""

    @property
    def name(self) -> ModelName: ...

    @property
    def problem(self) -> str | None: ...


class ModelLookup(Protocol):
    """Finds models by the exact name they are served under."""

    def find(self, name: str) -> KnownModel | None: ...
