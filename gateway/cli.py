"""`mlxd`, the command. Every error is one line on standard error and a non-zero exit."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.catalog import Catalog
from gateway.config import Settings, SettingsError, home_directory, load_settings
from gateway.control import ControlError, fetch_status
from gateway.keys import KeysError, add_key, list_keys, remove_key
from gateway.operations import AdminModel, AdminStatus, mlxd_version
from gateway.status import LastExit

app = typer.Typer(
    name="mlxd",
    help="Serve MLX models from this machine to the people around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(help="API keys: who may call.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file; mlxd.toml in the home otherwise.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Ends the process."""
    try:
        app(args=arguments if arguments is None else list(arguments), prog_name="mlxd")
    except (SettingsError, KeysError, ControlError) as why:
        print(f"mlxd: {' '.join(str(why).split())}", file=sys.stderr)
        sys.exit(1)


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    models: Annotated[list[Path] | None, typer.Option(help="Folder of models; may be given more than once.")] = None,
) -> None:
    """Run the service in the foreground until SIGTERM or Ctrl-C."""
    overrides: dict[str, object] = {}
    if host is not None:
        overrides["host"] = host
    if port is not None:
        overrides["port"] = port
    if models:
        overrides["models_directories"] = [str(path.absolute()) for path in models]
    settings = load_settings(config, home=home_directory(os.environ), overrides=overrides)
    from gateway.serve import run_service  # here, so that the other commands start fast

    raise typer.Exit(run_service(settings))


@app.command()
def status(
    config: ConfigOption = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """What the running service does now."""
    answer = fetch_status(_settings(config))
    if json:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        _print_status(answer)


@app.command()
def models(config: ConfigOption = None) -> None:
    """List the models that can be served, and what is wrong with the others."""
    settings = _settings(config)
    entries = Catalog([Path(directory) for directory in settings.models_directories]).entries()
    if not entries:
        places = ", ".join(settings.models_directories)
        print(f"mlxd: no model below {places}: put a folder with a config.json and its weights there", file=sys.stderr)
        return
    table = _table("model", "size", "context", "problem")
    for entry in entries:
        table.add_row(
            Text(entry.name),
            _size(entry.weight_bytes),
            "-" if entry.context_tokens is None else str(entry.context_tokens),
            Text(entry.problem or "-"),
        )
    _console().print(table)


@app.command()
def demo(
    *, keep: Annotated[bool, typer.Option("--keep", help="Leave the demo's folder and service in place.")] = False
) -> None:
    """Make a tiny model, serve it, crash it, and show that its clients never know."""
    from gateway import demo as demonstration

    raise typer.Exit(demonstration.main("keep" if keep else "remove"))


@app.command("version")
def show_version() -> None:
    """Print the version."""
    print(f"mlxd {mlxd_version()}")


@keys_app.command("add")
def keys_add(name: Annotated[str, typer.Argument(help="Who gets it: a label for logs.")]) -> None:
    """Make a key and show it, once."""
    key = add_key(_keys_path(), name, now_unix=int(time.time()))
    print(key)
    print("mlxd: this is the only time it is shown; a running service knows it already", file=sys.stderr)


@keys_app.command("list")
def keys_list() -> None:
    """List the keys by name."""
    records = list_keys(_keys_path())
    if not records:
        print("mlxd: no keys: only this machine can be served; make one with `mlxd keys add NAME`", file=sys.stderr)
        return
    table = _table("name", "made")
    for record in records:
        table.add_row(record.name, time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_unix)))
    _console().print(table)


@keys_app.command("remove")
def keys_remove(name: Annotated[str, typer.Argument(help="The key's name.")]) -> None:
    """Take a key back; a running service refuses it at once."""
    path = _keys_path()
    remove_key(path, name)
    if not list_keys(path):
        print("mlxd: that was the last key: a service on 127.0.0.1 now serves every local program", file=sys.stderr)


# --- what it looks like ----------------------------------------------------------------------------------------------


def _settings(config: Path | None) -> Settings:
    return load_settings(config, home=home_directory(os.environ))


def _keys_path() -> Path:
    return home_directory(os.environ) / "keys.json"


def _console() -> Console:
    """As wide as needed when nobody looks: a pipe must not get cut words."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_status(answer: AdminStatus) -> None:
    console = _console()
    gateway = answer.gateway
    console.print(f"mlxd {gateway.version}, process {gateway.pid}, up {_duration(gateway.uptime_seconds)}")
    table = _table("model", "state", "pid", "open", "waiting", "steps", "restarts", "memory", "remark")
    for model in answer.models:
        table.add_row(*_model_row(model))
    console.print(table)
    for model in answer.models:
        for line in _last_lines(model):
            console.print(Text(f"  {model.name}: {line}"))
    store = answer.cachestore
    if store is None:
        console.print("cache on disk: off")
    elif store.books is None:
        console.print(Text(f"cache on disk: {store.state}{_last_exit(store.last_exit)}"))
    else:
        books = store.books
        console.print(
            f"cache on disk: {store.state}, {books.blocks} blocks, "
            f"{_size(books.file_bytes)} of {_size(books.quota_bytes)}, {_size(books.written_bytes)} written, "
            f"{books.evicted} evicted, {books.quarantined} quarantined"
        )


def _model_row(model: AdminModel) -> tuple[Text | str, ...]:
    process = model.process
    if process is None:
        return (Text(model.name), "absent", "-", "0", "0", "0", "0", "-", Text(model.problem or "-"))
    if process.loading is not None:
        done = 100 * process.loading.done_bytes // max(1, process.loading.total_bytes)
        loading = f"{done} % of {_size(process.loading.total_bytes)} loaded"
    else:
        loading = ""
    remark = model.problem or loading or process.stuck_reason or _last_exit(process.last_exit).removeprefix(", ") or "-"
    return (
        Text(model.name),
        process.state,
        "-" if process.pid is None else str(process.pid),
        str(process.open_requests),
        str(process.waiting_requests),
        str(process.steps),
        str(process.restarts),
        "-" if process.memory_bytes is None else _size(process.memory_bytes),
        Text(remark),
    )


def _last_lines(model: AdminModel) -> tuple[str, ...]:
    """What a process that ended badly wrote last."""
    last = model.process.last_exit if model.process else None
    return last.stderr_tail[-5:] if last is not None and last.exit_code != 0 else ()


def _last_exit(last: LastExit | None) -> str:
    return "" if last is None else f", last exit: {last.reason}"


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
