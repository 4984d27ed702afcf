"""How many threads OpenBLAS multiplies with in this process: all of them while this model computes alone, else a part.

A product waits for the slowest of its threads. When two workers on two cores each take both, a pass takes up to twice
as long as with one core each; when only one of them works, the other core would be idle. So the workers divide the
cores by how many of them are at work, which the board says. Where no OpenBLAS was preloaded (`gateway/blas.py`), or it
was given one thread, there is nothing to do.
"""

import ctypes
import os
from collections.abc import Callable, Mapping

_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads")


def threads_of(most: int, workers: int) -> int:
    """Of `most` threads, what each of `workers` that compute now gets."""
    return max(1, most // max(1, workers))


class BlasThreads:
    """Call `share` with how many workers compute, this one included; cheap when that did not change."""

    def __init__(self, most: int, set_threads: Callable[[int], None]) -> None:
        self._most = most
        self._threads = most
        self._set_threads = set_threads

    def share(self, workers: int) -> None:
        threads = threads_of(self._most, workers)
        if threads != self._threads:
            self._set_threads(threads)
            self._threads = threads


def blas_threads(environment: Mapping[str, str] = os.environ) -> BlasThreads | None:
    """Of the OpenBLAS in this process, if it has one with several threads."""
    most = environment.get("OPENBLAS_NUM_THREADS", "")
    if not most.isdigit() or int(most) < 2:
        return None
    process = ctypes.CDLL(None)
    for name in _SETTERS:
        if (setter := getattr(process, name, None)) is not None:
            setter.argtypes, setter.restype = [ctypes.c_int], None
            return BlasThreads(int(most), setter)
    return None
