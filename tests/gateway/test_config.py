"""Settings: strict, complete, and plain about what is wrong."""

import re
import stat
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import (
    SettingsError,
    default_runtime_directory,
    home_directory,
    load_settings,
    parse_byte_size,
    prepare_directories,
    settings_from,
)
from protocol.addresses import SOCKET_PATH_MAX_BYTES, cachestore_socket, gateway_socket
from protocol.ids import Incarnation
from protocol.launch import CachestoreLaunch

HOME = Path("/home/owner/.mlxd")
EXAMPLE = Path(__file__).parents[2] / "deploy" / "mlxd.toml"


def decided(document: dict[str, object]):
    return settings_from(document, home=HOME, base=Path("/etc/mlxd"), user_id=501, source="mlxd.toml")


def test_an_empty_file_is_enough():
    """Everything has a default, and the default lets nobody in from the network."""
    settings = decided({})
    assert settings.is_loopback
    assert settings.port == 8321
    assert settings.models_directories == (f"{HOME}/models",)
    assert settings.runtime_directory == f"{HOME}/run"
    assert settings.cache.directory == f"{HOME}/cache"
    assert settings.limits.max_body_bytes == 32 * 1024**2


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"prt": 1}, "prt: no such setting"),
        ({"cache": {"qouta": "1GB"}}, "cache.qouta: no such setting"),
        ({"cache": {"quota": "50 parsecs"}}, "cache.quota: expected a size"),
        ({"cache": {"quota": -1}}, "cache.quota: expected a size"),
        ({"cache": 3}, "cache: "),
        ({"cache": {"persist": "always"}}, "cache.persist: expected one of 'second-touch', 'through', 'off'"),
        ({"log_level": "loud"}, "log_level: expected one of 'debug'"),
        ({"port": 70000}, "port: expected `int` <= 65535"),
        ({"port": "8321"}, "port: expected `int`"),
        ({"worker": {"hot_cache": True}}, "worker.hot_cache: expected a size"),
        ({"worker": {"max_rows": 0}}, "worker.max_rows: "),
        ({"models_directories": "models"}, "models_directories: expected `array`"),
        ({"models_directories": ["ok", ""]}, "models_directories[1]: expected a path"),
        ({"runtime_directory": "/" + "x" * 100}, "runtime_directory: socket path"),
        ({"worker_command": []}, "worker_command: "),
        ({"worker": {"kv_bits": 7}}, "worker.kv_bits: expected one of 'off', 4, 6, 8"),
        ({"worker": {"kv_bits": True}}, "worker.kv_bits: expected `int | str`"),
        ({"worker": {"kv_group_size": 48}}, "worker.kv_group_size: expected one of 32, 64, 128"),
        ({"models": {"m": {"kv_bits": 2}}}, "models[...].kv_bits: expected one of 'off', 4, 6, 8"),
        ({"models": {"m": {"bits": 8}}}, "models[...].bits: no such setting"),
        ({"models": {"m": 8}}, "models[...]: expected `object`"),
        ({"home": "/elsewhere"}, "home: not a setting; use --home or the environment variable MLXD_HOME"),
    ],
)
def test_a_refusal_names_file_key_and_what_is_allowed(document: dict[str, object], words: str):
    """One line: the file, the key, what is allowed."""
    with pytest.raises(SettingsError) as caught:
        decided(document)
    message = str(caught.value)
    assert message.startswith(f"mlxd.toml: {words}")
    assert "\n" not in message


def test_paths_start_at_home_or_at_the_file(monkeypatch: pytest.MonkeyPatch):
    """`~` is the user's home; a relative path does not depend on where the command was typed."""
    monkeypatch.setenv("HOME", "/home/owner")
    settings = decided({"models_directories": ["~/models", "shared", "/abs/../models"]})
    assert settings.models_directories == ("/home/owner/models", "/etc/mlxd/shared", "/models")


@pytest.mark.parametrize(
    ("written", "expected"),
    [("50GB", 50 * 10**9), ("2GiB", 2 * 2**30), ("1.5 gib", 3 * 2**29), ("7", 7), (7, 7), ("0.5k", 500), ("10 B", 10)],
)
def test_byte_sizes(written: object, expected: int):
    """Decimal and binary units, any case, integers as they are."""
    assert parse_byte_size(written) == expected


