"""Who asks, as far as the routes need to know."""

from msgspec import Struct

from gateway.admission import KeyLimits
from gateway.latency_class import ClassRights
from protocol.scopes import owner_id


class Caller(Struct, frozen=True, kw_only=True):
    """Whoever holds an API key. `key_name` is a label, not the key; `cache_scope` the secret salt of its prefixes.

    `cache_ttl_seconds` is how long its unused blocks stay on disk; None: for as long as there is room.
    `classes` and `limits` are what it may ask for, and how much of it; `weight` its share of a device beside others.
    """

    key_name: str
    cache_scope: bytes
    cache_ttl_seconds: float | None = None
    classes: ClassRights = ClassRights()
    limits: KeyLimits = KeyLimits()
    weight: float = 1.0

    @property
    def cache_owner(self) -> str:
        """The public name of its blocks."""
        return owner_id(self.cache_scope)
