"""Who may import whom: the contracts of pyproject.toml, checked like any other law."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_import_contracts_hold() -> None:
    """Every contract is kept; a broken one is shown with its chain of imports."""
    linter = Path(sys.executable).with_name("lint-imports")
    ended = subprocess.run(
        [str(linter), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_worker_file_is_on_one_side_of_mlx() -> None:
    """A new file of the worker is listed as free of MLX, or says in its name that it is not."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    free = next(c["source_modules"] for c in contracts if c["name"].startswith("In a worker"))
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "worker").rglob("*.py")]
    modules = {".".join(path.parts) for path in paths if path.name != "__init__"}
    joins_both = {"worker.__main__", "worker.demo_model", "worker.embedding.serving"}
    joins_both.add("worker.embedding.vectors")  # which knows NumPy only
    named = {module for module in modules if module.rpartition(".")[2].startswith("mlx_")}

    def is_free(module: str) -> bool:
        return any(module == listed or module.startswith(f"{listed}.") for listed in free)

    assert {module for module in modules if not is_free(module)} == joins_both | named
