"""API keys: named, kept as hashes in one private file, reloaded when it changes.

A key is shown once, when it is made. The file holds its SHA-256 (enough: a key is 256 random bits, so there is
nothing to guess) and a secret cache salt, so that equal prompts of two keys never share a prefix, unless a key was
made to share another one's.
"""

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import structlog
import tomli_w
from msgspec import Struct

from gateway.admission import DayTokens, KeyLimits
from gateway.latency_class import ClassRights
from gateway.private_files import FileNotPrivate, read_private, write_private
from protocol.latency import LatencyClass

KEY_PREFIX = "mlxd-"

_HEAD = b"# Written by `mlxd keys`. A key itself is in no file: this holds its hash.\n"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LEAST_WEIGHT, _MOST_WEIGHT = 0.1, 100.0
_log = structlog.stdlib.get_logger("mlxd.keys")


class KeysError(Exception):
    """The key file cannot be used, or a change to it is refused. One line that says what to do."""


class KeyRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. `sha256` and `cache_salt` are hexadecimal; keys of one salt share their prefixes.

    `cache_ttl_seconds`: blocks of this key that nobody used for so long leave the disk. None: they stay while there is
    room. `default_class` is what its requests are unless they say otherwise, `highest_class` the most that they can be.
    The limits are those of KeyLimits; None is no limit of its own. Beside others of its class a key of `weight` 2 gets
    twice as much of a model as one of 1.
    """

    name: str
    sha256: str
    created_unix: int
    cache_salt: str
    cache_ttl_seconds: float | None = None
    default_class: LatencyClass = LatencyClass.STANDARD
    highest_class: LatencyClass = LatencyClass.INTERACTIVE
    max_running: int | None = None
    max_queued: int | None = None
    tokens_per_day: int | None = None
    weight: float = 1.0

    @property
    def classes(self) -> ClassRights:
        return ClassRights(default=self.default_class, highest=self.highest_class)

    @property
    def limits(self) -> KeyLimits:
        return KeyLimits(max_running=self.max_running, max_queued=self.max_queued, tokens_per_day=self.tokens_per_day)

    @property
    def cache_scope(self) -> bytes:
        return bytes.fromhex(self.cache_salt)


class KeyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file as a whole."""

    version: int = 1
    keys: tuple[KeyRecord, ...] = ()


def digest_of(presented: str) -> str:
    """What the file keeps of a key. Any text is fine: a header may hold anything."""
    return hashlib.sha256(presented.encode("utf-8", "surrogatepass")).hexdigest()


def match_key(records: Sequence[KeyRecord], presented: str) -> KeyRecord | None:
    """The record of this key. Takes the same time whichever record matches, or none."""
    digest = digest_of(presented).encode()
    found: KeyRecord | None = None
    for record in records:
        if hmac.compare_digest(record.sha256.encode(), digest):
            found = record
    return found


def parse_keys(data: bytes, *, source: str) -> KeyFile:
    """Raises KeysError, which never quotes the content."""
    try:
        file = msgspec.convert(tomllib.loads(data.decode()), KeyFile)
        for record in file.keys:
            if len(bytes.fromhex(record.sha256)) != 32 or len(record.cache_scope) != 32:
                raise ValueError("sha256 and cache_salt must have 64 hexadecimal digits")
            if record.cache_ttl_seconds is not None and not record.cache_ttl_seconds > 0:
                raise ValueError("cache_ttl_seconds must be more than 0")
            if (wrong := _wrong_limits(record)) is not None:
                raise ValueError(wrong)
    except (msgspec.ValidationError, ValueError) as why:
        raise KeysError(f"{source} is damaged ({why}); restore it, or move it away and add the keys again") from None
    if file.version != 1:
        raise KeysError(f"{source} has version {file.version}, this mlxd reads version 1; upgrade mlxd")
    return file


class Keyring:
    """The keys of a running service. `records` is as fresh as the last `refresh`; `tokens` is what they used today."""

    def __init__(self, path: Path, *, tokens: DayTokens | None = None) -> None:
        """Raises KeysError when the file is there and cannot be used."""
        self.tokens = DayTokens() if tokens is None else tokens
        self._path = path
        self._seen = _signature(path)
        self._records = _load(path).keys

    @property
    def records(self) -> tuple[KeyRecord, ...]:
        return self._records

    def refresh(self) -> None:
        """Reload if the file changed. A file that turned bad or vanished locks nobody in or out: the keys stay
        as they were and the log says so. Removing the last key leaves a file with an empty list instead."""
        signature = _signature(self._path)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            if signature is None and self._records:
                raise KeysError(f"{self._path} vanished; restore it, or restart mlxd to serve without those keys")
            self._records = _load(self._path).keys
        except KeysError as why:
            _log.error("keys_kept_as_they_were", reason=str(why))
        else:
            _log.info("keys_reloaded", keys=len(self._records))

    def match(self, presented: str) -> KeyRecord | None:
        return match_key(self._records, presented)


