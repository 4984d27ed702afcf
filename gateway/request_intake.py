"""What others ask of dispatch, each in its turn: requests and their cancelling, orders, unloads, the end."""

from gateway.abilities import cannot_do
from gateway.admission import model_refusal
from gateway.dispatch_state import DispatchState
from gateway.dispatch_terms import DispatchSettings, ModelFolder, ModelFolders
from gateway.fleet_effects import FleetEffects
from gateway.fleet_failures import shutting_down
from gateway.fleet_terms import Draining, ModelWanted, Ready, ShutdownAsked, StopAsked, WaitersLeft
from gateway.model_waiters import Outcome
from gateway.open_requests import OpenRequest
from gateway.ports import CacheOrder
from gateway.worker_socket import WorkerSocket
from protocol.failures import Failure, FailureKind
from protocol.generation import Cancel
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass


class RequestIntake:
    """Called by the loop for every entry of its inbox that somebody in the gateway asked for."""

    def __init__(
        self,
        settings: DispatchSettings,
        folders: ModelFolders,
        state: DispatchState,
        effects: FleetEffects,
        socket: WorkerSocket,
    ) -> None:
        self._settings = settings
        self._folders = folders
        self._fleet = state.fleet
        self._open = state.open_requests
        self._waiters = state.waiters
        self._processes = state.processes
        self._ends = state.ends
        self._clock = state.clock
        self._effects = effects
        self._socket = socket

    async def submitted(self, request: OpenRequest) -> None:
        """Refuse it at once, or let it wait for its model."""
        model = request.model
        folder = self._folders.find(model)
        if folder is None or folder.problem is not None:
            request.fail(cannot_serve(model, folder))
            return
        unable = cannot_do(model, folder.kind, request.work)
        if unable is not None:
            request.fail(unable)
            return
        full = self._full(request) if request.takes_place else None
        if full is not None:
            request.fail(full)
            return
        self._open.wait(request)
        if request.takes_place:
            await self._effects.tell(model_wanted(model, folder))
        worker = self._processes.find(self._fleet.incarnation(model))
        if request.phase == "waiting" and worker is not None and worker.has_tokenizer:
            await self._effects.release(model, worker.incarnation, what="tokenizing")

    def _count(self, model: ModelName, latency_class: LatencyClass | None) -> int:
        """Those that go before a new one of this class: nobody is refused for the sake of who comes after them, or of
        who is gone although the process has yet to say so."""
        incarnation = self._fleet.incarnation(model)
        sent = self._open.sent_to(incarnation) if incarnation is not None else ()
        return sum(
            latency_class is None
            or (other.latency_class is not None and other.latency_class.rank <= latency_class.rank)
            for other in (*self._open.waiting(model), *sent)
            if other.takes_place and other.phase != "cancelled"
        )

    def _full(self, request: OpenRequest) -> Failure | None:
        """A process that serves takes its rows off those that wait."""
        model = request.model
        state = self._fleet.state(model)
        return model_refusal(
            model,
            ahead=self._count(model, request.latency_class),
            max_queued=self._settings.max_waiting_per_model,
            rows=state.limits.max_rows if isinstance(state, Ready) else 0,
            next_seconds=self._ends.next_of(model, self._clock()),
        )

    async def cancelled(self, request_id: RequestId) -> None:
        """Its client is gone."""
        request = self._open.find(request_id)
        if request is None:
            return
        request.fail(Failure(kind=FailureKind.CANCELLED, message="the client is gone"))
        if request.incarnation is None:
            self._open.remove(request)
            waits = any(other.takes_place for other in self._open.waiting(request.model))
            if request.takes_place and not waits and not self._waiters.wanted(request.model):
                await self._effects.tell(WaitersLeft(model=request.model))
            return
        self._open.cancel(request)
        # When the process is gone its exit takes the request out of the book.
        await self._socket.send_if_there(request.incarnation, Cancel(request_id=request_id))

    async def unload_asked(self, model: ModelName, outcome: Outcome) -> None:
        """`outcome` is resolved when the process that the model has now is gone."""
        incarnation = self._fleet.incarnation(model)
        await self._effects.tell(StopAsked(model=model))
        if incarnation is None:
            outcome.set_result(None)
            return
        self._waiters.wait_for_end(incarnation, outcome)
        self._effects.tell_if_stranded(model)

    async def ordered(self, model: ModelName, order: CacheOrder) -> None:
        """One that loads has nothing to unpin or to forget, and its budget is looked at when it is ready. One that
        drains has, and stores it before it goes."""
        state = self._fleet.state(model)
        if isinstance(state, Ready | Draining):
            await self._socket.send_if_there(state.incarnation, order)

    async def drain_deadline_passed(self) -> None:
        """Whatever is still open ends now, and every process is asked to go."""
        for request in self._open.everything():
            request.fail(shutting_down())
            if request.incarnation is None:
                self._open.remove(request)
            elif request.phase != "cancelled":
                self._open.cancel(request)
                await self._socket.send_if_there(request.incarnation, Cancel(request_id=request.request_id))
        drain_seconds = self._settings.fleet.terminate_grace_seconds
        await self._effects.tell(ShutdownAsked(drain_seconds=drain_seconds))


def model_wanted(model: ModelName, folder: ModelFolder) -> ModelWanted:
    """That somebody wants this model, with what the fleet must know of it."""
    return ModelWanted(model=model, weight_bytes=folder.weight_bytes, kind=folder.kind)


def cannot_serve(model: ModelName, folder: ModelFolder | None) -> Failure:
    """The refusal of a model that the catalog does not have, or has with a problem."""
    if folder is None:
        return Failure(
            kind=FailureKind.MODEL_NOT_FOUND, message=f"no model {model!r}; GET /v1/models lists those there are"
        )
    return Failure(kind=FailureKind.MODEL_UNAVAILABLE, message=f"model {model} cannot be loaded: {folder.problem}")
