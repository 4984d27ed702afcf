"""Children: what they are told, what they print, how they end."""

import asyncio
import os
import sys

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.processes import LINE_BYTES, TAIL_LINES, ChildProcess, LineCutter, spawn


@given(st.lists(st.sampled_from([b"a", b"b\n", b"\n", b"\xff", b"x" * (LINE_BYTES + 1), b"\x1b[31m"]), max_size=20))
def test_pieces_do_not_matter_and_lines_are_bounded(pieces: list[bytes]) -> None:
    """However the bytes arrive, the lines are the same, short and printable."""

    def cut(data: list[bytes]) -> list[str]:
        cutter = LineCutter()
        lines = [line for piece in data for line in cutter.feed(piece)]
        return lines + cutter.end()

    whole = b"".join(pieces)
    lines = cut([whole[at : at + 1] for at in range(len(whole))])
    assert lines == cut(pieces)
    assert all(len(line) <= LINE_BYTES and (line.isprintable() or line == "") for line in lines)


async def start(code: str, lines: list[str], launch_line: bytes = b"{}") -> ChildProcess:
    return await spawn(
        [sys.executable, "-c", code],
        launch_line=launch_line,
        environment={"ONLY": "this"},
        on_line=lines.append,
    )


async def test_a_child_is_told_on_stdin_and_both_streams_are_forwarded() -> None:
    """One line on standard input, an environment of its own, and everything it prints comes back."""
    lines: list[str] = []
    code = (
        "import os, sys; print(sys.stdin.readline().strip()); print(sorted(os.environ), file=sys.stderr); sys.exit(7)"
    )
    child = await start(code, lines, b'{"model": "m"}')
    ended = await child.wait()
    assert ended.exit_code == 7
    assert '{"model": "m"}' in lines
    assert any("ONLY" in line and "PATH" not in line for line in lines)


async def test_the_tail_is_the_last_lines() -> None:
    """A crash report holds the end of what was printed, not its beginning."""
    lines: list[str] = []
    child = await start("for n in range(100): print(n)", lines)
    ended = await child.wait()
    assert ended.stderr_tail == tuple(str(number) for number in range(100 - TAIL_LINES, 100))
    assert len(lines) == 100


async def test_a_grandchild_that_holds_the_pipes_does_not_hide_the_exit() -> None:
    """The exit is the child's own, whoever inherited its streams."""
    lines: list[str] = []
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdin=0);"
        "print(p.pid)"
    )
    child = await start(code, lines)
    async with asyncio.timeout(15):
        ended = await child.wait()
    assert ended.exit_code == 0
    os.kill(int(lines[0]), 9)


async def test_a_child_sees_end_of_file_when_its_stdin_is_closed_by_our_death() -> None:
    """The write end is ours alone: another child started meanwhile must not hold it open."""
    lines: list[str] = []
    waits = "import sys; sys.stdin.readline(); sys.stdin.read()"
    first = await start(waits, lines)
    second = await start(waits, lines)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, first._stdin_fd)  # closes the pipe's end, as the system does when we die
    os.close(nowhere)
    async with asyncio.timeout(15):
        assert (await first.wait()).exit_code == 0
    second.kill()
    assert (await second.wait()).signal == 9
    second.kill()  # harmless after the end


async def test_a_cancelled_wait_kills_the_child() -> None:
    """Nobody is left behind by a gateway that stops in a hurry."""
    child = await start("import time; time.sleep(60)", [])
    waiting = asyncio.create_task(child.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_a_command_that_does_not_exist_leaks_nothing() -> None:
    """The error is the system's own, and every descriptor is closed again."""
    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        await spawn(["/nonexistent"], launch_line=b"{}", environment={}, on_line=lambda _: None)
    with pytest.raises(ValueError, match="launch line"):
        await spawn([sys.executable], launch_line=b"x" * 40_000, environment={}, on_line=lambda _: None)
    assert psutil.Process().num_fds() <= before + 1  # the event loop's own watcher
