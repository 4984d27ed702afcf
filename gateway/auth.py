"""Who may come in: decided from a request's line and headers alone, before anything is read or routed."""

import hmac
import re
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from gateway.caller import Caller
from gateway.config import Settings
from gateway.keys import KEY_PREFIX, KeyRecord
from protocol.failures import Failure, FailureKind

LOCAL_CALLER = "local"
"""The name, in logs, of whoever calls a loopback service that has no keys."""

SCRAPER = "scraper"
"""The name, in logs, of whoever reads the metrics without the admin token, where the settings allow it."""

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PROBED_PATHS = ("/health", "/")
"""Both say nothing but that somebody is there. Claude Code asks for the second before it sends its key."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@\s]+)(?::\d{1,5})?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Knock(Struct, frozen=True, kw_only=True):
    """What is known of a request at the door. `headers` have lower-case names; `raw_path` has no query."""

    method: str
    path: str
    raw_path: bytes | None
    headers: tuple[tuple[bytes, bytes], ...]

    def values(self, name: bytes) -> list[str]:
        return [value.decode("latin-1").strip() for key, value in self.headers if key == name]


class House(Struct, frozen=True, kw_only=True):
    """What the door compares with. `local_scope` is the cache scope of callers without a key."""

    settings: Settings
    records: tuple[KeyRecord, ...]
    local_scope: bytes
    admin_token: str
    phase: Literal["serving", "draining"]


class Admitted(Struct, frozen=True, kw_only=True):
    """Come in, as this caller."""

    caller: Caller
    role: Literal["caller", "admin", "scraper", "probe"]


def admit(
    knock: Knock, house: House, match: Callable[[Sequence[KeyRecord], str], KeyRecord | None]
) -> Admitted | Failure:
    """Decide. The order matters: who may not come in learns nothing about routes, limits or the service's state."""
    if _is_liveness_probe(knock):
        return Admitted(caller=Caller(key_name="probe", cache_scope=b""), role="probe")
    refusal = _check_host(knock, house.settings) or _check_origin(knock, house.settings)
    if refusal is not None:
        return refusal
    admitted = _identify(knock, house, match)
    if isinstance(admitted, Failure):
        return admitted
    if house.phase == "draining" and admitted.role == "caller":
        return Failure(
            kind=FailureKind.SHUTTING_DOWN,
            message="This server is stopping. Try again in a moment: it may be restarting.",
            retry_after_seconds=5.0,
        )
    return _check_length(knock, house.settings) or admitted


def check_bind(settings: Settings, records: Sequence[KeyRecord]) -> str | None:
    """Why the service must not start listening here, in one line, or None."""
    if settings.is_loopback or records:
        return None
    return (
        f"host {settings.host} can be reached from the network and there is no API key: "
        "run `mlxd keys add NAME`, or set host to 127.0.0.1"
    )


def echoed_request_id(presented: Sequence[str]) -> str | None:
    """A client's own request id if it is safe to repeat in headers and logs; what looks like a key is not."""
    if len(presented) != 1 or not _REQUEST_ID.fullmatch(presented[0]):
        return None
    return None if presented[0].startswith((KEY_PREFIX, "sk-")) else presented[0]


def is_admin_path(path: str) -> bool:
    """However the path is spelled: the router forgives doubled slashes, so this must too."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return bool(parts) and parts[0].casefold() == "admin"


def is_metrics_path(path: str) -> bool:
    """As the router reads it."""
    return [part for part in path.split("/") if part not in ("", ".")] == ["metrics"]


def _shows_requests(knock: Knock) -> bool:
    """The one route of callers that the operator may use as well, to see everybody's requests."""
    parts = [part for part in knock.path.split("/") if part]
    return knock.method in ("GET", "HEAD") and parts[:2] == ["v1", "requests"] and len(parts) <= 3


