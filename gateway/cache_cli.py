"""`mlxd warm`, `mlxd explain` and `mlxd cache …`: questions and orders to the running service.

A key comes from MLXD_KEY or a file, never from an argument: arguments are seen by every process of the machine.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import quote

import msgspec
import typer
from msgspec import Struct
from rich.text import Text

from gateway.cache_terms import (
    AdminCache,
    BudgetRequest,
    BudgetSet,
    CacheForgotten,
    CacheWarm,
    ForgetRequest,
    PinDeleted,
    PinList,
    PinObject,
    UnpinRequest,
    pins_of_all,
)
from gateway.cli_output import (
    ConfigOption,
    HomeOption,
    JsonOption,
    console,
    print_json,
    settings_of,
    size_text,
    table,
)
from gateway.config import Settings, parse_byte_size
from gateway.control import ControlError, ServiceAnswer, ask_service, read_admin_token
from gateway.disk_worth import disk_worth
from gateway.durations import duration_text, parse_duration_seconds
from gateway.error_answers import OpenAIErrorBody
from gateway.explain import Explanation
from gateway.private_files import FileNotPrivate, read_private
from gateway.recipes import load_recipe, render_recipe
from protocol.disk_bench import DiskBench

KEY_VARIABLE = "MLXD_KEY"
BENCH_COMMAND = (sys.executable, "-P", "-m", "cachestore.bench")

_WARM_SECONDS = 3600.0
_PURGE_SECONDS = 120.0
_BENCH_SECONDS = 120.0

Wanted = TypeVar("Wanted")

cache_app = typer.Typer(help="Cached prefixes: what is kept, and for how long.", no_args_is_help=True)

KeyFileOption = Annotated[
    Path | None, typer.Option("--key-file", help=f"File that holds your API key; {KEY_VARIABLE} otherwise.")
]
KeyNameOption = Annotated[str | None, typer.Option("--key", help="Name of a key, as `mlxd keys list` shows it.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def warm_prefix(
    path: Annotated[Path, typer.Argument(metavar="FILE|RECIPE", help="A text file (system prompt) or a .toml recipe.")],
    config: ConfigOption = None,
    home: HomeOption = None,
    model: Annotated[str | None, typer.Option(help="Which model; the recipe's otherwise.")] = None,
    pin: Annotated[str | None, typer.Option(help="Keep the prefix under this name.")] = None,
    ttl: Annotated[str | None, typer.Option(help="How long it is kept, as 8h or 7d; until unpinned otherwise.")] = None,
    key_file: KeyFileOption = None,
    *,
    json: JsonOption = False,
) -> None:
    """Compute a prefix before anybody waits for it."""
    recipe, files = load_recipe(path)
    body = render_recipe(recipe, files, source=str(path), model=model, pin=pin, ttl=ttl)
    settings = settings_of(config, home)
    answer = ask_service(
        settings,
        "POST",
        "/v1/cache/warm",
        token=caller_key(key_file),
        body=msgspec.json.encode(body),
        timeout_seconds=_WARM_SECONDS,
    )
    warmed = _decoded(answer, CacheWarm)
    if json:
        print_json(warmed)
        return
    kept = ""
    if warmed.pin is not None:
        until = "until it is unpinned" if warmed.pin.ttl_seconds is None else duration_text(warmed.pin.ttl_seconds)
        kept = f"; pinned as {warmed.pin.name}, {until}"
    typer.echo(
        f"{warmed.model}: {warmed.prompt_tokens} tokens are warm ({warmed.cached_tokens} were before), "
        f"{warmed.blocks} blocks, {size_text(warmed.bytes)}, {warmed.durable_blocks} on disk, "
        f"{warmed.timings.prefill_seconds:.1f} s{kept}"
    )


def explain_request(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Of the answer, or of its header x-request-id.")],
    config: ConfigOption = None,
    home: HomeOption = None,
    key_file: KeyFileOption = None,
    *,
    json: JsonOption = False,
) -> None:
    """Why a request reused no more of its prompt."""
    path = f"/v1/requests/{quote(request_id, safe='')}/explain"
    answer = _decoded(ask_service(settings_of(config, home), "GET", path, token=caller_key(key_file)), Explanation)
    if json:
        print_json(answer)
        return
    out = console()
    out.print(Text(f"{answer.request_id} on {answer.model}: {answer.cached_tokens} of {answer.prompt_tokens} reused"))
    rows = table("from", "to", "tier")
    for part in answer.tiers:
        tier = "computed" if part.tier == "none" else part.tier
        rows.add_row(str(part.from_token), str(part.to_token), tier)
    out.print(rows)
    out.print(Text(f"{answer.reason}: {answer.reason_text}"))
    if answer.compared_with is not None:
        out.print(Text(f"compared with {answer.compared_with}: {answer.common_tokens} tokens in common"))
    if answer.first_divergent_message is not None:
        where = answer.first_divergent_message
        out.print(f"first message that differs: {where.index} ({where.role})")
    if answer.first_divergent_token is not None:
        start, end = answer.first_divergent_token
        out.print(f"first token that differs: one of {start} to {end - 1}")
    if answer.expected_restore_seconds is not None and answer.expected_compute_seconds is not None:
        out.print(
            f"expected: {answer.expected_restore_seconds:.3f} s to restore, "
            f"{answer.expected_compute_seconds:.3f} s to compute"
        )


@cache_app.command("status")
def show_status(config: ConfigOption = None, home: HomeOption = None, *, json: JsonOption = False) -> None:
    """Books, pins and misses of memory and disk."""
    books = _fetch_books(settings_of(config, home))
    if json:
        print_json(books)
        return
    out = console()
    rows = table("model", "state", "in memory", "budget", "blocks", "prefill", "reads", "not reused because")
    for row in books.models:
        hot = row.books
        if hot is None:
            rows.add_row(Text(row.model), row.state, "-", "-", "-", "-", "-", "-")
            continue
        misses = sorted(hot.misses.items(), key=lambda item: -item[1])
        rows.add_row(
            Text(row.model),
            row.state,
            size_text(hot.hot_cache_bytes),
            size_text(hot.hot_cache_budget_bytes) if hot.hot_cache_budget_bytes else "-",
            str(hot.hot_cache_blocks),
            f"{hot.prefill_tokens_per_second:.0f} tokens/s" if hot.prefill_tokens_per_second else "-",
            f"{size_text(hot.read_bytes_per_second)}/s" if hot.read_bytes_per_second else "-",
            Text(", ".join(f"{reason} {count}" for reason, count in misses) or "-"),
        )
    out.print(rows)
    disk = books.disk
    if disk is None:
        out.print(f"on disk: {books.disk_state}")
    else:
        budget = "no limit" if disk.daily_write_bytes is None else size_text(disk.daily_write_bytes)
        out.print(
            f"on disk: {books.disk_state}, {disk.blocks} blocks, {size_text(disk.file_bytes)} of "
            f"{size_text(disk.quota_bytes)}; written today {size_text(disk.written_today_bytes)} of {budget} "
            f"({disk.write_state}); {disk.evicted} evicted, {disk.expired} expired, {disk.quarantined} quarantined"
        )
    _print_all_pins(books)


@cache_app.command("pins")
def show_pins(config: ConfigOption = None, home: HomeOption = None, key_file: KeyFileOption = None) -> None:
    """Your own pinned prefixes, if you give a key; everybody's otherwise."""
    settings = settings_of(config, home)
    key = caller_key(key_file)
    if key is None:
        _print_all_pins(_fetch_books(settings), remark="nothing is pinned; `mlxd warm FILE --pin NAME` does that")
        return
    pins = _decoded(ask_service(settings, "GET", "/v1/cache/pins", token=key), PinList).data
    _print_pins([("you", pin) for pin in pins], remark="you pinned nothing; `mlxd warm FILE --pin NAME` does that")


