"""Every test here must leave no child and no file descriptor behind."""

from collections.abc import Iterator

import psutil
import pytest


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
