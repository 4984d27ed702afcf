"""Who waits for the books of every ready process, asked for now. Owned by the dispatch task."""

from gateway.dispatch_terms import BooksWanted
from gateway.fleet import Fleet
from gateway.fleet_terms import Ready
from gateway.worker_socket import WorkerSocket


class FreshBooks:
    """Each question is over when the last Pong to it came, or when whoever asked has waited long enough."""

    def __init__(self) -> None:
        self._wanted: list[BooksWanted] = []

    async def want(self, wanted: BooksWanted, fleet: Fleet, socket: WorkerSocket) -> None:
        """Ask every process that is ready."""
        for model in fleet.models:
            state = fleet.state(model)
            if isinstance(state, Ready):
                wanted.nonces.add(await socket.ping_if_there(state.incarnation))
        if wanted.nonces:
            self._wanted.append(wanted)
        else:
            wanted.fresh.set()

    def came(self, nonce: int) -> None:
        """A Pong with this nonce is here."""
        for wanted in self._wanted:
            wanted.nonces.discard(nonce)
            if not wanted.nonces:
                wanted.fresh.set()
        self._wanted = [wanted for wanted in self._wanted if wanted.nonces]

    def forget(self, wanted: BooksWanted) -> None:
        """Nobody waits for this one any more."""
        if wanted in self._wanted:
            self._wanted.remove(wanted)
