"""Drives one client against a running service, and says what came of it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.environments import program, programs
from tests.clients.table import ROUND_TRIP, Check, Client
from tests.fakes.client_model import PROOF, SEEN, TALKED
from tests.fakes.live_service import ROOT, LiveService

MODEL = "script"
EMBEDDER = "minilm"
_DRIVES = Path(__file__).parent / "drives"
_DRIVE_SECONDS = 540
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE")
"""What a client gets of our environment: nothing that could name another server or hold a key."""


def drive(client: Client, folder: Path, service: LiveService, key: str) -> tuple[Check, ...]:
    """What the client did. It runs in an empty home, which is removed afterwards."""
    scratch = Path(tempfile.mkdtemp(prefix="mlxd-client"))
    try:
        if client.launch:
            return (_run_agent(client, folder, service, key, scratch),)
        return _run_drive(client, folder, service, key, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_drive(client: Client, folder: Path, service: LiveService, key: str, scratch: Path) -> tuple[Check, ...]:
    script, *arguments = client.drive
    if client.registry == "npm":  # node looks for packages beside the script that imports them
        scripts = folder / "drives"
        shutil.copytree(_DRIVES, scripts, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    else:
        scripts = _DRIVES
    facts = {
        "MLXD_URL": service.base_url,
        "MLXD_KEY": key,
        "MLXD_MODEL": MODEL,
        "MLXD_EMBEDDER": EMBEDDER,
        "MLXD_PROOF": PROOF,
        "MLXD_SEEN": SEEN,
        "MLXD_TALKED": TALKED,
    }
    command = [program(client, folder), str(scripts / script), *arguments]
    done = _run(command, _environment(scratch) | facts, scratch)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"check"')]
    if done.returncode or not lines:
        print(done.stdout[-1000:], done.stderr[-3000:], file=sys.stderr)  # noqa: T201
        return (Check(check=ROUND_TRIP, verdict="fail", detail=f"the drive ended with {done.returncode}"),)
    checks = tuple(Check(**json.loads(line)) for line in lines)
    if any(check.verdict == "fail" for check in checks):
        print(done.stderr[-3000:], file=sys.stderr)  # noqa: T201
    return checks


def _run_agent(client: Client, folder: Path, service: LiveService, key: str, scratch: Path) -> Check:
    """An agent is started by `mlxd launch`, as its users start it, in an empty repository."""
    work = scratch / "work"
    work.mkdir()
    environment = _environment(scratch)
    environment["PATH"] = f"{programs(client, folder)}{os.pathsep}{environment['PATH']}"
    environment |= {"PYTHONPATH": str(ROOT), "MLXD_KEY": key, "MLXD_HOME": str(service.home)}
    subprocess.run(["git", "init", "--quiet"], cwd=work, env=environment, check=True)
    launch = [sys.executable, "-P", "-m", "gateway", "launch", client.launch, "--url", service.base_url]
    done = _run([*launch, "--model", MODEL, "--", *client.arguments], environment, work)
    check = "edit" if client.edits else ROUND_TRIP
    edited = work / client.edits
    if SEEN in done.stdout and (not client.edits or (edited.is_file() and PROOF in edited.read_text())):
        return Check(check=check, verdict="pass")
    print(done.stdout[-2000:], done.stderr[-3000:], file=sys.stderr)  # noqa: T201
    return Check(check=check, verdict="fail", detail=f"ended with {done.returncode} and did not do it")


def _environment(home: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "HOME": str(home), "NO_PROXY": "*", "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _run(command: list[str], environment: dict[str, str], directory: Path) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_DRIVE_SECONDS,
        )
    except subprocess.TimeoutExpired as why:
        said = [
            text.decode(errors="replace") if isinstance(text, bytes) else text or ""
            for text in (why.output, why.stderr)
        ]
        return subprocess.CompletedProcess(command, 124, *said)
