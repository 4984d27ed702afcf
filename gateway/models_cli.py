"""`mlxd load`, `unload` and `restart`: one model's process, at the operator's word. Each returns when it is done."""

import http.client
import sys
import threading
import time
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from gateway.cli_output import ConfigOption, HomeOption, settings_of
from gateway.config import Settings
from gateway.control import ControlError, ServiceAnswer, announced_service, ask_service, fetch_status, read_admin_token
from gateway.error_answers import OpenAIErrorBody
from gateway.model_routes import ModelOrder
from gateway.status import AdminModel
from gateway.status_report import last_error

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Its id, as `mlxd models` shows it.")]
Verb = Literal["load", "unload"]

_LONGEST_SECONDS = 7200.0
"""Some hundred gigabytes from a slow disk, on a busy day."""

_LOOK_SECONDS = 0.2


def load_model(model: ModelArgument, config: ConfigOption = None, home: HomeOption = None) -> None:
    """Load a model and wait until it is ready, or say why it is not."""
    settings = settings_of(config, home)
    _load(settings, model)


def unload_model(model: ModelArgument, config: ConfigOption = None, home: HomeOption = None) -> None:
    """End a model's process after its open requests. The next request loads it again."""
    settings = settings_of(config, home)
    _unload(settings, model)
    typer.echo(f"{model} is unloaded")


def restart_model(model: ModelArgument, config: ConfigOption = None, home: HomeOption = None) -> None:
    """Unload a model and load it again. A model that was given up is tried again, with a clean record."""
    settings = settings_of(config, home)
    known = _find(settings, model)
    if known is not None and known.problem is not None:
        raise ControlError(f"{model} was left as it is, since it could not be loaded again: {known.problem}")
    _unload(settings, model)
    _load(settings, model)


def _load(settings: Settings, model: str) -> None:
    started = time.monotonic()
    _order(settings, "load", model)
    process = known.process if (known := _find(settings, model)) is not None else None
    pid = "" if process is None or process.pid is None else f", process {process.pid}"
    typer.echo(f"{model} is ready{pid}, after {time.monotonic() - started:.1f} s")


def _unload(settings: Settings, model: str) -> None:
    _order(settings, "unload", model)


def _order(settings: Settings, verb: Verb, model: str) -> None:
    """Give the order, and show how far it is until it is carried out. Raises ControlError when it is not."""
    announced_service(settings)  # so that a service that does not run is not taken for a missing token
    token = read_admin_token(settings)
    body = msgspec.json.encode(ModelOrder(model=model))
    outcome: list[ServiceAnswer | ControlError] = []

    def ask() -> None:
        path = f"/admin/models/{verb}"
        try:
            asked = ask_service(settings, "POST", path, token=token, body=body, timeout_seconds=_LONGEST_SECONDS)
            outcome.append(asked)
        except ControlError as why:
            outcome.append(why)

    asking = threading.Thread(target=ask, name=verb, daemon=True)  # a Ctrl-C ends the waiting, not the order
    asking.start()
    with _Watch(verb, model) as watch:
        while asking.is_alive():
            asking.join(_LOOK_SECONDS)
            if asking.is_alive():
                watch.show(_find(settings, model))
    (answer,) = outcome
    if isinstance(answer, ControlError):
        raise answer
    if answer.status != http.client.OK:
        raise ControlError(_refusal(settings, model, answer))


def _refusal(settings: Settings, model: str, answer: ServiceAnswer) -> str:
    """The service's own words, and what only its operator may read."""
    try:
        message = msgspec.json.decode(answer.body, type=OpenAIErrorBody).error.message
    except msgspec.DecodeError:
        return f"the service answered {answer.status} in words of another version; restart mlxd serve"
    known = _find(settings, model)
    if known is None or known.process is None:
        return message
    error = last_error(known)
    told = f" (its process: {error})" if error is not None and error not in message else ""
    again = f"; `mlxd restart {model}` tries again at once" if known.process.state == "given_up" else ""
    return f"{message}{told}{again}"


def _find(settings: Settings, model: str) -> AdminModel | None:
    return next((known for known in fetch_status(settings).models if known.name == model), None)


class _Watch:
    """Progress on standard error: a bar where somebody looks, else a line when something changed."""

    def __init__(self, verb: Verb, model: str) -> None:
        self._verb = verb
        self._model = model
        self._said = ""
        self._bars: Progress | None = None
        self._bar: TaskID | None = None
        if sys.stderr.isatty():
            console = Console(stderr=True, highlight=False)
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            self._bars = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> "_Watch":
        if self._bars is not None:
            self._bars.start()
            self._bar = self._bars.add_task(f"{self._verb} {self._model}", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, model: AdminModel | None) -> None:
        process = None if model is None else model.process
        if process is None:
            return
        loading = process.loading
        if self._bars is not None and self._bar is not None:
            self._bars.update(
                self._bar,
                description=f"{self._model}: {_state_text(process.state)}",
                completed=0 if loading is None else loading.done_bytes,
                total=None if loading is None else loading.total_bytes,
            )
            return
        text = _state_text(process.state)
        if loading is not None and loading.total_bytes:
            text += f", {100 * loading.done_bytes // loading.total_bytes // 10 * 10} % read"
        if process.state == "draining" and process.open_requests:
            text += f", {process.open_requests} open"
        if text != self._said:
            self._said = text
            typer.echo(f"mlxd: {self._model}: {text}", err=True)


def _state_text(state: str) -> str:
    return state.replace("_", " ")
