"""A worker multiplies with the cores that nobody else uses."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import blas
from worker.blas_threads import BlasThreads, BusyCores, blas_threads, threads_of


@given(st.integers(1, 256), st.integers(0, 256), st.integers(0, 300), st.floats(0, 600))
def test_nobody_gets_none_nor_what_others_use(most: int, more: int, workers: int, busy: float) -> None:
    """All workers together take no more than they may, nor than there is beside others, unless each has only one."""
    threads = threads_of(most, most + more, workers=workers, busy_elsewhere=busy)
    assert 1 <= threads <= most
    assert threads == 1 or (threads * workers <= most and threads <= most + more - busy + 0.5)


@pytest.mark.parametrize(
    ("most", "cores", "workers", "busy", "threads"),
    [
        (2, 2, 1, 0.0, 2),
        (2, 2, 1, 0.3, 2),
        (2, 2, 1, 0.7, 1),
        (2, 2, 2, 0.0, 1),
        (8, 8, 1, 0.2, 8),
        (8, 8, 2, 3.9, 4),
        (8, 8, 1, 20.0, 1),
        (4, 16, 1, 4.0, 4),
        (4, 16, 1, 14.0, 2),
    ],
)
def test_who_gets_how_many(most: int, cores: int, workers: int, busy: float, threads: int) -> None:
    """A gateway that streams is no reason to halve a model's speed; a process that computes is, where it needs a core
    that the model would have."""
    assert threads_of(most, cores, workers=workers, busy_elsewhere=busy) == threads


def test_a_change_is_told_once_and_the_system_asked_now_and_then() -> None:
    """It is asked before each step, so it must cost nothing when nothing changed."""
    told: list[int] = []
    asked: list[float] = []
    now = 10.0

    def busy(seconds: float) -> float:
        asked.append(seconds)
        return 3.0 if now > 15 else 0.0

    threads = BlasThreads(4, 4, told.append, busy, lambda: now)
    for workers in (1, 1, 2, 2, 2, 3, 8, 1, 1):
        threads.share(workers)
    assert (told, asked) == ([2, 1, 4], [])
    for now in (10.2, 10.4, 11.0, 11.1, 16.0, 16.1):  # noqa: B007 - read by the clock
        threads.share(1)
    assert told == [2, 1, 4, 1]
    assert asked == [pytest.approx(1.0), pytest.approx(5.0)]


def test_what_others_use_is_seen() -> None:
    """A process that computes is about a core more than none, as far as it gets one; this process is not counted."""
    cores = BusyCores()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            cores.since_last(1.0)
            started = time.monotonic()
            while (seconds := time.monotonic() - started) < 1.0:
                pass  # as busy as the other
            assert 0.2 < cores.since_last(seconds) <= (os.cpu_count() or 1) + 0.5
        finally:
            other.kill()


@pytest.mark.parametrize("environment", [{}, {"OPENBLAS_NUM_THREADS": "1"}, {"OPENBLAS_NUM_THREADS": "all"}])
def test_with_one_thread_there_is_nothing_to_do(environment: dict[str, str]) -> None:
    """As where no BLAS was preloaded."""
    assert blas_threads(time.monotonic, environment) is None


PROGRAM = """
import ctypes
from worker.blas_threads import blas_threads
process = ctypes.CDLL(None)
names = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads")
now = next(getattr(process, name) for name in names if hasattr(process, name))
threads = blas_threads(lambda: 0.0)
said = [now()]
for workers in (2, 1):
    threads.share(workers)
    said.append(now())
print(said)
"""


@pytest.mark.skipif(sys.platform != "linux" or (os.cpu_count() or 1) < 2, reason="of Linux' CPU build")
def test_the_preloaded_library_does_what_it_is_told(tmp_path: Path) -> None:
    """In a process that has it as a worker has."""
    environment = {**blas.worker_environment({**os.environ, "OPENBLAS_NUM_THREADS": "2"}, tmp_path).environment}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[2, 1, 2]"
