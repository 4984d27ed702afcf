"""A worker's conduct on a device that it shares: joins the board, the lease and the rules of `neighbours`."""

from collections.abc import Callable

from worker.board import Board
from worker.neighbours import Hold, Load, Permits, Sharing, SharingSettings
from worker.prefill_lease import PrefillLease


class SharedDevice:
    """A `DeviceSharing` for real. Owned by the step thread; no call waits for another process."""

    def __init__(
        self,
        board: Board,
        lease: PrefillLease,
        settings: SharingSettings,
        *,
        clock: Callable[[], float],
        share_cores: Callable[[int], None] = lambda _workers: None,
    ) -> None:
        """`share_cores` is told before each step how many workers are at work, this one included."""
        self._share_cores = share_cores
        self._board = board
        self._lease = lease
        self._clock = clock
        self._sharing = Sharing(board.key, settings)

    def ask(self, load: Load, prefill_rank: int | None) -> Permits:
        now = self._look(load)
        if prefill_rank is None:
            self._sharing.wants_no_prefill(now)
            prefill = None
        else:
            prefill = self._sharing.hold_prefill(prefill_rank, now) or self._hold_for_lease(now)
        decode = self._sharing.hold_decode(now)
        others = self._sharing.others_at_work(now)
        self._share_cores(1 + others)
        self._publish()
        return Permits(prefill=prefill, decode=decode, company=others > 0)

    def rows_elsewhere(self) -> int | None:
        return self._sharing.rows_elsewhere(self._clock())

    def has_company(self, load: Load) -> bool:
        now = self._look(load)
        self._publish()
        return self._sharing.others_at_work(now) > 0

    def slice_started(self) -> None:
        self._sharing.slice_started(self._clock())
        self._publish()

    def slice_ended(self) -> None:
        self._sharing.slice_ended(self._clock())
        self._publish()

    def decoded(self) -> None:
        self._sharing.decoded(self._clock())

    def idle(self, load: Load) -> None:
        now = self._look(load)
        self._sharing.idle(now)
        self._lease.release()
        self._publish()

    def close(self) -> None:
        """Take the page down and give the lease back."""
        self._board.close()
        self._lease.close()

    def _look(self, load: Load) -> float:
        now = self._clock()
        self._sharing.sees(load, self._board.snapshot(), now)
        if not self._sharing.needs_lease:
            self._lease.release()
        return now

    def _hold_for_lease(self, now: float) -> Hold | None:
        if self._lease.try_take() == "refused":
            return self._sharing.lease_refused(now)
        self._sharing.lease_taken()
        return None

    def _publish(self) -> None:
        self._board.publish(self._sharing.activity())
