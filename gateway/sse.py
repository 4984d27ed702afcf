"""Server-sent events, sent for as long as somebody listens.

Nothing here creates a task or arms a timer per event: a stream costs three tasks in all.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Literal

from litestar.types import Receive, Send

from gateway.event_bytes import KEEPALIVE

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
"""Of every event stream; the last one asks nginx not to collect."""

StreamEnd = Literal["sent", "disconnected"]


async def until_disconnected(receive: Receive) -> None:
    """Return when the client is gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_stream(
    send: Send,
    chunks: AsyncIterator[bytes],
    *,
    headers: tuple[tuple[bytes, bytes], ...],
    disconnected: "asyncio.Task[None]",
    keepalive_seconds: float,
    keepalive: Callable[[], bytes] = lambda: KEEPALIVE,
) -> StreamEnd:
    """Answer 200 with the chunks until they end or the client is gone.

    A chunk is a number of whole events, perhaps none. The comment that `keepalive` gives goes out whenever nothing else
    did for `keepalive_seconds`, always between two chunks. `disconnected` runs `until_disconnected`.
    """
    await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *headers]})
    stream = _Stream(send, keepalive_seconds, keepalive)
    pump = asyncio.create_task(stream.pump(chunks))
    keeper = asyncio.create_task(stream.keep_alive())
    try:
        await asyncio.wait({pump, keeper, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if pump.done():
            await pump
            return "sent"
        if keeper.done() and not disconnected.done():
            await keeper
        return "disconnected"
    finally:
        pump.cancel()
        keeper.cancel()
        await asyncio.gather(pump, keeper, return_exceptions=True)


class _Stream:
    """The sending side of one stream. Two tasks write whole events, one at a time."""

    def __init__(self, send: Send, keepalive_seconds: float, keepalive: Callable[[], bytes]) -> None:
        self._send = send
        self._keepalive_seconds = keepalive_seconds
        self._keepalive = keepalive
        self._clock = asyncio.get_running_loop().time
        self._last_sent = self._clock()
        self._writing = asyncio.Lock()

    async def pump(self, chunks: AsyncIterator[bytes]) -> None:
        async for chunk in chunks:
            if chunk:
                await self._write(chunk)
        await self._writing.acquire()  # for good: nothing may follow the end
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self) -> None:
        while True:
            idle_seconds = self._clock() - self._last_sent
            if idle_seconds >= self._keepalive_seconds:
                await self._write(self._keepalive())
            else:
                await asyncio.sleep(self._keepalive_seconds - idle_seconds)

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._last_sent = self._clock()
