"""A program in launchctl's place: records its calls, keeps one job, and really runs it, as the property list says.

Its state is in the directory of STAND_IN_LAUNCHCTL: `calls`, one line each; `job`, the loaded target; `pid`, its
process. It knows the exit codes that launchctl was seen to give. `busy` there holds how often a bootstrap is still to
end with 5; `gui` says that somebody is logged in at the screen. PYTHONPATH is added to the job's environment, since the
tests run from a checkout that is not installed.
"""

import contextlib
import os
import plistlib
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["STAND_IN_LAUNCHCTL"])
NO_SUCH_PROCESS, BUSY, NO_SERVICE, NO_DOMAIN = 3, 5, 113, 125


def main(arguments: list[str]) -> int:
    with (STATE / "calls").open("a") as calls:
        calls.write(" ".join(arguments) + "\n")
    match arguments:
        case ["print", domain] if domain.count("/") == 1:
            return 0 if has_domain(domain) else NO_DOMAIN
        case ["print", target]:
            return show(target)
        case ["enable", _]:
            return 0
        case ["bootstrap", domain, path]:
            return bootstrap(domain, Path(path))
        case ["kill", "SIGTERM", target]:
            return terminate() if target == loaded() else NO_SERVICE
        case ["bootout", target]:
            return bootout(target)
        case _:
            sys.stderr.write("Unrecognized subcommand\n")
            return 64


def has_domain(domain: str) -> bool:
    return not domain.startswith("gui/") or (STATE / "gui").exists()


def loaded() -> str | None:
    job = STATE / "job"
    return job.read_text() if job.exists() else None


def show(target: str) -> int:
    if not has_domain(target):
        return NO_DOMAIN
    if target != loaded():
        return NO_SERVICE
    sys.stdout.write(f"{target} = {{\n\tstate = running\n\tpid = {(STATE / 'pid').read_text()}\n}}\n")
    return 0


def bootstrap(domain: str, path: Path) -> int:
    if not has_domain(domain):
        return NO_DOMAIN
    busy = STATE / "busy"
    if busy.exists() and (left := int(busy.read_text())):
        busy.write_text(str(left - 1))
        return BUSY
    if loaded() is not None:
        return BUSY
    job = plistlib.loads(path.read_bytes())
    os.umask(job["Umask"])
    with Path(job["StandardOutPath"]).open("ab") as out, Path(job["StandardErrorPath"]).open("ab") as errors:
        process = subprocess.Popen(
            job["ProgramArguments"],
            cwd=job["WorkingDirectory"],
            env={**job["EnvironmentVariables"], "PYTHONPATH": os.environ["PYTHONPATH"]},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
    (STATE / "pid").write_text(str(process.pid))
    (STATE / "job").write_text(f"{domain}/{job['Label']}")
    return 0


def terminate() -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((STATE / "pid").read_text()), signal.SIGTERM)
        return 0
    return NO_SUCH_PROCESS


def bootout(target: str) -> int:
    if target != loaded():
        return NO_SUCH_PROCESS
    terminate()
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int((STATE / "pid").read_text()), 0)
            time.sleep(0.05)  # it is nobody's child here, so its end can only be looked for
    (STATE / "job").unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
