"""mlxd as a unit of systemd: its text, and the systemctl calls. Decides only."""

from pathlib import PurePosixPath
from typing import Literal, assert_never

from gateway.service_plan import RESTART_SECONDS, UNIT, ServicePlan

START_SECONDS = 180

Action = Literal["reload", "enable", "disable", "restart", "is-active", "show"]


def unit(plan: ServicePlan) -> str:
    """The unit file."""
    account = [] if plan.account is None else [f"User={plan.account.name}", f"Group={plan.account.group}"]
    lines = [
        "[Unit]",
        "Description=mlxd, language models for the room",
        # Without a limit: it starts again for ever, slowly, as a broken disk or a taken port may mend.
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "# It says itself when it serves and when it stops.",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={' '.join(_word(word) for word in plan.program)}",
        f"WorkingDirectory={_escaped(plan.home)}",
        *account,
        'Environment="PYTHONUNBUFFERED=1" "LANG=C.UTF-8"',
        "UMask=0077",
        "LimitNOFILE=65536",
        f"TimeoutStartSec={START_SECONDS}",
        "# SIGTERM goes to the gateway alone: it drains, then ends its workers. Who is left after the time is killed.",
        "KillMode=mixed",
        f"TimeoutStopSec={plan.stop_seconds}",
        "Restart=on-failure",
        f"RestartSec={RESTART_SECONDS}",
        "# A worker that is killed for want of memory is restarted by the gateway, and takes nothing else down.",
        "OOMPolicy=continue",
        "",
        "[Install]",
        f"WantedBy={'default.target' if plan.scope == 'user' else 'multi-user.target'}",
    ]
    return "\n".join(lines) + "\n"


def unit_path(plan: ServicePlan, *, root: str = "/", config_home: str | None = None) -> PurePosixPath:
    """Where that file goes. `config_home` is XDG_CONFIG_HOME; `root` stands for the system's."""
    if plan.scope == "system":
        return PurePosixPath(root) / "etc/systemd/system" / UNIT
    return PurePosixPath(config_home or f"{plan.user_home}/.config") / "systemd/user" / UNIT


def systemctl(action: Action, plan: ServicePlan) -> tuple[str, ...]:
    """The call."""
    command = ("systemctl", "--user") if plan.scope == "user" else ("systemctl",)
    match action:
        case "reload":
            return (*command, "daemon-reload")
        case "enable" | "restart":
            return (*command, action, UNIT)
        case "disable":
            return (*command, "disable", "--now", UNIT)
        case "is-active":
            return (*command, "is-active", UNIT)
        case "show":
            return (*command, "show", UNIT, "--property=ActiveState,SubState,MainPID,NRestarts,Result,TimeoutStopUSec")
        case _:
            assert_never(action)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _word(text: str) -> str:
    """One argument of a command line; systemd would expand variables and specifiers in it."""
    inside = _escaped(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    is_plain = bool(text) and all(character.isalnum() or character in "/._-+:@,=" for character in text)
    return inside if is_plain else f'"{inside}"'
