"""The signature of a thinking block. Pure.

The API wants one that is not empty, and clients send it back unread. It is a keyed hash of the text, so that equal
thoughts of two services do not look alike; whatever comes back is accepted.
"""

import base64
import hashlib


class Seal:
    """Makes the signature of one block's text, piece by piece."""

    def __init__(self, secret: bytes) -> None:
        """`secret` has 64 bytes at most."""
        self._hash = hashlib.blake2b(key=secret, digest_size=48)

    def add(self, text: str) -> None:
        """More of the text."""
        self._hash.update(text.encode())

    def signature(self) -> str:
        """The signature of what was added, in base64."""
        return base64.b64encode(self._hash.digest()).decode()


def signature_of(text: str, secret: bytes) -> str:
    """The same of a whole text."""
    seal = Seal(secret)
    seal.add(text)
    return seal.signature()
