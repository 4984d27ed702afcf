"""What a browser must read before it lets a web page of a listed origin call this server. Decides only.

A page of any other origin is refused at the door (`auth`), so it never meets these.
"""

import re
from collections.abc import Sequence
from typing import Protocol

Headers = tuple[tuple[bytes, bytes], ...]

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,128}")
_MOST_NAMES = 64
_PREFLIGHT_SECONDS = 600


class Knock(Protocol):
    """What is known of a request at the door: `auth.Knock`."""

    @property
    def method(self) -> str: ...

    def values(self, name: bytes) -> list[str]: ...


def page_headers(knock: Knock, allowed_origins: Sequence[str]) -> Headers:
    """What every answer to a listed page carries, refusals too: without it the page could not read why.

    Keys travel in headers, never in cookies, so no credentials are allowed and every header of ours may be read.
    """
    origin = _listed_origin(knock, allowed_origins)
    if origin is None:
        return ()
    return (
        (b"access-control-allow-origin", origin.encode()),
        (b"access-control-expose-headers", b"*"),
        (b"vary", b"Origin"),
    )


def preflight_headers(knock: Knock, allowed_origins: Sequence[str]) -> Headers | None:
    """What to say, beside `page_headers`, to a browser that asks whether a page may call; None: it asks no such thing.

    It sends no key with this question, so the answer must tell nothing that a key would be needed for: it is the same
    for every path.
    """
    asked = knock.values(b"access-control-request-method")
    if knock.method != "OPTIONS" or not asked or _listed_origin(knock, allowed_origins) is None:
        return None
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-max-age", b"%d" % _PREFLIGHT_SECONDS),
    ]
    names = [name.strip() for value in knock.values(b"access-control-request-headers") for name in value.split(",")]
    if 0 < len(names) <= _MOST_NAMES and all(map(_HEADER_NAME.fullmatch, names)):
        headers.append((b"access-control-allow-headers", ", ".join(names).encode()))
    if knock.values(b"access-control-request-private-network") == ["true"]:
        headers.append((b"access-control-allow-private-network", b"true"))
    return tuple(headers)


def _listed_origin(knock: Knock, allowed_origins: Sequence[str]) -> str | None:
    origins = knock.values(b"origin")
    if len(origins) != 1 or origins[0] not in allowed_origins:
        return None
    return origins[0]
