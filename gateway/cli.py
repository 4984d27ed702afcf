"""`mlxd`, the command. Every error is one line on standard error and a non-zero exit."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from gateway.cache_cli import cache_app, explain_request, warm_prefix
from gateway.catalog import Catalog
from gateway.cli_output import ConfigOption, console, settings_of, size_text, table
from gateway.config import SettingsError, home_directory, load_settings
from gateway.control import ControlError, fetch_status
from gateway.durations import duration_text
from gateway.keys import KeysError
from gateway.keys_cli import keys_app
from gateway.operations import AdminModel, AdminStatus, mlxd_version
from gateway.recipes import RecipeError
from gateway.status import LastExit
from gateway.top_cli import show_top

app = typer.Typer(
    name="mlxd",
    help="Serve MLX models from this machine to the people around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(keys_app, name="keys")
app.add_typer(cache_app, name="cache")
app.command("warm")(warm_prefix)
app.command("explain")(explain_request)
app.command("top")(show_top)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Ends the process."""
    try:
        app(args=arguments if arguments is None else list(arguments), prog_name="mlxd")
    except (SettingsError, KeysError, ControlError, RecipeError) as why:
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
    answer = fetch_status(settings_of(config))
    if json:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        _print_status(answer)


@app.command()
def models(config: ConfigOption = None) -> None:
    """List the models that can be served, and what is wrong with the others."""
    settings = settings_of(config)
    entries = Catalog([Path(directory) for directory in settings.models_directories]).entries()
    if not entries:
        places = ", ".join(settings.models_directories)
        print(f"mlxd: no model below {places}: put a folder with a config.json and its weights there", file=sys.stderr)
        return
    rows = table("model", "size", "context", "problem")
    for entry in entries:
        rows.add_row(
            Text(entry.name),
            size_text(entry.weight_bytes),
            "-" if entry.context_tokens is None else str(entry.context_tokens),
            Text(entry.problem or "-"),
        )
    console().print(rows)


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


# --- what it looks like ----------------------------------------------------------------------------------------------


def _print_status(answer: AdminStatus) -> None:
    out = console()
    gateway = answer.gateway
    out.print(f"mlxd {gateway.version}, process {gateway.pid}, up {duration_text(gateway.uptime_seconds)}")
    rows = table("model", "state", "pid", "open", "waiting", "steps", "restarts", "memory", "remark")
    for model in answer.models:
        rows.add_row(*_model_row(model))
    out.print(rows)
    for model in answer.models:
        for line in _last_lines(model):
            out.print(Text(f"  {model.name}: {line}"))
    store = answer.cachestore
    if store is None:
        out.print("cache on disk: off")
    elif store.books is None:
        out.print(Text(f"cache on disk: {store.state}{_last_exit(store.last_exit)}"))
    else:
        books = store.books
        out.print(
            f"cache on disk: {store.state}, {books.blocks} blocks, "
            f"{size_text(books.file_bytes)} of {size_text(books.quota_bytes)}, "
            f"{size_text(books.written_bytes)} written, {books.evicted} evicted, {books.quarantined} quarantined"
        )


def _model_row(model: AdminModel) -> tuple[Text | str, ...]:
    process = model.process
    if process is None:
        return (Text(model.name), "absent", "-", "0", "0", "0", "0", "-", Text(model.problem or "-"))
    if process.loading is not None:
        done = 100 * process.loading.done_bytes // max(1, process.loading.total_bytes)
        loading = f"{done} % of {size_text(process.loading.total_bytes)} loaded"
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
        "-" if process.memory_bytes is None else size_text(process.memory_bytes),
        Text(remark),
    )


def _last_lines(model: AdminModel) -> tuple[str, ...]:
    """What a process that ended badly wrote last."""
    last = model.process.last_exit if model.process else None
    return last.stderr_tail[-5:] if last is not None and last.exit_code != 0 else ()


def _last_exit(last: LastExit | None) -> str:
    return "" if last is None else f", last exit: {last.reason}"
