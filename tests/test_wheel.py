"""What is shipped, and that generic package names cannot be mistaken for somebody else's."""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from msgspec.structs import fields

from gateway.config import Settings

ROOT = Path(__file__).parents[1]
PACKAGES = {"protocol", "gateway", "worker", "cachestore"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as hatchling builds it, with nothing fetched."""
    directory = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = directory.glob("*.whl")
    return path


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_claims_four_names(wheel: Path) -> None:
    """Four packages and the metadata; no tests, no deploy files, no stray module at the top."""
    tops = {name.split("/")[0] for name in _names(wheel)}

    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_the_wheel_has_every_source_file(wheel: Path) -> None:
    """Files that are no Python travel as well, such as the BLAS shim's source."""
    tracked = subprocess.run(["git", "ls-files", "-z", *sorted(PACKAGES)], cwd=ROOT, capture_output=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    sources = {name for name in tracked.stdout.decode().split("\0") if name and (ROOT / name).is_file()}

    assert "gateway/blas_shim.c" in sources
    assert sources - _names(wheel) == set()


def test_the_wheel_has_its_command_and_its_licence(wheel: Path) -> None:
    """`mlxd` is there after an installation, and so is what it may be used for."""
    names = _names(wheel)
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert "mlxd = gateway.cli:main" in archive.read(entry_points).decode()

    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_no_dependency_claims_our_names() -> None:
    """In an environment with everything installed, the four names are ours alone."""
    claims = importlib.metadata.packages_distributions()

    assert {name: owners for name in PACKAGES if (owners := set(claims.get(name, ())) - {"mlxd"})} == {}


@pytest.mark.parametrize("package", ["worker", "cachestore"])
def test_a_child_is_ours_whatever_the_current_directory_holds(package: str, tmp_path: Path) -> None:
    """The gateway spawns with -P: a folder named as our package in the service's directory is not run instead."""
    command = next(field.default for field in fields(Settings) if field.name == f"{package}_command")
    decoy = tmp_path / package
    decoy.mkdir()
    (decoy / "__main__.py").write_text("print('decoy')")
    (decoy / "__init__.py").write_text("")

    said = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=False, text=True, timeout=60
    )

    assert "decoy" not in said.stdout
