"""Installs one client's pinned packages into a folder of its own, below a cache that outlives the run."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.table import Client

_INSTALL_SECONDS = 600


class NotInstalled(Exception):
    """Why this client cannot be had here, in one line."""


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxd-clients"


def install(client: Client) -> Path:
    """The client's folder with exactly its packages; as it was if it has them already. Raises NotInstalled."""
    digest = hashlib.sha256(json.dumps([client.registry, *client.packages, sys.version]).encode()).hexdigest()[:12]
    folder = cache_directory() / f"{client.folder}-{digest}"
    done = folder / ".complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (_install_python if client.registry == "pypi" else _install_node)(folder, client.packages)
            done.touch()
    return folder


def program(client: Client, folder: Path) -> str:
    """What runs its drives."""
    return str(folder / "bin" / "python") if client.registry == "pypi" else _node()


def programs(client: Client, folder: Path) -> Path:
    """The directory of the commands that its packages bring."""
    return folder / "bin" if client.registry == "pypi" else folder / "node_modules" / ".bin"


def _install_python(folder: Path, packages: tuple[str, ...]) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    python = str(folder / "bin" / "python")
    if uv is not None:  # the same result, in a tenth of the time
        _command([uv, "venv", "--quiet", "--python", sys.executable, "--clear", str(folder)], folder)
        _command([uv, "pip", "install", "--quiet", "--python", python, *packages], folder)
    else:
        _command([sys.executable, "-m", "venv", str(folder)], folder)
        _command([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], folder)


def _install_node(folder: Path, packages: tuple[str, ...]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("there is no npm")
    (folder / "package.json").write_text('{"private": true}')
    _command([npm, "install", "--no-audit", "--no-fund", "--no-update-notifier", "--save-exact", *packages], folder)


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        raise NotInstalled("there is no node")
    return node


def _command(arguments: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            arguments,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_INSTALL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as why:
        raise NotInstalled(f"{Path(arguments[0]).name}: {type(why).__name__}") from None
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)  # noqa: T201
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise NotInstalled(f"{Path(arguments[0]).name}: {(lines or ['failed'])[0][:120]}")
