"""Public names for secret cache scopes."""

from hashlib import blake2b


def owner_id(scope: bytes) -> str:
    """16 hex digits that name a scope's owner in files and books, and tell nothing of its secret."""
    return blake2b(scope, digest_size=8, person=b"mlxd-owner").hexdigest()
