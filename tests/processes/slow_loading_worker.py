"""The real worker, but its weights load only when somebody writes to the pipe `may_load` in its folder."""

from collections.abc import Callable
from pathlib import Path

from worker import mlx_model
from worker.__main__ import exit_at_once, main

_load_model = mlx_model.load_model


def _load_when_allowed(path: Path, report: Callable[[int, int], None]) -> mlx_model.LoadedModel:
    (path / "may_load").read_bytes()
    return _load_model(path, report)


mlx_model.load_model = _load_when_allowed

if __name__ == "__main__":
    exit_at_once(main())
