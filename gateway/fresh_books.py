"""Who waits for the books of every process that serves, asked for now. Owned by the dispatch task."""

from gateway.dispatch_terms import BooksWanted
from gateway.fleet import Fleet
from gateway.fleet_terms import Draining, Ready
from gateway.worker_socket import WorkerSocket
from protocol.ids import Incarnation


class FreshBooks:
    """Each question is over when the last Pong to it came, or when whoever asked has waited long enough."""

    def __init__(self) -> None:
        self._wanted: list[BooksWanted] = []

    async def want(self, wanted: BooksWanted, fleet: Fleet, socket: WorkerSocket) -> None:
        """Ask every process that is meant. One that is known to be held is not asked for its books alone: it would not
        answer, and what is asked of it piles up in its socket."""
        meant = Ready if wanted.whose == "ready" else (Ready, Draining)
        for model in fleet.models:
            state = fleet.state(model)
            is_in_vain = wanted.whose == "ready" and fleet.is_suspended(model)
            if isinstance(state, meant) and not is_in_vain:
                wanted.asked[await socket.ping_if_there(state.incarnation)] = state.incarnation
        self._wanted.append(wanted)
        self._settle()

    def came(self, nonce: int) -> None:
        """A Pong with this nonce is here."""
        for wanted in self._wanted:
            wanted.asked.pop(nonce, None)
        self._settle()

    def ended(self, incarnation: Incarnation) -> None:
        """This process will not answer any more."""
        for wanted in self._wanted:
            for nonce in [nonce for nonce, asked in wanted.asked.items() if asked == incarnation]:
                del wanted.asked[nonce]
        self._settle()

    def _settle(self) -> None:
        for wanted in self._wanted:
            if not wanted.asked:
                wanted.fresh.set()
        self._wanted = [wanted for wanted in self._wanted if wanted.asked]

    def forget(self, wanted: BooksWanted) -> None:
        """Nobody waits for this one any more."""
        if wanted in self._wanted:
            self._wanted.remove(wanted)
