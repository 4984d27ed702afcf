"""A cachestore that tells its books and forgets. A program; dies when its directory is named `dies_at_start`.

It answers Forget behind the next Describe, so that replies come in another order than requests.
"""

import os
import sys
import threading
from pathlib import Path

import msgspec

from protocol.addresses import cachestore_socket
from protocol.blocks import BlockReply, BlockRequest, Describe, Described, Forget, Forgotten
from protocol.launch import CachestoreLaunch
from protocol.sockets import Listener


def exit_with_parent() -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock, held here, would abort the interpreter's shutdown
        pass
    os._exit(0)


def main() -> int:
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=CachestoreLaunch)
    if launch.directory == "dies_at_start":
        sys.stderr.write("no such disk\n")
        return 3
    threading.Thread(target=exit_with_parent, daemon=True).start()
    path = cachestore_socket(Path(launch.runtime_directory))
    listener: Listener[BlockRequest, BlockReply] = Listener(path, BlockRequest)  # pyright: ignore[reportArgumentType]
    forgets: list[int] = []
    while True:
        received = listener.receive(1.0)
        if received is None:
            continue
        peer, request = received
        if isinstance(request, Forget):
            forgets.append(request.call_id)
        if isinstance(request, Describe):
            listener.send(
                peer,
                Described(
                    call_id=request.call_id,
                    blocks=7,
                    file_bytes=0,
                    quota_bytes=launch.quota_bytes,
                    leases=0,
                    published=0,
                    written_bytes=0,
                    evicted=0,
                    quarantined=0,
                ),
            )
            while forgets:
                listener.send(peer, Forgotten(call_id=forgets.pop(), blocks=3, file_bytes=9))


if __name__ == "__main__":
    sys.exit(main())
