"""`mlxd launch NAME` and `mlxd connect NAME`: an agent that uses this server, and what to set in one by hand."""

import http.client
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer
from msgspec import Struct

from gateway.cache_cli import KeyFileOption, caller_key
from gateway.cli_output import ConfigOption, HomeOption, settings_of
from gateway.client_guides import GUIDES, guide
from gateway.client_setups import AGENTS, KEY_VARIABLE, NO_KEY, Server, file_text, with_files, with_key
from gateway.config import Settings
from gateway.control import ControlError, announced_service, service_url
from gateway.private_files import write_private

_ANSWER_SECONDS = 10.0

UrlOption = Annotated[
    str | None, typer.Option("--url", help="The server, as http://studio.local:8321; this machine's otherwise.")
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="Which model; needed if there are several.")]


class LaunchProblem(Exception):
    """Why the agent is not started. One line that says what to do."""


class _Extension(Struct, frozen=True, kw_only=True):
    problem: str | None = None
    profile_of: str | None = None


class _Model(Struct, frozen=True, kw_only=True):
    id: str
    context_length: int | None = None
    capabilities: tuple[str, ...] = ()
    mlxd: _Extension = _Extension()


class _Models(Struct, frozen=True, kw_only=True):
    data: tuple[_Model, ...]


def launch_agent(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(AGENTS)}.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="The agent's own.")] = None,
    url: UrlOption = None,
    model: ModelOption = None,
    key_file: KeyFileOption = None,
    config: ConfigOption = None,
    home: HomeOption = None,
) -> None:
    """Start a coding agent that uses this server. Its own configuration stays as it is."""
    if name not in AGENTS:
        known = ", ".join(AGENTS)
        raise LaunchProblem(f"`{name}` cannot be launched; these can: {known}. `mlxd connect` helps with others.")
    settings = settings_of(config, home)
    key = caller_key(key_file)
    setup = AGENTS[name](_server(settings, url, model, key))
    program = shutil.which(setup.program)
    if program is None:
        raise LaunchProblem(f"`{setup.program}` is not installed here: {setup.install}")
    key = key or NO_KEY
    directory = Path(settings.home) / "agents" / name
    for file in setup.files:
        path = directory / file.name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, file_text(file, key).encode())
    told = {name: with_files(with_key(value, key), str(directory)) for name, value in setup.environment.items()}
    own = [with_files(argument, str(directory)) for argument in setup.arguments]
    sys.stdout.flush()
    os.execve(program, [program, *own, *(arguments or [])], {**os.environ, **told})  # noqa: S606


def connect_client(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(GUIDES)}.")],
    url: UrlOption = None,
    model: ModelOption = None,
    key_file: KeyFileOption = None,
    config: ConfigOption = None,
    home: HomeOption = None,
) -> None:
    """Print what to set in a client, so that it uses this server. The key itself is never printed."""
    if name not in GUIDES:
        raise LaunchProblem(f"nothing is known of `{name}`; of these something is: {', '.join(GUIDES)}")
    typer.echo(guide(name, _server(settings_of(config, home), url, model, caller_key(key_file))))


def _server(settings: Settings, url: str | None, model: str | None, key: str | None) -> Server:
    """The server and its model. Raises LaunchProblem, ControlError."""
    at = (url or service_url(settings, announced_service(settings))).rstrip("/").removesuffix("/v1")
    models = _served_models(at, key)
    if model is None:
        writers = [
            known.id
            for known in models
            if known.mlxd.problem is None and known.mlxd.profile_of is None and "chat" in known.capabilities
        ]
        if len(writers) != 1:
            names = ", ".join(writers) or "none"
            raise LaunchProblem(f"say which model with --model; served here: {names}")
        model = writers[0]
    context_tokens = next((known.context_length for known in models if known.id == model), None)
    return Server(url=at, model=model, context_tokens=context_tokens)


def _served_models(url: str, key: str | None) -> tuple[_Model, ...]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LaunchProblem("--url must look like http://studio.local:8321")
    connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connection_type(parts.hostname, parts.port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", f"{parts.path}/v1/models", headers={"Authorization": f"Bearer {key or NO_KEY}"})
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as why:
        raise ControlError(f"no answer from {url} ({type(why).__name__}); does mlxd serve there?") from None
    finally:
        connection.close()
    if answer.status == http.client.UNAUTHORIZED:
        raise LaunchProblem(f"{url} wants a key: put yours into {KEY_VARIABLE}, or name its file with --key-file")
    try:
        return msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise LaunchProblem(f"{url} answered {answer.status}, and not as mlxd does; is it the right address?") from None
