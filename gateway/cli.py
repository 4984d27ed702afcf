"""`mlxd`, the command. Every error is one line on standard error and a non-zero exit."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from gateway.cache_cli import cache_app, explain_request, warm_prefix
from gateway.catalog import Catalog
from gateway.cli_output import ConfigOption, HomeOption, console, home_of, size_text, table
from gateway.config import SettingsError, load_settings
from gateway.control import ControlError
from gateway.keys import KeysError
from gateway.keys_cli import keys_app
from gateway.launch_cli import LaunchProblem, connect_client, launch_agent
from gateway.models_cli import load_model, restart_model, unload_model
from gateway.operations import mlxd_version
from gateway.plan_cli import show_plan
from gateway.recipes import RecipeError
from gateway.service_cli import service_app
from gateway.service_plan import ServiceProblem
from gateway.status_cli import show_status
from gateway.top_cli import show_top

ModelDirOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--model-dir", "--models", metavar="DIR", help="Folder of model folders; may be given more than once."
    ),
]

app = typer.Typer(
    name="mlxd",
    help="Serve MLX models from this machine to the people around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(keys_app, name="keys")
app.add_typer(cache_app, name="cache")
app.add_typer(service_app, name="service")
app.command("warm")(warm_prefix)
app.command("explain")(explain_request)
app.command("launch")(launch_agent)
app.command("connect")(connect_client)
app.command("top")(show_top)
app.command("plan")(show_plan)
app.command("status")(show_status)
app.command("load")(load_model)
app.command("unload")(unload_model)
app.command("restart")(restart_model)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Ends the process."""
    try:
        app(args=arguments if arguments is None else list(arguments), prog_name="mlxd")
    except (SettingsError, KeysError, ControlError, RecipeError, ServiceProblem, LaunchProblem) as why:
        print(f"mlxd: {' '.join(str(why).split())}", file=sys.stderr)
        sys.exit(1)


@app.command()
def serve(
    home: HomeOption = None,
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    model_dir: ModelDirOption = None,
    log_file: Annotated[Path | None, typer.Option(help="Log to this file, rotated, instead of standard error.")] = None,
) -> None:
    """Run the service in the foreground until SIGTERM or Ctrl-C. Prints `mlxd ready at URL` when it serves."""
    overrides: dict[str, object] = {}
    if host is not None:
        overrides["host"] = host
    if port is not None:
        overrides["port"] = port
    overrides |= _model_dirs(model_dir)
    settings = load_settings(config, home=home_of(home), overrides=overrides)
    from gateway.serve import run_service  # here, so that the other commands start fast

    raise typer.Exit(run_service(settings, log_file=log_file))


@app.command()
def models(config: ConfigOption = None, home: HomeOption = None, model_dir: ModelDirOption = None) -> None:
    """List the models that can be served, and what is wrong with the others."""
    settings = load_settings(config, home=home_of(home), overrides=_model_dirs(model_dir))
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
    home: HomeOption = None,
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the demo's folder and service in place.")] = False,
) -> None:
    """Make a tiny model, serve it, crash it, and show that its clients never know."""
    from gateway import demo as demonstration

    raise typer.Exit(demonstration.main(home_of(home), "keep" if keep else "remove"))


@app.command("version")
def show_version() -> None:
    """Print the version."""
    print(f"mlxd {mlxd_version()}")


def _model_dirs(named: list[Path] | None) -> dict[str, object]:
    """Those of the command line stand for those of the settings; a relative one starts where the command runs."""
    return {"models_directories": [str(path.expanduser().absolute()) for path in named]} if named else {}
