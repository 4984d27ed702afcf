"""Two real workers on one device: they take turns, and neither waits for ever for one that died or was stopped."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.blas import worker_environment
from protocol.generation import Finished, Prefilling
from protocol.ids import RequestId
from tests.processes.worker_pair import Pair

ROOT = Path(__file__).parents[2]
LONG = tuple(range(65, 91)) * 120


@pytest.fixture
def pair(
    script_model: Path, runtime_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Pair]]:
    """Starts the pair when called, so that a test can prepare the directory."""
    base = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    environment = worker_environment(base, tmp_path_factory.mktemp("blas")).environment
    started: list[Pair] = []

    def start() -> Pair:
        started.append(Pair(script_model, "fair", runtime_directory, environment))
        return started[-1]

    yield start
    for one in started:
        one.close()


def has_begun(pair: Pair, request_id: RequestId) -> bool:
    return any(isinstance(event, Prefilling) and event.done_tokens for _, event in pair.of(request_id))


def test_both_serve_and_leave_nothing(pair: Callable[[], Pair], runtime_directory: Path) -> None:
    """Prompts and rows in both at once all end well; each has its page, and takes it down when it drains."""
    two = pair()
    assert len(list((runtime_directory / "board").iterdir())) == 2
    requests = [two.generate(worker, LONG[:900], 30) for worker in (1, 2) for _ in range(3)]

    assert all(isinstance(two.end(request_id)[1], Finished) for request_id in requests)
    assert two.drain() == [0, 0]
    assert list((runtime_directory / "board").iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_neighbour_lost_amid_its_prompt(pair: Callable[[], Pair], how: signal.Signals) -> None:
    """Killed or stopped, lease in hand or not: the other's prompt is read all the same, and soon."""
    two = pair()
    two.expected_exits = 1
    lost = two.generate(1, LONG, 5)
    two.until(lambda: has_begun(two, lost))
    two.processes[0].send_signal(how)
    asked = two.generate(2, LONG, 5)
    _, end = two.end(asked)

    assert isinstance(end, Finished)


def test_a_board_that_cannot_be_made(pair: Callable[[], Pair], runtime_directory: Path) -> None:
    """The workers serve all the same, and say once that they take no turns."""
    (runtime_directory / "board").write_bytes(b"in the way")
    two = pair()
    _, end = two.end(two.generate(1, LONG[:300], 5))

    assert isinstance(end, Finished)
    assert "neighbours_ignored" in (runtime_directory / "1.log").read_text()
