"""What a linter cannot see about the shape of the tree."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.error_envelopes import error_answer
from protocol.failures import Failure, FailureKind
from protocol.ids import RequestId

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "gateway", "worker", "cachestore")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if "bench" not in path.parts)
EMPTY_NAMES = re.compile(r"(Manager|Helpers?|Utils?|Base|Impl)$|_v\d+$")


def _label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=_label)
def test_packages_export_nothing(path: Path) -> None:
    """One name has one import path: an `__init__.py` is a docstring."""
    body = _tree(path).body

    assert len(body) == 1
    assert ast.get_docstring(_tree(path))


@pytest.mark.parametrize("path", SOURCES, ids=_label)
def test_every_file_says_what_it_is(path: Path) -> None:
    """A module starts with its contract."""
    assert ast.get_docstring(_tree(path))


@pytest.mark.parametrize("path", SOURCES, ids=_label)
def test_names_say_something(path: Path) -> None:
    """No Manager, Helper, Utils, Base, Impl or _v2: such a name says that nobody found what the thing is."""
    names = [path.stem.title().replace("_", "")]
    names += [node.name for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef | ast.FunctionDef)]

    assert [name for name in names if EMPTY_NAMES.search(name)] == []


def _sleeps(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "sleep":
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id in ("time", "asyncio"):
            match node.args:
                case [ast.Constant(value=0)]:
                    pass  # gives way to other tasks; waits for nothing
                case _:
                    yield node.lineno


@pytest.mark.parametrize("path", [path for path in TESTS if path.name.startswith("test_")], ids=_label)
def test_no_test_sleeps(path: Path) -> None:
    """A test waits for a condition with a deadline: a sleep is too short on a slow machine and too long on all.

    What must *not* happen has no condition to wait for; such a sleep gives its reason on its line.
    """
    lines = path.read_text(encoding="utf-8").splitlines()

    assert [line for line in _sleeps(_tree(path)) if "# " not in lines[line - 1]] == []


@pytest.mark.parametrize("kind", FailureKind)
def test_every_failure_has_an_answer(kind: FailureKind) -> None:
    """A kind without a status, in either API's words, would be a crash in an error path."""
    for api in ("openai", "anthropic"):
        answer = error_answer(Failure(kind=kind, message="m"), api=api, request_id=RequestId("req_1"))

        assert 400 <= answer.status < 600


def test_the_lock_names_no_address_and_no_torch() -> None:
    """Hashes alone: the lock works with any index and tells nothing of the machine that wrote it."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    lines = [line for line in lock.splitlines() if line and not line.startswith((" ", "#"))]

    assert [line for line in lines if not re.match(r"[a-z0-9][a-z0-9.-]*==[^\s/:@]+ (; .+ )?\\$", line)] == []
    assert "://" not in lock
    assert not re.search(r"^(torch|nvidia-|mlx-cuda)", lock, re.MULTILINE)


def test_the_lock_has_every_dependency() -> None:
    """What pyproject.toml asks for is what `make setup` installs."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    asked = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["demo"]]
    for group in project["dependency-groups"].values():
        asked += [entry for entry in group if isinstance(entry, str)]
    names = {re.match(r"[A-Za-z0-9._-]+", entry).group().lower() for entry in asked}  # pyright: ignore[reportOptionalMemberAccess]
    locked = set(
        re.findall(r"^([a-z0-9.-]+)==", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    )

    assert names - locked == set()


def test_no_tracked_file_names_a_package_index_or_a_home() -> None:
    """A checkout says nothing of the machines it was written on."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    private = re.compile(rb"simple/?['\"\s]|/home/[a-z]|/Users/[a-z]|--(extra-)?index.url", re.IGNORECASE)
    tracked = [ROOT / name for name in listed.stdout.decode().split("\0") if name and name != "LICENSE"]
    found = [
        f"{_label(path)}: {hit.group()!r}"
        for path in tracked
        if path.is_file() and path != Path(__file__)
        for hit in [private.search(path.read_bytes())]
        if hit and path.suffix in {".toml", ".lock", ".cfg", ".yaml", ".yml", ".sh", ".json"}
    ]

    assert found == []
