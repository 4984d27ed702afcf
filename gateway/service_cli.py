"""`mlxd service …`: hand mlxd over to launchd or systemd, which start it again whenever it should run."""

import os
import pwd
import shlex
import sys
import time
from enum import StrEnum
from grp import getgrgid
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from gateway.cli_output import ConfigOption, HomeOption, JsonOption, home_of, print_json
from gateway.config import Settings, load_settings
from gateway.control import ControlError, announced_service, fetch_status, service_url
from gateway.operations import mlxd_version
from gateway.service_install import Hands, ServiceState, install, run_command, service_file, service_state, uninstall
from gateway.service_plan import ServiceAccount, ServicePlan, ServiceProblem, check_plan, remarks, stop_seconds

_LOOK_SECONDS = 0.5

service_app = typer.Typer(help="Run mlxd under launchd or systemd.", no_args_is_help=True)


class InitSystem(StrEnum):
    LAUNCHD = "launchd"
    SYSTEMD = "systemd"


ManagerOption = Annotated[
    InitSystem | None, typer.Option("--manager", help="Whose service; launchd on macOS, systemd elsewhere.")
]
DaemonOption = Annotated[
    bool, typer.Option("--daemon", help="The system's own service, from boot on, under --user; needs root.")
]
UserOption = Annotated[str | None, typer.Option("--user", help="The account of a --daemon; who called sudo otherwise.")]


class ServiceReport(Struct, frozen=True, kw_only=True):
    """`mlxd service status --json`. `url` and `pid` are there while it answers."""

    service: ServiceState
    url: str | None
    pid: int | None
    log: str


@service_app.command("install")
def install_service(
    home: HomeOption = None,
    config: ConfigOption = None,
    user: UserOption = None,
    manager: ManagerOption = None,
    wait: Annotated[float, typer.Option(help="How many seconds it may take until it serves.")] = 60.0,
    *,
    daemon: DaemonOption = False,
) -> None:
    """Install the service and start it; also after an upgrade, or when its settings' `drain_seconds` changed."""
    plan, settings = _plan(home, config, user=user, daemon=daemon)
    if daemon and os.geteuid() != 0:
        raise ServiceProblem("a --daemon is the system's: run this with sudo, or leave out --daemon")
    which = _manager(manager)
    hands = _hands(settings)
    install(which.value, plan, hands)
    path, _ = service_file(which.value, plan, hands)
    serving = _wait_until_serving(settings, wait)
    typer.echo(_next_steps(which, plan, path, serving))
    if mlxd_version() == "uninstalled":
        typer.echo(f"mlxd: mlxd is not installed in {plan.python}, so the service cannot find it; install it", err=True)
    for remark in remarks(plan):
        typer.echo(f"mlxd: {remark}", err=True)
    if serving is None:
        raise ServiceProblem(f"it is installed but does not serve yet; look into {plan.logs_directory}")


@service_app.command("uninstall")
def uninstall_service(
    home: HomeOption = None,
    config: ConfigOption = None,
    user: UserOption = None,
    manager: ManagerOption = None,
    *,
    daemon: DaemonOption = False,
) -> None:
    """Stop the service, let its requests end, and remove it. Models, keys and cache stay."""
    plan, settings = _plan(home, config, user=user, daemon=daemon)
    done = uninstall(_manager(manager).value, plan, _hands(settings))
    typer.echo("the service is removed" if done == "removed" else "no service was installed")
    typer.echo(f"what it worked with is still in {plan.home}")


@service_app.command("status")
def show_service(
    home: HomeOption = None,
    config: ConfigOption = None,
    user: UserOption = None,
    manager: ManagerOption = None,
    *,
    daemon: DaemonOption = False,
    json: JsonOption = False,
) -> None:
    """Whether it is installed, loaded, and answers. Exit code 0 if all of that, 3 otherwise."""
    plan, settings = _plan(home, config, user=user, daemon=daemon)
    state = service_state(_manager(manager).value, plan, _hands(settings))
    url, pid = _serving(settings) or (None, None)
    if json:
        print_json(ServiceReport(service=state, url=url, pid=pid, log=plan.log_path))
    else:
        typer.echo(f"{state.manager}: {state.file} {'is installed' if state.installed else 'is not there'}")
        where = f" in {state.domain}" if state.domain else ""
        typer.echo(f"loaded{where}" if state.loaded else "not loaded")
        typer.echo(f"serves at {url}, process {pid}" if url else f"does not answer; its log is {plan.log_path}")
        for line in state.details:
            typer.echo(f"  {line}")
    if not (state.installed and state.loaded and url):
        raise typer.Exit(3)