@cache_app.command("unpin")
def unpin_prefix(
    name: Annotated[str, typer.Argument(help="The pin's name.")],
    config: ConfigOption = None,
    home: HomeOption = None,
    key_file: KeyFileOption = None,
    key_name: KeyNameOption = None,
) -> None:
    """Let a pinned prefix age like any other: your own, or as the operator that of --key."""
    settings = settings_of(config, home)
    if key_name is not None:
        body = _request(UnpinRequest, {"name": name, "key": key_name})
        answer = ask_service(settings, "POST", "/admin/cache/unpin", token=read_admin_token(settings), body=body)
    else:
        answer = ask_service(settings, "DELETE", f"/v1/cache/pins/{quote(name, safe='')}", token=caller_key(key_file))
    if not _decoded(answer, PinDeleted).deleted:
        raise ControlError(f"nothing is pinned as {name!r}; `mlxd cache pins` lists what is")
    typer.echo(f"{name} is no longer pinned")


@cache_app.command("purge")
def purge(
    config: ConfigOption = None,
    home: HomeOption = None,
    model: Annotated[str | None, typer.Option(help="Blocks of this model.")] = None,
    key_name: KeyNameOption = None,
    older_than: Annotated[str | None, typer.Option(help="Blocks on disk that nobody used for so long, as 7d.")] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All blocks of all.")] = False,
    yes: YesOption = False,
) -> None:
    """Delete cached prefixes for good. Each purge leaves a line in the audit log."""
    settings = settings_of(config, home)
    criteria: dict[str, object] = {}
    words: list[str] = []
    if model is not None:
        criteria["model"] = model
        words.append(f"of model {model}")
    if key_name is not None:
        criteria["key"] = key_name
        words.append(f"of key {key_name}")
    if older_than is not None:
        criteria["unused_for_seconds"] = _duration_option("--older-than", older_than)
        words.append(f"unused for {older_than}, on disk")
    if everything == bool(criteria):
        raise ControlError("say what to purge: --model, --key or --older-than, or --all and nothing else")
    if everything:
        criteria["all"] = True
    if not yes and not _confirmed("all" if everything else ", ".join(words)):
        raise ControlError("nothing was deleted; say y, or add --yes")
    answer = ask_service(
        settings,
        "POST",
        "/admin/cache/forget",
        token=read_admin_token(settings),
        body=_request(ForgetRequest, criteria),
        timeout_seconds=_PURGE_SECONDS,
    )
    forgotten = _decoded(answer, CacheForgotten)
    memory = f"; memory of {', '.join(forgotten.models)}" if forgotten.models else ""
    disk = "the cache on disk is off" if forgotten.disk == "off" else f"{forgotten.disk_blocks} blocks on disk"
    typer.echo(f"deleted: {disk} ({size_text(forgotten.disk_bytes)}){memory}")


