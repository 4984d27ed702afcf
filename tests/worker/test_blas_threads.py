"""Workers divide the cores by how many of them compute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import blas
from worker.blas_threads import BlasThreads, blas_threads, threads_of


@given(st.integers(1, 256), st.integers(0, 300))
def test_nobody_gets_none_and_all_together_no_more_than_there_are(most: int, workers: int) -> None:
    """Unless there are more workers than threads: then each has one."""
    threads = threads_of(most, workers)
    assert 1 <= threads <= most
    assert threads * workers <= most or threads == 1


def test_a_change_is_told_once() -> None:
    """It is asked before each step, so it must cost nothing when nothing changed."""
    told: list[int] = []
    threads = BlasThreads(4, told.append)
    for workers in (1, 1, 2, 2, 2, 3, 8, 1, 1):
        threads.share(workers)
    assert told == [2, 1, 4]


@pytest.mark.parametrize("environment", [{}, {"OPENBLAS_NUM_THREADS": "1"}, {"OPENBLAS_NUM_THREADS": "all"}])
def test_with_one_thread_there_is_nothing_to_do(environment: dict[str, str]) -> None:
    """As where no BLAS was preloaded."""
    assert blas_threads(environment) is None


PROGRAM = """
import ctypes
from worker.blas_threads import blas_threads
process = ctypes.CDLL(None)
names = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads")
now = next(getattr(process, name) for name in names if hasattr(process, name))
threads = blas_threads()
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
