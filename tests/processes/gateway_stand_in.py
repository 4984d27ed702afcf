"""A parent that the orphan test kills: serves one endless request, then prints its children's pids and waits."""

import asyncio
import json
import sys
import time
from pathlib import Path

from gateway.cachestore_child import CachestoreSettings
from gateway.dispatch import Dispatch
from protocol.ids import Incarnation
from protocol.launch import CachestoreLaunch
from tests.processes.serving import ENVIRONMENT, HERE, Folders, settings_for, status_of, submit, until


def cachestore_settings(runtime_directory: Path, directory: str = "anywhere") -> CachestoreSettings:
    return CachestoreSettings(
        command=(sys.executable, "-P", str(HERE / "fake_cachestore.py")),
        environment=ENVIRONMENT,
        launch=CachestoreLaunch(
            directory=directory, runtime_directory=str(runtime_directory), incarnation=Incarnation(0)
        ),
        describe_every_seconds=0.1,
        describe_within_seconds=5.0,
        terminate_grace_seconds=2.0,
        backoff_first_seconds=0.1,
        backoff_longest_seconds=0.2,
    )


async def main() -> None:
    runtime_directory = Path(sys.argv[1])
    settings = settings_for(runtime_directory, cachestore=cachestore_settings(runtime_directory))
    dispatch = Dispatch(settings, Folders(), clock=time.monotonic, unix_clock=time.time)
    running = asyncio.create_task(dispatch.run())
    stream = submit(dispatch, "well_behaved", "forever")
    await stream.has_text()
    await until(lambda: (books := dispatch.status().cachestore) is not None and books.state == "ready")
    cachestore = dispatch.status().cachestore
    assert cachestore is not None
    sys.stdout.write(json.dumps([status_of(dispatch, "well_behaved").pid, cachestore.pid]) + "\n")
    sys.stdout.flush()
    await running


if __name__ == "__main__":
    asyncio.run(main())