@cache_app.command("budget")
def set_budget(
    model: Annotated[str, typer.Argument(help="The model.")],
    size: Annotated[str, typer.Argument(help='How much memory its prefixes may take, as "4GiB".')],
    config: ConfigOption = None,
    home: HomeOption = None,
) -> None:
    """Change how much memory a model's prefixes may take, until the service is restarted."""
    settings = settings_of(config, home)
    try:
        hot_cache_bytes = parse_byte_size(int(size) if size.isdecimal() else size)
    except ValueError as why:
        raise ControlError(f"SIZE: {why}") from None
    body = _request(BudgetRequest, {"model": model, "hot_cache_bytes": hot_cache_bytes})
    answer = ask_service(settings, "POST", "/admin/cache/budget", token=read_admin_token(settings), body=body)
    done = _decoded(answer, BudgetSet)
    when = "now" if done.holds == "now" else "from its next load on"
    typer.echo(f"{done.model}: {size_text(done.hot_cache_bytes)}, {when}; `hot_cache` in mlxd.toml keeps it for good")


@cache_app.command("bench")
def bench(config: ConfigOption = None, home: HomeOption = None, *, json: JsonOption = False) -> None:
    """Measure the cache's disk, and say for each loaded model whether it is worth it. Takes some ten seconds."""
    settings = settings_of(config, home)
    measured = _measure(settings)
    try:
        models = _fetch_books(settings).models
    except ControlError:
        models = ()
    worth = disk_worth(measured, models)
    if json:
        print_json(_BenchAnswer(bench=measured, models=worth))
        return
    out = console()
    rows = table("block", "write", "cold read", "warm read")
    for speed in measured.sizes:
        rows.add_row(
            size_text(speed.block_bytes),
            f"{size_text(speed.write_bytes_per_second)}/s",
            f"{size_text(speed.cold_read_bytes_per_second)}/s",
            f"{size_text(speed.warm_read_bytes_per_second)}/s",
        )
    out.print(rows)
    if measured.page_cache in ("kept", "unknown"):
        out.print("the system may have kept these files in memory, so the disk itself is perhaps slower than this")
    if not worth:
        out.print("no model is loaded: start the service, send a request, and ask again")
    for model in worth:
        out.print(Text(f"{model.model}: {model.text}"))
        if model.restore_seconds is not None and model.compute_seconds is not None:
            out.print(
                f"  1,000 tokens: {model.restore_seconds:.3f} s from disk, {model.compute_seconds:.3f} s computed"
            )


