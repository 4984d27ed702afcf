"""Puts mlxd into the care of launchd or systemd, takes it out again, and says how it stands there.

All that reaches the system goes through `Hands`, so that a stand-in can take its place.
"""

import contextlib
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, assert_never

from msgspec import Struct

from gateway import service_launchd as launchd
from gateway import service_systemd as systemd
from gateway.service_plan import ServicePlan, ServiceProblem

ManagerName = Literal["launchd", "systemd"]

_QUICK_SECONDS = 30.0
_OUTPUT_LINES = 3


class Ran(Struct, frozen=True, kw_only=True):
    """A command that has ended."""

    code: int
    output: str


def run_command(command: Sequence[str], timeout_seconds: float) -> Ran:
    """Run it to its end. Raises ServiceProblem when it does not exist or does not end."""
    try:
        ended = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_seconds,
            check=False,
        )
    except FileNotFoundError:
        raise ServiceProblem(f"there is no {command[0]} here; choose the other one with --manager") from None
    except subprocess.TimeoutExpired:
        raise ServiceProblem(f"`{' '.join(command)}` did not end within {timeout_seconds:.0f} s; try again") from None
    return Ran(code=ended.returncode, output=ended.stdout.decode(errors="replace"))


@dataclass(frozen=True, kw_only=True)
class Hands:
    """What the system is touched with. `is_serving` tells whether a service of this home lives, whoever runs it.

    `root` stands for the system's own directories.
    """

    run: Callable[[Sequence[str], float], Ran]
    sleep: Callable[[float], None]
    is_serving: Callable[[], bool]
    user_id: int
    root: str = "/"
    config_home: str | None = None
    said: list[str] = field(default_factory=list[str])
    """Every command, for those who want to see what was done."""

    def call(self, command: Sequence[str], timeout_seconds: float = _QUICK_SECONDS) -> Ran:
        self.said.append(" ".join(command))
        return self.run(command, timeout_seconds)


class ServiceState(Struct, frozen=True, kw_only=True):
    """How the service stands with its manager. `domain` is launchd's; `details` are for people."""

    manager: ManagerName
    file: str
    installed: bool
    loaded: bool
    domain: str | None = None
    details: tuple[str, ...] = ()


def service_file(manager: ManagerName, plan: ServicePlan, hands: Hands) -> tuple[Path, bytes]:
    """The file that the manager reads, and where."""
    match manager:
        case "launchd":
            return Path(launchd.job_path(plan, root=hands.root)), launchd.job_file(plan)
        case "systemd":
            path = systemd.unit_path(plan, root=hands.root, config_home=hands.config_home)
            return Path(path), systemd.unit(plan).encode()
        case _:
            assert_never(manager)


def service_state(manager: ManagerName, plan: ServicePlan, hands: Hands) -> ServiceState:
    """Raises ServiceProblem when the manager cannot be asked."""
    path, _ = service_file(manager, plan, hands)
    match manager:
        case "launchd":
            domain, printed = _loaded(plan, hands)
            details = launchd.telling_lines(printed)
            loaded = domain is not None
        case "systemd":
            domain = None
            loaded = hands.call(systemd.systemctl("is-active", plan)).code == 0
            details = tuple(hands.call(systemd.systemctl("show", plan)).output.splitlines())
        case _:
            assert_never(manager)
    return ServiceState(
        manager=manager,
        file=str(path),
        installed=path.is_file(),
        loaded=loaded,
        domain=domain,
        details=details,
    )


def install(manager: ManagerName, plan: ServicePlan, hands: Hands) -> None:
    """Write the file and start the service; one that is installed already is stopped in peace and replaced.

    Raises ServiceProblem. With systemd it serves when this returns, with launchd it has been started.
    """
    if hands.is_serving() and not service_state(manager, plan, hands).loaded:
        raise ServiceProblem(f"mlxd runs in {plan.home} already, by hand: stop it, then install the service")
    _make_directories(plan)
    path, content = service_file(manager, plan, hands)
    match manager:
        case "launchd":
            domain = _best_domain(plan, hands)
            _write(path, content)  # first, so that what cannot be installed stops nothing
            _stop_job(plan, hands)
            _start_job(plan, hands, domain, path)
        case "systemd":
            _write(path, content)
            _must(hands, systemd.systemctl("reload", plan))
            _must(hands, systemd.systemctl("enable", plan))
            _must(hands, systemd.systemctl("restart", plan), systemd.START_SECONDS + plan.stop_seconds + 10.0)
        case _:
            assert_never(manager)


