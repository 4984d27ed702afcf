"""`mlxd keys …`: who may call, how urgently, and how much."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from gateway.cli_output import HomeOption, console, home_of, table
from gateway.durations import duration_text, parse_duration_seconds
from gateway.keys import (
    KeyRecord,
    KeysError,
    add_key,
    change_key,
    list_keys,
    remove_key,
    shares_cache_with,
)
from protocol.latency import LatencyClass

_NO_LIMIT = "none"

keys_app = typer.Typer(help="API keys: who may call, how urgently, and how much.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="Who gets it: a label for logs.")]
ClassOption = Annotated[
    LatencyClass | None, typer.Option("--class", help="What its requests are unless they say otherwise.")
]
HighestOption = Annotated[LatencyClass | None, typer.Option("--highest-class", help="The most that they can be.")]
RunningOption = Annotated[
    str | None, typer.Option("--max-running", metavar="N", help="How many may run at once; `none` is no limit.")
]
QueuedOption = Annotated[
    str | None, typer.Option("--max-queued", metavar="N", help="How many may wait beside them; more are refused.")
]
TokensOption = Annotated[
    str | None, typer.Option("--tokens-per-day", metavar="N", help="Prompt and completion tokens in a day (UTC).")
]
WeightOption = Annotated[
    float | None, typer.Option("--weight", help="Its share of a model beside other keys; 1 is usual.")
]


@keys_app.command("add")
def keys_add(  # noqa: PLR0913  (one for each option)
    name: NameArgument,
    share_cache_with: Annotated[
        str | None, typer.Option(help="A key whose cached prefixes this one uses, and the other way round.")
    ] = None,
    cache_ttl: Annotated[
        str | None, typer.Option(help="How long its unused blocks stay on disk, as 8h or 7d; no limit otherwise.")
    ] = None,
    default_class: ClassOption = None,
    highest_class: HighestOption = None,
    max_running: RunningOption = None,
    max_queued: QueuedOption = None,
    tokens_per_day: TokensOption = None,
    weight: WeightOption = None,
    home: HomeOption = None,
) -> None:
    """Make a key and show it, once."""
    try:
        cache_ttl_seconds = None if cache_ttl is None else parse_duration_seconds(cache_ttl)
    except ValueError as why:
        raise KeysError(f"--cache-ttl: {why}") from None
    key = add_key(
        _keys_path(home),
        name,
        now_unix=int(time.time()),
        share_cache_with=share_cache_with,
        cache_ttl_seconds=cache_ttl_seconds,
        terms=_terms(default_class, highest_class, weight, limits=_limits(max_running, max_queued, tokens_per_day)),
    )
    typer.echo(key)
    _remark("this is the only time it is shown; a running service knows it already")


@keys_app.command("change")
def keys_change(
    name: Annotated[str, typer.Argument(help="The key's name.")],
    default_class: ClassOption = None,
    highest_class: HighestOption = None,
    max_running: RunningOption = None,
    max_queued: QueuedOption = None,
    tokens_per_day: TokensOption = None,
    weight: WeightOption = None,
    home: HomeOption = None,
) -> None:
    """Change a key's classes and limits; its next request has them. What is not named stays."""
    changed = change_key(
        _keys_path(home),
        name,
        _terms(default_class, highest_class, weight, limits=_limits(max_running, max_queued, tokens_per_day)),
    )
    typer.echo(f"{changed.name}: {changed.default_class}, at most {changed.highest_class}; {_limits_text(changed)}")


@keys_app.command("list")
def keys_list(home: HomeOption = None) -> None:
    """List the keys by name."""
    records = list_keys(_keys_path(home))
    if not records:
        _remark("no keys: only this machine can be served; make one with `mlxd keys add NAME`")
        return
    rows = table("name", "made", "class", "at most", "limits", "shares its cache with", "unused blocks stay")
    for record in records:
        rows.add_row(
            record.name,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_unix)),
            record.default_class,
            record.highest_class,
            _limits_text(record),
            ", ".join(shares_cache_with(records, record)) or "-",
            "-" if record.cache_ttl_seconds is None else duration_text(record.cache_ttl_seconds),
        )
    console().print(rows)


@keys_app.command("revoke")
@keys_app.command("remove", hidden=True)
def keys_revoke(
    name: Annotated[str, typer.Argument(help="The key's name.")],
    home: HomeOption = None,
) -> None:
    """Take a key back; a running service refuses it at once."""
    path = _keys_path(home)
    remove_key(path, name)
    if not list_keys(path):
        _remark("that was the last key: a service on 127.0.0.1 now serves every local program")


def _keys_path(home: Path | None) -> Path:
    return home_of(home) / "keys.toml"


def _remark(text: str) -> None:
    print(f"mlxd: {text}", file=sys.stderr)  # noqa: T201  (beside the output, not in it)


def _terms(
    default_class: LatencyClass | None,
    highest_class: LatencyClass | None,
    weight: float | None,
    *,
    limits: dict[str, int | None],
) -> Callable[[KeyRecord], KeyRecord]:
    """What changes in a record. A ceiling below the default takes the default down with it, unless both were named."""

    def changed(record: KeyRecord) -> KeyRecord:
        highest = highest_class or record.highest_class
        default = default_class or record.default_class
        if default_class is None and default.rank < highest.rank:
            default = highest
        share = record.weight if weight is None else weight
        return replace(record, default_class=default, highest_class=highest, weight=share, **limits)

    return changed


def _limits(max_running: str | None, max_queued: str | None, tokens_per_day: str | None) -> dict[str, int | None]:
    """Those that were named. Raises KeysError."""
    asked = {"max_running": max_running, "max_queued": max_queued, "tokens_per_day": tokens_per_day}
    limits: dict[str, int | None] = {}
    for name, text in asked.items():
        if text is None:
            continue
        if text == _NO_LIMIT:
            limits[name] = None
        elif text.isascii() and text.isdigit() and len(text) <= 15:
            limits[name] = int(text)
        else:
            option = name.replace("_", "-")
            raise KeysError(f"--{option}: write a whole number, or `{_NO_LIMIT}` for no limit")
    return limits


def _limits_text(record: KeyRecord) -> str:
    words = [
        f"{value} {what}"
        for value, what in (
            (record.max_running, "running"),
            (record.max_queued, "queued"),
            (record.tokens_per_day, "tokens a day"),
        )
        if value is not None
    ]
    if record.weight != 1:
        words.append(f"weight {record.weight:g}")
    return ", ".join(words) or "no limits"
