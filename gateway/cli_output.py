"""What the commands share: their settings, and how their output looks."""

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from gateway.config import Settings, home_directory, load_settings

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="mlxd's directory; $MLXD_HOME or ~/.mlxd otherwise.", show_default=False)
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file; mlxd.toml in the home otherwise.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")]


def home_of(home: Path | None) -> Path:
    """The home that was named, else the environment's. Raises SettingsError."""
    return home_directory(os.environ) if home is None else home.expanduser().absolute()


def settings_of(config: Path | None, home: Path | None) -> Settings:
    """Raises SettingsError."""
    return load_settings(config, home=home_of(home))


def print_json(answer: msgspec.Struct) -> None:
    """On standard output, for scripts."""
    typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())


def console() -> Console:
    """As wide as needed when nobody looks: a pipe must not get cut words."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def table(*columns: str) -> Table:
    """Without a frame, so that it can be read by eye and by awk."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def size_text(count: float) -> str:
    """`1.5 GB`."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
