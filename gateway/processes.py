"""Child processes: spawn with one line on standard input, forward what they print, report how they ended.

A child's standard input stays open as long as this process lives, so its end-of-file tells the child that its parent
is gone, however the parent died. No new session or process group: a SIGTERM to the group must reach the children.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

TAIL_LINES = 20
LINE_BYTES = 2000
"""A longer line of a child's output is cut there."""

_CHUNK_BYTES = 65536
_LAUNCH_LINE_MAX_BYTES = 32 * 1024
"""Below the smallest pipe capacity we meet (64 KiB), so that writing it never blocks."""

_OUTPUT_END_SECONDS = 1.0
_KILLED_SECONDS = 5.0


class ChildExit(Struct, frozen=True, kw_only=True):
    """How a child ended. Both codes are None when it could not be started; then `stderr_tail` says why."""

    exit_code: int | None = None
    signal: int | None = None
    stderr_tail: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """In words, for a log line or a status page."""
        if self.signal is not None:
            return f"signal {self.signal}"
        return "could not be started" if self.exit_code is None else f"exit code {self.exit_code}"


class LineCutter:
    """Bytes in any pieces → lines of bounded length. Undecodable bytes and control characters are replaced."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes. The rest of an overlong line is dropped."""
        *complete, rest = (self._rest + data).split(b"\n")
        lines: list[str] = []
        for line in complete:
            if not self._skipping:
                lines.append(_readable(line))
            self._skipping = False
        if len(rest) > LINE_BYTES and not self._skipping:
            lines.append(_readable(rest))
            self._skipping = True
        self._rest = b"" if self._skipping else rest
        return lines

    def end(self) -> list[str]:
        """The last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return [_readable(rest)] if rest else []


class ChildProcess:
    """One spawned child. `terminate` and `kill` are safe at any time; `wait` may be called once."""

    def __init__(self, process: asyncio.subprocess.Process, stdin_fd: int, output: "_Output") -> None:
        self._process = process
        self._stdin_fd = stdin_fd
        self._output = output

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """SIGTERM."""
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        if self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> ChildExit:
        """Until the child has ended and its output was read. Closes everything that belonged to it.

        When this is cancelled, the child is killed.
        """
        try:
            try:
                code = await self._process.wait()
            except asyncio.CancelledError:
                self.kill()
                async with asyncio.timeout(_KILLED_SECONDS):
                    await self._process.wait()
                raise
            # A grandchild may hold the pipe open, so its end is not waited for without limit.
            tail = await self._output.finish(_OUTPUT_END_SECONDS)
        finally:
            os.close(self._stdin_fd)
            self._output.close()
        if code < 0:
            return ChildExit(signal=-code, stderr_tail=tail)
        return ChildExit(exit_code=code, stderr_tail=tail)


async def spawn(
    command: Sequence[str],
    *,
    launch_line: bytes,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
) -> ChildProcess:
    """Start a child whose standard input begins with `launch_line`. Its output, both streams, goes to `on_line`.

    `environment` is all the child gets. Raises OSError when the command cannot be run, ValueError for an overlong line.
    """
    line = launch_line + b"\n"
    if len(line) > _LAUNCH_LINE_MAX_BYTES:
        raise ValueError(f"the launch line has {len(line)} bytes, the limit is {_LAUNCH_LINE_MAX_BYTES}")
    # Own pipes rather than asyncio's: with those, `wait` also waits for whoever else holds an end of them.
    stdin_read, stdin_write = os.pipe()
    output_read, output_write = os.pipe()
    try:
        os.write(stdin_write, line)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=stdin_read, stdout=output_write, stderr=output_write, env=dict(environment)
        )
    except BaseException:
        os.close(stdin_write)
        os.close(output_read)
        raise
    finally:
        os.close(stdin_read)
        os.close(output_write)
    return ChildProcess(process, stdin_write, await _Output.start(output_read, on_line))


class _Output:
    """Reads a child's output to its end; keeps the last lines."""

    def __init__(
        self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, on_line: Callable[[str], None]
    ) -> None:
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._transport = transport
        self._task = asyncio.create_task(self._read(reader))

    @classmethod
    async def start(cls, read_fd: int, on_line: Callable[[str], None]) -> "_Output":
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        pipe = os.fdopen(read_fd, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader, loop=loop), pipe)
        return cls(reader, transport, on_line)

    async def finish(self, timeout_seconds: float) -> tuple[str, ...]:
        await asyncio.wait([self._task], timeout=timeout_seconds)
        return tuple(self._tail)

    def close(self) -> None:
        self._task.cancel()
        self._transport.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        cutter = LineCutter()
        while data := await reader.read(_CHUNK_BYTES):
            self._keep(cutter.feed(data))
        self._keep(cutter.end())

    def _keep(self, lines: list[str]) -> None:
        for line in lines:
            self._tail.append(line)
            self._on_line(line)


def _readable(line: bytes) -> str:
    text = line[:LINE_BYTES].decode(errors="replace").rstrip()
    return "".join(character if character.isprintable() or character == "\t" else "�" for character in text)
