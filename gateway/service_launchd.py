"""mlxd as a job of launchd: its property list, the launchctl calls, and what their exit codes mean. Decides only."""

import plistlib
from pathlib import PurePosixPath
from typing import Literal, assert_never

from gateway.service_plan import LABEL, RESTART_SECONDS, ServicePlan

UMASK = 0o077
OPEN_FILES = 65536

Action = Literal["print-domain", "print", "enable", "bootstrap", "bootout", "terminate"]
"""`terminate` is SIGTERM and nothing else: `kickstart -k` would kill at once, and strand the memory of large models."""

Verdict = Literal["done", "again", "enable_first", "not_loaded", "no_domain", "refused", "failed"]
"""What an exit code means for what was wanted. `again`: launchd is busy with this job, try in a moment."""

AGAIN_SECONDS = 1.0
AGAIN_TIMES = 20
"""A label goes on draining for up to some 15 seconds after its bootout."""

_TELLING = ("state", "pid", "runs", "exit timeout", "spawn type", "last exit code", "last exit reason")


def job(plan: ServicePlan) -> dict[str, object]:
    """The property list as a dictionary; every key and type as launchd.plist(5) has them."""
    listed: dict[str, object] = {
        "Label": LABEL,
        "ProgramArguments": list(plan.program),
        "RunAtLoad": True,
        # Not `Crashed`, which leaves a job down that was killed for want of memory. A deliberate stop exits with 0.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_SECONDS,
        # Unset it is five seconds, in which no worker gives its memory back.
        "ExitTimeOut": plan.stop_seconds,
        # Unset means throttled CPU and disk; Background made decoding eight times slower.
        "ProcessType": "Interactive",
        "Umask": UMASK,
        "WorkingDirectory": plan.home,
        # launchd never rotates or opens these again, so the log itself is the service's own file beside them.
        "StandardOutPath": f"{plan.logs_directory}/launchd.out.log",
        "StandardErrorPath": f"{plan.logs_directory}/launchd.err.log",
        "EnvironmentVariables": _environment(plan),
    }
    if plan.account is not None:
        # No NumberOfFiles: in the system's domain it would change the limits of the whole machine.
        return {**listed, "UserName": plan.account.name, "GroupName": plan.account.group}
    return {
        **listed,
        "LimitLoadToSessionType": ["Aqua", "Background"],
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
    }


def job_file(plan: ServicePlan) -> bytes:
    """The same as the file that launchd reads."""
    return plistlib.dumps(job(plan), sort_keys=False)


def job_path(plan: ServicePlan, *, root: str = "/") -> PurePosixPath:
    """Where that file goes. `root` stands for the system's, so that a test need not write there."""
    if plan.scope == "system":
        return PurePosixPath(root) / "Library/LaunchDaemons" / f"{LABEL}.plist"
    return PurePosixPath(plan.user_home) / "Library/LaunchAgents" / f"{LABEL}.plist"


def domains(plan: ServicePlan, *, user_id: int) -> tuple[str, ...]:
    """The domains that this service can be in, the best first: `gui` exists only while its user is logged in there."""
    return ("system",) if plan.scope == "system" else (f"gui/{user_id}", f"user/{user_id}")


def launchctl(action: Action, domain: str, *, path: str = "") -> tuple[str, ...]:
    """The call. `path` is the property list's, for `bootstrap`."""
    target = f"{domain}/{LABEL}"
    match action:
        case "print-domain":
            return ("launchctl", "print", domain)
        case "print":
            return ("launchctl", "print", target)
        case "enable":
            return ("launchctl", "enable", target)
        case "bootstrap":
            return ("launchctl", "bootstrap", domain, path)
        case "bootout":
            return ("launchctl", "bootout", target)
        case "terminate":
            return ("launchctl", "kill", "SIGTERM", target)
        case _:
            assert_never(action)


def verdict(action: Action, code: int) -> Verdict:
    """What launchctl's exit code means. They are documented nowhere: this is what they were seen to mean."""
    match code:
        case 0:
            return "done"
        case 3 | 113:
            return "not_loaded"
        case 5 | 37 if action in ("bootstrap", "bootout"):
            return "again"
        case 119:
            return "enable_first"
        case 125:
            return "no_domain"
        case 150:
            return "refused"
        case _:
            return "failed"


def telling_lines(printed: str) -> tuple[str, ...]:
    """Of `launchctl print`, what helps a person. Its text is no interface, so nothing is decided by it."""
    lines = (line.strip() for line in printed.splitlines() if line.startswith("\t") and not line.startswith("\t\t"))
    return tuple(line for line in lines if line.partition(" =")[0] in _TELLING)


def _environment(plan: ServicePlan) -> dict[str, str]:
    """All of it: launchd gives a daemon no HOME and a short PATH. What the installer's shell had stays there."""
    directory = PurePosixPath(plan.python).parent
    environment = {
        "HOME": plan.user_home,
        "PATH": f"{directory}:/usr/bin:/bin:/usr/sbin:/sbin",
        "LANG": "en_US.UTF-8",
        "PYTHONUNBUFFERED": "1",
        # Before Metal starts: a long kernel beside a lit display is not killed for it.
        "AGX_RELAX_CDM_CTXSTORE_TIMEOUT": "1",
    }
    if plan.scope == "system":
        environment |= {"TMPDIR": f"{plan.home}/run", "HF_HOME": f"{plan.home}/hf"}
    return environment