def list_keys(path: Path) -> tuple[KeyRecord, ...]:
    """Raises KeysError."""
    return _load(path).keys


def add_key(
    path: Path,
    name: str,
    *,
    now_unix: int,
    share_cache_with: str | None = None,
    cache_ttl_seconds: float | None = None,
    terms: Callable[[KeyRecord], KeyRecord] | None = None,
) -> str:
    """Add a key under a new name and return it: the only time it can be seen. Raises KeysError.

    `share_cache_with` names a key whose cached prefixes this one may use, and the other way round. `terms` sets the
    record's classes and limits.
    """
    if not _NAME.fullmatch(name):
        raise KeysError("a key's name has 1 to 64 letters, digits, dots, dashes or underscores; choose such a name")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    with _exclusive(path):
        records = _load(path).keys
        if any(record.name == name for record in records):
            raise KeysError(f"there is a key named {name!r}; revoke it first, or choose another name")
        record = KeyRecord(
            name=name,
            sha256=digest_of(key),
            created_unix=now_unix,
            cache_salt=secrets.token_hex(32) if share_cache_with is None else _salt_of(records, share_cache_with),
            cache_ttl_seconds=cache_ttl_seconds,
        )
        _store(path, (*records, _on_terms(record, terms)))
    return key


def change_key(path: Path, name: str, terms: Callable[[KeyRecord], KeyRecord]) -> KeyRecord:
    """Set a key's classes and limits, for its requests from now on. Gives the new record. Raises KeysError."""
    with _exclusive(path):
        records = _load(path).keys
        found = next((record for record in records if record.name == name), None)
        if found is None:
            known = ", ".join(record.name for record in records) or "none"
            raise KeysError(f"there is no key of that name; the keys are: {known}")
        changed = _on_terms(found, terms)
        _store(path, tuple(changed if record is found else record for record in records))
    return changed


def remove_key(path: Path, name: str) -> None:
    """Running services refuse the key from their next request on. Raises KeysError."""
    with _exclusive(path):
        records = _load(path).keys
        kept = tuple(record for record in records if record.name != name)
        if len(kept) == len(records):
            known = ", ".join(record.name for record in records) or "none"
            raise KeysError(f"there is no key of that name; the keys are: {known}")
        _store(path, kept)


def shares_cache_with(records: Sequence[KeyRecord], record: KeyRecord) -> tuple[str, ...]:
    """The names of the other keys that use this one's prefixes."""
    return tuple(other.name for other in records if other.cache_salt == record.cache_salt and other.name != record.name)


def _on_terms(record: KeyRecord, terms: Callable[[KeyRecord], KeyRecord] | None) -> KeyRecord:
    if terms is None:
        return record
    changed = terms(record)
    if (wrong := _wrong_limits(changed)) is not None:
        raise KeysError(f"{wrong}; choose others")
    return changed


def _wrong_limits(record: KeyRecord) -> str | None:
    if record.default_class.rank < record.highest_class.rank:
        return f"default_class {record.default_class} is above highest_class {record.highest_class}"
    if record.max_running is not None and record.max_running < 1:
        return "max_running must be at least 1"
    if record.max_queued is not None and record.max_queued < (1 if record.max_running is None else 0):
        return "max_queued must be at least 1, or at least 0 beside a max_running"
    if record.tokens_per_day is not None and record.tokens_per_day < 1:
        return "tokens_per_day must be at least 1"
    if not _LEAST_WEIGHT <= record.weight <= _MOST_WEIGHT:
        return f"weight must be from {_LEAST_WEIGHT} to {_MOST_WEIGHT:g}"
    return None


def _salt_of(records: Sequence[KeyRecord], name: str) -> str:
    for record in records:
        if record.name == name:
            return record.cache_salt
    known = ", ".join(record.name for record in records) or "none"
    raise KeysError(f"there is no key of that name to share a cache with; the keys are: {known}")


def _load(path: Path) -> KeyFile:
    try:
        return parse_keys(read_private(path), source=str(path))
    except FileNotFoundError:
        return KeyFile()
    except FileNotPrivate as why:
        raise KeysError(str(why)) from None
    except OSError as why:
        raise KeysError(f"{path} cannot be read ({why.strerror or why}); check its owner and permissions") from None


def _store(path: Path, records: Sequence[KeyRecord]) -> None:
    document = msgspec.to_builtins(KeyFile(keys=tuple(records)), str_keys=True)
    try:
        write_private(path, _HEAD + tomli_w.dumps(document).encode())
    except OSError as why:
        raise KeysError(f"{path} cannot be written ({why.strerror}); check the folder's owner and free space") from None


@contextmanager
def _exclusive(path: Path) -> Generator[None]:
    """One writer at a time, in any process. The kernel frees the lock if its holder dies."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as why:
        raise KeysError(f"{path.parent} cannot be written ({why.strerror}); check its owner") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    # The mode too: a chmod that mends the file must be seen.
    return (facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_mode)
