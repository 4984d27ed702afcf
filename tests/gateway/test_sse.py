"""Streams: whole events, comments in between, and an end when nobody listens."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway import sse
from tests.fakes.openai_app import Answer, until


class Wire:
    """Both sides of one exchange. `gate` holds up the writer while it is clear."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.client_left = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.gate.wait()
        self.sent.append(message)

    async def receive(self) -> Any:
        await self.client_left.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def stream(self, chunks: AsyncIterator[bytes], *, keepalive_seconds: float) -> "asyncio.Task[sse.StreamEnd]":
        disconnected = asyncio.create_task(sse.until_disconnected(self.receive))

        async def run() -> sse.StreamEnd:
            try:
                return await sse.send_stream(
                    self.send,
                    chunks,
                    headers=((b"x-more", b"1"),),
                    disconnected=disconnected,
                    keepalive_seconds=keepalive_seconds,
                )
            finally:
                disconnected.cancel()

        return asyncio.create_task(run())


async def chunks_of(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_chunks_arrive_in_order_and_the_body_ends_once() -> None:
    """All chunks, empty ones skipped, then exactly one end, with headers that keep proxies from collecting."""
    wire = Wire()
    end = await wire.stream(chunks_of(b"data: 1\n\n", b"", b"data: 2\n\n"), keepalive_seconds=10)
    answer = Answer(wire.sent)
    assert end == "sent"
    assert (answer.status, answer.body, answer.is_whole) == (200, b"data: 1\n\ndata: 2\n\n", True)
    assert [message.get("more_body") for message in wire.sent[1:]] == [True, True, False]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-more"] == "1"


async def test_silence_is_filled_with_comments_until_the_next_event() -> None:
    """A client's idle timeout never fires: comments come by the gateway's own clock, and stop with the stream."""
    wire = Wire()
    resume = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await resume.wait()
        yield b"data: 2\n\n"

    stream = wire.stream(slow(), keepalive_seconds=0.01)
    await until(lambda: wire.body.count(sse.KEEPALIVE) >= 3)
    resume.set()
    assert await stream == "sent"
    comments = wire.body.count(sse.KEEPALIVE)
    assert wire.body == b"data: 1\n\n" + sse.KEEPALIVE * comments + b"data: 2\n\n"


async def test_a_comment_waits_for_the_event_that_is_being_written() -> None:
    """While an event is on its way to a slow client nothing else is written into it."""
    wire = Wire()
    resume = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await resume.wait()

    stream = wire.stream(slow(), keepalive_seconds=0.01)
    await until(lambda: bool(wire.sent))
    wire.gate.clear()
    before = len(wire.sent)
    await asyncio.sleep(0.05)  # several times the interval: what must not happen has no condition to wait on
    assert len(wire.sent) <= before + 1
    wire.gate.set()
    await until(lambda: wire.body.count(sse.KEEPALIVE) >= 1)
    resume.set()
    assert await stream == "sent"
    assert wire.body.replace(sse.KEEPALIVE, b"") == b"data: 1\n\n"


async def test_the_stream_ends_when_the_client_leaves() -> None:
    """Nobody listens: the chunks' iterator is ended at once, also while it waits or while a write is stuck."""
    wire = Wire()
    ended = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    stream = wire.stream(endless(), keepalive_seconds=10)
    await until(lambda: b"data: 1" in wire.body)
    wire.client_left.set()
    assert await stream == "disconnected"
    await asyncio.wait_for(ended.wait(), 5)


async def test_a_failing_write_is_raised_not_swallowed() -> None:
    """A send that raises ends the stream with that error."""

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("broken pipe")

    disconnected = asyncio.create_task(asyncio.Event().wait())
    try:
        with pytest.raises(OSError, match="broken pipe"):
            await sse.send_stream(
                send,
                chunks_of(b"data: 1\n\n"),
                headers=(),
                disconnected=disconnected,  # pyright: ignore[reportArgumentType]
                keepalive_seconds=10,
            )
    finally:
        disconnected.cancel()
