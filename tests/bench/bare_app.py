# pyright: basic
"""What any gateway costs: an ASGI app that reads the request and only answers. Started by `gateway_bench.py`.

    python bare_app.py SOCKET_FILE_DESCRIPTOR

The same server as mlxd's, uvicorn with the same settings. A body that asks for a stream gets as many events as mlxd
sends for one token.
"""

import socket
import sys

import uvicorn

_WHOLE = b'{"id": "chatcmpl-1", "object": "chat.completion", "choices": [{"message": {"content": "hi"}}]}'
_EVENTS = [b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'] * 3 + [b"data: [DONE]\n\n"]


async def app(scope, receive, send) -> None:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    is_stream = b'"stream": true' in body
    kind = b"text/event-stream" if is_stream else b"application/json"
    headers = [(b"content-type", kind)]
    if not is_stream:
        headers.append((b"content-length", str(len(_WHOLE)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in _EVENTS if is_stream else [_WHOLE]:
        await send({"type": "http.response.body", "body": piece, "more_body": is_stream})
    if is_stream:
        await send({"type": "http.response.body", "body": b""})


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", server_header=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
