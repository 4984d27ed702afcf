"""What the operator may set: one frozen `Settings`, read once from a TOML file and passed on as a value.

`settings_from` decides; `load_settings` reads the file; `prepare_directories` makes the private directories.
"""

import hashlib
import os
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import msgspec
from msgspec import Meta, Struct

from gateway.admission import ClassBounds, ClassLimits
from gateway.model_settings import KVBitsSetting, ModelSettings
from gateway.profiles import Profile, name_problem
from protocol.addresses import SocketPathTooLong, cachestore_socket, gateway_socket
from protocol.kv_storage import KVGroupSize
from protocol.launch import PersistPolicy

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})

_UNIT_BYTES = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_BYTE_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*")


class SettingsError(Exception):
    """The settings cannot be used. One line: where, which key, what is allowed."""


def parse_byte_size(value: object) -> int:
    """Bytes of `50_000_000_000`, `"50GB"`, `"1.5 GiB"`. Raises ValueError that says what is allowed."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := _BYTE_SIZE.fullmatch(value)):
        number, unit = match.groups()
        if (factor := _UNIT_BYTES.get(unit.lower())) is not None:
            whole, _, fraction = number.partition(".")
            # Integers all the way: a float would round large sizes.
            return int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)
    raise ValueError('expected a size in bytes: an integer, or text such as "50GB" or "2GiB"')


LogLevel = Literal["debug", "info", "warning", "error"]
MetricsAccess = Literal["admin", "open"]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


class CacheSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={
    "quota_bytes": "quota", "free_floor_bytes": "free_floor", "daily_write_bytes": "daily_write",
}):  # fmt: skip
    """The KV cache on disk. `free_floor_bytes` stay free on its volume, whatever the quota says.

    `daily_write_bytes` are written in a day at most: an SSD wears by what is written, not by what is kept.
    """

    directory: str
    quota_bytes: int = 50 * 1024**3
    free_floor_bytes: int = 5 * 1024**3
    daily_write_bytes: int = 200 * 1024**3
    persist: PersistPolicy = "second-touch"


class WorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={
    "hot_cache_bytes": "hot_cache", "live_kv_bytes": "live_kv",
}):  # fmt: skip
    """What every worker gets. `context_tokens` None means what the model itself allows; `live_kv_bytes`, for the KV of
    requests that run, None an eighth of the memory that all models may have. `kv_bits` are those of a number in a key
    or value, in groups of `kv_group_size` that share a scale (of fewer where that is no part of a head).

    A process has `load_timeout_seconds`, and two more for each GiB of weights, to load. One that has work and makes no
    step for `hang_seconds` is ended, and another takes its place.
    """

    max_rows: Annotated[int, Meta(ge=1, le=256)] = 16
    hot_cache_bytes: int = 2 * 1024**3
    live_kv_bytes: int | None = None
    kv_bits: KVBitsSetting = "off"
    kv_group_size: KVGroupSize = 64
    context_tokens: Positive | None = None
    prefill_slice_seconds: Annotated[float, Meta(gt=0, le=10)] = 0.2
    load_timeout_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    hang_seconds: Annotated[float, Meta(ge=3, le=86_400)] = 60.0


class MemorySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={
    "limit_bytes": "limit", "working_bytes": "working",
}):  # fmt: skip
    """How much memory all models together may take, and who leaves when another needs it.

    `limit_bytes` None is three quarters of the machine's. Every loaded model is counted with its weights, its
    `hot_cache`, its `live_kv` and `working_bytes` for scratch. A model without work leaves when its room is wanted, the
    one that rested longest first, and after `unload_after_seconds` anyhow (0: never); the `pinned` ones stay. A load
    for which there is no room waits `wait_seconds` at most.
    """

    limit_bytes: int | None = None
    working_bytes: int = 256 * 1024**2
    pinned: tuple[str, ...] = ()
    unload_after_seconds: Seconds = 0.0
    wait_seconds: Seconds = 600.0


class LimitSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={
    "max_body_bytes": "max_body",
}):  # fmt: skip
    """Bounds on what clients may ask. `max_queued_requests` counts, per model, those that do not run yet; the others
    count, per class and for any model: those that wait, those that are given to a model at once, and the tokens of a
    day. `warm` is what only fills the cache."""

    max_body_bytes: int = 32 * 1024**2
    max_queued_requests: Positive = 64
    max_queued_interactive: Positive = 128
    max_queued_standard: Positive = 128
    max_queued_batch: Positive = 128
    max_queued_warm: Positive = 128
    max_running_interactive: Positive | None = None
    max_running_standard: Positive | None = None
    max_running_batch: Positive | None = None
    max_running_warm: Positive | None = None
    tokens_per_day_interactive: Positive | None = None
    tokens_per_day_standard: Positive | None = None
    tokens_per_day_batch: Positive | None = None
    tokens_per_day_warm: Positive | None = None

    @property
    def of_classes(self) -> ClassLimits:
        return ClassLimits(
            interactive=ClassBounds(
                max_running=self.max_running_interactive,
                max_queued=self.max_queued_interactive,
                tokens_per_day=self.tokens_per_day_interactive,
            ),
            standard=ClassBounds(
                max_running=self.max_running_standard,
                max_queued=self.max_queued_standard,
                tokens_per_day=self.tokens_per_day_standard,
            ),
            batch=ClassBounds(
                max_running=self.max_running_batch,
                max_queued=self.max_queued_batch,
                tokens_per_day=self.tokens_per_day_batch,
            ),
            warm=ClassBounds(
                max_running=self.max_running_warm,
                max_queued=self.max_queued_warm,
                tokens_per_day=self.tokens_per_day_warm,
            ),
        )


class WaitingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream's client hears while it waits.

    A comment every `keepalive_seconds`. Its status line comes when its model has accepted the prompt, or after
    `headers_seconds` whatever the model does: many clients and proxies give a server a minute for it, some less.
    """

    keepalive_seconds: Annotated[float, Meta(gt=0, le=10)] = 10.0
    headers_seconds: Annotated[float, Meta(gt=0, le=240)] = 3.0


class ExplainSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long hashes of finished requests stay in memory, so that `mlxd explain` can compare; 0 switches it off."""

    keep_minutes: Annotated[float, Meta(ge=0, le=1440)] = 30.0


class MetricsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may read GET /metrics: whoever has the admin token, or everybody who can reach the service."""

    access: MetricsAccess = "admin"


class ResponseSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={
    "quota_bytes": "quota", "key_quota_bytes": "key_quota",
}):  # fmt: skip
    """Responses that their clients asked to have stored. `keep_hours` after their last use they go; 0 stores none."""

    keep_hours: Annotated[float, Meta(ge=0, le=24 * 366)] = 24.0
    quota_bytes: int = 512 * 1024**2
    key_quota_bytes: int = 64 * 1024**2
    key_responses: Positive = 1000


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it. `home` comes from --home or MLXD_HOME, never from the file."""

    home: str
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8321
    models_directories: tuple[str, ...]
    runtime_directory: str
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    drain_seconds: Seconds = 30.0
    log_level: LogLevel = "info"
    worker_command: Annotated[tuple[str, ...], Meta(min_length=1)] = (sys.executable, "-P", "-m", "worker")
    cachestore_command: Annotated[tuple[str, ...], Meta(min_length=1)] = (sys.executable, "-P", "-m", "cachestore")
    cache: CacheSettings
    worker: WorkerSettings = WorkerSettings()
    memory: MemorySettings = MemorySettings()
    limits: LimitSettings = LimitSettings()
    waiting: WaitingSettings = WaitingSettings()
    explain: ExplainSettings = ExplainSettings()
    metrics: MetricsSettings = MetricsSettings()
    responses: ResponseSettings = ResponseSettings()
    profiles: dict[str, Profile] = {}
    models: dict[str, ModelSettings] = {}

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in LOOPBACK_HOSTS

    @property
    def keys_path(self) -> Path:
        return Path(self.home) / "keys.toml"

    @property
    def logs_directory(self) -> Path:
        """Where the service writes its log when a service manager runs it."""
        return Path(self.home) / "logs"

    @property
    def tokens_path(self) -> Path:
        """How many tokens each key used today."""
        return Path(self.home) / "tokens_today.json"

    @property
    def responses_path(self) -> Path:
        """Responses that their clients asked to have stored."""
        return Path(self.home) / "responses.sqlite3"

    @property
    def local_salt_path(self) -> Path:
        """The cache scope of keyless local callers; a secret, so that it survives restarts."""
        return Path(self.home) / "local_scope"

    @property
    def admin_token_path(self) -> Path:
        return Path(self.runtime_directory) / "admin.token"

    @property
    def service_path(self) -> Path:
        """Where a running service says how to reach it."""
        return Path(self.runtime_directory) / "service.json"


_CHOICES = {
    "log_level": get_args(LogLevel),
    "cache.persist": get_args(PersistPolicy),
    "metrics.access": get_args(MetricsAccess),
    **dict.fromkeys(("worker.kv_bits", "models[...].kv_bits"), get_args(KVBitsSetting)),
    **dict.fromkeys(("worker.kv_group_size", "models[...].kv_group_size"), get_args(KVGroupSize)),
}


def home_directory(environment: Mapping[str, str]) -> Path:
    """MLXD_HOME or ~/.mlxd. Raises SettingsError when neither can be known (launchd daemons have no HOME)."""
    if chosen := environment.get("MLXD_HOME"):
        return Path(chosen).expanduser().absolute()
    if user_home := environment.get("HOME"):
        return Path(user_home).absolute() / ".mlxd"
    raise SettingsError("no home directory: name one that mlxd may write to with --home or MLXD_HOME")


def default_runtime_directory(home: Path, *, user_id: int) -> Path:
    """`home/run`, or a short private directory when socket paths there would be too long for the system.

    Depends on nothing but its arguments (not on TMPDIR), so the service and the command line agree.
    """
    preferred = home / "run"
    try:
        gateway_socket(preferred)
        cachestore_socket(preferred)
    except SocketPathTooLong:
        digest = hashlib.blake2b(os.fsencode(home), digest_size=6).hexdigest()
        return Path("/tmp") / f"mlxd-{user_id}-{digest}"  # noqa: S108  (0700 and ours: prepare_directories checks)
    return preferred


# The values that are not yet what they mean when TOML has been read.
_SIZES = (
    *("cache.quota", "cache.free_floor", "cache.daily_write"),
    *(
        "worker.hot_cache",
        "worker.live_kv",
        "memory.limit",
        "memory.working",
        "limits.max_body",
        "responses.quota",
        "responses.key_quota",
    ),
)
_PATHS = ("models_directories", "runtime_directory", "cache.directory")


def settings_from(
    document: Mapping[str, object], *, home: Path, base: Path, user_id: int, source: str = "settings"
) -> Settings:
    """Decide the settings from a parsed TOML document. Relative paths start at `base`.

    Raises SettingsError with one line: `source`, the key, what is allowed.
    """
    if "home" in document:
        raise SettingsError(f"{source}: home: not a setting; use --home or the environment variable MLXD_HOME instead")
    cache = document.get("cache", {})
    filled: dict[str, object] = {
        "models_directories": [str(home / "models")],
        "runtime_directory": str(default_runtime_directory(home, user_id=user_id)),
        **document,
        "home": str(home),
        # A cache that is no table is left for the conversion to refuse.
        "cache": {"directory": str(home / "cache"), **cache} if isinstance(cache, dict) else cache,
    }

    try:
        for read, keys in ((parse_byte_size, _SIZES), (partial(_read_path, base=base), _PATHS)):
            for key in keys:
                _replace_in(filled, key, read)
        settings = msgspec.convert(filled, Settings)
        for name in settings.profiles:
            if (problem := name_problem(name)) is not None:
                raise _BadValue(f"profiles: {name!r} {problem}")
        gateway_socket(Path(settings.runtime_directory))
        cachestore_socket(Path(settings.runtime_directory))
    except msgspec.ValidationError as why:
        raise SettingsError(f"{source}: {_readable(str(why))}") from None
    except _BadValue as why:
        raise SettingsError(f"{source}: {why}") from None
    except SocketPathTooLong as why:
        raise SettingsError(f"{source}: runtime_directory: {why}") from None
    return settings


def load_settings(path: Path | None, *, home: Path, overrides: Mapping[str, object] | None = None) -> Settings:
    """Read `path`, or `home/mlxd.toml` if there is one. `overrides` are top-level keys from the command line.

    Raises SettingsError.
    """
    source = path if path is not None else home / "mlxd.toml"
    document: dict[str, object] = {}
    try:
        document = tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path is not None:
            raise SettingsError(f"{source}: no such file; name an existing one with --config") from None
    except tomllib.TOMLDecodeError as why:
        raise SettingsError(f"{source}: not valid TOML: {why}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{source}: not valid TOML: save the file as UTF-8") from None
    except OSError as why:
        raise SettingsError(f"{source}: cannot be read ({why.strerror}); check its path and permissions") from None
    return settings_from(
        {**document, **(overrides or {})},
        home=home,
        base=source.absolute().parent,
        user_id=os.getuid(),
        source=str(source),
    )


def prepare_directories(settings: Settings) -> None:
    """Make the home, its logs and the runtime directory, private to this user. Raises SettingsError if one cannot be.

    The cache directory is the cachestore's to make.
    """
    home, runtime = Path(settings.home), Path(settings.runtime_directory)
    _make_private(home.resolve())
    _make_private(settings.logs_directory)
    # Not resolved: in a shared temporary directory a symlink may be somebody else's trap.
    _make_private(runtime)


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.lstat()
    except OSError as why:
        raise SettingsError(
            f"{path}: cannot make this directory ({why.strerror}); choose another in mlxd.toml"
        ) from None
    if not stat.S_ISDIR(facts.st_mode):
        raise SettingsError(f"{path}: is not a directory; move it away or choose another in mlxd.toml")
    if facts.st_uid != os.getuid():
        raise SettingsError(f"{path}: belongs to another user; remove it or choose another directory in mlxd.toml")
    if facts.st_mode & 0o077:
        path.chmod(0o700)


class _BadValue(Exception):
    """Key and reason."""


def _replace_in(document: dict[str, object], key: str, read: Callable[[object], object]) -> None:
    """Put what `read` makes of the value in its place. Sections are replaced, never changed: they are the caller's."""
    section, _, name = key.rpartition(".")
    table = document.get(section) if section else document
    if not isinstance(table, dict) or name not in table:
        return  # what has the wrong shape is left for the conversion to refuse
    values = cast("dict[str, object]", table)
    value = values[name]
    try:
        if isinstance(value, list):
            items = cast("list[object]", value)
            replaced: object = [_read_item(key, number, item, read) for number, item in enumerate(items)]
        else:
            replaced = read(value)
    except ValueError as why:
        raise _BadValue(f"{key}: {why}") from None
    if section:
        document[section] = {**values, name: replaced}
    else:
        document[name] = replaced


def _read_item(key: str, number: int, item: object, read: Callable[[object], object]) -> object:
    try:
        return read(item)
    except ValueError as why:
        raise _BadValue(f"{key}[{number}]: {why}") from None


def _read_path(value: object, *, base: Path) -> str:
    """`~` is the user's home, a relative path starts at `base`."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("expected a path as text")
    try:
        return os.path.normpath(base / Path(value).expanduser())
    except RuntimeError:
        raise ValueError("no such user's home directory; write the path in full") from None


def _readable(why: str) -> str:
    """msgspec's "… - at `$.cache.quota`" as "cache.quota: …"."""
    text, separator, place = why.rpartition(" - at `")
    if not separator:
        text, place = why, "$`"
    key = place.rstrip("`").removeprefix("$").removeprefix(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", text):
        name = f"{key}.{unknown.group(1)}" if key else unknown.group(1)
        return f"{name}: no such setting; deploy/mlxd.toml lists them all"
    if text.startswith("Invalid enum value") and key in _CHOICES:
        return f"{key}: expected one of {', '.join(map(repr, _CHOICES[key]))}"
    text = text[:1].lower() + text[1:]
    return f"{key}: {text}" if key else text
