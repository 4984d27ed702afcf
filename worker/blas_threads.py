"""How many threads OpenBLAS multiplies with in this process: as many as there are cores that nobody else uses.

A product waits for the slowest of its threads, and a pass is some hundred products. With both of two cores a model
computes 1.3 times as fast as with one, but a decode step took 0.9 s instead of 0.1 s when others had work for these
cores, too. So cores are counted off: one for every other worker that is at work, which the board says at once, and what
any process used lately, which the system says. Where no OpenBLAS was preloaded (`gateway/blas.py`), or it was given
one thread, or its threads are OpenMP's, there is nothing to do.
"""

import ctypes
import os
from collections.abc import Callable, Mapping

import psutil

_NAMES = (
    ("scipy_openblas_set_num_threads64_", "scipy_openblas_get_parallel64_"),
    ("openblas_set_num_threads", "openblas_get_parallel"),
)
_PTHREADS = 1
"""A build with threads of its own only notes the number. One on OpenMP frees buffers then, perhaps under a product."""

_LOOKED_AFTER_SECONDS = 0.5


def threads_of(most: int, cores: int, *, workers: int, busy_elsewhere: float) -> int:
    """How many threads one of `workers` that compute now gets, where they may have `most` together on a machine of so
    many `cores`, of which other processes use `busy_elsewhere`."""
    return max(1, min(most // max(1, workers), round(cores - busy_elsewhere)))


class BusyCores:
    """How many cores all other processes used since it was asked last; what a host took from this machine counts."""

    def __init__(self) -> None:
        self._busy_seconds, self._own_seconds = self._look()

    def since_last(self, seconds: float) -> float:
        """`seconds` is how long ago that was."""
        busy_before, own_before = self._busy_seconds, self._own_seconds
        self._busy_seconds, self._own_seconds = self._look()
        elsewhere = (self._busy_seconds - busy_before) - (self._own_seconds - own_before)
        return max(0.0, elsewhere / seconds)

    @staticmethod
    def _look() -> tuple[float, float]:
        machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        # Linux counts guests as users already.
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return sum(machine) - idle - guests, own.user + own.system


class BlasThreads:
    """Call `share` before each step; cheap when nothing changed."""

    def __init__(
        self,
        most: int,
        cores: int,
        set_threads: Callable[[int], None],
        busy_elsewhere: Callable[[float], float],
        clock: Callable[[], float],
    ) -> None:
        self._most = most
        self._cores = cores
        self._threads = most
        self._set_threads = set_threads
        self._busy_elsewhere = busy_elsewhere
        self._clock = clock
        self._looked_at = clock()
        self._busy = 0.0

    def share(self, workers: int) -> None:
        """`workers` compute now, this one included."""
        if (seconds := self._clock() - self._looked_at) >= _LOOKED_AFTER_SECONDS:
            self._busy = self._busy_elsewhere(seconds)
            self._looked_at += seconds
        threads = threads_of(self._most, self._cores, workers=workers, busy_elsewhere=self._busy)
        if threads != self._threads:
            self._set_threads(threads)
            self._threads = threads


def blas_threads(clock: Callable[[], float], environment: Mapping[str, str] = os.environ) -> BlasThreads | None:
    """Of the OpenBLAS in this process, if it has one with several threads."""
    most = environment.get("OPENBLAS_NUM_THREADS", "")
    if not most.isdigit() or int(most) < 2:
        return None
    process = ctypes.CDLL(None)
    for setter_name, kind_name in _NAMES:
        setter, kind = getattr(process, setter_name, None), getattr(process, kind_name, None)
        if setter is None or kind is None or kind() != _PTHREADS:
            continue
        setter.argtypes, setter.restype = [ctypes.c_int], None
        return BlasThreads(int(most), psutil.cpu_count() or int(most), setter, BusyCores().since_last, clock)
    return None
