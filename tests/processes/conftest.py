"""Workers for the tests here, each of which must leave no child and no file descriptor behind."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes.running_worker import Start, gateway_environment, started


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    this = psutil.Process()
    descriptors = this.num_fds()
    yield
    left = this.children(recursive=True)
    for child in left:
        child.kill()
    assert left == []
    # The event loop of the test itself is still open here, hence not zero.
    assert this.num_fds() <= descriptors + 5


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the gateway starts workers with."""
    return gateway_environment(tmp_path_factory.mktemp("blas"))


@pytest.fixture
def start(runtime_directory: Path, environment: dict[str, str]) -> Iterator[Start]:
    """Start one worker; it is killed at the end of the test if it still runs."""
    with tempfile.TemporaryDirectory() as logs, started(runtime_directory, environment, Path(logs)) as start_one:
        yield start_one
