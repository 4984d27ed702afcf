"""What the HTTP dialects need from the rest of the gateway, so that each can be built and tested alone."""

from typing import Literal, Protocol

from gateway.replies import Reply
from gateway.residency import Resident
from gateway.status import ServiceStatus
from protocol.blocks import BlockReply, Describe, Forget, UnpinBlocks
from protocol.failures import Failure
from protocol.generation import ForgetHot, SetBudget, Unpin, Work
from protocol.ids import ModelName

CacheOrder = Unpin | SetBudget | ForgetHot
"""What a worker is told about its hot tier. It answers nothing: its books show what came of it."""

CacheQuestion = Forget | UnpinBlocks | Describe
"""What the gateway asks of the cachestore. Its `call_id` is filled in on the way."""


class Generator(Protocol):
    """Runs requests."""

    def submit(self, model: ModelName, work: Work) -> Reply:
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


class ModelControl(Protocol):
    """Loads and unloads models at the operator's word. Called on the event loop."""

    async def load_and_wait(self, model: ModelName) -> Failure | None:
        """None once the model is ready, else why it is not."""
        ...

    async def unload_and_wait(self, model: ModelName) -> Failure | None:
        """None once the process that the model has now is gone, after its open requests; at once if it has none."""
        ...

    def residents(self) -> tuple[Resident, ...]:
        """Who has memory now, or waits for it, as the ledger counts it."""
        ...


class CacheControl(Protocol):
    """Acts on the caches of all processes. Called on the event loop."""

    def tell(self, model: ModelName, order: CacheOrder) -> Literal["told", "not_loaded"]:
        """Order a model's process. A budget for a model that is not loaded is remembered for its next load."""
        ...

    async def orders_followed(self) -> Literal["followed", "unknown"]:
        """Whether every process has done what it was told so far, or is gone. Waits for that, but not for ever."""
        ...

    async def fresh_status(self) -> ServiceStatus:
        """The status with books asked for now, or the last ones of a process that does not answer soon."""
        ...

    async def ask_cachestore(self, question: CacheQuestion) -> BlockReply | None:
        """Its reply, None when caching on disk is off. Raises CachestoreSilent."""
        ...
