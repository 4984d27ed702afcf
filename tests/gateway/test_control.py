"""The service's listening socket."""

import asyncio
import socket

from gateway.control import open_port


async def test_answers_do_not_wait_for_the_clients_acknowledgement() -> None:
    """Nagle's algorithm is off on every accepted connection: with it each answer of two writes takes 40 ms longer."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        connection: socket.socket = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with open_port("127.0.0.1", 0) as listener:
        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await accepted != 0
            writer.close()
