"""Message ⇄ bytes. One msgpack frame per message; bulk bytes never travel here (the cachestore leases files)."""

from typing import Generic, TypeVar, cast

import msgspec

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class MalformedMessage(Exception):
    """These bytes are no message of this direction. Says why, never quotes them: they may hold a prompt."""


class Codec(Generic[Incoming, Outgoing]):
    """Both directions of one connection, as seen from one side.

    `decode` gives a value of `Incoming` or raises MalformedMessage, whatever the bytes.
    """

    def __init__(self, incoming: object) -> None:
        # `object`, since a union of structs is no `type` to a type checker; the caller's annotation gives Incoming.
        self._decoder = msgspec.msgpack.Decoder(cast("type[Incoming]", incoming))
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Outgoing) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> Incoming:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError, OverflowError) as why:
            raise MalformedMessage(f"{len(data)} bytes: {why}") from None
