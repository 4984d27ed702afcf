"""What the dispatch task owns. Nobody else changes any of it, so nothing here needs a lock."""

from collections.abc import Callable

from msgspec import Struct

from gateway.admission import RecentEnds
from gateway.fleet import Fleet
from gateway.fresh_books import FreshBooks
from gateway.load_times import LoadTimes
from gateway.model_waiters import ModelWaiters
from gateway.open_requests import OpenRequests
from gateway.worker_processes import WorkerProcesses


class DispatchState(Struct, frozen=True, kw_only=True):
    """There from before `run` until after it. `clock` is monotonic; `ends` are those of requests, by their model."""

    fleet: Fleet
    open_requests: OpenRequests
    waiters: ModelWaiters
    processes: WorkerProcesses
    books: FreshBooks
    ends: RecentEnds
    loads: LoadTimes
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