@given(st.text())
def test_any_text_is_a_size_or_a_value_error(text: str):
    """No text makes the parser raise anything else."""
    try:
        assert parse_byte_size(text) >= 0
    except ValueError as why:
        assert "expected a size" in str(why)


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=200))
def test_the_default_runtime_directory_always_has_room_for_sockets(name: str):
    """Whatever the home is called, both sockets fit the system's limit, and the answer is always the same."""
    home = Path("/") / name.strip("/.") / "x"
    chosen = default_runtime_directory(home, user_id=501)
    assert len(str(gateway_socket(chosen)).encode()) <= SOCKET_PATH_MAX_BYTES
    assert len(str(cachestore_socket(chosen)).encode()) <= SOCKET_PATH_MAX_BYTES
    assert chosen == default_runtime_directory(home, user_id=501)


def test_two_homes_or_users_share_no_short_directory():
    """The short directory is named by user and home."""
    long = Path("/") / ("x" * 120)
    names = {
        default_runtime_directory(long, user_id=1),
        default_runtime_directory(long, user_id=2),
        default_runtime_directory(long / "y", user_id=1),
    }
    assert len(names) == 3


def test_home_comes_from_the_environment():
    """MLXD_HOME wins; without it and HOME (a launchd daemon) the error says what to set."""
    assert home_directory({"MLXD_HOME": "/srv/mlxd", "HOME": "/root"}) == Path("/srv/mlxd")
    assert home_directory({"HOME": "/root"}) == Path("/root/.mlxd")
    with pytest.raises(SettingsError, match="with --home or MLXD_HOME"):
        home_directory({})


def test_files_that_cannot_be_used(tmp_path: Path):
    """Absent by name, broken TOML, not UTF-8, a directory: each is one clear line; an absent default file is fine."""
    assert load_settings(None, home=tmp_path).port == 8321
    with pytest.raises(SettingsError, match="no such file"):
        load_settings(tmp_path / "absent.toml", home=tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("port = ")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_settings(broken, home=tmp_path)
    broken.write_bytes(b"host = '\xff'")
    with pytest.raises(SettingsError, match="UTF-8"):
        load_settings(broken, home=tmp_path)
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(tmp_path, home=tmp_path)


def test_the_command_line_wins(tmp_path: Path):
    """Overrides stand above the file."""
    (tmp_path / "mlxd.toml").write_text("port = 1\nhost = '192.0.2.1'\n")
    settings = load_settings(None, home=tmp_path, overrides={"port": 2})
    assert (settings.port, settings.host, settings.is_loopback) == (2, "192.0.2.1", False)


def test_the_example_lists_every_default(monkeypatch: pytest.MonkeyPatch):
    """deploy/mlxd.toml, uncommented, is accepted and changes nothing but what it says it bounds."""
    monkeypatch.setenv("HOME", "/home/owner")
    text = EXAMPLE.read_text()
    uncommented = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    document = tomllib.loads(uncommented)
    assert document["worker"].pop("context_tokens")
    assert document["worker"].pop("live_kv")
    assert document["memory"].pop("limit")
    assert document["limits"].pop("max_running_batch")
    assert document["limits"].pop("tokens_per_day_batch")
    assert decided(document) == decided({}) == decided(tomllib.loads(text))


def test_directories_are_private(tmp_path: Path):
    """Home and runtime directory become 0700 if they were not; a symlinked runtime directory is refused."""
    home = tmp_path / "h"
    home.mkdir(mode=0o755)
    settings = settings_from({}, home=home, base=home, user_id=0)
    prepare_directories(settings)
    for path in (home, Path(settings.runtime_directory)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    trap = tmp_path / "trap"
    trap.symlink_to(home)
    with pytest.raises(SettingsError, match="not a directory"):
        prepare_directories(settings_from({"runtime_directory": str(trap)}, home=home, base=home, user_id=0))


def test_values_travel_to_the_children(tmp_path: Path):
    """What settings hold can go into a child's launch message as it is: plain numbers and text."""
    settings = settings_from({"cache": {"quota": "1GB"}}, home=tmp_path, base=tmp_path, user_id=0)
    launch = CachestoreLaunch(
        directory=settings.cache.directory,
        runtime_directory=settings.runtime_directory,
        incarnation=Incarnation(1),
        quota_bytes=settings.cache.quota_bytes,
        free_floor_bytes=settings.cache.free_floor_bytes,
        daily_write_bytes=settings.cache.daily_write_bytes,
    )
    assert msgspec.json.decode(msgspec.json.encode(launch), type=CachestoreLaunch) == launch
    assert msgspec.json.encode(settings)