class _BenchAnswer(Struct, frozen=True, kw_only=True):
    bench: DiskBench
    models: tuple[Struct, ...]


# --- asking ----------------------------------------------------------------------------------------------------------


def caller_key(key_file: Path | None) -> str | None:
    """The caller's key; None is enough on a machine without keys."""
    if key_file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ControlError(f"{KEY_VARIABLE} holds no key; put the key there, alone")
        return key or None
    try:
        key = read_private(key_file, max_bytes=4096).decode("ascii").strip()
    except (OSError, UnicodeDecodeError, FileNotPrivate) as why:
        raise ControlError(f"no key from --key-file ({why}); give a private file that holds the key alone") from None
    if not key.isprintable() or not key:
        raise ControlError("--key-file holds no key; put the key there, alone on one line")
    return key


def _decoded(answer: ServiceAnswer, wanted: type[Wanted]) -> Wanted:
    if answer.status == 401:
        raise ControlError(f"the service wants a key: set {KEY_VARIABLE}, or name a file with --key-file")
    try:
        if answer.status != 200:
            raise ControlError(msgspec.json.decode(answer.body, type=OpenAIErrorBody).error.message)
        return msgspec.json.decode(answer.body, type=wanted)
    except msgspec.DecodeError:
        raise ControlError(
            f"the service answered {answer.status} in words of another version; restart mlxd serve"
        ) from None


def _request(body_type: type[Struct], fields: dict[str, object]) -> bytes:
    """Checked here as the service would, so that a slip is found before anything is asked."""
    try:
        msgspec.convert(fields, body_type)
    except msgspec.ValidationError as why:
        raise ControlError(f"{why}; correct that argument") from None
    return msgspec.json.encode(fields)


def _fetch_books(settings: Settings) -> AdminCache:
    return _decoded(ask_service(settings, "GET", "/admin/cache", token=read_admin_token(settings)), AdminCache)


def _confirmed(which: str) -> bool:
    """Nobody who is not there can say yes."""
    return sys.stdin.isatty() and typer.confirm(f"Delete cached prefixes: {which}?")


def _duration_option(name: str, text: str) -> float:
    try:
        return parse_duration_seconds(text)
    except ValueError as why:
        raise ControlError(f"{name}: {why}") from None


def _measure(settings: Settings) -> DiskBench:
    """Run the bench as a process of its own: it knows the files' format, which is the cachestore's."""
    try:
        ended = subprocess.run(
            [*BENCH_COMMAND, settings.cache.directory, str(settings.cache.free_floor_bytes)],
            capture_output=True,
            timeout=_BENCH_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ControlError(f"the disk took over {_BENCH_SECONDS:.0f} s; look after it before you cache on it") from None
    if ended.returncode != 0:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        raise ControlError(lines[-1] if lines else f"the bench ended with {ended.returncode}; try again")
    try:
        return msgspec.json.decode(ended.stdout, type=DiskBench)
    except msgspec.DecodeError as why:
        raise ControlError(f"the bench answered in other words ({why}); reinstall mlxd") from None


# --- showing ---------------------------------------------------------------------------------------------------------


def _print_all_pins(books: AdminCache, *, remark: str = "") -> None:
    keys: dict[str, str] = {}
    for owner in books.owners:
        keys[owner.owner] = f"{keys[owner.owner]}, {owner.key}" if owner.owner in keys else owner.key
    pins = [(keys.get(owner, owner), pin) for owner, pin in pins_of_all(books, unix_now=time.time())]
    _print_pins(pins, remark=remark)


def _print_pins(pins: list[tuple[str, PinObject]], *, remark: str) -> None:
    if not pins:
        if remark:
            typer.echo(f"mlxd: {remark}", err=True)
        return
    rows = table("pin", "whose", "models", "tokens", "in memory", "on disk", "expires in")
    for whose, pin in pins:
        left = "never" if pin.expires_unix is None else duration_text(pin.expires_unix - time.time())
        rows.add_row(
            Text(pin.name),
            Text(whose),
            Text(", ".join(pin.models) or "-"),
            str(pin.tokens) if pin.tokens else "-",
            size_text(pin.hot_bytes) if pin.hot_bytes else "-",
            size_text(pin.disk_bytes) if pin.disk_blocks else "-",
            left,
        )
    console().print(rows)
