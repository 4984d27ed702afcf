"""Reasoning on its way through a client that keeps conversations, and is to give it back unchanged. Decides only.

Nothing in it is secret from that client, which was shown the same text. The seal says that the text came from here and
was made for this caller: whatever else a client sends in its place is not shown to the model as its own thought.
"""

import base64
import binascii
import hashlib
import hmac
import zlib

_PREFIX = "mlxd1."
_TAG_BYTES = 16
_TEXT_MAX_BYTES = 8 * 1024**2


def seal(text: str, cache_scope: bytes) -> str:
    """An opaque string of ASCII."""
    data = text.encode()
    return _PREFIX + base64.urlsafe_b64encode(_tag(data, cache_scope) + zlib.compress(data)).decode()


def unseal(sealed: str, cache_scope: bytes) -> str | None:
    """The text, None when it was not sealed here for this caller."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        packed = base64.b64decode(sealed[len(_PREFIX) :].encode("ascii"), altchars=b"-_", validate=True)
        # Bounded: a few bytes can stand for gigabytes.
        data = zlib.decompressobj().decompress(packed[_TAG_BYTES:], _TEXT_MAX_BYTES)
        return data.decode() if hmac.compare_digest(packed[:_TAG_BYTES], _tag(data, cache_scope)) else None
    except (binascii.Error, zlib.error, UnicodeError):
        return None


def _tag(data: bytes, cache_scope: bytes) -> bytes:
    key = hashlib.blake2b(cache_scope, digest_size=32, person=b"mlxd-reasoning").digest()
    return hashlib.blake2b(data, key=key, digest_size=_TAG_BYTES).digest()
