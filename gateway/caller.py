"""Who asks, as far as the routes need to know."""

from msgspec import Struct


class Caller(Struct, frozen=True, kw_only=True):
    """The holder of an API key. `key_name` is a label, not the key; `cache_scope` is the secret salt of its prefixes."""

    key_name: str
    cache_scope: bytes
