"""The gateway may be killed; its children notice by themselves."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import psutil

from tests.processes.serving import ENVIRONMENT, HERE, serving, settings_for, submit, until


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_children_of_a_killed_gateway_exit_and_the_next_gateway_serves(runtime_directory: Path) -> None:
    """After kill -9 of the parent, end-of-file on stdin ends worker and cachestore; stale sockets stop nobody."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        str(HERE / "gateway_stand_in.py"),
        str(runtime_directory),
        stdout=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert parent.stdout is not None
    async with asyncio.timeout(20):
        while not (line := await parent.stdout.readline()).startswith(b"["):  # log lines come first
            assert line
    pids: list[int] = json.loads(line)
    assert all(is_running(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    await parent.communicate()
    await until(lambda: not any(is_running(pid) for pid in pids), within_seconds=5.0)
    async with serving(settings_for(runtime_directory)) as dispatch:
        await submit(dispatch, "well_behaved").end()
