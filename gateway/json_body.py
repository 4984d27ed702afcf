"""Reading a request's body: bounded, and only if it is plain JSON. For every dialect."""

from collections.abc import Iterable

from litestar.types import Receive
from msgspec import Struct

from protocol.failures import Failure, FailureKind


class ClientGone(Struct, frozen=True):
    """The client left before its body was whole; nobody reads an answer."""


async def read_json_body(
    headers: Iterable[tuple[bytes, bytes]], receive: Receive, *, max_body_bytes: int
) -> bytes | Failure | ClientGone:
    """The body's bytes, not decoded.

    The body is read before its media type is refused, so that the connection stays usable; one that is over the
    limit is left unread, and the server closes the connection.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return ClientGone()
        body += message["body"]
        if len(body) > max_body_bytes:
            return Failure(
                kind=FailureKind.BODY_TOO_LARGE,
                message=f"The body is over this server's limit of {max_body_bytes} bytes. Send a shorter conversation.",
            )
        if not message["more_body"]:
            return not_plain_json(headers) or bytes(body)


def not_plain_json(headers: Iterable[tuple[bytes, bytes]]) -> Failure | None:
    """Why these headers are not those of a plain JSON body. A missing Content-Type is let through."""
    for name, value in headers:
        text = value.decode("latin-1").strip().lower()
        if name == b"content-encoding" and text not in ("", "identity"):
            return _unsupported_media("The body is compressed. Send it without Content-Encoding.")
        if name == b"content-type" and not _is_json(text):
            return _unsupported_media("The body is not JSON in UTF-8. Send it as `Content-Type: application/json`.")
    return None


def _is_json(content_type: str) -> bool:
    media_type, *parameters = (part.strip() for part in content_type.split(";"))
    charsets = [value.strip('" ') for key, _, value in (part.partition("=") for part in parameters) if key == "charset"]
    return media_type == "application/json" and all(charset in ("utf-8", "utf8") for charset in charsets)


def _unsupported_media(message: str) -> Failure:
    return Failure(kind=FailureKind.UNSUPPORTED_MEDIA_TYPE, message=message)
