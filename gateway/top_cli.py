"""`mlxd top`: the open requests of the running service, as they go."""

import http.client
import sys
import time
from typing import Annotated

import msgspec
import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gateway.cli_output import ConfigOption, HomeOption, console, settings_of, table
from gateway.config import Settings
from gateway.control import ControlError, announced_service, ask_service, read_admin_token
from gateway.durations import duration_text
from gateway.in_flight import RequestView, RequestViews

_REFRESH_SECONDS = 1.0


def show_top(
    config: ConfigOption = None,
    home: HomeOption = None,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end, for scripts.")] = False,
) -> None:
    """Who waits, for what, and how long still. Ends with Ctrl-C."""
    settings = settings_of(config, home)
    out = console()
    if once or not sys.stdout.isatty():
        out.print(_rows(_fetch(settings)))
        return
    with Live(_rows(_fetch(settings)), console=out, auto_refresh=False, screen=True) as live:
        try:
            while True:
                time.sleep(_REFRESH_SECONDS)
                live.update(_rows(_fetch(settings)), refresh=True)
        except KeyboardInterrupt:
            return


def _fetch(settings: Settings) -> tuple[RequestView, ...]:
    announced_service(settings)  # so that a service that does not run is not taken for a missing token
    answer = ask_service(settings, "GET", "/admin/requests", token=read_admin_token(settings))
    if answer.status != http.client.OK:
        raise ControlError(f"the service answered {answer.status}: it may be of another version; restart mlxd serve")
    try:
        return msgspec.json.decode(answer.body, type=RequestViews).data
    except msgspec.DecodeError as why:
        raise ControlError(f"the service is of another version ({why}); restart it") from None


def _rows(views: tuple[RequestView, ...]) -> Table:
    rows = table("request", "key", "model", "class", "phase", "age", "ahead", "eta", "progress", "waits for")
    for view in views:
        rows.add_row(
            Text(view.id),
            Text(view.key),
            Text(view.model),
            view.latency_class,
            view.phase,
            duration_text(view.seconds),
            "-" if view.ahead is None else str(view.ahead),
            "-" if view.eta_seconds is None else duration_text(view.eta_seconds),
            _progress_text(view),
            view.held_by or "-",
        )
    if not views:
        rows.caption = "no open requests"
    return rows


def _progress_text(view: RequestView) -> str:
    if view.loading_percent is not None:
        return f"{view.loading_percent} % loaded"
    if view.progress is not None:
        cached = f", {view.progress.cached_tokens} cached" if view.progress.cached_tokens else ""
        return f"{view.progress.done_tokens}/{view.progress.total_tokens} of the prompt{cached}"
    if view.phase == "decoding":
        return f"{view.completion_tokens} tokens"
    return "-" if view.prompt_tokens is None else f"prompt of {view.prompt_tokens}"