@service_app.command("print")
def print_service(
    home: HomeOption = None,
    config: ConfigOption = None,
    user: UserOption = None,
    manager: ManagerOption = None,
    *,
    daemon: DaemonOption = False,
) -> None:
    """Show the file that `install` would write, and touch nothing."""
    plan, settings = _plan(home, config, user=user, daemon=daemon)
    _, content = service_file(_manager(manager).value, plan, _hands(settings))
    typer.echo(content.decode(), nl=False)


# --- inside ----------------------------------------------------------------------------------------------------------


def _manager(named: InitSystem | None) -> InitSystem:
    return named or (InitSystem.LAUNCHD if sys.platform == "darwin" else InitSystem.SYSTEMD)


def _plan(home: Path | None, config: Path | None, *, user: str | None, daemon: bool) -> tuple[ServicePlan, Settings]:
    """Raises ServiceProblem and SettingsError."""
    account = _account(user) if daemon else None
    if user is not None and not daemon:
        raise ServiceProblem("--user is for a --daemon; a service of your own runs as you")
    if account is not None and home is None and "MLXD_HOME" not in os.environ:
        home = Path(account.home, ".mlxd")
    chosen = home_of(home)
    config = None if config is None else config.absolute()
    settings = load_settings(config, home=chosen)
    plan = ServicePlan(
        scope="user" if account is None else "system",
        python=sys.executable,
        home=str(chosen),
        config=None if config is None else str(config),
        # An account made for a service has no home of its own worth the name.
        user_home=str(chosen) if account is not None else os.environ.get("HOME") or str(chosen),
        stop_seconds=stop_seconds(settings.drain_seconds),
        account=account,
    )
    check_plan(plan)
    return plan, settings


def _account(user: str | None) -> ServiceAccount:
    name = user or os.environ.get("SUDO_USER", "")
    if not name:
        raise ServiceProblem("whose daemon is it? Name an account that is not root with --user")
    try:
        entry = pwd.getpwnam(name)
        group = getgrgid(entry.pw_gid).gr_name
    except KeyError:
        raise ServiceProblem(f"there is no account {name}: make one, or name another with --user") from None
    return ServiceAccount(
        name=name, group=group, user_id=entry.pw_uid, group_id=entry.pw_gid, home=entry.pw_dir.rstrip("/") or "/"
    )


def _hands(settings: Settings) -> Hands:
    def is_serving() -> bool:
        try:
            announced_service(settings)
        except ControlError:
            return False
        return True

    return Hands(
        run=run_command,
        sleep=time.sleep,
        is_serving=is_serving,
        user_id=os.getuid(),
        config_home=os.environ.get("XDG_CONFIG_HOME"),
    )


def _serving(settings: Settings) -> tuple[str, int] | None:
    try:
        fetch_status(settings)
        address = announced_service(settings)
    except ControlError:
        return None
    return service_url(settings, address), address.pid


def _wait_until_serving(settings: Settings, seconds: float) -> tuple[str, int] | None:
    deadline = time.monotonic() + seconds
    while (serving := _serving(settings)) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return serving


def _next_steps(manager: InitSystem, plan: ServicePlan, path: Path, serving: tuple[str, int] | None) -> str:
    home = f" --home {shlex.quote(plan.home)}"
    whose = "" if plan.account is None else f" --daemon --user {plan.account.name}"
    lines = [f"installed {path}"]
    if serving is not None:
        lines.append(f"mlxd ready at {serving[0]}")
    lines += [
        f"  log         {plan.log_path}",
        f"  settings    {plan.config or f'{plan.home}/mlxd.toml'}",
        f"  a key       mlxd keys add NAME{home}",
        f"  how it is   mlxd status{home}",
        f"  remove it   mlxd service uninstall{home}{whose}",
    ]
    if manager is InitSystem.SYSTEMD and plan.scope == "user":
        lines.append("  without a login it runs only after: loginctl enable-linger")
    return "\n".join(lines)
