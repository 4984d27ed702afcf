"""What a service manager is to run, and how long it must wait, for launchd and systemd alike. Decides only."""

from math import ceil
from typing import Literal

from msgspec import Struct

ServiceScope = Literal["user", "system"]
"""`user`: belongs to who installed it and runs as them. `system`: starts at boot as an account of its own."""

LABEL = "studio.mlxd"
"""The service's name for launchd."""

UNIT = "mlxd.service"
"""And for systemd."""

RESTART_SECONDS = 10
"""Between a bad end and the next start."""

_AFTER_DRAIN_SECONDS = 150
"""Workers' own drain, SIGTERM (longer by their weights, up to 512 GiB), SIGKILL, connections, cachestore: 10 + 61 +
10 + 5 + 10, and half as much again, since a supervisor that kills too early can strand a Mac's wired memory."""


class ServiceAccount(Struct, frozen=True, kw_only=True):
    """Who the service runs as when it is the system's. `home` is that account's own directory, whatever it is for."""

    name: str
    group: str
    user_id: int
    group_id: int
    home: str


class ServicePlan(Struct, frozen=True, kw_only=True):
    """One service. Paths are absolute. `account` is there exactly when the scope is `system`.

    `user_home` is the HOME that the service sees.
    """

    scope: ServiceScope
    python: str
    home: str
    config: str | None
    user_home: str
    stop_seconds: int
    account: ServiceAccount | None = None

    @property
    def program(self) -> tuple[str, ...]:
        """The command. It names no secret: every program of the machine can read it."""
        config = () if self.config is None else ("--config", self.config)
        return (self.python, "-P", "-m", "gateway", "serve", "--home", self.home, *config, "--log-file", self.log_path)

    @property
    def logs_directory(self) -> str:
        return f"{self.home}/logs"

    @property
    def log_path(self) -> str:
        """The service's own log, which it rotates."""
        return f"{self.logs_directory}/mlxd.log"


class ServiceProblem(Exception):
    """The service cannot be installed, removed or asked about like this. One line that says what to do."""


def stop_seconds(drain_seconds: float) -> int:
    """How long a manager waits between SIGTERM and SIGKILL: longer than the service's own longest way to its end."""
    return ceil(drain_seconds) + _AFTER_DRAIN_SECONDS


def check_plan(plan: ServicePlan) -> None:
    """Raises ServiceProblem for what no service manager could run."""
    for what, path in (("home", plan.home), ("Python", plan.python), ("settings file", plan.config or "/")):
        if not path.startswith("/") or not path.isprintable():
            raise ServiceProblem(f"the {what} is at {path!r}: services need an absolute path of printable characters")
        if path != path.rstrip() or path.endswith("\\"):
            raise ServiceProblem(f"the {what} is at {path!r}: no service manager reads a path that ends in this")
    if (plan.scope == "system") != (plan.account is not None):
        raise ServiceProblem("a service of the system runs as an account of its own: name one with --user")
    if plan.account is not None and plan.account.user_id == 0:
        raise ServiceProblem("mlxd answers strangers, so it does not run as root: name another account with --user")


def remarks(plan: ServicePlan) -> tuple[str, ...]:
    """What will probably hurt later, in words for the one who installs."""
    guarded = ("Documents", "Desktop", "Downloads", "Library/Mobile Documents")
    user_home = plan.user_home if plan.account is None else plan.account.home
    told: list[str] = []
    for what, path in (("home", plan.home), ("Python", plan.python)):
        if any(_is_below(path, f"{user_home}/{folder}") for folder in guarded) or _is_below(path, "/Volumes"):
            told.append(f"macOS may keep a service out of {path} (its {what}): choose another place, or allow it there")
    return tuple(told)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
