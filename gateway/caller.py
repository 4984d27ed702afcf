"""Who asks, as far as the routes need to know."""

from msgspec import Struct


class Caller(Struct, frozen=True, kw_only=True):
    """Whoever holds an API key. `key_name` is a label, not the key; `cache_scope` the secret salt of its prefixes."""

    key_name: str
    cache_scope: bytes