def uninstall(manager: ManagerName, plan: ServicePlan, hands: Hands) -> Literal["removed", "was_not_there"]:
    """Stop the service, with the time that it needs, and remove its file. Its home stays. Raises ServiceProblem."""
    path, _ = service_file(manager, plan, hands)
    was_there = path.is_file()
    match manager:
        case "launchd":
            was_there |= _stop_job(plan, hands)
            path.unlink(missing_ok=True)
        case "systemd":
            if was_there:
                _must(hands, systemd.systemctl("disable", plan), plan.stop_seconds + 10.0)
                path.unlink()
                _must(hands, systemd.systemctl("reload", plan))
        case _:
            assert_never(manager)
    return "removed" if was_there else "was_not_there"


# --- launchd ---------------------------------------------------------------------------------------------------------


def _loaded(plan: ServicePlan, hands: Hands) -> tuple[str | None, str]:
    """The domain that has the job, and what launchctl prints of it."""
    for domain in launchd.domains(plan, user_id=hands.user_id):
        ran = hands.call(launchd.launchctl("print", domain))
        if ran.code == 0:
            return domain, ran.output
    return None, ""


def _best_domain(plan: ServicePlan, hands: Hands) -> str:
    *others, last = launchd.domains(plan, user_id=hands.user_id)
    for domain in others:
        if hands.call(launchd.launchctl("print-domain", domain)).code == 0:
            return domain
    return last


def _stop_job(plan: ServicePlan, hands: Hands) -> bool:
    """Whether there was one. Told to end before it is thrown out: a bootout waits only as long as the job that was
    loaded says, which may be an older and too short time."""
    domain, _ = _loaded(plan, hands)
    if domain is None:
        return False
    hands.call(launchd.launchctl("terminate", domain))
    for _ in range(plan.stop_seconds):
        if not hands.is_serving():
            break
        hands.sleep(1.0)
    _insist("bootout", domain, hands, timeout_seconds=plan.stop_seconds + 10.0)
    return True


def _start_job(plan: ServicePlan, hands: Hands, domain: str, path: Path) -> None:
    # First: a job that was once disabled stays so for ever, whatever is installed under its name.
    hands.call(launchd.launchctl("enable", domain))
    _insist("bootstrap", domain, hands, timeout_seconds=_QUICK_SECONDS, path=str(path))


def _insist(
    action: Literal["bootstrap", "bootout"], domain: str, hands: Hands, *, timeout_seconds: float, path: str = ""
) -> None:
    """Try until launchd is no longer busy with this job. Raises ServiceProblem."""
    command = launchd.launchctl(action, domain, path=path)
    ran = Ran(code=0, output="")
    for _ in range(launchd.AGAIN_TIMES):
        ran = hands.call(command, timeout_seconds)
        match launchd.verdict(action, ran.code):
            case "done":
                return
            case "not_loaded" if action == "bootout":
                return
            case "enable_first":
                hands.call(launchd.launchctl("enable", domain))
            case "again":
                pass
            case "not_loaded" | "no_domain" | "refused" | "failed":
                break
        hands.sleep(launchd.AGAIN_SECONDS)
    if action == "bootstrap" and hands.call(launchd.launchctl("print", domain)).code == 0:
        return  # it is there, whatever launchctl made of that
    raise ServiceProblem(f"{_failed(command, ran)}; `log show --last 5m --predicate 'process == \"launchd\"'` says why")


# --- both ------------------------------------------------------------------------------------------------------------


def _must(hands: Hands, command: Sequence[str], timeout_seconds: float = _QUICK_SECONDS) -> None:
    ran = hands.call(command, timeout_seconds)
    if ran.code != 0:
        user = "--user " if "--user" in command else ""
        raise ServiceProblem(f"{_failed(command, ran)}; `journalctl {user}-u {systemd.UNIT} -n 50` says why")


def _failed(command: Sequence[str], ran: Ran) -> str:
    words = " ".join(" ".join(ran.output.split("\n")[:_OUTPUT_LINES]).split())
    return f"`{' '.join(command)}` ended with {ran.code}" + (f" ({words})" if words else "")


def _make_directories(plan: ServicePlan) -> None:
    """What must be there before the program starts: a manager that cannot open a log says nothing about it."""
    account = plan.account
    names = ["", "logs"] if account is None else ["", "logs", "run", "hf", "models"]
    for name in names:
        path = Path(plan.home, name)
        try:
            if not path.is_dir():
                path.mkdir(mode=0o700, parents=True)
                if account is not None:
                    os.chown(path, account.user_id, account.group_id)
            owner = path.stat().st_uid
        except OSError as why:
            raise ServiceProblem(f"{path} cannot be made ({why.strerror}); choose another --home") from None
        if account is not None and owner != account.user_id:
            raise ServiceProblem(f"{path} is not {account.name}'s: run chown -R {account.name} {plan.home}")


def _write(path: Path, content: bytes) -> None:
    """Readable by all, as launchd wants it; there is no secret in it."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as why:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ServiceProblem(f"{path} cannot be written ({why.strerror}); do you have the rights?") from None