def _is_liveness_probe(knock: Knock) -> bool:
    # Spelled exactly, undecoded as well: a forgiving exception to the key rule would be a hole in it.
    is_read = knock.method in ("GET", "HEAD")
    return is_read and knock.path in _PROBED_PATHS and knock.raw_path in (None, knock.path.encode())


def _check_host(knock: Knock, settings: Settings) -> Failure | None:
    """Against DNS rebinding: a web page may point its own name at 127.0.0.1, but cannot change the Host it sends."""
    allowed = frozenset(name.lower() for name in settings.allowed_hosts)
    if settings.is_loopback:
        allowed |= _LOOPBACK_NAMES
    elif not allowed:
        return None
    hosts = knock.values(b"host")
    match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if match is not None and match.group(1).lower().rstrip(".") in allowed:
        return None
    return Failure(
        kind=FailureKind.FORBIDDEN,
        message="This Host is not served here. Call the server by its own name, or have it added to allowed_hosts.",
    )


def _check_origin(knock: Knock, settings: Settings) -> Failure | None:
    if all(origin in settings.allowed_origins for origin in knock.values(b"origin")):
        return None
    return Failure(
        kind=FailureKind.FORBIDDEN,
        message="Web pages of this Origin may not call this server. Have the origin added to allowed_origins.",
    )


def _identify(
    knock: Knock, house: House, match: Callable[[Sequence[KeyRecord], str], KeyRecord | None]
) -> Admitted | Failure:
    presented = _presented_keys(knock)
    is_metrics = is_metrics_path(knock.path)
    is_for_admins = is_metrics or is_admin_path(knock.path)
    if is_for_admins or _shows_requests(knock):
        token = house.admin_token.encode()
        if any(hmac.compare_digest(key.encode("latin-1"), token) for key in presented):
            return Admitted(caller=Caller(key_name="admin", cache_scope=b""), role="admin")
    if is_metrics and house.settings.metrics.access == "open" and knock.method in ("GET", "HEAD"):
        return Admitted(caller=Caller(key_name=SCRAPER, cache_scope=b""), role="scraper")
    if is_for_admins:
        return Failure(
            kind=FailureKind.UNAUTHENTICATED,
            message="This route needs the admin token of the running service. Use `mlxd status` on the server.",
        )
    if not house.records and house.settings.is_loopback:
        return Admitted(caller=Caller(key_name=LOCAL_CALLER, cache_scope=house.local_scope), role="caller")
    for key in presented:
        record = match(house.records, key)
        if record is not None:
            caller = Caller(
                key_name=record.name,
                cache_scope=record.cache_scope,
                cache_ttl_seconds=record.cache_ttl_seconds,
                classes=record.classes,
                limits=record.limits,
                weight=record.weight,
            )
            return Admitted(caller=caller, role="caller")
    return Failure(
        kind=FailureKind.UNAUTHENTICATED,
        message="No valid API key. Send one as `Authorization: Bearer <key>` or `x-api-key: <key>`; "
        "the server's owner makes keys with `mlxd keys add`.",
    )


def _presented_keys(knock: Knock) -> list[str]:
    """Both headers count, and every one of them: SDKs send foreign keys beside the right one."""
    keys = knock.values(b"x-api-key")
    for value in knock.values(b"authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            keys.append(key.strip())
    return [key for key in keys if key]


def _check_length(knock: Knock, settings: Settings) -> Failure | None:
    """Refuse a body that says it is too long, before a byte of it is read. Undeclared ones are counted as they come."""
    limit = settings.limits.max_body_bytes
    for value in knock.values(b"content-length"):
        if not (value.isascii() and value.isdigit()):
            return Failure(kind=FailureKind.INVALID_REQUEST, message="Content-Length is no number. Mend the client.")
        if len(value) > 18 or int(value) > limit:
            return Failure(
                kind=FailureKind.BODY_TOO_LARGE,
                message=f"The body is over this server's limit of {limit} bytes. Send less, or have max_body raised.",
            )
    return None
